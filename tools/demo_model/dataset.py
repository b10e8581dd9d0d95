"""Token files for training: chats with a mask on the answers, and prose; a small part of each is held out."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from random import Random

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from tools.demo_model import corpora, countries, questions, tokenizer, values, wordnet
from tools.demo_model.chats import ChatMaker

CHATS, LATE_CHATS = 200_000, 60_000
HELD_OUT_CHATS = 600
GLOSSES = {"noun": 1000, "verb": 300, "adj": 300}
PROSE_SHARES = {"austen": 0.38, "wordnet": 0.25, "factbook": 0.12, "bible": 0.25}
HELD_OUT_EVERY = 50  # one prose document in fifty


def chat_makers(unpacked: Path) -> tuple[ChatMaker, ChatMaker]:
    """Makers of training chats and of held-out chats; they share no first name."""
    nations = countries.load(corpora.factbook_entries(unpacked))
    names = corpora.first_names(unpacked)
    defined = {thing.noun for thing in questions.things()}
    glosses = [g for g in wordnet.glosses(unpacked) if g.word not in defined and len(g.definition) < 100]
    chosen = [g for part, count in GLOSSES.items() for g in [g for g in glosses if g.part == part][:count]]
    seen, unseen = [n for n in names if not values.unseen(n)], [n for n in names[:1500] if values.unseen(n)]
    return ChatMaker(seen, nations, chosen, seed=1), ChatMaker(unseen, nations, chosen, seed=2)


def prose(unpacked: Path) -> dict[str, list[str]]:
    """Documents by corpus."""
    rng = Random(3)
    lines = wordnet.prose(unpacked)
    rng.shuffle(lines)
    return {
        "austen": corpora.austen(unpacked),
        "bible": corpora.bible(unpacked),
        "factbook": corpora.factbook(corpora.factbook_entries(unpacked)),
        "wordnet": corpora.documents(lines),
    }


def prepare(folder: Path) -> None:
    """Make tokenizer.json and the token files in ``folder/tokens`` from the unpacked packages."""
    unpacked, out = folder / "unpacked", folder / "tokens"
    out.mkdir(exist_ok=True)
    maker, held_out_maker = chat_makers(unpacked)
    chats = [maker.draw() for _ in range(CHATS)]
    held_out = [held_out_maker.draw() for _ in range(HELD_OUT_CHATS)]
    texts = prose(unpacked)
    rng = Random(4)
    sample = [tokenizer.render(c) for c in rng.sample(chats, 60_000)]
    bpe = tokenizer.train(
        [*sample, *(d for name in texts for d in rng.sample(texts[name], min(700, len(texts[name]))))]
    )
    bpe.save(str(folder / "tokenizer.json"))

    _write_chats(out / "chat", chats, bpe)
    _write_chats(out / "chat_late", [maker.draw_late() for _ in range(LATE_CHATS)], bpe)
    _write_chats(out / "chat_held_out", held_out, bpe)
    sizes = {}
    for name, documents in texts.items():
        test = documents[::HELD_OUT_EVERY]
        train = [d for i, d in enumerate(documents) if i % HELD_OUT_EVERY]
        _write(out / f"prose_{name}", [e.ids for e in bpe.encode_batch(train)], None)
        _write(out / f"prose_{name}_held_out", [e.ids for e in bpe.encode_batch(test)], None)
        sizes[name] = sum(len(d.encode()) for d in test)
    (out / "held_out_bytes.json").write_text(json.dumps(sizes))


def _write_chats(path: Path, chats: list[list[dict[str, str]]], bpe: Tokenizer) -> None:
    assistant = bpe.encode("assistant").ids
    if len(assistant) != 1:
        raise ValueError(f"'assistant' is {len(assistant)} tokens; answer_mask needs it to be one")
    encoded = bpe.encode_batch([tokenizer.render(c) for c in chats])
    _write(path, [e.ids for e in encoded], [tokenizer.answer_mask(e.ids, assistant[0]) for e in encoded])


def _write(path: Path, rows: list[list[int]], masks: list[list[int]] | None) -> None:
    """Every document ends with <|endoftext|>; the mask is 1 everywhere unless given."""
    ids = [np.array([*row, tokenizer.END_OF_TEXT], dtype=np.uint16) for row in rows]
    weights = (
        [np.array([*mask, 0], dtype=np.uint8) for mask in masks] if masks else [np.ones(len(i), np.uint8) for i in ids]
    )
    np.savez(
        path,
        ids=np.concatenate(ids),
        mask=np.concatenate(weights),
        starts=np.cumsum([0, *map(len, ids)]).astype(np.int64),
    )
    tokens, marked = sum(map(len, ids)), sum(int(w.sum()) for w in weights)
    print(f"{path.name}: {len(rows)} documents, {tokens} tokens, {marked} of them answers or prose")


@dataclass
class Documents:
    """Tokens of many documents: ids [N] uint16, mask [N] uint8, starts [documents + 1]."""

    ids: NDArray[np.uint16]
    mask: NDArray[np.uint8]
    starts: NDArray[np.int64]

    @classmethod
    def load(cls, path: Path) -> Documents:
        with np.load(path.with_suffix(".npz")) as file:
            return cls(file["ids"], file["mask"], file["starts"])


class RowFiller:
    """Fills rows of ``length`` tokens with whole documents in shuffled order; the last one of a row is cut."""

    def __init__(self, documents: Documents, length: int, rng: np.random.Generator) -> None:
        self.documents, self.length, self.rng = documents, length, rng
        self._order: list[int] = []

    def row(self) -> tuple[NDArray[np.uint16], NDArray[np.uint8]]:
        """ids and mask, each [length]."""
        ids = np.zeros(self.length, np.uint16)
        mask = np.zeros(self.length, np.uint8)
        filled = 0
        while filled < self.length:
            if not self._order:
                self._order = self.rng.permutation(len(self.documents.starts) - 1).tolist()
            index = self._order.pop()
            start = self.documents.starts[index]
            stop = min(self.documents.starts[index + 1], start + self.length - filled)
            ids[filled : filled + stop - start] = self.documents.ids[start:stop]
            mask[filled : filled + stop - start] = self.documents.mask[start:stop]
            filled += int(stop - start)
        return ids, mask


class Mixture:
    """Batches in which each row is prose with probability ``prose_share`` and chats otherwise."""

    def __init__(self, folder: Path, length: int, batch: int, prose_share: float, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.rng, self.batch, self.prose_share = rng, batch, prose_share
        self.chat = RowFiller(Documents.load(folder / "chat"), length, rng)
        self.late = RowFiller(Documents.load(folder / "chat_late"), length, rng)
        self.prose = {n: RowFiller(Documents.load(folder / f"prose_{n}"), length, rng) for n in PROSE_SHARES}

    def next(self, late: bool = False) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """ids and mask, each [batch, length]; ``late`` takes the chats of the last part of the training."""
        chat, rows = self.late if late else self.chat, []
        for _ in range(self.batch):
            if self.rng.random() < self.prose_share:
                name = self.rng.choice(list(PROSE_SHARES), p=list(PROSE_SHARES.values()))
                rows.append(self.prose[name].row())
            else:
                rows.append(chat.row())
        return np.stack([r[0] for r in rows]).astype(np.int64), np.stack([r[1] for r in rows]).astype(bool)
