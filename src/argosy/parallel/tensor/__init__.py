"""Tensor and sequence parallelism: every matrix of a block, and the vocabulary, is sharded over ranks that work on the same tokens."""
