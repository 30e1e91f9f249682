"""Functions registered as torch operators, into which torch.compile does not trace.

`torch.library.custom_op` does the same, but its operators load torch's compiler when they are first called: a second of a
run's start. As there, autograd does not see what the function does.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

_LIBRARY = torch.library.Library("argosy", "FRAGMENT")


def operator(name: str, fake: Callable[..., Any]) -> Callable[[Callable[..., Any]], Any]:
    """Register the decorated function as `torch.ops.argosy.<name>`, and return that operator in its place.

    Args:
        fake: returns empty results of the right shapes, from the same arguments.
    """

    def register(function: Callable[..., Any]) -> Any:
        @wraps(function)
        def below_autograd(*arguments: Any) -> Any:
            with torch._C._AutoDispatchBelowAutograd():
                return function(*arguments)

        schema = torch.library.infer_schema(function, mutates_args=())
        _LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
        _LIBRARY.impl(name, below_autograd, "CompositeExplicitAutograd")
        torch.library.register_fake(f"argosy::{name}", fake, lib=_LIBRARY)
        return getattr(torch.ops.argosy, name).default

    return register
