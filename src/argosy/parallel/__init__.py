"""How a model is spread over devices, behind one seam: `forward_backward(batch, step) -> (loss sum, tokens, metrics)`."""
