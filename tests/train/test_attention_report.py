"""A run on a GPU says at its start who computes attention, and what would make it faster; and a run whose passes cannot be captured as
CUDA graphs, though that was asked for, says why."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from argosy.config.resolve import resolve
from argosy.extras import install_extra
from argosy.model.ops import flash, hopper
from argosy.parallel.mesh import Mesh
from argosy.train.attention_report import attention_lines
from argosy.train.opening import opening_warnings

Say = Callable[..., list[str]]
GPU = torch.device("cuda")
FASTER = f"flash-attn-4 would be faster: {install_extra('flash')}"


@pytest.fixture
def say(monkeypatch: pytest.MonkeyPatch) -> Say:
    """Say what a run of gpt2 would on an H100 with a measured Triton and without flash-attn-4, but for what is given."""

    def lines(*overrides: str, capability: int = 9, triton: str = "3.7.0", package: str | None = None) -> list[str]:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (capability, 0))
        monkeypatch.setattr(flash, "INSTALLED", package)
        monkeypatch.setattr(hopper, "_TRITON", triton)
        keys = ["model=gpt2", "data.train=corpus", "train.global_batch=8", "train.steps=9", "optim.lr=1e-3", *overrides]
        spec = resolve(None, keys).spec
        return attention_lines(spec, "bf16" if spec.train.precision == "auto" else spec.train.precision, GPU)

    return lines


def test_the_kernels_that_compute_attention_are_named(say: Say) -> None:
    assert say() == ["attention by Argosy's own kernels"]
    assert say("data.document_mask=true") == ["attention by Argosy's own kernels"]
    assert say(triton="9.0", package="4.0.0") == ["attention by flash-attn-4"]
    assert say("train.deterministic=false", capability=8) == ["attention by cuDNN"]
    assert say("model.positions=alibi") == ["attention by FlexAttention"]


OURS = "would leave it to Argosy's own kernels, and be faster"


@pytest.mark.parametrize(
    ("keys", "change"),
    [
        (["train.precision=fp16"], f"train.precision=bf16 {OURS}"),
        (["model.dropout=0.1"], f"model.dropout=0 {OURS}"),
        (["data.seq_len=1000"], f"data.seq_len=1024 {OURS}"),
        (["train.precision=fp32"], f"train.precision=bf16 {OURS}"),
        # No learned position is beyond max_seq_len.
        (["model.max_seq_len=1000", "data.seq_len=1000"], f"data.seq_len=896 {OURS}"),
        (["model.max_seq_len=100", "data.seq_len=100"], FASTER),
        (["train.precision=fp32", "model.dropout=0.1"], f"train.precision=bf16 and model.dropout=0 {OURS}"),
        (["train.precision=fp16", "data.seq_len=1000"], f"train.precision=bf16 and data.seq_len=1024 {OURS}"),
        (
            ["parallel.cp=2", "parallel.cp_kind=allgather", "model.dropout=0.1"],
            f"model.dropout=0 and parallel.cp_kind=ulysses {OURS}",
        ),
        (
            ["train.precision=fp32", "model.dropout=0.1", "data.seq_len=1000"],
            f"train.precision=bf16 and model.dropout=0 and data.seq_len=1024 {OURS}",
        ),
        (["model.positions=alibi", "train.precision=fp32", "model.dropout=0.1"], None),
    ],
)
def test_what_would_make_it_faster_is_named(say: Say, keys: list[str], change: str | None) -> None:
    (line,) = say(*keys)
    assert line.partition("; ")[2] == (change or "")


@pytest.mark.parametrize(
    ("keys", "change"),
    [
        (["data.seq_len=1000"], FASTER),
        (["train.precision=fp16"], FASTER),
        (["model.dropout=0.1"], FASTER.replace(":", " with model.dropout=0:")),
        (
            ["train.precision=fp32", "model.dropout=0.1"],
            FASTER.replace(":", " with train.precision=bf16 and model.dropout=0:"),
        ),
    ],
)
def test_a_package_is_named_where_no_key_is_enough(say: Say, keys: list[str], change: str) -> None:
    (line,) = say(*keys, triton="9.0")
    assert line.partition("; ")[2] == change


def test_without_our_kernels_the_package_or_another_choice_is_named(say: Say) -> None:
    assert say(triton="9.0") == [f"attention by torch; {FASTER}"]
    # An A100 has neither.
    assert say(capability=8) == [
        "attention by torch; train.deterministic=false leaves it to cuDNN, which is faster and not repeatable"
    ]


def test_layers_of_different_kinds_have_a_line_each(say: Say) -> None:
    keys = ["model=gemma3-1b", "model.head_dim=128", "data.seq_len=2040"]
    assert say(*keys) == [
        f"attention in a window of 512 by FlexAttention; data.seq_len=2048 {OURS}",
        f"attention over the whole sequence by torch; data.seq_len=2048 {OURS}",
    ]


@pytest.mark.parametrize(
    ("device", "graph", "mask", "said"),
    [
        ("cpu", "on", "causal-lm", ["there is no GPU"]),
        ("cpu", "auto", "causal-lm", []),
        ("cuda", "on", "causal-lm", []),
        (
            "cuda",
            "on",
            "prefix-lm",
            ["the mask depends on the batch, and not all of attention is by Argosy's own kernels"],
        ),
        ("cuda", "auto", "prefix-lm", []),
    ],
)
def test_graphs_that_were_asked_for_and_cannot_be_captured_are_told(
    device: str, graph: str, mask: str, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    keys = ["model=gpt2", "data.train=corpus", "train.global_batch=8", "train.steps=9", "optim.lr=1e-3"]
    spec = resolve(None, [*keys, f"data.task={mask}", f"parallel.graph={graph}"]).spec
    on = torch.device(device)
    session: Any = SimpleNamespace(spec=spec, precision="fp32", device=on, mesh=Mesh(on))
    told = [(text, warned) for event, text, warned in opening_warnings(session) if event == "graph"]
    assert told == [(f"parallel.graph=on, but no CUDA graph is captured: {why}", True) for why in said]
