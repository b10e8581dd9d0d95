"""The many ways in which a person asks a question, and the one answer that the model should learn."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from random import Random

from tools.demo_model.countries import Country
from tools.demo_model.wordnet import Gloss

DATA = Path(__file__).parent / "data"
IRREGULAR = {"goose": "geese", "mouse": "mice", "sheep": "sheep", "deer": "deer", "moose": "moose", "fish": "fish",
             "salmon": "salmon", "wolf": "wolves", "calf": "calves", "leaf": "leaves", "knife": "knives",
             "shelf": "shelves", "thief": "thieves", "wife": "wives", "foot": "feet", "tooth": "teeth", "man": "men",
             "woman": "women", "child": "children", "person": "people", "scarf": "scarves",
             "potato": "potatoes", "tomato": "tomatoes", "mango": "mangoes", "mosquito": "mosquitoes",
             "volcano": "volcanoes", "scissors": "scissors"}  # fmt: skip


@dataclass(frozen=True)
class Thing:
    """A noun with its definition; article is "a", "an", "the" or "" for a substance."""

    noun: str
    article: str
    definition: str
    group: str  # heading of the definitions file, or "wordnet"

    @property
    def phrase(self) -> str:
        return f"{self.article} {self.noun}".strip()

    @property
    def plural(self) -> str:
        return pluralise(self.noun) if self.article in ("a", "an") else self.phrase


def pluralise(noun: str) -> str:
    """English plural of a noun, by its last word."""
    head, _, last = noun.rpartition(" ")
    if last in IRREGULAR:
        plural = IRREGULAR[last]
    elif re.search(r"[^aeiou]y$", last):
        plural = last[:-1] + "ies"
    elif re.search(r"(s|x|z|ch|sh)$", last):
        plural = last + "es"
    else:
        plural = last + "s"
    return f"{head} {plural}".strip()


def things() -> list[Thing]:
    """The hand-written definitions."""
    result, group = [], ""
    for line in (DATA / "definitions.txt").read_text().splitlines():
        if line.startswith("# "):
            group = line[2:]
            continue
        match = re.match(r"(?:(An?|The) )?(.+?) (?:is|are) ", line)
        if match is None:
            raise ValueError(f"definitions.txt: no 'is' or 'are' in {line!r}")
        article, noun = (match[1] or "").lower(), match[2]
        result.append(Thing(noun if article else noun[0].lower() + noun[1:], article, line, group))
    return result


def stem(name: str) -> str:
    """A name without its own full stop ("Washington, D.C."), to end a sentence with."""
    return name.rstrip(".")


def sloppy(text: str, rng: Random) -> str:
    """How people type: often without capitals, apostrophes or the final mark."""
    draw = rng.random()
    if draw < 0.45:
        return text
    text = text.rstrip("?.!") if draw < 0.85 else text
    if draw > 0.62:
        text = text.lower()
    return text.replace("'", "") if rng.random() < 0.4 else text


def ask_thing(thing: Thing, rng: Random) -> str:
    """One of the ways to ask what a thing is."""
    one, many, word = thing.phrase, thing.plural, thing.noun
    forms = [
        f"What is {one}?", f"What is {one}?", f"What is {one}?", f"What's {one}?", f"What are {many}?",
        f"Define {word}.", f"Define {one}.", f"Tell me about {many}.", f"Tell me about {one}.", f"Describe {one}.",
        f"Tell me what {one} is.", f"Can you tell me what {one} is?", f"Do you know what {one} is?",
        f"What does {word} mean?", f'What does "{word}" mean?', f"What is the meaning of {word}?", f"Explain {one}.",
        f"What do you know about {many}?", f"What exactly is {one}?", f"{word[0].upper()}{word[1:]}?",
        f"I want to know what {one} is.", f"Explain what {one} is.", f"Please define {word}.", f"What is {word}?",
    ]  # fmt: skip
    if not thing.article or thing.article == "the":
        forms = [f for f in forms if not f.startswith("What are ")] if not thing.noun.endswith("s") else forms
    return sloppy(rng.choice(forms), rng)


def ask_kind(thing: Thing, rng: Random) -> tuple[str, str] | None:
    """A yes/no question on the kind that the definition names ("Is a cat an animal?")."""
    kinds = ("animal", "bird", "fruit", "vegetable", "insect", "reptile", "fish", "tool", "building", "vehicle",
             "person", "machine", "plant")  # fmt: skip
    own = next((k for k in kinds if re.search(rf" is an? [a-z ,-]*?\b{k}\b", thing.definition)), None)
    if own is None or thing.article not in ("a", "an") or thing.noun == own:
        return None
    living = {"animal", "bird", "insect", "reptile", "fish"}
    others = [k for k in kinds if k != own and not (k in living and own in living) and {k, own} != {"fruit", "plant"}]
    others = [
        k for k in others if k not in ("plant", "machine", "person", thing.noun) and own not in ("plant", "machine")
    ]
    kind = own if rng.random() < 0.55 or not others else rng.choice(others)
    phrase = f"{'an' if kind[0] in 'aeiou' else 'a'} {kind}"
    subject = thing.phrase[0].upper() + thing.phrase[1:]
    answer = (
        f"Yes, {thing.phrase} is {phrase}." if kind == own else f"No, {thing.phrase} is not {phrase}. {subject} is "
    )
    if kind != own:
        answer += f"{'an' if own[0] in 'aeiou' else 'a'} {own}."
    return sloppy(f"Is {thing.phrase} {phrase}?", rng), answer


def ask_gloss(gloss: Gloss, rng: Random) -> tuple[str, str]:
    """Question and answer for a WordNet sense."""
    word, meaning = gloss.word, gloss.definition
    asks = [
        f"What does {word} mean?",
        f'What does "{word}" mean?',
        f"Define {word}.",
        f"What is the meaning of {word}?",
    ]
    if gloss.part == "noun":
        article = "an" if word[0] in "aeiou" else "a"
        counted = re.match(r"(an?|one|any) ", meaning) is not None
        phrase = f"{article} {word}" if counted else word
        asks += [f"What is {phrase}?", f"What is {phrase}?", f"Tell me about {phrase}.", f"Explain {phrase}."]
        return sloppy(rng.choice(asks), rng), f"{phrase[0].upper()}{phrase[1:]} is {meaning}."
    if gloss.part == "verb":
        asks += [f"What does it mean to {word}?", f"What does to {word} mean?"]
        return sloppy(rng.choice(asks), rng), f"To {word} means to {meaning}."
    return sloppy(rng.choice(asks), rng), f"{word.capitalize()} means {meaning}."


def ask_capital(country: Country, rng: Random) -> tuple[str, str]:
    """Question and answer on a country's capital."""
    name = rng.choice([country.name, country.name, *country.aliases])
    bare = name.removeprefix("the ")
    forms = [
        f"What is the capital of {name}?", f"What is the capital of {name}?", f"What's the capital of {name}?",
        f"Which city is the capital of {name}?", f"Tell me the capital of {name}.", f"Capital of {bare}?",
        f"Name the capital of {name}.", f"Do you know the capital of {name}?", f"{bare} capital",
        f"What is {bare}'s capital?", f"What is the capital city of {name}?", f"The capital of {name}?",
    ]  # fmt: skip
    return sloppy(rng.choice(forms), rng), f"The capital of {country.name} is {stem(country.capital)}."


