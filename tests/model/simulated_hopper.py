"""A simulation of what Hopper kernels rely on: groups of warps, barriers in shared memory, TMA transfers and asynchronous matmuls.

It runs the Python source of the kernels themselves. Groups of warps are threads, of which one runs at a time, chosen at random after every
access to shared memory; transfers end at random times. What a GPU would do wrong in silence, or hang on, raises a Fault: a slot that is
written while it is read or read before it is loaded, a barrier with an arrival too many, a result that is used before it is complete,
work in flight at the end, a deadlock.
"""

from __future__ import annotations

import random
import re
import struct
import threading
from collections.abc import Callable, Iterable
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
from triton.experimental.gluon import language
from triton.runtime.jit import JITFunction

# Bytes of a value in shared memory.
BYTES = {"bfloat16": 2, "float32": 4, "int32": 4}
# How much faster or slower than others a group of warps may be, and transfers.
SPEEDS = (0.003, 0.1, 1.0, 1.0, 30.0)


class Fault(AssertionError):
    """What a kernel must not do."""


class _Stopped(BaseException):
    """Ends the thread of a group of warps when the simulation is over."""


class Number(int):
    """A scalar of a kernel."""

    def to(self, _: object) -> Number:
        return self


def _numbers(name: str) -> Callable[[int, int], Any]:
    compute = getattr(int, name)

    def operator(self: int, other: int) -> Any:
        result = compute(self, other) if isinstance(other, int) else NotImplemented
        return Number(result) if isinstance(result, int) and not isinstance(result, bool) else result

    return operator


for _name in ("add", "radd", "sub", "rsub", "mul", "rmul", "floordiv", "mod", "and", "xor"):
    setattr(Number, f"__{_name}__", _numbers(f"__{_name}__"))


class Tensor(np.ndarray[Any, Any]):
    """A tensor in registers."""

    type = SimpleNamespace(layout=SimpleNamespace(parent=None))

    def to(self, dtype: object) -> Any:
        return self.astype(np.float32) if dtype == "float32" else self


def tensor(values: Any) -> Any:
    return np.asarray(values).view(Tensor)


class Barrier:
    """An mbarrier: a phase is complete when all have arrived and all bytes that are expected have come."""

    def init(self, count: int) -> None:
        self.count = self.missing = count
        self.bytes = self.phases = 0

    def arrive(self, *, expected: int = 0) -> None:
        if not self.missing:
            raise Fault("an arrival too many in a phase of a barrier")
        self.missing -= 1
        self.add_bytes(expected)

    def add_bytes(self, count: int) -> None:
        self.bytes += count
        if not self.missing and not self.bytes:
            self.phases += 1
            self.missing = self.count


class Slot:
    """A piece of shared memory that is stored or read as a whole, and loaded as a whole or in rows."""

    def __init__(self, shape: Iterable[int], dtype: str) -> None:
        self.shape = tuple(shape)
        self.bytes = BYTES[dtype] * int(np.prod(self.shape))
        self.values: Any = None
        self.readers = 0
        # The rows that are being loaded.
        self.loading: list[range] = []

    def permute(self, _: object) -> Part:
        return Part(self, transposed=True)

    def slice(self, start: int, size: int, dim: int = 0) -> Part:
        chosen = slice(start, start + size)
        return Part(self, columns=chosen) if dim else Part(self, rows=chosen)

    def store(self, values: Any) -> None:
        if self.readers or self.loading:
            raise Fault("a slot is written while it is read or loaded")
        self.values = np.array(values)

    def load(self, _: object) -> Any:
        return tensor(self.read())

    def read(self) -> Any:
        if self.loading or self.values is None:
            raise Fault("a slot is read before it is loaded")
        return self.values


class Part(NamedTuple):
    """Rows or columns of a slot, or its transpose."""

    slot: Slot
    transposed: bool = False
    rows: slice = slice(None)
    columns: slice = slice(None)

    def read(self) -> Any:
        values = self.slot.read()[self.rows, self.columns]
        return values.T if self.transposed else values


class Slots:
    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def index(self, place: int) -> Any:
        return self.items[place]


