"""The loss of direct preference optimisation (DPO) on pairs of answers.

A row holds the chosen conversation (document 0) and the rejected one (document 1). With the log-probabilities of the two answers by
the model, p, and by the reference, r, the loss of a pair is

    -log sigmoid(beta ((p_chosen - p_rejected) - (r_chosen - r_rejected)))

The log-probability of an answer is the negative of its summed cross-entropy, which every layout of the output head computes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from argosy.data.samples.masks import IGNORED
from argosy.model.objective import Loss, Objective


def preference_loss(
    losses: Callable[..., tuple[Tensor, Tensor]],
    x: Tensor,
    labels: Tensor,
    documents: Tensor,
    preference: Tensor,
    objective: Objective,
    metrics: dict[str, Tensor],
    load: Tensor | None,
) -> Loss:
    """Return the summed loss of the pairs.

    Args:
        losses: returns the summed cross-entropy of (x, labels=), first with a gradient.
        x: the output of the last norm, [batch, seq, hidden].
        documents: 0 in the chosen conversation, 1 in the rejected one, [batch, seq].
        preference: beta, and beta times the reference's (r_chosen - r_rejected), [batch, 2].
        metrics, load: what the layers report.
    """
    lead = torch.stack([_lead(losses, x[n : n + 1], labels[n : n + 1], documents[n : n + 1]) for n in range(len(x))])
    beta, reference = preference.float().unbind(1)
    margin = beta * lead - reference
    # One term for each sample, as in the next-sentence loss of BERT.
    total = -F.logsigmoid(margin).sum() * objective.tokens_per_sample
    kept = margin.detach()
    shown = {"reward_margin": kept.sum(), "reward_accuracy": (kept > 0).sum()}
    shown = {name: value * objective.tokens_per_sample for name, value in shown.items()}
    return Loss(total * objective.scale, total.detach(), metrics | shown, load)


def _lead(losses: Callable[..., tuple[Tensor, Tensor]], x: Tensor, labels: Tensor, documents: Tensor) -> Tensor:
    """Return by how much the log-probability of the chosen answer of one row exceeds that of the rejected one."""
    chosen, rejected = (losses(x, labels=labels.masked_fill(documents != side, IGNORED))[0] for side in (0, 1))
    return rejected - chosen
