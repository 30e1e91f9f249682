"""Initial weights depend on the seed and the parameter's name, and on nothing else."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch

from argosy.config.resolve import resolve_model
from argosy.model import build
from argosy.model.build import build_model, fill_like_initial, initial_value, initial_weights, initialise

SIZES = ["hidden=64", "heads=4", "vocab_size=500", "max_seq_len=32"]


def weights(seed: int = 1, *changes: str) -> dict[str, torch.Tensor]:
    spec = resolve_model("gpt2", [*SIZES, "layers=3", *changes])
    model = build_model(spec)
    initialise(model, spec, seed)
    return {name: p.detach() for name, p in model.named_parameters()}


def test_the_same_name_gets_the_same_value_in_a_model_of_other_depth() -> None:
    torch.manual_seed(123)  # whatever was drawn before does not matter
    shallow = weights(1)
    torch.rand(1000)
    deep = weights(1, "layers=5")
    residual = ("attn.out.weight", "mlp.down.weight")  # scaled by depth, by design
    for name in shallow:
        if not name.endswith(residual):
            assert torch.equal(shallow[name], deep[name])


def test_seeds_and_names_give_different_values() -> None:
    first, second = weights(1), weights(2)
    assert not torch.equal(first["embed.tokens.weight"], second["embed.tokens.weight"])
    assert not torch.equal(first["layers.0.attn.qkv.weight"], first["layers.1.attn.qkv.weight"])


def test_the_scales_are_those_of_gpt2() -> None:
    found = weights(3)
    assert float(found["embed.tokens.weight"].std()) == pytest.approx(0.02, rel=0.05)
    assert float(found["layers.0.mlp.down.weight"].std()) == pytest.approx(0.02 / math.sqrt(6), rel=0.05)
    assert bool((found["layers.0.attn_norm.weight"] == 1).all())
    assert bool((found["layers.0.attn.qkv.bias"] == 0).all())


@pytest.mark.parametrize("preset", ["gpt2", "t5-small", "gemma3-1b"])
@pytest.mark.parametrize(
    ("name", "constant"), [("scale", None), ("bias", 0.0), ("norm.bias", 0.0), ("norm.weight", 1.0)]
)
def test_a_parameter_starts_by_its_name_inside_a_module_or_outside(
    preset: str, name: str, constant: float | None
) -> None:
    spec = resolve_model(preset)
    measured = torch.full((8, 16), -5.0)
    fill_like_initial(name, measured, spec)
    for value in (measured, initial_value(name, torch.Size((8, 16)), spec, seed=1)):
        expected = spec.norm_start if constant == 1.0 else constant
        if expected is None:
            assert 0 < float(value.std()) < 2
        else:
            assert bool((value == expected).all())


@pytest.mark.parametrize("preset", ["t5-small", "t5-v1.1-small"])
def test_a_fresh_t5_guesses_evenly_with_a_head_of_its_own_or_without(preset: str) -> None:
    """What it is trained from: a loss a little above that of saying every token is as likely as another."""
    spec = resolve_model(preset, [*SIZES, "layers=2", "decoder_layers=2", "dropout=0"])
    model = build_model(spec)
    initialise(model, spec, seed=1)
    tokens = torch.randint(0, 500, (4, 16), generator=torch.Generator().manual_seed(0))
    logits = model(tokens, decoder_tokens=tokens.flip(1))
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())
    assert float(loss.detach()) == pytest.approx(math.log(500), abs=1.0)


BLOCK = 512


def all_at_once(drawn: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return all values, each of which lasts until the next."""
    return {name: value.clone() for name, value in drawn}


