"""Prefix language modelling: a prefix is seen both ways, the rest causally, and the loss is of the rest alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from argosy.config.resolve import resolve, resolve_model
from argosy.data.open import open_data
from argosy.data.samples.masks import IGNORED
from argosy.data.samples.windows import Batch
from argosy.data.synthetic import synthetic_batch
from argosy.errors import ArgosyError
from argosy.model.attention import BACKENDS, Case, Mask, explicit_bias
from argosy.model.build import build_model, initialise
from argosy.tasks.prefix_lm import PrefixLM, PrefixSpec, with_prefix

SMALL = ["layers=3", "hidden=48", "heads=4", "kv_heads=2", "ffn=64", "vocab_size=101", "max_seq_len=24"]
SEQ, PREFIX = 24, 9


def model_of(*more: str) -> torch.nn.Module:
    spec = resolve_model("llama2-7b", [*SMALL, *more])
    model = build_model(spec).eval()
    initialise(model, spec, 3)
    return model


def reach_of(*lengths: int) -> torch.Tensor:
    return torch.tensor([[max(q, length - 1) for q in range(SEQ)] for length in lengths])


def tokens_of(count: int = 1) -> torch.Tensor:
    return torch.randint(0, 101, (count, SEQ), generator=torch.Generator().manual_seed(0))


def moved_by(model: torch.nn.Module, place: int) -> list[bool]:
    """Whether the logits of each place change with the token at one of them."""
    tokens, reach = tokens_of(), reach_of(PREFIX)
    other = tokens.clone()
    other[0, place] = (other[0, place] + 1) % 101
    with torch.no_grad():
        difference = (model(tokens, reach=reach) - model(other, reach=reach)).abs().amax(-1)[0]
    return [bool(x > 1e-7) for x in difference]


def test_a_later_token_of_the_prefix_changes_the_earlier_ones() -> None:
    assert moved_by(model_of(), PREFIX - 1) == [True] * SEQ


@pytest.mark.parametrize("place", [PREFIX, PREFIX + 5, SEQ - 1])
def test_a_token_behind_the_prefix_changes_nothing_before_it(place: int) -> None:
    assert moved_by(model_of(), place) == [False] * place + [True] * (SEQ - place)


def test_attention_is_that_of_an_explicit_mask_in_plain_torch() -> None:
    lengths, heads = (1, 5, SEQ), 4
    q, k, v = torch.randn(3, 3, heads, SEQ, 8, generator=torch.Generator().manual_seed(1))
    causal = torch.ones(SEQ, SEQ).tril().bool()
    within = torch.stack([torch.arange(SEQ)[:, None].maximum(torch.arange(SEQ)) < length for length in lengths])
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=(causal | within)[:, None])
    case = Case(Mask(causal=True, reach=reach_of(*lengths)), q.device, q.dtype, 8, SEQ, 0.0)
    serving = [backend for backend in BACKENDS if backend.refuses(case) is None]
    assert [backend.name for backend in serving] == ["explicit"]
    torch.testing.assert_close(serving[0].prepare(case, None)(q, k, v), expected)
    bias = explicit_bias(case)
    assert bias is not None
    assert torch.equal(bias[:, 0] == 0, causal | within)


def test_a_prefix_of_one_token_is_causal_language_modelling() -> None:
    model, tokens = model_of(), tokens_of()
    torch.testing.assert_close(model(tokens, reach=reach_of(1)), model(tokens))


def rows(count: int) -> Batch:
    tokens = np.arange(count * (SEQ + 1)).reshape(count, SEQ + 1)
    return Batch(tokens[:, :-1], tokens[:, 1:])


def test_the_loss_is_of_what_follows_the_prefix() -> None:
    batch = with_prefix(rows(50), 0, 7, PrefixSpec())
    for labels, whole, reach in zip(batch.labels, rows(50).labels, batch.inputs["reach"], strict=True):
        length = int(reach[0]) + 1
        assert 1 <= length <= SEQ
        assert (labels[: length - 1] == IGNORED).all()
        assert np.array_equal(labels[length - 1 :], whole[length - 1 :])
        assert np.array_equal(reach, np.maximum(np.arange(SEQ), length - 1))


def test_a_prefix_depends_on_the_seed_and_the_sample_alone() -> None:
    """So that a resumed run, whatever its layout, draws what the first one would have drawn."""
    whole = with_prefix(rows(40), 100, 7, PrefixSpec())
    for first, count in ((100, 3), (117, 1), (120, 20)):
        part = with_prefix(replace(rows(40).rows(first - 100, first - 100 + count)), first, 7, PrefixSpec())
        assert np.array_equal(part.inputs["reach"], whole.inputs["reach"][first - 100 : first - 100 + count])
    other = with_prefix(rows(40), 100, 8, PrefixSpec())
    assert not np.array_equal(other.inputs["reach"], whole.inputs["reach"])


def test_lengths_fill_the_shares_asked_for() -> None:
    drawn = with_prefix(rows(2000), 0, 7, PrefixSpec(shortest=0.25, longest=0.5)).inputs["reach"][:, 0] + 1
    assert set(drawn) == set(range(6, 13))
    assert set(with_prefix(rows(2000), 0, 7, PrefixSpec()).inputs["reach"][:, 0] + 1) == set(range(1, SEQ + 1))


KEYS = ["model=llama2-7b", *(f"model.{key}" for key in SMALL), "train.global_batch=4", "train.steps=3", "optim.lr=1e-3"]
ASK = [*KEYS, "data.task=prefix-lm", "train.precision=fp32"]


def test_a_synthetic_batch_has_prefixes() -> None:
    batch = synthetic_batch(resolve(None, [*ASK, "data.train=corpus"]).spec)
    assert set(batch.inputs) == {"reach"}
    assert batch.valid_tokens < batch.tokens.size


@pytest.mark.parametrize(
    ("keys", "key"),
    [
        (["data.prefix={shortest: 0.6, longest: 0.5}"], "data.prefix.shortest"),
        (["model=mpt-125m-alibi", "data.task=prefix-lm"], "data.task"),
        (["data.task=causal-lm", "data.prefix={}"], "data.prefix"),
    ],
)
def test_what_makes_no_sense_is_refused(keys: list[str], key: str) -> None:
    base = ASK if keys[0] != "model=mpt-125m-alibi" else [k for k in ASK if not k.startswith("model")]
    with pytest.raises(ArgosyError) as refused:
        resolve(None, [*base, "data.train=corpus", *keys])
    assert refused.value.key == key


def test_a_prompt_is_the_prefix_of_what_is_written() -> None:
    task = PrefixLM()
    assert task.prompt_inputs(3, range(5)) == {"reach": [2, 2, 2, 3, 4]}
    assert task.prompt_inputs(3, range(2, 6)) == {"reach": [0, 1, 2, 3]}
    assert task.prompt_inputs(3, range(4, 7)) == {"reach": [0, 1, 2]}


def test_a_run_resumes_to_the_same_bits_and_writes(write_spec: Callable[..., Path], argosy: Callable[..., Any]) -> None:
    data = {"train": str(open_train(write_spec())), "seq_len": 32, "split": [90, 10, 0], "task": "prefix-lm"}
    spec = write_spec(data=data, optim={"lr": 1e-3, "schedule": "constant"})
    for name, steps in (("whole", 6), ("halves", 4), ("halves", 6)):
        done = argosy("train", spec, f"name={name}", f"train.steps={steps}", "--quiet")
        assert done.returncode == 0, done.stderr
    final = [spec.parent / "runs" / name / "checkpoints" / "step-00000006" for name in ("whole", "halves")]
    weights = [sorted(path.glob("*.safetensors")) for path in final]
    assert [file.read_bytes() for file in weights[0]] == [file.read_bytes() for file in weights[1]]
    written = argosy("sample", spec.parent / "runs" / "whole", "--prompt", "once", "--tokens", "5")
    assert written.returncode == 0, written.stderr
    assert written.stdout.startswith("once")


def open_train(spec: Path) -> str:
    return resolve(spec, []).spec.data.train[0].path


def test_windows_of_a_corpus_become_samples_with_prefixes(write_spec: Callable[..., Path]) -> None:
    keys = ["data.task=prefix-lm", "data.prefix.longest=0.5", "data.mask_eod=true", "data.document_mask=true"]
    batch = open_data(resolve(write_spec(), keys).spec).training().batch(5, 4)
    assert set(batch.inputs) == {"documents", "reach"}
    assert (batch.inputs["reach"][:, 0] < 17).all()
    assert (batch.labels[:, -1] != IGNORED).any()
