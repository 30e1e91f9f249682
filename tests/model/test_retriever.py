"""The two towers: a softmax over the blocks of the micro-batch, learnt where it can be."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from argosy.config.resolve import resolve_model
from argosy.model.build import build_model, initialise
from argosy.model.objective import Objective

SIZES = ["layers=2", "hidden=32", "heads=4", "ffn=64", "vocab_size=64", "max_seq_len=16", "dropout=0"]


def retriever(*changes: str) -> torch.nn.Module:
    spec = resolve_model("ict-base", [*SIZES, *changes])
    model = build_model(spec)
    initialise(model, spec, seed=1)
    return model


def test_the_loss_is_the_softmax_over_the_blocks_and_a_block_is_no_wrong_answer_to_itself() -> None:
    model = retriever()
    tokens, queries = torch.randint(0, 64, (6, 12)), torch.randint(0, 64, (6, 8))
    scores = model(tokens, query_tokens=queries)
    loss = model(tokens, torch.arange(6), Objective(), query_tokens=queries)
    torch.testing.assert_close(loss.total, F.cross_entropy(scores, torch.arange(6), reduction="sum"))
    assert float(loss.metrics["top1_accuracy"]) == (scores.argmax(1) == torch.arange(6)).sum()
    top5 = scores.topk(5).indices
    assert float(loss.metrics["top5_accuracy"]) == (top5 == torch.arange(6)[:, None]).any(1).sum()
    labels = torch.tensor([0, 1, 2, 3, 4, 0])
    kept = [
        [0, 1, 2, 3, 4],
        [1, 0, 2, 3, 4, 5],
        [2, 0, 1, 3, 4, 5],
        [3, 0, 1, 2, 4, 5],
        [4, 0, 1, 2, 3, 5],
        [5, 1, 2, 3, 4],
    ]
    expected = sum(F.cross_entropy(scores[row, columns], torch.tensor(0)) for row, columns in enumerate(kept))
    torch.testing.assert_close(model(tokens, labels, Objective(), query_tokens=queries).total, expected)


def test_scores_are_products_in_32_bits_whatever_the_towers_compute_in(monkeypatch: pytest.MonkeyPatch) -> None:
    model = retriever("retrieval={shared: true, projection: null}").bfloat16()
    queries, blocks = torch.randn(2, 6, 32).bfloat16() + 3  # large products that differ by little
    given = iter((queries, blocks))
    monkeypatch.setattr(model.towers["shared"], "forward", lambda *_: next(given))
    tokens = torch.zeros(6, 4, dtype=torch.long)
    exact = queries.double() @ blocks.double().t() / 32**0.5
    torch.testing.assert_close(model(tokens, query_tokens=tokens).double(), exact, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("changes", [[], ["retrieval={shared: true, projection: null}"]])
def test_queries_learn_to_find_their_blocks(changes: list[str]) -> None:
    model = retriever(*changes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(0)
    for _ in range(120):
        topic = torch.randint(0, 16, (16, 1), generator=generator)
        tokens = topic * 4 + torch.randint(0, 4, (16, 12), generator=generator)
        queries = topic * 4 + torch.randint(0, 4, (16, 8), generator=generator)
        loss = model(tokens, topic[:, 0], Objective(), query_tokens=queries)
        (loss.total / 16).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert float(loss.cross_entropy) / 16 < 0.7  # guessing among some ten topics costs log(10) = 2.3
    assert float(loss.metrics["top5_accuracy"]) / 16 > 0.9
