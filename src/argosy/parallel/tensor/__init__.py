"""Tensor and sequence parallelism: the matrices of a block and the vocabulary, sharded over ranks with the same tokens."""
