"""Decoding with a key/value cache gives the logits of a full forward pass, and the tokens of transformers' generate."""

from __future__ import annotations

import pytest
import torch

import hf_models
from argosy.config.resolve import resolve_model
from argosy.infer.loading import load_model
from argosy.model.build import build_model, initialise
from argosy.model.decoding import Sampling, choose, generate
from argosy.model.kv_cache import CachedTexts

CPU = torch.device("cpu")
GREEDY = Sampling(tokens=14, temperature=0.0)
# Of different lengths: the shorter ones are padded. The windows of the models are 9 tokens.
PROMPTS = [[5, 200, 17], [80, 81, 82, 83, 84, 85, 86, 87, 88, 89, 90], [7]]


@pytest.fixture(scope="module", params=sorted(hf_models.DECODERS))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[object, torch.nn.Module]:
    """A model of transformers, and ours with its weights."""
    directory = tmp_path_factory.mktemp(request.param)
    theirs = hf_models.save(request.param, directory)
    return theirs, load_model(f"hf:{directory}", device="cpu", precision="fp32").model


def test_logits_of_a_ragged_batch_are_those_of_full_passes_of_each_text(pair: tuple[object, torch.nn.Module]) -> None:
    _, model = pair
    texts = [list(prompt) for prompt in PROMPTS]
    cached = CachedTexts(model, limit=64, most=64, device=CPU)
    for token in range(12):
        with torch.no_grad():
            found = cached(texts)
            full = torch.stack([model(torch.tensor([text]))[0, -1] for text in texts])
        torch.testing.assert_close(found, full, rtol=1e-4, atol=1e-4)
        for text in texts:
            text.append(token * 20 + len(text))


def test_greedy_tokens_are_those_of_transformers(pair: tuple[object, torch.nn.Module]) -> None:
    theirs, model = pair
    cached = CachedTexts(model, limit=64, most=64, device=CPU)
    found = generate(cached, PROMPTS, GREEDY, stop=None)
    for prompt, written in zip(PROMPTS, found, strict=True):
        alone = theirs.generate(  # type: ignore[attr-defined]
            torch.tensor([prompt]), do_sample=False, max_new_tokens=14, eos_token_id=None, pad_token_id=0
        )
        assert written == alone[0, len(prompt) :].tolist()


def small(positions: str) -> torch.nn.Module:
    keys = [
        "layers=2",
        "hidden=32",
        "heads=4",
        "kv_heads=4",
        "vocab_size=101",
        "max_seq_len=16",
        f"positions={positions}",
    ]
    spec = resolve_model("gpt2" if positions == "learned" else "llama2-7b", keys)
    model = build_model(spec).eval()
    initialise(model, spec, 3)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.3)
    return model


@pytest.mark.parametrize("positions", ["learned", "rope"])
def test_a_text_longer_than_the_model_reads_goes_on_from_its_last_tokens(positions: str) -> None:
    model, options = small(positions), Sampling(tokens=24, temperature=0.7, top_k=0, seed=4)
    prompts = [[1, 2, 3, 4, 5], list(range(20))]

    def uncached(texts: list[list[int]]) -> torch.Tensor:
        return torch.stack([model(torch.tensor([text[-16:]]))[0, -1] for text in texts])

    cached = CachedTexts(model, limit=16, most=44, device=CPU)
    assert generate(cached, prompts, options, stop=None) == generate(uncached, prompts, options, stop=None)


def test_a_prefix_is_read_both_ways_however_long_its_neighbours_are() -> None:
    model = small("rope")
    prompts = [[9, 8, 7, 6, 5, 4], [1, 2]]

    def beside(row: int, shown: range) -> dict[str, list[int]]:
        return {"reach": [max(place, len(prompts[row]) - 1) - shown.start for place in shown]}

    with torch.no_grad():
        found = CachedTexts(model, limit=16, most=16, device=CPU, beside=beside)(prompts)
        for row, prompt in enumerate(prompts):
            reach = torch.full((1, len(prompt)), len(prompt) - 1)
            torch.testing.assert_close(found[row], model(torch.tensor([prompt]), reach=reach)[0, -1])


def test_a_text_ends_at_its_stop_token_and_does_not_depend_on_the_others() -> None:
    model, options = small("rope"), Sampling(tokens=9, temperature=1.0, seed=2)

    def write(prompts: list[list[int]], stop: int | None) -> list[list[int]]:
        return generate(CachedTexts(model, limit=16, most=16, device=CPU), prompts, options, stop=stop)

    alone = [write([prompt], None)[0] for prompt in ([1, 2, 3], [4])]
    assert write([[1, 2, 3], [4]], None) == alone
    stop = alone[0][3]
    assert write([[1, 2, 3], [4]], stop) == [row[: row.index(stop)] if stop in row else row for row in alone]


def test_top_p_keeps_the_fewest_tokens_that_reach_it() -> None:
    logits = torch.tensor([[0.1, 0.6, 0.05, 0.25]]).log()
    generator = torch.Generator().manual_seed(0)

    def drawn(top_p: float, top_k: int = 0) -> set[int]:
        options = Sampling(temperature=1.0, top_k=top_k, top_p=top_p)
        return {choose(logits, options, [generator])[0] for _ in range(200)}

    assert [drawn(p) for p in (0.0, 0.5, 0.7, 0.9, 1.0)] == [{1}, {1}, {1, 3}, {0, 1, 3}, {0, 1, 2, 3}]
    assert drawn(1.0, top_k=2) == {1, 3}
