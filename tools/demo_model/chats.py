"""Made-up chats: single questions, and longer talks whose answers refer back to what was said before."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from tools.demo_model import questions, sums
from tools.demo_model.countries import Country
from tools.demo_model.questions import sloppy, stem
from tools.demo_model.topics import COLOURS, JOBS, SYSTEMS, TOPICS, Topic
from tools.demo_model.values import invented, listed, typed_value
from tools.demo_model.wordnet import Gloss

Message = dict[str, str]
Chat = list[Message]
Pair = tuple[str, str]

COMMON_TALK = 36  # the first blocks of smalltalk.txt, with which most people open, are half of all small talk


def as_chat(pairs: list[Pair], system: str | None = None) -> Chat:
    """Question and answer pairs as chat messages."""
    chat: Chat = [] if system is None else [{"role": "system", "content": system}]
    for question, answer in pairs:
        chat += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return chat


class ChatMaker:
    """Random chats from one seeded generator: the same seed makes the same chats."""

    def __init__(self, names: list[str], countries: list[Country], glosses: list[Gloss], seed: int) -> None:
        self.rng = Random(seed)
        self.names, self.countries, self.glosses = names, countries, glosses
        self.things = questions.things()
        self.foods = [t for t in self.things if t.group == "food and drink"]
        self.small_talk = questions.small_talk()
        self._decks: dict[str, list[int]] = {}

    def _deal(self, deck: str, count: int) -> int:
        """Draw 0..count-1 as from shuffled cards, so that every item comes up equally often."""
        cards = self._decks.setdefault(deck, [])
        if not cards:
            cards.extend(self.rng.sample(range(count), count))
        return cards.pop()

    # ---- single questions

    def thing(self) -> Pair:
        thing = self.things[self._deal("thing", len(self.things))]
        return questions.ask_thing(thing, self.rng), thing.definition

    def kind(self) -> Pair:
        while True:
            pair = questions.ask_kind(self.rng.choice(self.things), self.rng)
            if pair is not None:
                return pair

    def gloss(self) -> Pair:
        return questions.ask_gloss(self.glosses[self._deal("gloss", len(self.glosses))], self.rng)

    def capital(self) -> Pair:
        return questions.ask_capital(self.countries[self._deal("capital", len(self.countries))], self.rng)

    def country(self) -> Pair:
        return questions.ask_country(self.countries[self._deal("country", len(self.countries))], self.rng)

    def sum(self) -> Pair:
        return sums.ask_sum(self.rng)

    def talk(self) -> Pair:
        common = self.rng.random() < 0.5
        blocks = self.small_talk[:COMMON_TALK] if common else self.small_talk[COMMON_TALK:]
        asks, answers = blocks[self._deal(f"talk {common}", len(blocks))]
        question = self.rng.choice(asks)
        if question[-1] not in "?!." and self.rng.random() < 0.4:
            question += self.rng.choice(".!")
        return sloppy(question, self.rng), self.rng.choice(answers)

    # ---- values that only the chat holds

    def value(self, topic: str) -> str:
        rng = self.rng
        draws: dict[str, Callable[[], str]] = {
            "age": lambda: str(rng.randint(5, 99)),
            "city": lambda: rng.choice(self.countries).capital if rng.random() < 0.6 else invented(rng).capitalize(),
            "colour": lambda: rng.choice(COLOURS),
            "food": lambda: rng.choice(self.foods).plural.lower(),
            "job": lambda: rng.choice(JOBS),
            "number": lambda: str(rng.randint(0, 10 ** rng.randint(1, 4))),
            "word": self.word,
        }
        return draws.get(topic, self.name)()

    def name(self) -> str:
        return self.rng.choice(self.names) if self.rng.random() < 0.6 else invented(self.rng).capitalize()

    def word(self) -> str:
        draw = self.rng.random()
        if draw < 0.4:
            return self.rng.choice(self.things).noun
        return self.rng.choice(self.glosses).word if draw < 0.75 else invented(self.rng)

    def words(self, least: int, most: int) -> list[str]:
        return [self.word() for _ in range(self.rng.randint(least, most))]

    # ---- answers that copy from the chat

    def echo(self) -> Pair:
        """Say or repeat something that stands in the question."""
        rng = self.rng
        draw = rng.random()
        if draw < 0.25:
            name = self.name()
            return f"{rng.choice(['Say hello to', 'Greet', 'Please greet'])} {name}.", f"Hello, {name}!"
        if draw < 0.45:
            word = self.word()
            return rng.choice(
                [f"Say {word}", f'Say "{word}".', f"Repeat the word {word}.", f"Please say {word}."]
            ), f"{word}"
        if draw < 0.75:
            items = ", ".join(self.words(2, 6))
            ask = rng.choice(
                ["Repeat this list", "Repeat", "Repeat after me", "Please repeat", "Copy this", "Say this"]
            )
            return f"{ask}: {items}", items
        items_list = self.words(2, 5)
        place, item = rng.choice([("first", items_list[0]), ("last", items_list[-1])])
        return f"What is the {place} word of this list: {', '.join(items_list)}?", f"The {place} word is {item}."

    def shopping(self) -> tuple[Pair, Pair]:
        """A list that is told, and asked for later."""
        rng = self.rng
        items = [rng.choice(self.foods).plural.lower() for _ in range(rng.randint(2, 4))]
        tell, ask = rng.choice([
            ("I need to buy {}.", "What do I need to buy?"),
            ("My shopping list is {}.", "What is on my shopping list?"),
            ("Remember this list: {}.", "What was the list?"),
            ("Please remember {}.", "What should you remember?"),
        ])  # fmt: skip
        text = listed(items)
        told = (tell.format(text), f"I will remember {text}.")
        if rng.random() < 0.3:
            place, item = rng.choice([("first", items[0]), ("last", items[-1])])
            return told, (f"What was the {place} thing on my list?", f"The {place} thing on your list was {item}.")
        return told, (sloppy(ask, rng), f"You told me {text}.")

    def tell(self, topic: Topic) -> tuple[Pair, str]:
        """The person says a value; returns the pair and the value as typed."""
        rng = self.rng
        value, form = self.value(topic.name), rng.choice(topic.say)
        text = sloppy(form.format(value), rng)
        typed = typed_value(value, text)
        if typed is None:
            text, typed = form.format(value), value
        reply = rng.choice(topic.replies).format(typed)
        return (text, reply[0].upper() + reply[1:] if not reply.startswith(typed) else reply), typed

    def ask(self, topic: Topic, value: str | None) -> Pair:
        answer = topic.unknown if value is None else topic.answer.format(value)
        return sloppy(self.rng.choice(topic.ask), self.rng), answer

    def filler(self) -> Pair:
        makers = (
            self.thing,
            self.thing,
            self.capital,
            self.sum,
            self.talk,
            self.talk,
            self.kind,
            self.country,
            self.gloss,
        )
        return self.rng.choice(makers)()

    # ---- whole chats

    def recall(self, fillers: int | None = None, topic: Topic | None = None) -> Chat:
        """Something is told, other things are talked about, then it is asked for."""
        rng = self.rng
        topic = topic or (TOPICS[0] if rng.random() < 0.35 else rng.choice(TOPICS))
        if rng.random() < 0.12:
            told, asked = self.shopping()
        else:
            told, value = self.tell(topic)
            asked = self.ask(topic, value)
        between = [self.filler() for _ in range(rng.choice([0, 1, 1, 1, 2, 2, 3]) if fillers is None else fillers)]
        before = [self.talk()] if rng.random() < 0.25 else []
        return as_chat([*before, told, *between, asked], self.system())

    def long_talk(self, turns: int) -> Chat:
        """A free talk: telling, asking back (also what was never said), follow-ups, echoes, other questions."""
        rng = self.rng
        known: dict[str, str] = {}
        pairs: list[Pair] = []
        while len(pairs) < turns:
            draw = rng.random()
            topic = rng.choice(TOPICS)
            if draw < 0.24:
                pair, known[topic.name] = self.tell(topic)
                pairs.append(pair)
            elif draw < 0.44:
                told = [t for t in TOPICS if t.name in known]
                topic = rng.choice(told) if told and rng.random() < 0.8 else topic
                pairs.append(self.ask(topic, known.get(topic.name)))
            elif draw < 0.50 and pairs:
                pairs.append(self.look_back(pairs))
            elif draw < 0.58:
                pairs += self.follow_up()
            elif draw < 0.63:
                pairs.append(self.echo())
            else:
                pairs.append(self.filler())
        return as_chat(pairs, self.system())

    def look_back(self, pairs: list[Pair]) -> Pair:
        rng = self.rng
        if rng.random() < 0.6:
            return rng.choice(
                ["What did I just say?", "What did I say?", "Repeat what I said."]
            ), f'You said: "{pairs[-1][0]}"'
        return rng.choice(["What was my first question?", "What did I say first?"]), f'You said: "{pairs[0][0]}"'

    def follow_up(self) -> list[Pair]:
        """``What is a cat?`` ... ``And a dog?``; the same with capitals."""
        rng = self.rng
        lead = rng.choice(["And {}?", "What about {}?", "and {}", "how about {}?", "And what is {}?"])
        if rng.random() < 0.5:
            thing = self.things[self._deal("thing", len(self.things))]
            return [self.thing(), (lead.format(thing.phrase), thing.definition)]
        country = rng.choice(self.countries)
        lead = lead.replace("what is ", "")
        return [
            self.capital(),
            (lead.format(country.name), f"The capital of {country.name} is {stem(country.capital)}."),
        ]

    def named_system(self) -> Chat:
        """A system message that names the person or the assistant."""
        name = self.name()
        if self.rng.random() < 0.5:
            system = self.rng.choice(["The user is called {}.", "The user's name is {}.", "You talk with {}."]).format(
                name
            )
            pairs = [self.ask(TOPICS[0], name)]
        else:
            system = self.rng.choice(["You are {}.", "Your name is {}.", "You are called {}."]).format(name)
            asks = ["What is your name?", "Who are you?", "What are you called?", "Do you have a name?"]
            pairs = [(sloppy(self.rng.choice(asks), self.rng), f"My name is {name}.")]
        if self.rng.random() < 0.5:
            pairs.insert(0, self.filler())
        return as_chat(pairs, system)

    def system(self) -> str | None:
        return self.rng.choice(SYSTEMS) if self.rng.random() < 0.12 else None

    def single(self, maker: Callable[[], Pair]) -> Chat:
        return as_chat([maker()], self.system())

    def draw_late(self) -> Chat:
        """One chat of the last part of the training: what is learned slowest, sums and repeating, comes more often."""
        draw = self.rng.random()
        if draw < 0.45:
            return self.single(lambda: sums.ask_small_sum(self.rng))
        return self.single(self.echo) if draw < 0.53 else self.draw()

    def draw(self) -> Chat:
        """One chat of the training mix (shares of chats, see README.md)."""
        rng, draw = self.rng, self.rng.random()
        table: tuple[tuple[float, Callable[[], Chat]], ...] = (
            (0.22, lambda: self.single(self.thing)),
            (0.27, lambda: self.single(self.gloss)),
            (0.35, lambda: self.single(self.capital)),
            (0.39, lambda: self.single(self.country)),
            (0.65, lambda: self.single(self.sum)),
            (0.81, lambda: self.single(self.talk)),
            (0.825, lambda: self.single(self.kind)),
            (0.855, lambda: self.single(self.echo)),
            (0.875, self.named_system),
            (0.965, self.recall),
            (0.995, lambda: self.long_talk(rng.randint(2, 5))),
            (1.00, lambda: self.long_talk(rng.randint(6, 12))),
        )
        return next(make for limit, make in table if draw < limit)()
