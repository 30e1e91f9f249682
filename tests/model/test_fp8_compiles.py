"""The kernels that round to 8 bits, and those that sum, compile for Hopper with the installed Triton, without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="the kernels need triton, which the dev extra brings on Linux")

COMPILE = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from argosy.model.ops.kernels import fp8_cross_entropy_kernel, fp8_kernel, fp8_mlp_kernel, heads_kernel, matmul_kernel

POINTERS = {
    **dict.fromkeys(["x", "y", "d_out", "d_q", "d_k", "d_v", "w", "logits"], "*bf16"), **dict.fromkeys(["values", "transposed"], "*fp8e5"),
    **dict.fromkeys("parts found scale norms out largest d_scale d_bias sums cos sin lses".split(), "*fp32"), "labels": "*i64",
    **dict.fromkeys(["factor", "z_loss", "inverse"], "fp32"),
}
# Numbers that need not be multiples of 16.
ANY = ("used", "kv_heads", "tiles", "measured", "factor", "vocab", "begin", "z_loss", "inverse", "ignored")


def compiled(kernel, **constants):
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else POINTERS.get(name, "i32") for name in names}
    fixed = {(names.index(name),): value for name, value in constants.items()}
    known = {(n,): [["tt.divisibility", 16]] for n, name in enumerate(names) if name not in constants and name not in ANY}
    made = compile(ASTSource(kernel, signature, fixed, known), target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    assert made.asm["cubin"]
    return made.asm


def rounds(kernel, **constants):
    code = compiled(kernel, LARGEST=57344.0, **constants)
    exchanged = [line for line in code["ttgir"].splitlines() if "convert_layout" in line]
    assert exchanged and not any("f8E" in line for line in exchanged), "single bytes are exchanged between threads"
    assert "st.global.v4" in code["ptx"], "no wide stores"


tile = dict(QUADS=16, C=64)
rounds(fp8_kernel._round, PARTS=1024, **tile)
for summed in (False, True):
    rounds(fp8_cross_entropy_kernel._rounded_gradient, SUMMED=summed, **tile)
compiled(fp8_kernel._largest, B=8192)
compiled(fp8_mlp_kernel._column_norms, R=32, C=64)
for kind, gated in (("gelu_tanh", False), ("gelu", False), ("relu", False), ("silu", True), ("gelu_tanh", True)):
    form = dict(KIND=kind, GATED=gated)
    compiled(fp8_mlp_kernel._measure, R=8, C=256, **form)
    rounds(fp8_mlp_kernel._activate, PARTS=1024, QUADS=16, C=64 if gated else 128, **form)
    rounds(fp8_mlp_kernel._differentiate, SUMMED=not gated, **form, **tile)
# Triton makes a constant of a size of one.
for size in ({}, {"count": 1}):
    compiled(matmul_kernel._sum, PARTS=2, ADDS=True, B=2048, **size)
for gated in (False, True):
    compiled(fp8_mlp_kernel._bound, GATED=gated, PARTS=1024)
for rope in (False, True):
    for half in (32, 64):
        rounds(heads_kernel._join_rounded, ROPE=rope, SUMMED=not rope, PARTS=1024, GROUP=4, HALF=half, QUADS=16)
print("compiled")
"""


def test_they_compile_for_hopper() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True, timeout=580, check=False
    )
    assert "compiled" in done.stdout, done.stderr[-3000:]
