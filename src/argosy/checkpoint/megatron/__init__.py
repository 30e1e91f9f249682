"""Megatron-LM checkpoints in the `torch_dist` format: read without running their pickles, and imported."""
