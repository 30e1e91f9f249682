"""Messages between ranks and between the agents of nodes, as JSON where torch would use pickle."""

from __future__ import annotations

import json
from dataclasses import astuple
from datetime import datetime
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


class _RendezvousJson:
    """The state of torch's rendezvous as JSON, with the part of pickle's interface that torch's module uses."""

    PickleError = ValueError
    _NODES = ("wait_list", "redundancy_list")

    @classmethod
    def dumps(cls, state: Any) -> bytes:
        """Encode every field. A field that a newer torch added raises an error, since no reader would know it."""
        document = dict(vars(state))
        document["deadline"] = None if state.deadline is None else state.deadline.isoformat()
        document["participants"] = [[*astuple(node), rank] for node, rank in state.participants.items()]
        document["last_heartbeats"] = [[*astuple(node), at.isoformat()] for node, at in state.last_heartbeats.items()]
        document |= {name: [astuple(node) for node in document[name]] for name in cls._NODES}
        return json.dumps(document).encode()

    @classmethod
    def loads(cls, content: bytes) -> Any:
        from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc, _RendezvousState

        def node(addr: Any, pid: Any, local_id: Any) -> Any:
            return _NodeDesc(str(addr), int(pid), int(local_id))

        try:
            document, state = json.loads(content), _RendezvousState()
            if document.keys() != vars(state).keys():
                raise ValueError(f"its keys are {', '.join(document)}")
            state.round, state.complete, state.closed = (document[key] for key in ("round", "complete", "closed"))
            deadline = document["deadline"]
            state.deadline = None if deadline is None else datetime.fromisoformat(deadline)
            state.participants = {node(*who): int(rank) for *who, rank in document["participants"]}
            state.last_heartbeats = {node(*who): datetime.fromisoformat(at) for *who, at in document["last_heartbeats"]}
            for name in cls._NODES:
                setattr(state, name, {node(*who) for who in document[name]})
        except (TypeError, AttributeError, KeyError) as error:
            raise ValueError(f"this is no state of a rendezvous: {error}") from None
        return state


def use_json_rendezvous() -> None:
    """Make the agents of all nodes exchange their rendezvous state as JSON.

    torch pickles it: anybody who reaches the store's port could run code on every node.
    """
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    dynamic_rendezvous.pickle = _RendezvousJson  # type: ignore[assignment, attr-defined]
