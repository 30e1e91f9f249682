"""The demo's corpus: short stories from a grammar, generated on the spot.

The vocabulary is small and the combinations are many, so that a small model writes whole sentences after a few hundred steps.
Names, things and numbers recur within a story, so that it can go on to learn coreference and addition.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from argosy.config.seeds import derive_seed

OPENING = "Once upon a time"

_NAMES = {
    "he": ("Tom", "Ben", "Max", "Sam", "Leo", "Finn", "Hugo", "Oscar"),
    "she": ("Mia", "Anna", "Lily", "Ruth", "Clara", "Nora", "Ella", "Ida"),
}
_ANIMALS = ("fox", "bear", "mouse", "rabbit", "duck", "cat", "hedgehog", "goat", "crow", "badger")
_KINDS = ("small", "brave", "clever", "shy", "hungry", "curious", "gentle", "noisy")
_PLACES = ("forest", "river", "mill", "harbour", "village", "garden", "castle", "lake", "mountain", "bridge")
_THINGS = ("lantern", "key", "map", "bell", "kite", "drum", "basket", "mirror", "boat", "clock")
_COLOURS = ("red", "blue", "green", "golden", "silver", "white", "black", "yellow")
_TIMES = ("One morning", "One evening", "One cold night", "In the spring", "After the rain", "At noon")
_FRUITS = ("apples", "pears", "nuts", "berries", "plums", "cherries")
_KEEPERS = ("baker", "miller", "captain", "queen", "teacher", "gardener", "king", "fisherman")
_GIFTS = ("warm bread", "a bowl of soup", "a new hat", "a silver coin", "a jar of honey", "a long story")
_MOODS = ("happy", "tired", "proud", "quiet", "full of joy", "glad")
_WEATHER = ("The sun was shining", "The wind was cold", "Snow was falling", "The moon was bright", "It was raining")


def stories(count: int) -> Iterator[str]:
    """Yield `count` stories, the same ones on every machine."""
    for number in range(count):
        yield _story(random.Random(derive_seed(0, "demo", number)))


def _story(rng: random.Random) -> str:
    he, friend_he = rng.choice(("he", "she")), rng.choice(("he", "she"))
    name, friend = rng.choice(_NAMES[he]), rng.choice(_NAMES[friend_he])
    while friend == name:
        friend = rng.choice(_NAMES[friend_he])
    animal, other = rng.sample(_ANIMALS, 2)
    home, place = rng.sample(_PLACES, 2)
    his = {"he": "his", "she": "her"}[he]
    opening = f"{OPENING} there was a {rng.choice(_KINDS)} {animal} called {name}, who lived near the {home}."
    middle = rng.choice((_lost_thing, _harvest, _journey))
    meeting = f"{name} had a friend called {friend}, a {rng.choice(_KINDS)} {other}."
    end = rng.choice((
        f"In the end {name} went home to the {home}, {rng.choice(_MOODS)} and {rng.choice(_MOODS)}.",
        f"That night {name} and {friend} slept well in {his} house near the {home}.",
        f"From that day on, {name} and {friend} were never alone.",
    ))  # fmt: skip
    return " ".join((opening, meeting, *middle(rng, name, he, friend, place), end))


def _lost_thing(rng: random.Random, name: str, he: str, friend: str, place: str) -> Iterator[str]:
    thing, colour, keeper = rng.choice(_THINGS), rng.choice(_COLOURS), rng.choice(_KEEPERS)
    yield f"{rng.choice(_TIMES)}, {name} found a {colour} {thing} under a tree near the {place}."
    yield f'"Whose {thing} is this?" {he} asked.'
    yield f'"It belongs to the {keeper}," said {friend}.'
    yield f"So they carried the {colour} {thing} to the {keeper}, and the {keeper} gave them {rng.choice(_GIFTS)}."


def _harvest(rng: random.Random, name: str, he: str, friend: str, place: str) -> Iterator[str]:
    mine, more, fruit = rng.randint(1, 5), rng.randint(1, 4), rng.choice(_FRUITS)
    yield f"{rng.choice(_TIMES)}, {name} and {friend} went to the {place} to look for {fruit}."
    yield f"{rng.choice(_WEATHER)}."
    yield f"{name} found {mine} {fruit}, and {friend} found {more}."
    yield f'"Now we have {mine + more} {fruit}!" said {rng.choice((name, friend))}.'


def _journey(rng: random.Random, name: str, he: str, friend: str, place: str) -> Iterator[str]:
    keeper, thing = rng.choice(_KEEPERS), rng.choice(_THINGS)
    yield f"{rng.choice(_TIMES)}, {name} wanted to see the {place}, and {friend} came too."
    yield f"{rng.choice(_WEATHER)}, and the way was long."
    yield f"At the {place} they met the {keeper}, who was looking for a {thing}."
    yield f'"I will help you," said {name}, and {he} found the {thing} behind a {rng.choice(("stone", "wall", "door"))}.'
