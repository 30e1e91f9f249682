"""How a module may be sharded by tensor parallelism, declared beside its code and read by `argosy.parallel.tensor`.

A module class names in `tensor_parallel` its own parameters and those of its children, and what becomes of each when its matmuls
are cut over ranks. A name may be that of a parameter (`out.weight`) or of a child, for all parameters in it (`q_norm`). A layout
refuses a model with a parameter that nothing declares: its gradient would silently not be summed.

Attention, MLP and experts are the tensor-parallel region of a block: column-parallel matmuls on the way in, row-parallel ones on
the way out. Inside, a rank has all tokens and a part of the heads or of the inner width. Outside, it has all of the residual
stream or, with sequence parallelism, its share of the tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

from torch import Tensor, nn


class Sharding(NamedTuple):
    """What becomes of one parameter: cut along `dim`, or whole on every rank. The gradient of a whole one is this rank's part of
    a sum over ranks `always`, only with `sequence` parallelism, or `never`."""

    dim: int | None = None
    partial: Literal["always", "sequence", "never"] = "never"


Declaration = Mapping[str, Sharding]

# A matmul's output features, rows of its weight; with its bias.
COLUMN = Sharding(dim=0)
# A matmul's input features. Its bias is added after the sum over ranks, and so is outside of the region.
ROW = Sharding(dim=1)
# Entries of the vocabulary, rows of the matrix.
VOCABULARY = Sharding(dim=0)
# Whole, inside the region: used with some of the heads or a part of every expert.
INSIDE = Sharding(partial="always")
# Whole, outside of the region: with sequence parallelism used with some of the tokens.
OUTSIDE = Sharding(partial="sequence")
# Whole, and used with all tokens on every rank alike.
REPLICATED = Sharding()


def shardable(name: str) -> Any:
    """The attribute of a parameter that a layout may shard: reading it gives what this rank computes with, a plain tensor."""

    def read(module: nn.Module) -> Tensor | None:
        try:
            parameter = module._parameters[name]
        except KeyError:
            raise AttributeError(f"{type(module).__name__} has no parameter {name!r} yet") from None
        local: Callable[[nn.Parameter], Tensor] | None = module.__dict__.get(LOCAL)
        return parameter if local is None or parameter is None else local(parameter)

    return property(read, lambda module, value: module.register_parameter(name, value))


# The attribute in which a layout puts the function from a parameter of a module to this rank's part of it.
LOCAL = "_local_part"
