"""Kernels that update parameters compile for a GPU. Triton's interpreter, which other tests run them by, accepts more than its compiler."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="the kernels need triton, which the dev extra brings on Linux")
COMPILE = """
import re

import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from argosy.train.adamw_kernel import adamw_kernel
from argosy.train.lion_update import lion_kernel

FIXED = {"parameter_type": tl.bfloat16, "gradient_type": tl.float32, "ALIGNED": True, "B": 4096}
POINTERS = {"table": "*i64", "row_of": "*i32", "scale": "*fp32", "skip": "*fp32", "corrections": "*fp32"}


def compiled(kernel, **more):
    names, fixed = kernel.arg_names, FIXED | more
    signature = {name: "constexpr" if name in fixed else POINTERS.get(name, "fp32") for name in names}
    source = ASTSource(kernel, signature, {(names.index(name),): value for name, value in fixed.items()})
    assembly = compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8}).asm["ptx"]
    assert "ld.global.v4" in assembly, "aligned parameters are not read by wide loads"
    return assembly


def arithmetic(assembly):
    return re.findall(r"^\\s*((?:add|sub|mul|fma|div|sqrt)[.\\w]*f32)", assembly, re.MULTILINE)


compiled(lion_kernel)
plain, measured = (compiled(adamw_kernel, MEASURED=on) for on in (False, True))
atomics = [re.findall(r"(?:atom|red)\\S*max\\S*", assembly) for assembly in (plain, measured)]
assert not atomics[0]
assert atomics[1] and all("relaxed" in one for one in atomics[1]), "it does not measure, or waits for other memory"
assert len(arithmetic(plain)) > 100
assert arithmetic(plain) == arithmetic(measured), "measuring changes the update"
"""


def test_the_update_kernels_compile_for_a_gpu() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
