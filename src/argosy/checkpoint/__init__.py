"""Checkpoints: no pickle, hashed while written, renamed into place, verified before use."""