def ask_country(country: Country, rng: Random) -> tuple[str, str]:
    """Question and answer on where a country is, what it is, what is spoken there, or whose capital a city is."""
    name, subject = country.name, country.name[0].upper() + country.name[1:]
    where = f"{subject} is a country in {country.region}. Its capital is {stem(country.capital)}."
    choices = [
        ([f"Where is {name}?", f"In which part of the world is {name}?", f"Where is {name} located?"], where),
        ([f"What is {name}?", f"Tell me about {name}.", f"What do you know about {name}?", f"{name}?"], where),
    ]
    if country.capital not in country.name:
        capital_of = f"{stem(country.capital)} is the capital of {name}."
        city = country.capital
        asks = [
            f"{city} is the capital of which country?",
            f"What is {city}?",
            f"Where is {city}?",
            f"Tell me about {city}.",
        ]
        choices.append((asks, capital_of))
    if country.languages:
        spoken = " and ".join(filter(None, [", ".join(country.languages[:-1]), country.languages[-1]]))
        asks = [f"What language do people speak in {name}?", f"What languages are spoken in {name}?",
                f"Which language is spoken in {name}?"]  # fmt: skip
        choices.append((asks, f"People in {name} speak {spoken}."))
    asks, answer = rng.choice(choices)
    return sloppy(rng.choice(asks), rng), answer


def small_talk() -> list[tuple[list[str], list[str]]]:
    """The blocks of smalltalk.txt: (questions, answers)."""
    blocks = []
    for block in (DATA / "smalltalk.txt").read_text().split("\n\n"):
        lines = [line for line in block.splitlines() if line[:2] in ("? ", "> ")]
        if lines:
            blocks.append(([q[2:] for q in lines if q[0] == "?"], [a[2:] for a in lines if a[0] == ">"]))
    return blocks
