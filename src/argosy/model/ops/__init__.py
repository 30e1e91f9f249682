"""The operations between matmuls, each in two forms: plain torch, and a Triton kernel that reads and writes memory once.

The torch form defines what an operation computes and runs everywhere. The tests compare the kernel with it. The kernel runs
on a GPU (`argosy.model.ops.choice` decides). Both accumulate in 32-bit floats, whatever the dtype of the tensors.
"""
