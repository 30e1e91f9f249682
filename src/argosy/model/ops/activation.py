"""The MLP's activation, with the bias of the matmul before it: gelu (exact or tanh), relu, swiglu and geglu."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from argosy.model.ops.choice import use_kernel

# The activation of the gate, of those that are gated.
INNER = {"swiglu": "silu", "geglu": "gelu_tanh"}


def activate(kind: str, y: Tensor, bias: Tensor | None) -> Tensor:
    """Return kind(y + bias), for `gelu`, `gelu_tanh` and `relu`."""
    if use_kernel(y):
        from argosy.model.ops.kernels.activation_kernel import Activate

        result: Tensor = Activate.apply(y, bias, kind)
        return result
    if bias is not None:
        y = y + bias
    if kind == "relu":
        return F.relu(y)
    return F.gelu(y, approximate={"gelu": "none", "gelu_tanh": "tanh"}[kind])


def gated(kind: str, gate: Tensor, up: Tensor, weight: Tensor | None = None) -> Tensor:
    """Return silu(gate) x up (`swiglu`) or gelu_tanh(gate) x up (`geglu`), times `weight` [rows] if it is given."""
    inner = INNER[kind]
    if use_kernel(gate):
        from argosy.model.ops.kernels.activation_kernel import Gated, WeightedGated

        result: Tensor = (
            Gated.apply(gate, up, inner) if weight is None else WeightedGated.apply(gate, up, weight, inner)
        )
        return result
    y = (F.silu(gate) if inner == "silu" else F.gelu(gate, approximate="tanh")) * up
    return y if weight is None else (y * weight[:, None]).to(y.dtype)
