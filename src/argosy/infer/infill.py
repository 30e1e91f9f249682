"""Text from models that do not continue a prompt: BERT fills masked tokens, T5 writes the text of marked spans.

A BERT prompt holds the mask token, `[MASK]` or the one that data.bert.mask names, for each token to fill in. A T5 prompt may
hold sentinels, `<extra_id_0>` and so on; the model writes each sentinel and the text it stands for.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from argosy.data.special import SpecialTokens
from argosy.data.text.tokenizer import Tokenizer
from argosy.errors import ArgosyError
from argosy.infer.loading import Loaded
from argosy.infer.prompt_ids import encode_prompt
from argosy.model.decoding import Sampling, choose, generate
from argosy.tasks.masked_lm import BertSpec
from argosy.tasks.span_corruption import T5Spec
from argosy.tasks.span_corruption import sentinels as sentinels_of

_SENTINEL = re.compile(r"<extra_id_(\d+)>")


@torch.no_grad()
def fill_masks(loaded: Loaded, tokenizer: Tokenizer, prompt: str, options: Sampling) -> str:
    """Return the prompt with a token in place of each mask. All are chosen at once, independently of each other."""
    bert = (loaded.spec.data.bert if loaded.spec is not None else None) or BertSpec()
    special = SpecialTokens(tokenizer, loaded.source.model.vocab_size)
    cls, sep, mask, pad = (special.id_of(f"data.bert.{r}", getattr(bert, r)) for r in ("cls", "sep", "mask", "pad"))
    name = bert.mask_in_text
    first, *others = (encode_prompt(loaded.source, tokenizer, part) for part in prompt.split(name))
    if not others:
        raise ArgosyError(
            "config.bad-value",
            f"this model fills in hidden tokens, and there is no {name} in the prompt",
            key="--prompt",
            value=prompt,
            fix=f"--prompt 'Paris is the {name} of France.'",
        )
    ids = [cls, *first]
    for part in others:
        ids += [mask, *part]
    ids.append(sep)
    _require_room(loaded, len(ids))
    logits = loaded.model(torch.tensor([ids], device=loaded.device))[0].float().cpu()
    logits[:, [cls, sep, mask, pad]] = -torch.inf
    logits = logits[:, : loaded.source.vocabulary(tokenizer)]
    masked = [at for at, id_ in enumerate(ids) if id_ == mask]
    generator = torch.Generator().manual_seed(options.derived_seed)
    for at, token in zip(masked, choose(logits[masked], options, [generator] * len(masked)), strict=True):
        ids[at] = token
    return tokenizer.decode(ids[1:-1])


@torch.no_grad()
def write_spans(loaded: Loaded, tokenizer: Tokenizer, prompt: str, options: Sampling) -> str:
    """Return the decoder's output for the prompt, up to its end token."""
    t5 = (loaded.spec.data.t5 if loaded.spec is not None else None) or T5Spec()
    special = SpecialTokens(tokenizer, loaded.source.model.vocab_size)
    eos, start = (special.id_of(f"data.t5.{r}", getattr(t5, r)) for r in ("eos", "pad"))
    sentinels = sentinels_of(special, t5)
    ids: list[int] = []
    # Alternates between text and the number of a sentinel.
    for at, part in enumerate(_SENTINEL.split(prompt)):
        if at % 2 and int(part) >= len(sentinels):
            raise ArgosyError(
                "config.bad-value",
                f"there are {len(sentinels)} sentinels, <extra_id_0> to <extra_id_{len(sentinels) - 1}>",
                key="--prompt",
                value=f"<extra_id_{part}>",
                fix="use one of them",
            )
        ids += [sentinels[-1] - int(part)] if at % 2 else encode_prompt(loaded.source, tokenizer, part)
    ids.append(eos)
    _require_room(loaded, len(ids))
    source = torch.tensor([ids], device=loaded.device)
    limit = loaded.source.model.max_seq_len

    def next_logits(texts: Sequence[Sequence[int]]) -> Tensor:
        shown = torch.tensor([text[-limit:] for text in texts], device=loaded.device)
        logits: Tensor = loaded.model(source, decoder_tokens=shown)
        return logits[:, -1]

    [written] = generate(next_logits, [[start]], options, stop=eos, vocabulary=loaded.source.vocabulary(tokenizer))
    return "".join(_named(written, tokenizer, sentinels))


def _named(ids: Sequence[int], tokenizer: Tokenizer, sentinels: range) -> Iterator[str]:
    """Yield the text, with sentinels by name even if the tokenizer does not know them."""
    text: list[int] = []
    for id_ in ids:
        if id_ in sentinels:
            yield tokenizer.decode(text)
            yield f"<extra_id_{sentinels[-1] - id_}>"
            text = []
        else:
            text.append(id_)
    yield tokenizer.decode(text)


def _require_room(loaded: Loaded, length: int) -> None:
    longest = loaded.source.model.max_seq_len
    if length > longest:
        raise ArgosyError(
            "config.arithmetic",
            f"the prompt is {length} tokens with those around it, the model reads {longest}",
            key="--prompt",
            fix="shorten it",
        )
