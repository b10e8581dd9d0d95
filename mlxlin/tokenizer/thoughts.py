"""Telling a model's thought from its answer while both stream by."""

from __future__ import annotations


class ThoughtSplitter:
    """Cuts a reply at its thinking markers.

    Args:
        markers: the texts that open and close a thought.
        opening: what the template put at the start of the reply; a thought may have been opened there.
    """

    def __init__(self, markers: tuple[str, str], opening: str = "") -> None:
        self._markers = markers
        self._inside = False
        self._held = ""
        self._cut(opening)

    def add(self, text: str) -> list[tuple[bool, str]]:
        """Parts of the text as (is a thought, text), markers left out; what may become a marker is held back."""
        return self._cut(text)

    def finish(self) -> list[tuple[bool, str]]:
        """What was held back and became no marker."""
        held, self._held = self._held, ""
        return [(self._inside, held)] if held else []

    def _cut(self, text: str) -> list[tuple[bool, str]]:
        text = self._held + text
        parts = []
        while True:
            marker = self._markers[self._inside]
            before, found, after = text.partition(marker)
            if not found:
                break
            parts.append((self._inside, before))
            self._inside, text = not self._inside, after
        keep = held_back(text, (marker,))
        parts.append((self._inside, text[: len(text) - keep]))
        self._held = text[len(text) - keep :]
        return [part for part in parts if part[1]]


def held_back(text: str, words: tuple[str, ...]) -> int:
    """How many characters at the end of a text may be the beginning of one of the words."""
    longest = min(len(text), max(map(len, words), default=1) - 1)
    for count in range(longest, 0, -1):
        if any(word.startswith(text[-count:]) for word in words):
            return count
    return 0