class Matrix:
    """A matrix in memory with a TMA descriptor. Counts how often each value was written."""

    layout = None

    def __init__(self, values: Any) -> None:
        self.values, self.written = values, np.zeros(values.shape, int)


class Pointer:
    """A pointer, or a tensor of pointers, to memory."""

    def __init__(self, memory: Matrix, offset: Any = 0) -> None:
        self.memory, self.offset = memory, offset

    def __add__(self, more: Any) -> Pointer:
        return Pointer(self.memory, self.offset + np.asarray(more))

    def __sub__(self, less: int) -> Pointer:
        return self + -less

    def to(self, _: object) -> Pointer:
        return self


class Matmul:
    """An asynchronous matmul. Its operands in shared memory must not change, and nothing but another may add to it, until it is waited
    for."""

    def __init__(self, left: Any, right: Any, accumulator: Any, use_acc: bool) -> None:
        self.operands = [Part(x) if isinstance(x, Slot) else x for x in (left, right)]
        self.accumulator = accumulator if use_acc else 0
        self.result: Any = None
        for part in self._parts():
            part.read()
            part.slot.readers += 1

    def _parts(self) -> list[Part]:
        return [x for x in self.operands if isinstance(x, Part)]

    def finish(self) -> None:
        for part in self._parts():
            part.slot.readers -= 1
        left, right = (x.read() if isinstance(x, Part) else np.asarray(x) for x in self.operands)
        start = self.accumulator.result if isinstance(self.accumulator, Matmul) else self.accumulator
        self.result = tensor(left @ right + start)

    def __getattr__(self, name: str) -> Any:
        raise Fault("the result of a matmul is used before it is complete")

    __add__ = __mul__ = __rmul__ = __sub__ = __getattr__


class Group:
    """A group of warps."""

    def __init__(self, machine: Machine, work: Callable[[], None]) -> None:
        self.ready: Callable[[], bool] = lambda: True
        self.program = machine.program
        self.speed = machine.random.choice(SPEEDS)
        self.matmuls: list[Matmul] = []
        self.stores: list[object] = []
        self.go = threading.Semaphore(0)
        self.over = False
        self.thread = threading.Thread(target=self._run, args=(machine, work), daemon=True)
        self.thread.start()

    def _run(self, machine: Machine, work: Callable[[], None]) -> None:
        try:
            self.go.acquire()
            if not machine.stopped:
                work()
                if self.matmuls or self.stores:
                    raise Fault("a group of warps ends before its matmuls and stores")
        except _Stopped:
            pass
        except BaseException as error:  # noqa: BLE001 - told by the machine's thread
            machine.error = error
        self.over = True
        machine.turn.release()


