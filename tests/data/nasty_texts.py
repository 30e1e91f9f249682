"""Documents on which rules about words, lines and repetition disagree easily: scripts, symbols, lists, repeats of every length."""

from __future__ import annotations

import random

PLAIN = [
    "the",
    "of",
    "and",
    "to",
    "in",
    "is",
    "that",
    "it",
    "for",
    "was",
    "on",
    "are",
    "as",
    "with",
    "his",
    "they",
    "be",
    "at",
    "this",
    "have",
    "from",
    "or",
    "had",
    "by",
    "not",
    "what",
    "were",
    "when",
    "your",
    "can",
    "said",
    "there",
    "use",
    "an",
    "each",
    "which",
    "she",
    "do",
    "how",
    "their",
    "if",
    "will",
    "up",
    "other",
    "about",
    "out",
    "many",
    "then",
    "them",
    "these",
    "so",
    "some",
    "her",
    "would",
    "make",
    "like",
    "him",
    "into",
    "time",
    "has",
    "look",
    "two",
    "more",
]
ODD = [
    "don't",
    "e-mail",
    "U.S.",
    "naïve",
    "İstanbul",
    "ſtraße",
    "漢字",
    "かな",
    "кириллица",
    "مرحبا",
    "👩\u200d👩\u200d👧",
    "x²",
    "½",
    "１２",
    "...",
    "…",
    "#",
    "##",
    "•",
    "-",
    "--",
    "*",
    "a_b",
    "__init__",
    "{x}",
    "[1]",
    "[citation",
    "needed]",
    "http://a.b/c?d=e",
    "a@b.co",
    "first.last@mail.example.org",
    "8.8.8.8",
    "192.168.0.1",
    "300.1.1.1",
    "10.1.2.3.4",
    "01.2.3.4",
    "\u200b",
    "\u3000",
    "\x1c",
    "javascript",
    "lorem",
    "ipsum",
    "cookie",
]
ENDS = (".", ".", ".", "!", "?", "...", "…", '"', "", ",", "。", ".)")


def sentence(rng: random.Random, words: list[str]) -> str:
    return " ".join(rng.choice(words) for _ in range(rng.randrange(1, 18))) + rng.choice(ENDS)


def document(rng: random.Random) -> str:
    """Return a text: prose of few or many words, with lines, paragraphs and passages that repeat."""
    words = rng.sample(PLAIN, rng.choice([3, 10, 60])) + rng.sample(ODD, rng.choice([0, 0, 3, 20]))
    if rng.random() < 0.1:
        words = ["a", "b", "ab", "aa", "ba"]
    lines = [sentence(rng, words) for _ in range(rng.randrange(1, 30))]
    if rng.random() < 0.3:
        lines = [rng.choice(("- ", "• ", "  - ", "")) + line for line in lines]
    for _ in range(rng.choice([0, 0, 1, 3, 8])):
        lines.insert(rng.randrange(len(lines)), rng.choice(lines))
    if rng.random() < 0.3:
        passage = sentence(rng, words) + " " + sentence(rng, words)
        lines = [line + (" " + passage if rng.random() < 0.2 else "") for line in lines]
    return "".join(line + rng.choice(("\n", "\n", "\n\n", " ", "\r\n", "\n\n\n")) for line in lines)


def documents(count: int, seed: int = 0) -> list[str]:
    rng = random.Random(seed)
    return [text for text in (document(rng) for _ in range(count)) if text.strip()]