@pytest.mark.parametrize("preset", ["gpt2", "t5-small"])
@pytest.mark.parametrize("threads", [1, 3])
def test_the_blocks_of_a_parameter_are_drawn_by_any_number_of_threads(
    preset: str, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(build, "_MOST_AHEAD", 20_000)
    name = "embed.tokens.weight"
    spec = resolve_model(preset, [*SIZES, "layers=2", "vocab_size=31"])
    model = build_model(spec)
    shape = dict(model.named_parameters())[name].shape
    in_one = initial_value(name, shape, spec, seed=1).flatten()
    monkeypatch.setattr(build, "_BLOCK", BLOCK)
    found = all_at_once(initial_weights(model, spec, 1))
    for parameter, value in model.named_parameters():
        assert torch.equal(found[parameter], initial_value(parameter, value.shape, spec, seed=1))
    blocks = found[name].flatten().split(BLOCK)
    assert len(blocks) == 4
    assert torch.equal(blocks[0], in_one[:BLOCK])
    assert all(not torch.equal(one[:256], other[:256]) for one, other in itertools.pairwise(blocks))
    assert float(in_one.std()) == pytest.approx(float(found[name].std()), rel=0.1)


def test_rows_of_t5_keep_their_scales_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block is of whole rows, some of queries and some of keys."""
    spec = resolve_model("t5-small", [*SIZES, "layers=2", "head_dim=16"])
    monkeypatch.setattr(build, "_BLOCK", 5 * 64 + 1)
    qkv = initial_value("layers.0.attn.qkv.weight", torch.Size((4 * 3 * 16, 64)), spec, seed=1).view(4, 3, 16, 64)
    assert float(qkv[:, 0].std()) == pytest.approx(spec.init_std / 8 / 4, rel=0.05)
    assert float(qkv[:, 1:].std()) == pytest.approx(spec.init_std / 8, rel=0.05)


@pytest.mark.parametrize(
    ("span", "firsts"),
    [
        (range(1), [0]),
        (range(511, 513), [0, 8]),
        (range(1024, 1536), [16]),
        (range(31_999, 32_000), [496]),
        (range(0), []),
    ],
)
def test_a_rank_draws_only_the_blocks_in_which_it_has_numbers(
    span: range, firsts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = resolve_model("gpt2", [*SIZES, "layers=2"])
    model = build_model(spec)
    monkeypatch.setattr(build, "_BLOCK", BLOCK)
    draw, drawn = build._draw, list[int]()

    def noted(rows: torch.Tensor, *more: Any) -> None:
        if rows.untyped_storage().nbytes() == 500 * 64 * 4:
            drawn.append(rows.storage_offset() // 64)
        draw(rows, *more)

    whole = all_at_once(initial_weights(model, spec, 1))
    monkeypatch.setattr(build, "_memory", lambda spare, numbers, **how: torch.empty(numbers))
    monkeypatch.setattr(build, "_draw", noted)
    found = all_at_once(initial_weights(model, spec, 1, lambda p: span if len(p) == 500 else range(p.numel())))
    assert sorted(drawn) == firsts
    for name, value in found.items():
        part = slice(span.start, span.stop) if len(value) == 500 else slice(None)
        assert torch.equal(value.flatten()[part], whole[name].flatten()[part])


def test_what_is_drawn_ahead_is_bounded_also_where_a_rank_keeps_little_of_each_parameter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class AtOnce(ThreadPoolExecutor):
        def submit(self, work: Any, /, *arguments: Any, **named: Any) -> Any:
            done: Future[Any] = Future()
            done.set_result(work(*arguments, **named))
            return done

    spec = resolve_model("gpt2", [*SIZES, "layers=12"])
    draw, drawn = build._draw, list[int]()

    def noted(rows: torch.Tensor, *more: Any) -> None:
        drawn.append(rows.numel())
        draw(rows, *more)

    monkeypatch.setattr(build, "_draw", noted)
    monkeypatch.setattr(build, "ThreadPoolExecutor", AtOnce)
    monkeypatch.setattr(build, "_BLOCK", 2048)
    monkeypatch.setattr(build, "_MOST_AHEAD", 20_000)
    next(initial_weights(build_model(spec), spec, 1, lambda parameter: range(1)))
    assert 10_000 < sum(drawn) <= 20_000


@pytest.mark.parametrize("kept", [1, 3])
def test_values_are_drawn_into_the_memory_of_earlier_ones(kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """For a rank that keeps a third of each parameter, into that of values of the same size only."""
    spec = resolve_model("gpt2", [*SIZES, "layers=12"])
    model = build_model(spec)
    monkeypatch.setattr(build, "_BLOCK", BLOCK)
    monkeypatch.setattr(build, "_MOST_AHEAD", 40_000)
    parts = {p.numel(): range(p.numel() // kept) for p in model.parameters()}
    whole = all_at_once(initial_weights(model, spec, 1))
    memory, new = build._memory, list[int]()

    def noted(spare: list[torch.Tensor], numbers: int, **how: bool) -> torch.Tensor:
        before = [id(one) for one in spare]
        found = memory(spare, numbers, **how)
        assert len(found) >= numbers
        assert len(found) == numbers or how["whole"]
        if id(found) not in before:
            assert all(len(one) < numbers if how["whole"] else len(one) != numbers for one in spare)
            new.append(numbers)
        return found

    monkeypatch.setattr(build, "_memory", noted)
    for name, value in initial_weights(model, spec, 1, lambda p: parts[p.numel()]):
        part = parts[value.numel()]
        assert torch.equal(value.flatten()[part.start : part.stop], whole[name].flatten()[part.start : part.stop])
        value.fill_(float("nan"))  # whoever reads it later would notice
    assert new[0] == 500 * 64
    assert all(new.count(numbers) * numbers <= 40_000 * kept for numbers in new)
    assert sum(new) < sum(p.numel() for p in model.parameters()) * 0.55
