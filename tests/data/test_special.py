"""Special tokens by name or id: T5's sentinels are those the tokenizer has, or ids that are free, and never words."""

from __future__ import annotations

from tokenizers import Tokenizer, models

from argosy.data.special import SpecialTokens
from argosy.data.text.tokenizer import ByteTokenizer, JsonTokenizer
from argosy.tasks.span_corruption import T5Spec, sentinels


def tokenizer_of(*names: str) -> JsonTokenizer:
    return JsonTokenizer(str(Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)})).to_str()), "made")


def test_sentinels_are_those_that_the_tokenizer_names_one_below_the_other() -> None:
    falling = tokenizer_of("a", "b", "<extra_id_2>", "<extra_id_1>", "<extra_id_0>", "c")
    assert sentinels(SpecialTokens(falling, 6), T5Spec()) == range(2, 5)
    assert sentinels(SpecialTokens(falling, 6), T5Spec(sentinels=2)) == range(3, 5)
    rising = tokenizer_of("a", "<extra_id_0>", "<extra_id_1>")
    assert sentinels(SpecialTokens(rising, 3), T5Spec()) == range(1, 2)


def test_sentinels_that_are_free_ids_end_where_words_begin() -> None:
    assert sentinels(SpecialTokens(ByteTokenizer(), 300), T5Spec(sentinel=299)) == range(257, 300)
    assert sentinels(SpecialTokens(ByteTokenizer(), 300), T5Spec(sentinel=299, sentinels=10)) == range(290, 300)
    assert sentinels(SpecialTokens(ByteTokenizer(), 300), T5Spec(sentinel=9)) == range(10)  # named on purpose
    assert sentinels(SpecialTokens(None, 300), T5Spec(sentinel=299)) == range(200, 300)
