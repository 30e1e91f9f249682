"""A benchmark of a training step's matmuls at the GPU's power limit: torch's, every algorithm that cuBLASLt proposes, and Argosy's kernel.

    python benchmarks/matmuls.py [MODEL] [--batch 4] [--seq-len 8192] [--seconds 0.5] [--rounds 2] [--least 0.01] [KEY=VALUE …]

The matmuls are those that a step of the model asks torch for one by one, with their shapes, layouts and types. Those of Argosy's own kernels
are not among them (`ARGOSY_KERNELS=torch` in the environment turns these kernels off, and so lists their matmuls too), nor are batched ones
(weight gradients that are split along the tokens), 8-bit ones and those of experts. Each is timed for so long that the GPU is at its power
limit, where an algorithm that is 10% faster in a few runs may be slower, since it takes more power. The benchmark prints the time relative
to torch's, and whether the bits are torch's.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from argosy.config.benchmark import benchmark_spec
from argosy.data.synthetic import synthetic_batch
from argosy.measure.calibrate import paced
from argosy.measure.step_bench import start
from argosy.model.ops.beside import multiplies
from argosy.train.device import prepare_device
from argosy.train.step import take_step

# Algorithms to ask cuBLASLt for, and how many of the fastest in a few runs are timed for long.
PROPOSALS, TIMED = 16, 6


class Matmul(NamedTuple):
    """out [rows, columns] = a [rows, inner] b [inner, columns], or out + a b if it accumulates."""

    rows: int
    inner: int
    columns: int
    # Whether the rows of a and of b are next to each other in memory; otherwise their columns are.
    by_rows: tuple[bool, bool]
    dtype: torch.dtype
    out_dtype: torch.dtype
    accumulates: bool

    @property
    def flops(self) -> int:
        return 2 * self.rows * self.inner * self.columns

    def __str__(self) -> str:
        layout = "".join("r" if rows else "c" for rows in self.by_rows)
        form = f"{self.rows} x {self.inner} x {self.columns} {layout}"
        out = "" if self.out_dtype == self.dtype else f" to {str(self.out_dtype).removeprefix('torch.')}"
        return form + out + (", added" if self.accumulates else "")

    def operands(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Return random factors, and zeros for the result."""

        def drawn(rows: int, columns: int, by_rows: bool) -> Tensor:
            x = torch.randn((rows, columns) if by_rows else (columns, rows), device=device).to(self.dtype)
            return x if by_rows else x.t()

        a, b = drawn(self.rows, self.inner, self.by_rows[0]), drawn(self.inner, self.columns, self.by_rows[1])
        return a, b, torch.zeros(self.rows, self.columns, device=device, dtype=self.out_dtype)

    def by_torch(self, a: Tensor, b: Tensor, out: Tensor) -> None:
        if self.out_dtype != self.dtype and self.accumulates:
            torch.addmm(out, a, b, out_dtype=self.out_dtype, out=out)
        elif self.out_dtype != self.dtype:
            torch.mm(a, b, out_dtype=self.out_dtype, out=out)
        elif self.accumulates:
            out.addmm_(a, b)
        else:
            torch.mm(a, b, out=out)


