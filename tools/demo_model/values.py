"""Random values that an answer can only get by reading the chat: names, words, numbers, lists."""

from __future__ import annotations

import hashlib
from random import Random

ONSETS = "b c d f g h j k l m n p r s t v w z br ch dr gr kl pr sh st th tr".split()
ENDINGS = "n l r s m t k d".split()


def unseen(name: str) -> bool:
    """Whether a name is kept out of training (one in twelve, by its hash) so that tests can use it."""
    return hashlib.md5(name.lower().encode()).digest()[0] % 12 == 0


def invented(rng: Random) -> str:
    """An invented lower-case word of one to three syllables that is not kept out of training."""
    while True:
        word = "".join(rng.choice(ONSETS) + rng.choice("aeiou") for _ in range(rng.randint(1, 3)))
        if rng.random() < 0.5 or len(word) < 3:
            word += rng.choice(ENDINGS)
        if not unseen(word):
            return word


def listed(items: list[str]) -> str:
    """``a, b and c``."""
    return " and ".join(filter(None, [", ".join(items[:-1]), items[-1]]))


def typed_value(value: str, text: str) -> str | None:
    """The value as it stands in a text that may have been lower-cased, or None when it does not stand there."""
    return next((v for v in (value, value.lower()) if v in text), None)
