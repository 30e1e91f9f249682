"""The operations between matrix products, each twice: plain torch, and a Triton kernel that reads and writes memory once.

The plain twin defines what an operation computes, runs everywhere and is what the tests compare the kernel with. The
kernel serves on a GPU (`argosy.model.ops.choice` decides). Both accumulate in 32-bit floats, whatever the tensors are.
"""
