"""Small sums, counting and comparing."""

from __future__ import annotations

from random import Random

from tools.demo_model.questions import sloppy

WORDS = ("zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
         "seventeen eighteen nineteen twenty").split()  # fmt: skip


def number(text: int) -> str:
    """A number from 0 to 20 as a word."""
    return WORDS[text]


def add(a: int, b: int, rng: Random) -> tuple[str, str]:
    forms = [f"What is {a} plus {b}?", f"What is {a} + {b}?", f"{a} + {b}", f"{a}+{b}", f"{a} + {b} = ?", f"{a}+{b}=",
             f"{a}+{b}=?", f"How much is {a} + {b}?", f"Add {a} and {b}.", f"How much is {a} plus {b}?",
             f"What's {a}+{b}?", f"Calculate {a} + {b}.", f"What is the sum of {a} and {b}?",
             f"{a} plus {b}", f"{a} + {b} ="]  # fmt: skip
    return sloppy(rng.choice(forms), rng), f"{a} + {b} = {a + b}."


def subtract(a: int, b: int, rng: Random) -> tuple[str, str]:
    forms = [f"What is {a} minus {b}?", f"What is {a} - {b}?", f"{a} - {b}", f"{a}-{b}", f"{a} - {b} = ?", f"{a}-{b}=",
             f"How much is {a} - {b}?", f"Subtract {b} from {a}.", f"How much is {a} minus {b}?", f"{a} minus {b}",
             f"What's {a}-{b}?", f"Calculate {a} - {b}.", f"Take {b} from {a}.", f"{a} - {b} ="]  # fmt: skip
    return sloppy(rng.choice(forms), rng), f"{a} - {b} = {a - b}."


def multiply(a: int, b: int, rng: Random) -> tuple[str, str]:
    forms = [f"What is {a} times {b}?", f"{a} * {b}", f"{a} x {b}", f"{a}*{b}", f"Multiply {a} by {b}.",
             f"How much is {a} times {b}?", f"What is {a} * {b}?", f"{a} times {b}"]  # fmt: skip
    return sloppy(rng.choice(forms), rng), f"{a} x {b} = {a * b}."


def in_words(rng: Random) -> tuple[str, str]:
    a, b = rng.randint(0, 10), rng.randint(0, 10)
    if rng.random() < 0.6:
        forms = [
            f"What is {number(a)} plus {number(b)}?",
            f"{number(a)} plus {number(b)}",
            f"Add {number(a)} and {number(b)}.",
        ]
        return sloppy(rng.choice(forms), rng), f"{number(a).capitalize()} plus {number(b)} is {number(a + b)}."
    a, b = max(a, b), min(a, b)
    forms = [f"What is {number(a)} minus {number(b)}?", f"{number(a)} minus {number(b)}"]
    return sloppy(rng.choice(forms), rng), f"{number(a).capitalize()} minus {number(b)} is {number(a - b)}."


def compare(rng: Random) -> tuple[str, str]:
    a, b = rng.sample(range(0, 21), 2)
    if rng.random() < 0.5:
        word, best = rng.choice(["bigger", "larger", "greater"]), max(a, b)
    else:
        word, best = "smaller", min(a, b)
    return sloppy(f"Which is {word}, {a} or {b}?", rng), f"{best} is {word} than {a + b - best}."


def count(rng: Random) -> tuple[str, str]:
    start, steps = rng.choice([1, 1, rng.randint(1, 30)]), rng.randint(2, 9)
    listed = ", ".join(str(n) for n in range(start, start + steps + 1))
    forms = [f"Count from {start} to {start + steps}."]
    if start == 1:
        forms += [f"Count to {start + steps}.", f"Can you count to {start + steps}?"]
    return sloppy(rng.choice(forms), rng), f"{listed}."


def neighbour(rng: Random) -> tuple[str, str]:
    n = rng.randint(1, 40)
    if rng.random() < 0.6:
        return sloppy(
            rng.choice([f"What comes after {n}?", f"What number comes after {n}?"]), rng
        ), f"{n + 1} comes after {n}."
    return sloppy(
        rng.choice([f"What comes before {n}?", f"What number comes before {n}?"]), rng
    ), f"{n - 1} comes before {n}."


def ask_small_sum(rng: Random) -> tuple[str, str]:
    """An addition or subtraction of 0..20."""
    a, b = rng.randint(0, 20), rng.randint(0, 20)
    return add(a, b, rng) if rng.random() < 0.45 else subtract(max(a, b), min(a, b), rng)


def ask_sum(rng: Random) -> tuple[str, str]:
    """A random small sum with its answer; sums of 0..20 are the commonest."""
    draw = rng.random()
    if draw < 0.40:
        return add(rng.randint(0, 20), rng.randint(0, 20), rng)
    if draw < 0.74:
        a, b = rng.randint(0, 20), rng.randint(0, 20)
        return subtract(max(a, b), min(a, b), rng) if rng.random() < 0.75 else subtract(a, b, rng)
    if draw < 0.79:
        return add(rng.randint(0, 99), rng.randint(0, 99), rng)
    if draw < 0.84:
        return multiply(rng.randint(0, 10), rng.randint(0, 10), rng)
    return rng.choice([in_words, compare, count, neighbour])(rng)
