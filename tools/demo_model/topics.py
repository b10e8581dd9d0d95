"""What a person tells about themself in the made-up chats, and how it is asked for later."""

from __future__ import annotations

from dataclasses import dataclass

COLOURS = "red blue green yellow black white brown pink purple orange grey gold silver turquoise violet".split()
JOBS = (
    "teacher doctor nurse farmer cook baker driver pilot painter writer singer student lawyer engineer sailor dentist "
    "gardener builder plumber waiter tailor librarian scientist programmer musician photographer"
).split()
SYSTEMS = [
    "You are a helpful assistant.", "You are a helpful assistant. Answer briefly.", "Be brief.", "Be polite.",
    "Answer in one sentence.", "You are a friendly assistant.", "Help the user.", "Give short answers.",
    "You are the demo model of mlxlin.", "You are kind and helpful.", "Answer the question.",
]  # fmt: skip


@dataclass(frozen=True)
class Topic:
    """One thing: ways to say it and to ask for it; {} is the value."""

    name: str
    say: tuple[str, ...]
    replies: tuple[str, ...]
    ask: tuple[str, ...]
    answer: str
    unknown: str  # the answer when it was not said


TOPICS = (
    Topic(
        "name",
        ("My name is {}.", "My name is {}.", "I am {}.", "I'm {}.", "Call me {}.", "Hello, my name is {}.",
         "Hi, I am {}.", "Hi, I'm {}!", "My name's {}.", "Hello! I am {}.", "You can call me {}.", "Hey, {} here.",
         "I am called {}.", "Hi! My name is {}."),
        ("Nice to meet you, {}!", "Hello, {}! How can I help you?"),
        ("What is my name?", "What is my name?", "What did I say my name was?", "Do you remember my name?",
         "What's my name?", "Who am I?", "Can you tell me my name?", "Tell me my name.", "Say my name.",
         "Do you know my name?", "What was my name again?", "What did I say my name is?"),
        "Your name is {}.",
        "You have not told me your name yet.",
    ),
    Topic(
        "age",
        ("I am {} years old.", "My age is {}.", "I'm {} years old.", "I am {} years old.", "I turned {} this year."),
        ("So you are {} years old. Thank you for telling me.",),
        ("How old am I?", "What is my age?", "Do you remember my age?", "Do you know how old I am?",
         "What did I say my age was?", "How old did I say I am?"),
        "You are {} years old.",
        "You have not told me your age yet.",
    ),
    Topic(
        "city",
        ("I live in {}.", "I am from {}.", "I come from {}.", "My home is in {}.", "I'm from {}."),
        ("{} sounds like a nice place.",),
        ("Where do I live?", "Where am I from?", "Which city do I live in?", "Do you remember where I live?",
         "Where did I say I live?", "What city am I from?"),
        "You live in {}.",
        "You have not told me where you live yet.",
    ),
    Topic(
        "colour",
        ("My favourite colour is {}.", "My favorite color is {}.", "I like the colour {}.", "I love the color {}."),
        ("I will remember that you like {}.",),
        ("What is my favourite colour?", "What's my favorite color?", "Which colour do I like?",
         "What colour did I say I like?", "Do you remember my favourite colour?", "What is my favorite color?"),
        "Your favourite colour is {}.",
        "You have not told me your favourite colour yet.",
    ),
    Topic(
        "food",
        ("My favourite food is {}.", "I like to eat {}.", "I love to eat {}.", "My favorite food is {}."),
        ("I have never tasted it, but I will remember that you like {}.",),
        ("What is my favourite food?", "What do I like to eat?", "What food do I like?", "What's my favorite food?",
         "What did I say I like to eat?"),
        "You like to eat {}.",
        "You have not told me what you like to eat yet.",
    ),
    Topic(
        "job",
        ("I am a {}.", "I work as a {}.", "I'm a {}.", "My job is {}."),
        ("It must be interesting to be a {}.",),
        ("What is my job?", "What do I work as?", "Do you remember my job?", "What did I say my job is?",
         "What is my work?"),
        "You are a {}.",
        "You have not told me your job yet.",
    ),
    Topic(
        "friend",
        ("My friend is called {}.", "My best friend is {}.", "I have a friend called {}.", "My friend's name is {}."),
        ("{} must be a good friend.",),
        ("What is my friend's name?", "What is my friend called?", "Who is my best friend?", "Who is my friend?",
         "Do you remember my friend's name?"),
        "Your friend is called {}.",
        "You have not told me about your friend yet.",
    ),
    Topic(
        "pet",
        ("My cat is called {}.", "My dog is called {}.", "I have a dog called {}.", "I have a cat called {}.",
         "My pet is called {}.", "My dog's name is {}.", "My cat's name is {}."),
        ("{} is a good name for a pet.",),
        ("What is my pet called?", "What is the name of my pet?", "Do you remember my pet's name?",
         "What is my pet's name?"),
        "Your pet is called {}.",
        "You have not told me about your pet yet.",
    ),
    Topic(
        "number",
        ("Remember the number {}.", "My number is {}.", "My lucky number is {}.", "Please remember the number {}."),
        ("I will remember the number {}.",),
        ("Which number did I tell you?", "What is my number?", "What was the number?", "What is my lucky number?",
         "Which number should you remember?"),
        "The number is {}.",
        "You have not told me a number yet.",
    ),
    Topic(
        "word",
        ("Remember the word {}.", "The secret word is {}.", "The password is {}.", "My secret word is {}.",
         "Please remember the word {}."),
        ("I will remember the word {}.",),
        ("What is the secret word?", "What was the word?", "Which word did I tell you?", "What is the password?",
         "Which word should you remember?"),
        "The word is {}.",
        "You have not told me a word yet.",
    ),
)  # fmt: skip
