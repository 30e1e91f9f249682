"""Reading a pickle as data, without running it.

A pickle is a program: it names functions and their arguments. Here its opcodes are followed, but nothing is imported, looked
up or called. A global stays a name (`GlobalName`), and a call stays a record of the function and its arguments
(`PickledObject`). A name that the caller has not allowed ends the reading: the writer meant something else than to describe
tensors.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

_PLAIN = {
    "INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4",
    "FLOAT", "BINFLOAT", "STRING", "BINSTRING", "SHORT_BINSTRING", "BINBYTES", "SHORT_BINBYTES",
    "BINBYTES8", "BYTEARRAY8", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8",
}  # fmt: skip
_FRESH: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None, "NEWTRUE": lambda: True, "NEWFALSE": lambda: False,
    "EMPTY_LIST": list, "EMPTY_TUPLE": tuple, "EMPTY_DICT": dict, "EMPTY_SET": set,
}  # fmt: skip
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


class UnreadableError(ValueError):
    """The bytes are no pickle, or use opcodes in a way that no writer of tensors does."""


class UnknownNameError(ValueError):
    """The pickle names something that the caller did not allow."""


@dataclass(frozen=True, slots=True)
class GlobalName:
    """A global that unpickling would import."""

    dotted: str


@dataclass(eq=False, slots=True)
class PickledObject:
    """An object that unpickling would make by calling `what`. `items` are the elements of a list, or the pairs of a mapping."""

    what: GlobalName
    args: tuple[Any, ...]
    state: Any = None
    items: list[Any] = field(default_factory=list)

    def is_a(self, *dotted: str) -> bool:
        return self.what.dotted in dotted

    def get(self, key: str) -> Any:
        """Return an attribute from the object's state, or None."""
        return self.state.get(key) if isinstance(self.state, dict) else None


@dataclass(frozen=True, slots=True)
class PersistentId:
    """A persistent id: a value stored outside the pickle."""

    id: Any


def read_pickle(content: bytes, allowed: Callable[[str], bool]) -> Any:
    """Return the value of a pickle: plain values as they are, everything else as `GlobalName` and `PickledObject`.

    `allowed` is called with every dotted name.
    """
    machine = _Machine(allowed)
    try:
        for opcode, arg, _ in pickletools.genops(content):
            if opcode.name == "STOP":
                return machine.pop()
            machine.step(opcode.name, arg)
    except UnknownNameError:
        raise
    except (ValueError, IndexError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise UnreadableError(str(error) or type(error).__name__) from None
    raise UnreadableError("it has no end")


class _Machine:
    """The stack machine that pickles are written for, with its memo."""

    def __init__(self, allowed: Callable[[str], bool]) -> None:
        self.allowed = allowed
        self.stack: list[Any] = []
        # Height of the stack at each open mark.
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}

    def step(self, name: str, arg: Any) -> None:
        if name in _PLAIN:
            self.stack.append(arg)
        elif name in _FRESH:
            self.stack.append(_FRESH[name]())
        elif name in _TUPLES:
            self.stack.append(tuple(self.take(_TUPLES[name])))
        elif name in ("PUT", "BINPUT", "LONG_BINPUT"):
            self.memo[arg] = self.stack[-1]
        elif name in ("GET", "BINGET", "LONG_BINGET"):
            self.stack.append(self.memo[arg])
        elif name not in ("PROTO", "FRAME"):
            handler = getattr(self, f"do_{name.lower()}", None)
            if handler is None:
                raise UnreadableError(f"it uses {name}")
            handler(*(() if arg is None else (arg,)))

    def pop(self) -> Any:
        if self.marks and self.marks[-1] == len(self.stack):
            raise UnreadableError("its marks are out of order")
        return self.stack.pop()

    def take(self, count: int) -> list[Any]:
        return [self.pop() for _ in range(count)][::-1]

    def take_to_mark(self) -> list[Any]:
        at = self.marks.pop()
        values = self.stack[at:]
        del self.stack[at:]
        return values

    def name(self, module: str, name: str) -> GlobalName:
        dotted = f"{module}.{name}"
        if not self.allowed(dotted):
            raise UnknownNameError(dotted)
        return GlobalName(dotted)

    def call(self, what: Any, args: Any) -> Any:
        if not isinstance(what, GlobalName) or not isinstance(args, tuple):
            raise UnreadableError("it calls something that is no name")
        if what.dotted == "builtins.getattr" and len(args) == 2 and isinstance(args[0], GlobalName):
            # This is how a member of an enumeration is pickled.
            return self.name(args[0].dotted, str(args[1]))
        return PickledObject(what, args)

    def do_mark(self) -> None:
        self.marks.append(len(self.stack))

    def do_pop(self) -> None:
        if self.marks and self.marks[-1] == len(self.stack):
            self.marks.pop()
        else:
            self.stack.pop()

    def do_pop_mark(self) -> None:
        self.take_to_mark()

    def do_dup(self) -> None:
        self.stack.append(self.stack[-1])

    def do_memoize(self) -> None:
        self.memo[len(self.memo)] = self.stack[-1]

    def do_list(self) -> None:
        self.stack.append(self.take_to_mark())

    def do_tuple(self) -> None:
        self.stack.append(tuple(self.take_to_mark()))

    def do_frozenset(self) -> None:
        self.stack.append(frozenset(self.take_to_mark()))

    def do_dict(self) -> None:
        self.stack.append(dict(_pairs(self.take_to_mark())))

    def do_append(self) -> None:
        self._extend([self.pop()])

    def do_appends(self) -> None:
        self._extend(self.take_to_mark())

    def do_setitem(self) -> None:
        self._update(self.take(2))

    def do_setitems(self) -> None:
        self._update(self.take_to_mark())

    def do_additems(self) -> None:
        values = self.take_to_mark()
        self.stack[-1].update(values)

    def _extend(self, values: list[Any]) -> None:
        target = self.stack[-1]
        (target.items if isinstance(target, PickledObject) else target).extend(values)

    def _update(self, values: list[Any]) -> None:
        target, pairs = self.stack[-1], _pairs(values)
        if isinstance(target, PickledObject):
            target.items.extend(pairs)
        else:
            target.update(pairs)

    def do_global(self, arg: str) -> None:
        module, _, name = arg.partition(" ")
        self.stack.append(self.name(module, name))

    def do_stack_global(self) -> None:
        self.stack.append(self.name(*(str(part) for part in self.take(2))))

    def do_inst(self, arg: str) -> None:
        module, _, name = arg.partition(" ")
        self.stack.append(self.call(self.name(module, name), tuple(self.take_to_mark())))

    def do_obj(self) -> None:
        what, *args = self.take_to_mark()
        self.stack.append(self.call(what, tuple(args)))

    def do_reduce(self) -> None:
        self.stack.append(self.call(*self.take(2)))

    do_newobj = do_reduce

    def do_newobj_ex(self) -> None:
        what, args, keywords = self.take(3)
        self.stack.append(self.call(what, (*args, keywords)))

    def do_build(self) -> None:
        state = self.pop()
        if not isinstance(self.stack[-1], PickledObject):
            raise UnreadableError("it gives a state to something plain")
        self.stack[-1].state = state

    def do_persid(self, arg: str) -> None:
        self.stack.append(PersistentId(arg))

    def do_binpersid(self) -> None:
        self.stack.append(PersistentId(self.pop()))


def _pairs(values: list[Any]) -> Iterable[tuple[Any, Any]]:
    return list(zip(values[::2], values[1::2], strict=True))
