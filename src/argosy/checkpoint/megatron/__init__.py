"""Checkpoints of Megatron-LM in its `torch_dist` format: read without running their pickles, and imported."""