class Recorder(TorchDispatchMode):
    """Counts the matmuls that run inside."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[Matmul] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        name = function._schema.name.removeprefix("aten::")
        if name in ("mm", "addmm", "addmm_"):
            added, factors = (args[0], args[1:3]) if name.startswith("addmm") else (None, args[:2])
            # A sum with something else, such as a bias, is another operation.
            if added is None or added.data_ptr() == result.data_ptr():
                self.found[_matmul(*factors, result, added is not None)] += 1
        return result


def _matmul(a: Tensor, b: Tensor, out: Tensor, accumulates: bool) -> Matmul:
    by_rows = (a.stride(1) == 1, b.stride(1) == 1)
    return Matmul(a.shape[0], a.shape[1], b.shape[1], by_rows, a.dtype, out.dtype, accumulates)


class _Proposal(ctypes.Structure):
    """What cuBLASLt calls a heuristic result: the algorithm, its workspace, and how well it suits."""

    _fields_ = (
        ("algorithm", ctypes.c_uint64 * 8), ("workspace", ctypes.c_size_t), ("state", ctypes.c_int), ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )  # fmt: skip


class CublasLt:
    """cuBLASLt's C interface, as far as timing its algorithms needs it. It computes out^T = b^T a^T in its own order of columns."""

    _TYPES, _FP32, _COMPUTE = {torch.float32: 0, torch.bfloat16: 14, torch.float16: 2}, 0, 68
    _TRANSPOSE_A, _TRANSPOSE_B, _WORKSPACE = 3, 4, 1
    _TILE, _SPLIT, _CLUSTER = (1, ctypes.c_uint32), (2, ctypes.c_uint32), (8, ctypes.c_uint16)

    def __init__(self, device: torch.device) -> None:
        with open("/proc/self/maps") as maps:
            path = next(line.split()[-1] for line in maps if "libcublasLt.so" in line)
        self._library = ctypes.CDLL(path)
        self._handle = ctypes.c_void_p()
        self._call("Create", ctypes.byref(self._handle))
        self._space = torch.empty(64 << 20, dtype=torch.uint8, device=device)

    def _call(self, name: str, *given: Any) -> None:
        if status := getattr(self._library, f"cublasLt{name}")(*given):
            raise RuntimeError(f"cublasLt{name} returned {status}")

    def _layout(self, x: Tensor, by_rows: bool) -> ctypes.c_void_p:
        made, (rows, columns) = ctypes.c_void_p(), x.shape if not by_rows else reversed(x.shape)
        line = x.stride(0) if by_rows else x.stride(1)
        sizes = ctypes.c_uint64(rows), ctypes.c_uint64(columns), ctypes.c_int64(line)
        self._call("MatrixLayoutCreate", ctypes.byref(made), self._TYPES[x.dtype], *sizes)
        return made

    def problem(self, matmul: Matmul, a: Tensor, b: Tensor, out: Tensor) -> tuple[ctypes.c_void_p, ...]:
        """Return the descriptions of a matmul and of its matrices."""
        made = ctypes.c_void_p()
        self._call("MatmulDescCreate", ctypes.byref(made), self._COMPUTE, self._FP32)
        for place, by_rows in ((self._TRANSPOSE_A, matmul.by_rows[1]), (self._TRANSPOSE_B, matmul.by_rows[0])):
            turned = ctypes.c_int32(not by_rows)
            self._call("MatmulDescSetAttribute", made, place, ctypes.byref(turned), ctypes.c_size_t(4))
        return made, self._layout(b, matmul.by_rows[1]), self._layout(a, matmul.by_rows[0]), self._layout(out, True)

    def proposals(self, problem: tuple[ctypes.c_void_p, ...]) -> dict[str, _Proposal]:
        """Return algorithms that sum each result in one place, by their tile and cluster."""
        wanted, found, count = ctypes.c_void_p(), (_Proposal * PROPOSALS)(), ctypes.c_int(0)
        self._call("MatmulPreferenceCreate", ctypes.byref(wanted))
        space = ctypes.c_uint64(self._space.numel())
        self._call("MatmulPreferenceSetAttribute", wanted, self._WORKSPACE, ctypes.byref(space), ctypes.c_size_t(8))
        self._call(
            "MatmulAlgoGetHeuristic", self._handle, *problem, problem[-1], wanted, PROPOSALS, found, ctypes.byref(count)
        )
        usable = [one for one in found[: count.value] if not one.state and self._setting(one, self._SPLIT) <= 1]
        return {
            f"tile {self._setting(one, self._TILE)}, cluster {self._setting(one, self._CLUSTER)}": one for one in usable
        }

    def _setting(self, proposal: _Proposal, which: tuple[int, Any]) -> int:
        number, kind = which
        value, written = kind(0), ctypes.c_size_t(0)
        size = ctypes.c_size_t(ctypes.sizeof(value))
        read = self._library.cublasLtMatmulAlgoConfigGetAttribute
        read(ctypes.byref(proposal.algorithm), number, ctypes.byref(value), size, ctypes.byref(written))
        return int(value.value)

    def run(
        self,
        problem: tuple[ctypes.c_void_p, ...],
        proposal: _Proposal,
        matmul: Matmul,
        a: Tensor,
        b: Tensor,
        out: Tensor,
    ) -> None:
        once, added = ctypes.c_float(1), ctypes.c_float(float(matmul.accumulates))
        b_at, a_at, out_at, space = (ctypes.c_void_p(t.data_ptr()) for t in (b, a, out, self._space))
        made, b_form, a_form, out_form = problem
        self._call(
            "Matmul", self._handle, made, ctypes.byref(once), b_at, b_form, a_at, a_form, ctypes.byref(added), out_at, out_form, out_at,
            out_form, ctypes.byref(proposal.algorithm), space, ctypes.c_size_t(self._space.numel()),
            ctypes.c_void_p(torch.cuda.current_stream().cuda_stream),
        )  # fmt: skip


