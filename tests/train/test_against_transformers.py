"""A few steps of training are those of transformers' model with torch's AdamW on the same samples: loss, norm and weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from argosy.config.resolve import resolve
from argosy.data.open import open_data
from argosy.infer.loading import load_model
from argosy.record.jsonl import read_metrics
from argosy.train.run import TrainOptions, train
from hf_models import save

STEPS, BATCH = 5, 8
SAMPLES: dict[str, dict[str, Any]] = {
    "bert": {"bert": {"cls": 252, "sep": 253, "mask": 254, "pad": 255}},
    "t5": {"t5": {"sentinel": 253, "sentinels": 20, "eos": 254, "pad": 255}},
}


@pytest.mark.parametrize("kind", ["gpt2", "llama3", "mpt", "qwen3_moe", "bert", "t5"])
def test_steps_are_those_of_transformers(
    kind: str, write_spec: Callable[..., Path], corpus: Path, tmp_path: Path
) -> None:
    theirs = save(kind, tmp_path / "hf").eval()  # no dropout
    model: dict[str, Any] = {"moe": {"balance_loss": 0}} if kind == "qwen3_moe" else {"dropout": 0.0}
    path = write_spec(
        init_from=f"hf:{tmp_path / 'hf'}", model=model, train={"global_batch": BATCH, "steps": STEPS},
        data={"train": str(corpus), "seq_len": 32, "split": [90, 10, 0]} | SAMPLES.get(kind, {}),
        optim={"lr": 3e-3, "warmup": 2, "clip": 0.5, "weight_decay": 0.1}, parallel={"micro_batch": 2}, eval="off",
    )  # fmt: skip
    resolved = resolve(path)
    assert train(resolved, path, TrainOptions(quiet=True)) == 0
    ours = read_metrics(tmp_path / "runs" / "tiny" / "metrics.jsonl")
    decayed, others = ([p for p in theirs.parameters() if (p.ndim >= 2) is matrix] for matrix in (True, False))
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], betas=(0.9, 0.95)
    )
    stream = open_data(resolved.spec).training()
    for step in range(STEPS):
        batch = stream.batch(step * BATCH, BATCH)
        inputs = {name: torch.from_numpy(array).long() for name, array in batch.inputs.items()}
        loss, shown = losses(
            kind, theirs, torch.from_numpy(batch.tokens).long(), torch.from_numpy(batch.labels).long(), inputs
        )
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
        for group in optimizer.param_groups:
            group["lr"] = ours[step + 1]["lr"]
        optimizer.step()
        assert ours[step + 1]["loss"] == pytest.approx(float(shown), rel=1e-5)
        assert ours[step + 1]["grad_norm"] == pytest.approx(float(norm), rel=1e-4)
    trained = load_model(str(tmp_path / "runs" / "tiny"), device="cpu").model
    tokens = torch.randint(0, 250, (2, 24))
    with torch.no_grad():
        found = trained(tokens, **({"decoder_tokens": tokens.flip(1)} if kind == "t5" else {}))
        expected = logits(kind, theirs, tokens, {"decoder_tokens": tokens.flip(1)} if kind == "t5" else {})
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max()))


def logits(kind: str, model: Any, tokens: Tensor, inputs: dict[str, Tensor]) -> Tensor:
    if kind == "t5":
        found: Tensor = model(input_ids=tokens, decoder_input_ids=inputs["decoder_tokens"]).logits
    else:
        found = model(input_ids=tokens)["prediction_logits" if kind == "bert" else "logits"]
    return found


def losses(kind: str, model: Any, tokens: Tensor, labels: Tensor, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """(what is minimised, what is shown as the loss)"""
    if kind != "bert":
        loss = F.cross_entropy(logits(kind, model, tokens, inputs).flatten(0, 1), labels.flatten())
        return loss, loss.detach()
    out = model(
        input_ids=tokens, token_type_ids=inputs["token_types"], attention_mask=inputs["padding_mask"]
    )  # fmt: skip
    asked = out.prediction_logits.gather(1, inputs["predicted"][:, :, None].expand(-1, -1, 257))
    hidden = F.cross_entropy(asked.flatten(0, 1), labels.flatten())
    return hidden + F.cross_entropy(out.seq_relationship_logits, inputs["pair_labels"]), hidden.detach()
