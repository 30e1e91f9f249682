"""A gated MLP by Argosy's own Hopper kernels. On such a GPU they run; elsewhere they are compiled for it, and what is around them runs
with their arithmetic in plain torch."""

from __future__ import annotations

import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

pytest.importorskip("triton", reason="the kernels need triton, which the dev extra brings on Linux")

from argosy.model.layers import MLP
from argosy.model.ops import beside, hopper, matmul, mlp
from argosy.model.ops.choice import kernels
from argosy.model.ops.kernels import hopper_matmul
from argosy.model.ops.matmul import listen, weights_later
from argosy.parallel.transformer_blocks import recompute_block
from argosy.train.kernel_profile import kind_of
from model.small_matmuls import DEVICE, HOPPER, TOO_SMALL, UNLOADABLE, fill_an_h200, small_shapes

# Tokens, hidden and inner width; then parts of tiles in every direction, fewer tiles than processors, and many.
SHAPES = [(96, 512, 64)]
if HOPPER:
    SHAPES += [
        (1000, 520, 1048),
        (1, 1000, 264),
        (65, 512, 8),
        (129, 4104, 136),
        (4096, 1280, 5120),
        (5000, 2048, 8192),
    ]
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "swiglu": F.silu,
    "geglu": lambda x: F.gelu(x, approximate="tanh"),
}


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The passes that the kernels make, with small shapes too. Without the kernels their arithmetic in plain torch makes them."""
    found: list[str] = []

    def value_of(kind: str, gate: Tensor, up: Tensor) -> Tensor:
        return (F.silu(gate) if kind == "silu" else F.gelu(gate, approximate="tanh")) * up

    def gated_products(x: Tensor, gate: Tensor, up: Tensor, kind: str) -> tuple[Tensor, ...]:
        y_gate, y_up = (x.float() @ weight.float().t() for weight in (gate, up))
        y_gate, y_up = y_gate.bfloat16(), y_up.bfloat16()
        return y_gate, y_up, value_of(kind, y_gate.float(), y_up.float()).bfloat16()

    def gated_gradients(d_y: Tensor, down: Tensor, gate: Tensor, up: Tensor, kind: str) -> tuple[Tensor, ...]:
        with torch.enable_grad():
            leaves = [t.detach().float().requires_grad_() for t in (gate, up)]
            value = value_of(kind, *leaves)
        return tuple(t.bfloat16() for t in torch.autograd.grad(value, leaves, d_y.float() @ down.float()))

    def add_product(stream: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        assert bias is None
        return (stream.float() + (x.float() @ weight.float().t()).bfloat16().float()).bfloat16()

    for twin in (gated_products, gated_gradients, add_product):
        name = twin.__name__
        run: Any = getattr(hopper_matmul, name) if HOPPER else twin

        def call(*args: Any, name: str = name, run: Any = run) -> Any:
            found.append(name)
            return run(*args)

        monkeypatch.setattr(hopper_matmul, name, call)
    with small_shapes(monkeypatch):
        yield found


def drawn(tokens: int, hidden: int, width: int) -> list[Tensor]:
    """Return an input and the weights of gate, up and down."""
    torch.manual_seed(1)
    x = torch.randn(tokens, hidden, device=DEVICE)
    gate, up = (torch.randn(width, hidden, device=DEVICE) * hidden**-0.5 for _ in range(2))
    down = torch.randn(hidden, width, device=DEVICE) * width**-0.5
    return [t.bfloat16().requires_grad_() for t in (x, gate, up, down)]


@pytest.mark.parametrize("kind", ACTIVATIONS)
@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize(("tokens", "hidden", "width"), SHAPES)
def test_results_and_gradients_are_those_of_32_bits(
    tokens: int, hidden: int, width: int, added: bool, kind: str, calls: list[str]
) -> None:
    leaves = drawn(tokens, hidden, width)
    x, gate, up, down = leaves
    # Where the kernel could not add, a model does not ask it to.
    added = added and (not HOPPER or (width >= 512 and hidden % 16 == 0))
    stream = torch.randn_like(x).requires_grad_() if added else None
    leaves += [] if stream is None else [stream]
    d_y = torch.randn_like(x)
    y = mlp.gated_mlp(x, kind, gate, up, down, stream)
    assert calls == ["gated_products"] + ([] if stream is None else ["add_product"])
    exact = ACTIVATIONS[kind](x.float() @ gate.float().t()) * (x.float() @ up.float().t()) @ down.float().t()
    exact = exact if stream is None else exact + stream.float()
    ours = [y, *torch.autograd.grad(y, leaves, d_y)]
    theirs = [exact, *torch.autograd.grad(exact, leaves, d_y.float())]
    for one, other in zip(ours, theirs, strict=True):
        assert (one.float() - other).norm() < 1e-2 * other.norm()


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_they_give_the_same_bits_again(kind: str) -> None:
    leaves = drawn(*((4096, 1280, 5120) if HOPPER else (64, 512, 64)))
    x, gate, up, down = leaves
    runs = []
    for _ in range(10 if HOPPER else 2):
        y = mlp.gated_mlp(x, kind, gate, up, down)
        runs.append([y, *torch.autograd.grad(y, leaves, torch.ones_like(y))])
    assert all(torch.equal(first, other) for run in runs[1:] for first, other in zip(runs[0], run, strict=True))


def module_of(kind: str, *, bias: bool = False, width: int = 64) -> MLP:
    spec: Any = SimpleNamespace(hidden=512, ffn=width, activation=kind, gated=kind in ACTIVATIONS, mlp_bias=bias)
    module = MLP(spec).to(DEVICE, torch.bfloat16)
    torch.manual_seed(2)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=0.04)
    return module


def tokens(count: int = 64) -> Tensor:
    return torch.randn(2, count // 2, 512, device=DEVICE).bfloat16()


def passed(module: MLP, x: Tensor) -> list[Tensor]:
    """Return the output of a module, and the gradients of its input and of the parameters that are trained."""
    leaf = x.clone().requires_grad_()
    leaves = [leaf, *(p for p in module.parameters() if p.requires_grad)]
    with kernels(on=True):
        y = module(leaf)
        return [y, *torch.autograd.grad(y, leaves, torch.ones_like(y))]


if HOPPER:

    @pytest.mark.parametrize("kind", ACTIVATIONS)
    @pytest.mark.parametrize("large", [0.0, 1e4, -1e30, float("inf"), float("nan")])
    def test_extreme_values_are_those_of_separate_kernels(kind: str, large: float) -> None:
        module, x = module_of(kind), tokens(512)
        x[0, 7, 3] = large
        x[1, 200] = large
        ours = passed(module, x)
        module.fuses_activation = False
        for one, other in zip(ours, passed(module, x), strict=True):
            assert torch.equal(one.isfinite(), other.isfinite())
            one, other = (t.double().nan_to_num(0, 0, 0) for t in (one, other))
            assert (one - other).norm() <= 1e-2 * other.norm()


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_a_model_uses_them(kind: str, calls: list[str]) -> None:
    found = passed(module_of(kind), tokens())
    assert calls == ["gated_products", "gated_gradients"]
    assert found[0].shape == found[1].shape == (2, 32, 512)


def test_a_model_adds_its_output_to_a_stream(calls: list[str]) -> None:
    module, x = module_of("swiglu", width=512), tokens()
    stream = torch.randn_like(x).requires_grad_()
    with kernels(on=True):
        assert module.down.adds_to(stream)
        y = module(x, stream)
        expected = stream + module(x)
    assert calls == ["gated_products", "add_product", "gated_products"]
    assert torch.equal(y, expected)
    parts = [stream, *module.parameters()]
    d_y = torch.randn_like(y)
    assert all(map(torch.equal, torch.autograd.grad(y, parts, d_y), torch.autograd.grad(expected, parts, d_y)))


WHY_NOT = ["a bias of the output", "no gate", "biases", "8-bit floats", "adapters", "32 bits", "a transposed input"]
WHY_NOT += ["no tokens", "a narrow row", *TOO_SMALL, *UNLOADABLE]


@pytest.mark.parametrize("why", WHY_NOT)
def test_they_are_not_used_where_they_cannot_serve(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, x = module_of("gelu_tanh" if why == "no gate" else "swiglu", bias=why == "biases"), tokens()
    weight = module.down.weight.detach()
    if why == "8-bit floats":
        module.up.fp8 = True
    elif why == "adapters":
        module.down.lora_scale = 1.0
    elif why == "a bias of the output":
        module.down.bias = torch.nn.Parameter(torch.zeros(512, device=DEVICE, dtype=x.dtype))
    elif why == "32 bits":
        module, x = module.float(), x.float()
    elif why == "a transposed input":
        x = x.transpose(0, 1)
    elif why == "no tokens":
        x = x[:, :0]
    elif why in TOO_SMALL:
        TOO_SMALL[why](monkeypatch)
    elif why == "a narrow row":
        module = module_of("swiglu", width=72)
    elif why in UNLOADABLE:
        module.down.weight = torch.nn.Parameter(UNLOADABLE[why](weight))
    assert module._fused(x) is None


@pytest.mark.parametrize(("factors", "filled"), [(1, False), (2, True)])
def test_tiles_of_all_factors_count(factors: int, filled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    fill_an_h200(monkeypatch)
    assert beside.fits(DEVICE, 66 * 128, 512, 256, factors=factors) == filled


@pytest.mark.parametrize(
    ("version", "runs"), [("3.6.0", True), ("3.7.1", True), ("3.9.0", True), ("3.8.0", False), ("3.60.0", False)]
)
def test_they_run_only_with_the_versions_of_triton_they_were_measured_with(
    version: str, runs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(beside, "gluon_refusal", hopper.gluon_refusal)
    monkeypatch.setattr(hopper, "gpu_refusal", lambda device, capabilities: None)
    monkeypatch.setattr(hopper, "_TRITON", version)
    assert (module_of("swiglu")._fused(tokens()) is not None) == runs


@pytest.mark.parametrize(("how", "passes"), [("full", 2), ("selective", 0)])
def test_selective_recompute_runs_matmuls_once_and_so_cannot_use_them(how: str, passes: int, calls: list[str]) -> None:
    module, x = module_of("swiglu"), tokens()
    whole = passed(module, x)
    calls.clear()
    recompute_block(module, how)
    found = passed(module, x)
    assert calls.count("gated_products") == passes
    for one, other in zip(found, whole, strict=True):
        assert (one - other).norm() < 1e-2 * other.norm()


@pytest.mark.parametrize("frozen", [("down",), ("up",), ("gate", "up"), ("up", "down", "gate")])
def test_frozen_weights_get_no_gradient_and_change_no_other(frozen: tuple[str, ...]) -> None:
    module, x = module_of("swiglu"), tokens()
    whole = dict(zip(["y", "x", *(name for name, _ in module.named_parameters())], passed(module, x), strict=True))
    for name in frozen:
        module.get_submodule(name).requires_grad_(False)
    left = ["y", "x", *(name for name, p in module.named_parameters() if p.requires_grad)]
    for name, found in zip(left, passed(module, x), strict=True):
        assert torch.equal(found, whole[name]), name


def test_only_the_gradients_that_are_wanted_are_computed(calls: list[str]) -> None:
    module, x = module_of("swiglu"), tokens()
    _, _, *whole = passed(module, x)
    with kernels(on=True):
        y = module(x)
    found = torch.autograd.grad(y, list(module.parameters()), torch.ones_like(y))
    assert all(torch.equal(one, other) for one, other in zip(found, whole, strict=True))
    for name in ("gate", "up"):
        module.get_submodule(name).requires_grad_(False)
    calls.clear()
    with kernels(on=True):
        module(x).sum().backward()
    assert calls == ["gated_products"]


def test_a_gradient_at_an_odd_address_is_copied() -> None:
    module, x = module_of("swiglu"), tokens().requires_grad_()
    with kernels(on=True):
        y = module(x)
    d_y = torch.randn(y.numel() + 1, device=DEVICE).bfloat16()[1:].view(y.shape)
    found = torch.autograd.grad(y, [x, module.down.weight], d_y, retain_graph=True)
    assert all(map(torch.equal, found, torch.autograd.grad(y, [x, module.down.weight], d_y.clone())))


def test_autograd_frees_gate_and_up_before_their_weights_get_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one layer holds in the backward pass is then what it holds matmul by matmul."""
    kept: list[weakref.ref[Tensor]] = []
    alive: list[int] = []
    plain = matmul.product

    def keeping(run: Any) -> Any:
        def call(*args: Any) -> Any:
            found = run(*args)
            kept.extend(weakref.ref(t.untyped_storage()) for t in found)
            return found

        return call

    def product(*args: Any) -> Tensor:
        alive.append(sum(one() is not None for one in kept))
        return plain(*args)

    monkeypatch.setattr(hopper_matmul, "gated_products", keeping(hopper_matmul.gated_products))
    monkeypatch.setattr(matmul, "product", product)
    monkeypatch.setattr(mlp, "product", product)
    module, x = module_of("swiglu"), tokens().requires_grad_()
    with kernels(on=True):
        y = module(x)
    y.sum().backward()
    # The down projection's gradient, which reads the activation, then that of gate and up.
    assert alive == [3, 0, 0]