def forms_of(
    matmul: Matmul, a: Tensor, b: Tensor, out: Tensor, library: CublasLt | None
) -> dict[str, Callable[[], None]]:
    """Return ways to compute a matmul."""
    forms: dict[str, Callable[[], None]] = {"torch": lambda: matmul.by_torch(a, b, out)}
    plain = matmul.out_dtype == matmul.dtype and matmul.by_rows == (True, False) and not matmul.accumulates
    if library is None:
        return forms
    if plain and multiplies(a, b.t()):
        from argosy.model.ops.kernels.hopper_matmul import plain_product

        forms["Argosy's kernel"] = lambda: out.set_(plain_product(a, b.t()))  # type: ignore[call-overload]
    problem = library.problem(matmul, a, b, out)
    for name, proposal in library.proposals(problem).items():
        forms[name] = lambda proposal=proposal: library.run(problem, proposal, matmul, a, b, out)  # type: ignore[misc]
    return forms


def time_forms(
    matmul: Matmul, count: int, device: torch.device, library: CublasLt | None, seconds: float, rounds: int
) -> None:
    a, b, out = matmul.operands(device)
    forms = forms_of(matmul, a, b, out, library)
    first: Tensor | None = None
    bits: dict[str, str] = {}
    for name, form in forms.items():
        out.zero_()
        form()
        first = out.clone() if first is None else first
        bits[name] = "" if torch.equal(first, out) else ", other bits"
    quick = sorted(forms, key=lambda name: paced(forms[name], device, 0.01))
    chosen = ["torch", *[name for name in quick if name != "torch"][:TIMED]]
    found: dict[str, list[float]] = {name: [] for name in chosen}
    for _ in range(rounds):
        for name in chosen:
            found[name].append(paced(forms[name], device, seconds))
    by_torch = statistics.mean(found["torch"])
    rate = matmul.flops / by_torch / 1e12
    print(f"{count} of {matmul}: {by_torch * 1e3:.3f} ms by torch, {rate:.4g} TFLOP/s", flush=True)
    for name in sorted(chosen[1:], key=lambda name: sum(found[name])):
        each = ", ".join(f"{one / by_torch:.3f}" for one in found[name])
        print(f"  {name:24}{statistics.mean(found[name]) / by_torch:.3f} ({each}){bits[name]}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="llama3-1b")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seq-len", type=int, default=8192)
    parser.add_argument("--seconds", type=float, default=0.5, help="length of a measurement; the second half counts")
    parser.add_argument("--rounds", type=int, default=2, help="measurements of each form, in turn")
    parser.add_argument("--least", type=float, default=0.01, help="the least share of all FLOPs that is timed")
    options, keys = parser.parse_known_args()
    keys = ["parallel.graph=off", *keys]
    spec = benchmark_spec(options.model, keys, steps=1, batch=options.batch, seq_len=options.seq_len)
    device = prepare_device(spec.train)
    engine, optimizer = start(spec, device)
    with Recorder() as recorder:
        take_step(engine, optimizer, engine.place(synthetic_batch(spec)), step=1, lr=spec.optim.lr)
    del engine, optimizer
    library = CublasLt(device) if device.type == "cuda" and torch.version.hip is None else None
    total = sum(matmul.flops * count for matmul, count in recorder.found.items())
    for matmul, count in sorted(recorder.found.items(), key=lambda item: -item[0].flops * item[1]):
        if matmul.flops * count >= options.least * total:
            time_forms(matmul, count, device, library, options.seconds, options.rounds)
    print(f"{len(recorder.found)} forms of matmuls, {total / 1e12:.4g} TFLOP a step")


if __name__ == "__main__":
    main()
