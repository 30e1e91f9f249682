"""Messages between ranks: torch's pickled ones are refused."""

from __future__ import annotations

from typing import Any


def refuse_pickled_messages() -> None:
    """Make torch's object collectives raise in this process instead of unpickling data of another rank.

    The lint keeps them out of our own code; this also stops calls inside torch.
    """
    from torch.distributed import distributed_c10d

    def refuse(*_: Any) -> Any:
        raise RuntimeError("ranks exchange tensors and JSON, never pickles: see argosy.parallel.host_group")

    for name in ("_pickler", "_unpickler"):
        setattr(distributed_c10d, name, refuse)