def test_a_listener_hears_the_gradient_of_the_input() -> None:
    class Listener:
        readers = 0

        def __init__(self) -> None:
            self.heard: list[Tensor] = []

        def hear(self, gradient: Tensor) -> None:
            self.heard.append(gradient)

    module, listener = module_of("swiglu"), Listener()
    x = tokens().requires_grad_()
    listen(x, listener)
    with kernels(on=True):
        y = module(x)
    [d_x] = torch.autograd.grad(y, [x], torch.ones_like(y))
    assert listener.readers == len(listener.heard) == 1
    assert torch.equal(listener.heard[0], d_x)


def test_weight_gradients_can_wait() -> None:
    module, x = module_of("swiglu"), tokens()
    _, _, *now = passed(module, x)
    with kernels(on=True):
        y = module(x)
    with weights_later() as later:
        y.backward(torch.ones_like(y))
    assert all(p.grad is None for p in module.parameters())
    later.run()
    for parameter, one in zip(module.parameters(), now, strict=True):
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, one)


def test_a_profiler_counts_them_as_matmuls() -> None:
    assert kind_of("_gemm_beside") == "gemm"


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource
from argosy.model.ops.kernels import hopper_matmul

kernel = hopper_matmul._gemm_beside
BF16, FP32 = "*bf16", "*fp32"
# What follows, its kind, and the pointers beside the result's.
forms = [("activation", "silu", dict(out_beside=BF16, out_last=BF16))]
forms += [("gradients", "gelu_tanh", dict(out_beside=BF16, saved=BF16, saved_beside=BF16))]
forms += [("sum", None, dict(saved=BF16)), ("sum", None, dict(saved=BF16, saved_beside=BF16)), ("product", None, {})]
forms += [("heads", (4, size), dict(out_beside=BF16, out_last=BF16, saved=FP32, saved_beside=FP32)) for size in (64, 256)]
for then, kind, pointers in forms:
    weights = {"activation": (128, 64), "gradients": (64, 256)}.get(then, (256, 64))
    described = {"a": (64, 64), "b": weights} | ({"b_up": weights} if then == "activation" else {})
    types = {name: f"tensordesc<bf16[{rows}, {columns}],{hopper_matmul._LAYOUT!r}>" for name, (rows, columns) in described.items()}
    types |= {"out": BF16, **pointers}
    absent = [name for name in ("b_up", "saved", "saved_beside", "out_beside", "out_last") if name not in types]
    constants = dict.fromkeys(absent) | {"KIND": kind, "THEN": then}
    signature = dict.fromkeys(kernel.arg_names, "i32") | types | dict.fromkeys(constants, "constexpr")
    known = [n for n, name in enumerate(kernel.arg_names) if str(types.get(name)).startswith("*") or name == "width"]
    attributes = {(n,): [["tt.divisibility", 16]] for n in known}
    source = GluonASTSource(kernel, signature, constexprs=constants, attrs=attributes)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    # Two workers, each with three loops of steps of four instructions.
    assert made.asm["cubin"] and made.asm["ptx"].count("wgmma.mma_async") >= 2 * 3 * 4
    assert made.asm["ptx"].count("st.global.v4") >= 2 * 2, f"{then}: no wide stores"
print("compiled")
"""


def test_they_compile_for_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    found = subprocess.run([sys.executable, "-c", COMPILE], capture_output=True, text=True, timeout=580)
    assert "compiled" in found.stdout, found.stderr
