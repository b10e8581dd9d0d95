"""Measure the exported model: definitions, capitals, sums, small talk, memory, copying, perplexity, parity.

Answers are greedy, from the stored (bfloat16-rounded) weights computed in float32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from random import Random

import numpy as np
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from tools.demo_model import dataset, tokenizer
from tools.demo_model.chats import Chat, ChatMaker
from tools.demo_model.model import CONFIG, LanguageModel
from tools.demo_model.questions import DATA, pluralise, stem, things
from tools.demo_model.topics import TOPICS

OPENINGS = ("Hello", "Who are you?", "How are you?", "What can you do?", "Thank you", "Tell me a joke", "hi",
            "What is your name?", "Goodbye", "Tell me a story")  # fmt: skip
JUDGED = DATA / "judged_answers.tsv"


@dataclass
class Answerer:
    """Greedy answers of a model folder."""

    model: LanguageModel
    bpe: Tokenizer

    @classmethod
    def load(cls, folder: Path) -> Answerer:
        model = LanguageModel(CONFIG)
        model.load_state_dict({name: w.float() for name, w in load_file(folder / "model.safetensors").items()})
        return cls(model.eval(), Tokenizer.from_file(str(folder / "tokenizer.json")))

    @torch.no_grad()
    def answers(self, chats: list[Chat], limit: int = 64, batch: int = 32) -> list[str]:
        """The next assistant message of every chat."""
        results: list[str] = []
        for start in range(0, len(chats), batch):
            rows = [self.bpe.encode(tokenizer.render(c, True)).ids for c in chats[start : start + batch]]
            results += self._batch(rows, limit)
        return results

    def _batch(self, rows: list[list[int]], limit: int) -> list[str]:
        lengths = [len(r) for r in rows]
        open_rows = set(range(len(rows)))
        for _ in range(limit):
            if not open_rows:
                break
            chosen = sorted(open_rows)
            longest = max(len(rows[i]) for i in chosen)
            ids = torch.tensor([rows[i] + [tokenizer.PAD] * (longest - len(rows[i])) for i in chosen])
            last = self.model.model(ids)[range(len(chosen)), [len(rows[i]) - 1 for i in chosen]]
            for i, token in zip(chosen, self.model.head(last).argmax(-1).tolist(), strict=True):
                if token in (tokenizer.CHAT_END, tokenizer.END_OF_TEXT):
                    open_rows.discard(i)
                else:
                    rows[i].append(token)
        return [self.bpe.decode(r[n:]) for r, n in zip(rows, lengths, strict=True)]


def asked(questions: list[str]) -> list[Chat]:
    """One chat with an open question for each question."""
    return [[{"role": "user", "content": q}] for q in questions]


def share(right: list[bool]) -> str:
    return f"{sum(right)} of {len(right)} ({100 * sum(right) / len(right):.1f} %)"


def common_things() -> list[str]:
    """The 200 things, as phrases: "a cat", "bread"."""
    known = {t.noun: t.phrase for t in things()}
    words = [
        w for line in (DATA / "common_things.txt").read_text().splitlines() if line[0] != "#" for w in line.split()
    ]
    return [known.get(w, f"{'an' if w[0] in 'aeiou' else 'a'} {w}") for w in words]


def definitions(answerer: Answerer) -> None:
    """Compare with the answers that were judged one by one (the file is written when it is not there)."""
    phrases = common_things()
    answers = answerer.answers(asked([f"What is {p}?" for p in phrases]))
    if not JUDGED.exists():
        rows = [f"?\t{p}\t{a}" for p, a in zip(phrases, answers, strict=True)]
        JUDGED.write_text("# verdict (right, wrong, ? for not judged yet), thing, answer\n" + "\n".join(rows) + "\n")
    lines = [line.split("\t") for line in JUDGED.read_text().splitlines() if line[0] != "#"]
    verdicts = {(phrase, answer): verdict for verdict, phrase, answer in lines}
    found = [verdicts.get((p, a), "?") for p, a in zip(phrases, answers, strict=True)]
    print(f"definitions judged right: {share([v == 'right' for v in found])}, not judged: {found.count('?')}")
    expected = {t.phrase: t.definition for t in things()}
    forms = {
        "whats a cat": [f"whats {p}" for p in phrases],
        "define cat": [f"define {p.split(' ', 1)[-1]}" for p in phrases],
        "tell me about cats": [
            f"tell me about {pluralise(p[2:].strip()) if p[:2] in ('a ', 'an') else p}" for p in phrases
        ],
    }
    for form, questions in forms.items():
        pairs = zip(phrases, answerer.answers(asked(questions)), strict=True)
        print(f"same as the taught definition, asked like '{form}': {share([a == expected.get(p) for p, a in pairs])}")


def capitals(answerer: Answerer, maker: ChatMaker) -> None:
    for form in ("What is the capital of {}?", "capital of {}"):
        questions = [
            form.format(c.name if "?" in form else c.name.removeprefix("the ").lower()) for c in maker.countries
        ]
        pairs = zip(maker.countries, answerer.answers(asked(questions)), strict=True)
        print(f"capitals, asked like '{form}': {share([f'is {stem(c.capital)}.' in a for c, a in pairs])}")


def sums(answerer: Answerer) -> None:
    additions = [(a, b, a + b) for a in range(21) for b in range(21)]
    subtractions = [(a, b, a - b) for a in range(21) for b in range(a + 1)]
    larger = [(a, b, a + b) for a, b in (Random(6).sample(range(21, 100), 2) for _ in range(200))]
    for name, form, triples in (
        ("all additions of 0..20", "What is {} + {}?", additions),
        ("all additions of 0..20, typed '2+2'", "{}+{}", additions),
        ("all subtractions of 0..20", "What is {} - {}?", subtractions),
        ("200 additions of 21..99", "What is {} + {}?", larger),
    ):
        answers = answerer.answers(asked([form.format(a, b) for a, b, _ in triples]), limit=16, batch=128)
        right = [answer.endswith(f"= {c}.") for (_, _, c), answer in zip(triples, answers, strict=True)]
        print(f"{name}: {share(right)}")


def memory(answerer: Answerer, maker: ChatMaker) -> None:
    """Three-turn chats with names that no training chat holds, and lists and names to copy."""
    named = [maker.recall(fillers=1, topic=TOPICS[0]) for _ in range(80)]
    named = [c for c in named if "name is" in c[-1]["content"]][:50]
    told = [maker.recall(fillers=1) for _ in range(100)]
    for label, chats in (("name", named), ("any fact or list", told)):
        answers = answerer.answers([c[:-1] for c in chats])
        right = [c[-1]["content"] == a for c, a in zip(chats, answers, strict=True)]
        print(f"{label} told, another question, then asked for: {share(right)}")
    lists = [", ".join(maker.words(3, 5)) for _ in range(50)]
    answers = answerer.answers(asked([f"Repeat this list: {text}" for text in lists]))
    print(f"lists repeated exactly: {share([a == text for a, text in zip(answers, lists, strict=True)])}")
    names = [maker.rng.choice(maker.names) for _ in range(50)]
    answers = answerer.answers(asked([f"Say hello to {n}." for n in names]))
    print(f"'Say hello to NAME.': {share([a == f'Hello, {n}!' for a, n in zip(answers, names, strict=True)])}")


def small_talk(answerer: Answerer) -> None:
    for question, answer in zip(OPENINGS, answerer.answers(asked(list(OPENINGS))), strict=True):
        print(f"  > {question}\n    {answer}")


@torch.no_grad()
def perplexity(answerer: Answerer, texts: dict[str, list[str]]) -> None:
    """Perplexity per token and bits per byte on held-out documents, each read from its start."""
    total = np.zeros(3)  # loss, tokens, bytes
    for name, documents in texts.items():
        sums = np.zeros(3)
        for text in documents[:: dataset.HELD_OUT_EVERY]:
            ids = torch.tensor([[tokenizer.END_OF_TEXT, *answerer.bpe.encode(text).ids]])
            loss = torch.nn.functional.cross_entropy(answerer.model(ids[:, :-1])[0], ids[0, 1:], reduction="sum")
            sums += (loss.item(), ids.shape[1] - 1, len(text.encode()))
        print_perplexity(name, *sums)
        total += sums
    print_perplexity("prose, all four", *total)


def print_perplexity(name: str, loss: float, tokens: float, size: float) -> None:
    bits = loss / math.log(2) / size
    print(f"held-out {name}: perplexity {math.exp(loss / tokens):.1f}, {bits:.3f} bits per byte, {tokens:.0f} tokens")


@torch.no_grad()
def parity(answerer: Answerer, folder: Path, texts: dict[str, list[str]]) -> None:
    """The same loss in transformers' Qwen3_5ForCausalLM, float32."""
    from transformers import Qwen3_5ForCausalLM

    theirs = Qwen3_5ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    text = "\n".join(documents[0] for documents in texts.values())
    ids = torch.tensor([answerer.bpe.encode(text).ids[:1024]])
    losses = [
        torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:]).item()
        for logits in (answerer.model(ids), theirs(ids).logits)
    ]
    print(f"loss on {ids.shape[1]} tokens: ours {losses[0]:.6f}, transformers {losses[1]:.6f}")
    if not np.isclose(*losses, atol=1e-3, rtol=0):
        raise SystemExit("the losses differ by more than 1e-3")


def evaluate(folder: Path, unpacked: Path) -> None:
    """Print every measurement of the model folder; the unpacked packages give the countries and held-out texts."""
    torch.set_num_threads(1)
    answerer = Answerer.load(folder)
    _, maker = dataset.chat_makers(unpacked)
    texts = dataset.prose(unpacked)
    parity(answerer, folder, texts)
    perplexity(answerer, texts)
    definitions(answerer)
    capitals(answerer, maker)
    sums(answerer)
    memory(answerer, maker)
    small_talk(answerer)