class Machine:
    """Multiprocessors that run the programs of one kernel."""

    def __init__(self, seed: int) -> None:
        self.program = 0
        self.random = random.Random(seed)
        self.groups: list[Group] = []
        self.transfers: list[Callable[[], None]] = []
        self.transfer_speed = self.random.choice(SPEEDS)
        self.turn = threading.Semaphore(0)
        self.stopped = False
        self.error: BaseException | None = None

    def namespace(self, modules: Iterable[ModuleType]) -> dict[str, Any]:
        """Return the names of kernels' modules, with functions that run here and look other names up in what is returned."""
        names: dict[str, Any] = {name: value for module in modules for name, value in vars(module).items()}
        names |= {name: value.value for name, value in names.items() if isinstance(value, language.constexpr)}
        names |= {
            "gl": self._language(), "mbarrier": self._barriers(), "tma": SimpleNamespace(store_wait=self._store_wait),
            "_fetch": self._load, "_write": self._store, "warpgroup_mma": self._matmul, "warpgroup_mma_wait": self._wait_matmuls,
            "fence_async_shared": lambda: None,
        }  # fmt: skip
        names |= {
            name: FunctionType(f.fn.__code__, names, name) for name, f in names.items() if isinstance(f, JITFunction)
        }
        return names

    def run(self, kernel: Callable[..., None], programs: int, *given: Any) -> None:
        """Run the programs of a kernel to their end."""
        self.programs = programs
        for self.program in range(programs):
            kernel(*given)
        try:
            while self.error is None:
                ready = [group for group in self.groups if not group.over and group.ready()]
                if not ready and not self.transfers:
                    break
                speeds = [group.speed for group in ready] + [self.transfer_speed] * len(self.transfers)
                chosen = self.random.choices(range(len(speeds)), speeds)[0]
                if chosen < len(ready):
                    self.current = ready[chosen]
                    self.current.go.release()
                    self.turn.acquire()
                else:
                    self.transfers.pop(chosen - len(ready))()
            if self.error is None and not all(group.over for group in self.groups):
                raise Fault("a deadlock")
        finally:
            self.stopped = True
            for group in self.groups:
                group.go.release()
                group.thread.join()
        if self.error is not None:
            raise self.error

    def _pause(self, ready: Callable[[], bool] = lambda: True) -> None:
        """Let others run until a group of warps is ready to go on, and is chosen."""
        me = self.current
        me.ready = ready
        self.turn.release()
        me.go.acquire()
        if self.stopped:
            raise _Stopped

    def _barriers(self) -> Any:
        def arrive(barrier: Barrier, count: int) -> None:
            self._pause()
            for _ in range(count):
                barrier.arrive()

        def expect(barrier: Barrier, size: int) -> None:
            self._pause()
            barrier.arrive(expected=size)

        def wait(barrier: Barrier, phase: int) -> None:
            self._pause(lambda: barrier.phases % 2 != phase)

        return SimpleNamespace(init=Barrier.init, arrive=arrive, expect=expect, wait=wait, MBarrierLayout=lambda: None)

    def _load(self, matrix: Matrix, place: list[int], barrier: Barrier, part: Slot | Part) -> None:
        self._pause()
        slot, part = (part.slot, part) if isinstance(part, Part) else (part, Part(part))
        height, width = slot.shape
        rows = range(*part.rows.indices(height))
        if slot.readers or any(rows[0] in other or other[0] in rows for other in slot.loading):
            raise Fault("a slot is loaded while it is read or loaded")
        slot.loading.append(rows)
        row, column = place

        def finish() -> None:
            if slot.values is None:
                slot.values = np.full(slot.shape, np.nan, matrix.values.dtype)
            # What is past the end of the matrix is zero.
            found = matrix.values[row : row + len(rows), column : column + width]
            slot.values[part.rows] = 0
            slot.values[rows[0] : rows[0] + found.shape[0], : found.shape[1]] = found
            slot.loading.remove(rows)
            barrier.add_bytes(-slot.bytes * len(rows) // height)

        self.transfers.append(finish)

    def _store(self, matrix: Matrix, place: list[int], slot: Slot) -> None:
        self._send(matrix, place, slot, added=False)

    def add_tile(self, matrix: Matrix, place: list[int], slot: Slot) -> None:
        self._send(matrix, place, slot, added=True)

    def _send(self, matrix: Matrix, place: list[int], slot: Slot, *, added: bool) -> None:
        self._pause()
        me, (row, column), (rows, columns) = self.current, place, slot.shape
        where = np.s_[row : row + rows, column : column + columns]
        slot.readers += 1
        me.stores.append(token := object())

        def finish() -> None:
            slot.readers -= 1
            me.stores.remove(token)
            matrix.values[where] = slot.read() + (matrix.values[where] if added else 0)
            matrix.written[where] += 1

        self.transfers.append(finish)

    def _store_wait(self, most: int) -> None:
        """Wait for all stores of a group of warps but the last ones."""
        me = self.current
        before = me.stores[: len(me.stores) - most]
        self._pause(lambda: not set(before) & set(me.stores))

    def _matmul(self, left: Any, right: Any, acc: Any, *, use_acc: bool = True, is_async: bool = False) -> Matmul:
        self._pause()
        assert is_async
        self.current.matmuls.append(Matmul(left, right, acc, use_acc))
        return self.current.matmuls[-1]

    def _wait_matmuls(self, most: int, deps: list[Any]) -> Any:
        while len(self.current.matmuls) > most:
            self._pause()
            self.current.matmuls.pop(0).finish()
        results = [x if not isinstance(x, Matmul) or x.result is None else x.result for x in deps]
        return results[0] if len(results) == 1 else results

    def _language(self) -> Any:
        def warp_specialize(parts: Any, *_: object) -> None:
            self.groups += [Group(self, lambda f=f, given=given: f(*given)) for f, given in parts]  # type: ignore[misc]

        def atomic_add(counter: list[int], more: int, sem: str) -> Number:
            self._pause()
            counter[0] += more
            return Number(counter[0] - more)

        def allocate(dtype: str, shape: list[int], _: object) -> Any:
            if dtype == "bfloat16" and len(shape) == 2:
                return Slot(shape, dtype)
            return Slots([Barrier() if dtype == "int64" else Slot(shape[1:], dtype) for _ in range(shape[0])])

        names: dict[str, Any] = {name: name for name in ("float32", "bfloat16", "int64", "int32")}
        layouts = ("Blocked", "Slice", "NVMMADistributed", "NVMMAShared", "DotOperand", "SwizzledShared")
        names |= {f"{name}Layout": lambda *_, **__: None for name in layouts}
        return SimpleNamespace(
            **names, warp_specialize=warp_specialize, atomic_add=atomic_add, allocate_shared_memory=allocate, load=_read, store=_write,
            inline_asm_elementwise=_assembly, static_range=range, convert_layout=lambda x, _: x, max=_reduce(np.max), sum=_reduce(np.sum),
            minimum=lambda a, b: Number(min(a, b)), maximum=lambda a, b: tensor(np.maximum(a, b)), arange=lambda a, b, _: tensor(np.arange(a, b)),
            zeros=lambda shape, *_: tensor(np.zeros(shape, np.float32)), full=lambda shape, value, *_: tensor(np.full(shape, value)),
            multiple_of=lambda x, _: x, zeros_like=lambda x: tensor(np.zeros_like(x)), where=lambda *x: tensor(np.where(*x)),
            program_id=lambda _: Number(self.current.program), num_programs=lambda _: Number(self.programs),
        )  # fmt: skip


def _reduce(compute: Callable[..., Any]) -> Callable[..., Any]:
    def reduce(x: Any, axis: int) -> Any:
        result = compute(np.asarray(x), axis=axis)
        return Number(result) if result.ndim == 0 else tensor(result)

    return reduce


def _read(pointer: Pointer, mask: Any = True, other: float = 0.0) -> Any:
    values = np.where(mask, pointer.memory.values[np.where(mask, pointer.offset, 0)], other)
    return (
        Number(values)
        if values.ndim == 0 and np.issubdtype(pointer.memory.values.dtype, np.integer)
        else tensor(values)
    )


def _write(pointer: Pointer, values: Any, mask: Any = True) -> None:
    chosen, values, offset = np.broadcast_arrays(mask, np.asarray(values), pointer.offset)
    pointer.memory.values[offset[chosen]] = values[chosen]
    pointer.memory.written[offset[chosen]] += 1


_HIDE = re.compile(
    r"\{ \.reg \.f32 (\w+); set\.(lt|gt)\.f32\.f32 \1, \$2, \$3; fma\.rn\.f32 \$0, \1, 0f(\w{8}), \$1; \}"
)


def _assembly(code: str, _: str, operands: list[Any], **__: object) -> Any:
    """Compute what the instructions of the kernels do."""
    if code == "mov.b32 $0, $1;":
        return operands[0]
    if found := _HIDE.fullmatch(code):
        values, limit, constant = operands
        far = (np.less if found[2] == "lt" else np.greater)(limit, constant)
        return tensor(values + far.astype(np.float32) * np.float32(struct.unpack(">f", bytes.fromhex(found[3]))[0]))
    known = {
        "ex2.approx.ftz.f32 $0, $1;": np.exp2,
        "lg2.approx.f32 $0, $1;": np.log2,
        "cvt.rni.s32.f32 $0, $1;": np.rint,
    }
    return tensor(known[code](operands[0]))
