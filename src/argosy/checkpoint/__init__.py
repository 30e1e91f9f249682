"""Checkpoints that can be trusted: no pickle, hashed while written, renamed into place, verified before use."""
