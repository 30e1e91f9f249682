"""BERT and T5 compute what transformers computes: logits, losses and gradients, weights copied both ways."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
import transformers
from torch import Tensor
from torch.nn import functional as F

from argosy.checkpoint.hf.hf_convert import entries, from_hf, to_hf
from argosy.config.model import ModelSpec
from argosy.config.resolve import resolve_model
from argosy.data.samples.masks import IGNORED
from argosy.model.build import build_model, initialise
from argosy.model.objective import Objective

T = transformers
SMALL = ["layers=3", "hidden=48", "heads=4", "ffn=80", "vocab_size=101", "max_seq_len=40", "dropout=0"]
BERT = {
    "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 80, "vocab_size": 101,
    "max_position_embeddings": 40, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
T5 = {
    "d_model": 48,
    "num_layers": 3,
    "num_decoder_layers": 2,
    "num_heads": 4,
    "d_kv": 16,
    "d_ff": 80,
    "vocab_size": 101,
}


def _t5_1_1() -> torch.nn.Module:
    model = T.T5ForConditionalGeneration(
        T.T5Config(**T5, dropout_rate=0.0, feed_forward_proj="gated-gelu", tie_word_embeddings=False)
    )
    model.lm_head.weight = torch.nn.Parameter(torch.empty(101, 48))  # transformers ties it whatever is asked for
    return model


CASES: dict[str, tuple[str, list[str], Any]] = {
    "bert": ("bert-base", [], lambda: T.BertForPreTraining(T.BertConfig(**BERT))),
    "bert-without-pairs": ("bert-base", ["pair=none"], lambda: T.BertForMaskedLM(T.BertConfig(**BERT))),
    "t5": (
        "t5-small",
        ["head_dim=16", "decoder_layers=2"],
        lambda: T.T5ForConditionalGeneration(T.T5Config(**T5, dropout_rate=0.0)),
    ),
    "t5-v1.1": ("t5-v1.1-small", ["head_dim=16", "decoder_layers=2"], _t5_1_1),
}


class Pair(NamedTuple):
    spec: ModelSpec
    ours: torch.nn.Module
    theirs: torch.nn.Module

    def gradients(self) -> dict[str, Tensor]:
        """Theirs, in our names. A tensor they hold under two names has its gradient under the first."""
        return from_hf(entries(self.spec), {k: p.grad for k, p in self.theirs.named_parameters()})


def _pair(name: str) -> Pair:
    preset, changes, make = CASES[name]
    spec = resolve_model(preset, SMALL + changes)
    torch.manual_seed(0)
    theirs = make().eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(0.0, 0.2)
    ours = build_model(spec)
    ours.load_state_dict(from_hf(entries(spec), {k: v.detach().clone() for k, v in theirs.state_dict().items()}))
    return Pair(spec, ours.eval(), theirs)


def _assert_same(found: Tensor, expected: Tensor, name: str = "") -> None:
    scale = float(expected.detach().abs().max())
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5 * scale, msg=lambda m: f"{name}: {m}")


def _assert_same_gradients(pair: Pair) -> None:
    expected = pair.gradients()
    assert {name for name, _ in pair.ours.named_parameters()} == set(expected)
    for name, parameter in pair.ours.named_parameters():
        _assert_same(parameter.grad, expected[name], name)


def _bert_inputs() -> dict[str, Tensor]:
    """Three rows, of which the second ends in padding."""
    generator = torch.Generator().manual_seed(1)
    padding = torch.ones(3, 33, dtype=torch.bool)
    padding[1, 20:] = False
    labels = torch.randint(0, 101, (3, 33), generator=generator)
    labels[torch.rand(3, 33, generator=generator) < 0.7] = IGNORED
    return {
        "tokens": torch.randint(1, 101, (3, 33), generator=generator),  # theirs takes no gradient for reading token 0
        "token_types": torch.randint(0, 2, (3, 33), generator=generator),
        "padding_mask": padding,
        "labels": labels.masked_fill(~padding, IGNORED),
        "pair_labels": torch.tensor([0, 1, 1]),
    }


@pytest.mark.parametrize("name", ["bert", "bert-without-pairs"])
def test_bert_gives_the_same_logits_losses_and_gradients(name: str) -> None:
    pair, inputs = _pair(name), _bert_inputs()
    mask, labels = inputs["padding_mask"], inputs["labels"]
    theirs = pair.theirs(inputs["tokens"], attention_mask=mask.long(), token_type_ids=inputs["token_types"])
    logits = theirs.prediction_logits if pair.spec.judges_pairs else theirs.logits
    seen = {"token_types": inputs["token_types"], "padding_mask": mask}
    _assert_same(pair.ours(inputs["tokens"], **seen)[mask], logits[mask])
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    tokens = int((labels != IGNORED).sum())
    total = expected
    if pair.spec.judges_pairs:
        _assert_same(pair.ours.pair(pair.ours.encoder(inputs["tokens"], **seen)), theirs.seq_relationship_logits)
        asked = F.cross_entropy(theirs.seq_relationship_logits, inputs["pair_labels"])
        total = expected + asked * tokens
    total.backward()
    loss = pair.ours(
        inputs["tokens"],
        labels,
        Objective(tokens_per_sample=tokens / 3),
        pair_labels=inputs["pair_labels"],
        **seen,
    )
    loss.total.backward()
    _assert_same(loss.cross_entropy, expected.detach())
    _assert_same(loss.total.detach(), total.detach())
    if pair.spec.judges_pairs:
        _assert_same(loss.metrics["nsp_loss"] / tokens, asked.detach())
    _assert_same_gradients(pair)


def test_asking_at_some_positions_is_asking_at_all_with_the_others_ignored() -> None:
    pair, inputs = _pair("bert-without-pairs"), _bert_inputs()
    labels = inputs["labels"]
    most = int((labels != IGNORED).sum(1).max())
    predicted = torch.sort((labels == IGNORED).long(), dim=1, stable=True).indices[:, :most]
    seen = {"token_types": inputs["token_types"], "padding_mask": inputs["padding_mask"]}
    everywhere = pair.ours(inputs["tokens"], labels, Objective(), **seen)
    some = pair.ours(inputs["tokens"], labels.gather(1, predicted), Objective(), predicted=predicted, **seen)
    torch.testing.assert_close(some.total, everywhere.total)


@pytest.mark.parametrize("name", ["t5", "t5-v1.1"])
def test_t5_gives_the_same_logits_losses_and_gradients(name: str) -> None:
    pair = _pair(name)
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(0, 101, (2, 300), generator=generator)  # longer than the farthest distance that is told
    decoder_tokens, labels = torch.randint(0, 101, (2, 2, 150), generator=generator)
    theirs = pair.theirs(input_ids=tokens, decoder_input_ids=decoder_tokens).logits
    _assert_same(pair.ours(tokens, decoder_tokens=decoder_tokens), theirs)
    F.cross_entropy(theirs.flatten(0, 1), labels.flatten(), reduction="sum").backward()
    pair.ours(tokens, labels, Objective(), decoder_tokens=decoder_tokens).total.backward()
    _assert_same_gradients(pair)


@pytest.mark.parametrize("name", CASES)
def test_weights_survive_the_way_there_and_back(name: str) -> None:
    pair = _pair(name)
    weights = dict(pair.ours.named_parameters())
    exported = to_hf(entries(pair.spec), weights)
    original = pair.theirs.state_dict()
    assert all(torch.equal(exported[name], original[name]) for name in exported)
    tied = {"cls.predictions.decoder.weight", "cls.predictions.decoder.bias", "lm_head.weight"}
    tied |= {"encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "bert.embeddings.position_ids"}
    assert set(original) - set(exported) <= tied
    back = from_hf(entries(pair.spec), exported)
    assert all(torch.equal(back[name], weights[name]) for name in weights)


def test_padding_changes_nothing_and_gives_no_nan() -> None:
    pair, inputs = _pair("bert"), _bert_inputs()
    mask = torch.zeros(3, 33, dtype=torch.bool)
    mask[:, :10] = True
    mask[2] = False  # nothing but padding
    short = pair.ours(inputs["tokens"][:, :10])
    found = pair.ours(inputs["tokens"], padding_mask=mask)
    assert bool(found.isfinite().all())
    torch.testing.assert_close(found[:2, :10], short[:2], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["t5-small", "t5-v1.1-small"])
def test_fresh_weights_of_t5_are_as_wide_as_transformers(name: str) -> None:
    sizes = ["layers=1", "hidden=256", "heads=4", "head_dim=32", "ffn=512", "vocab_size=500"]
    spec = resolve_model(name, sizes)
    ours = build_model(spec)
    initialise(ours, spec, seed=1)
    theirs = T.T5ForConditionalGeneration(
        T.T5Config(
            d_model=256, num_layers=1, num_heads=4, d_kv=32, d_ff=512, vocab_size=500,
            feed_forward_proj="gated-gelu" if spec.gated else "relu",
        )
    ).state_dict()  # fmt: skip
    wide = {name: float(weight.std()) for name, weight in theirs.items()}
    if not spec.tied:  # drawn as wide as an embedding, as it is there, it would begin far from an even guess
        wide["lm_head.weight"] = spec.hidden**-0.5
    for name, weight in to_hf(entries(spec), ours.state_dict()).items():
        assert float(weight.std()) == pytest.approx(wide[name], rel=0.02 + 4 * weight.numel() ** -0.5, abs=1e-6), name


@pytest.mark.parametrize("name", ["bert-base", "t5-small"])
def test_a_fresh_model_starts_near_the_uniform_guess(name: str) -> None:
    spec = resolve_model(name, [*SMALL, "hidden=256", "init_std=0.02"])
    model = build_model(spec)
    initialise(model, spec, seed=1)
    tokens = torch.randint(0, 101, (64, 40))
    more = {"decoder_tokens": tokens} if name == "t5-small" else {}
    loss = model(tokens, tokens.roll(-1, 1), Objective(), **more).cross_entropy / tokens.numel()
    assert float(loss) == pytest.approx(torch.tensor(101.0).log().item(), abs=0.1)
