"""The MLP's non-linearity, with the bias of the product before it: gelu (exact or by tanh), relu, and silu(gate) x up."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from argosy.model.ops.choice import use_kernel


def activate(kind: str, y: Tensor, bias: Tensor | None) -> Tensor:
    """kind(y + bias), for `gelu`, `gelu_tanh` and `relu`."""
    if use_kernel(y):
        from argosy.model.ops.kernels.activation import Activate

        result: Tensor = Activate.apply(y, bias, kind)
        return result
    if bias is not None:
        y = y + bias
    if kind == "relu":
        return F.relu(y)
    return F.gelu(y, approximate="tanh" if kind == "gelu_tanh" else "none")


def gated(kind: str, gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) x up (`swiglu`), or gelu_tanh(gate) x up (`geglu`)."""
    if use_kernel(gate):
        from argosy.model.ops.kernels.activation import Gated

        result: Tensor = Gated.apply(gate, up, "silu" if kind == "swiglu" else "gelu_tanh")
        return result
    return (F.silu(gate) if kind == "swiglu" else F.gelu(gate, approximate="tanh")) * up
