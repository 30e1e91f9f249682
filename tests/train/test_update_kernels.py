"""Kernels that update parameters compile for a GPU. Triton's interpreter, which other tests run them by, accepts more than its compiler."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="the kernels need triton, which the dev extra brings on Linux")
COMPILE = """
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from {module} import {kernel} as kernel

fixed = {{"parameter_type": tl.bfloat16, "gradient_type": tl.float32, "ALIGNED": True, "B": 4096}}
pointers = {{"table": "*i64", "row_of": "*i32", "scale": "*fp32", "skip": "*fp32", "corrections": "*fp32"}}
names = kernel.arg_names
signature = {{name: "constexpr" if name in fixed else pointers.get(name, "fp32") for name in names}}
source = ASTSource(kernel, signature, {{(names.index(name),): value for name, value in fixed.items()}})
assembly = compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]
assert "ld.global.v4" in assembly, "aligned parameters are not read by wide loads"
"""


@pytest.mark.parametrize(
    ("module", "kernel"),
    [("argosy.train.adamw_kernel", "adamw_kernel"), ("argosy.train.lion_update", "lion_kernel")],
)
def test_an_update_kernel_compiles_for_a_gpu(module: str, kernel: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    code = COMPILE.format(module=module, kernel=kernel)
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
