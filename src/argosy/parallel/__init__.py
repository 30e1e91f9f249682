"""Layouts that spread a model over devices, behind one interface: `forward_backward(batch, step) -> (loss sum, tokens, metrics)`."""
