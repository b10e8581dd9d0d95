"""Facts about countries for questions: capital, region, languages (CIA World Factbook of 2015 with corrections)."""

from __future__ import annotations

import html
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CORRECTIONS = Path(__file__).parent / "data" / "countries.tsv"


@dataclass(frozen=True)
class Country:
    name: str  # as it stands in a sentence, with "the" where English has it
    capital: str
    region: str  # "Western Europe", "the Caribbean"
    languages: tuple[str, ...]  # at most three
    aliases: tuple[str, ...]  # other names a person may type


def load(entries: list[dict[str, Any]]) -> list[Country]:
    """Sovereign countries that have a capital, by name."""
    corrections, result = _corrections(), {}
    for entry in entries:
        short = _text(entry, "Government", "Country name", "conventional short form")
        long = _text(entry, "Government", "Country name", "conventional long form")
        raw = short if short and short.lower() != "none" else long
        name, capital, aliases, region, languages = corrections.get(raw, [""] * 5)
        capital = capital or _capital(_text(entry, "Government", "Capital", "name"))
        if not raw or name == "-" or capital in ("", "None") or _text(entry, "Government", "Dependency status"):
            continue
        result[name or raw] = Country(
            name or raw,
            capital,
            region or _region(_text(entry, "Geography", "Location")),
            tuple(languages.split(",")) if languages else _languages(_text(entry, "People and Society", "Languages")),
            tuple(a for a in aliases.split(",") if a),
        )
    return [result[name] for name in sorted(result)]


def _text(node: Any, *path: str) -> str:
    for key in path:
        node = node.get(key, {}) if isinstance(node, dict) else {}
    text = node.get("text") if isinstance(node, dict) else None
    return html.unescape(text).strip() if isinstance(text, str) else ""


def _corrections() -> dict[str, list[str]]:
    rows = (line.split("\t") for line in CORRECTIONS.read_text().splitlines() if line and line[0] != "#")
    return {row[0]: [*row[1:], "", "", "", ""][:5] for row in rows}


def _capital(text: str) -> str:
    return re.split(r"[;:(]| in Romanian", text)[0].strip()


def _region(location: str) -> str:
    region = re.split(r",|;| bordering| \(", location)[0].removeprefix("interior ").strip()
    return f"the {region}" if region in ("Caribbean", "Middle East") else region


def _languages(text: str) -> tuple[str, ...]:
    plain = re.sub(r"\([^)]*\)|[\d.]+%|\bnote\b.*|;.*", "", text)
    names = [re.sub(r"\s+", " ", part).strip() for part in plain.split(",")]
    return tuple([n for n in names if re.fullmatch(r"[A-Z][a-z]+(?: [A-Z][a-z]+)?", n)][:3])
