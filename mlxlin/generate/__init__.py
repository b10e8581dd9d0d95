"""The loops around the pure function (tokens, state) -> (logits, state). None of them knows a terminal.

prefill   reads a prompt in chunks
Decoding  one row's tokens, computed one step ahead, with the state that goes with them
pieces    their text, up to a stop text
stream    all three
batch     several prompts at once
"""

from mlxlin.generate.batching import batch
from mlxlin.generate.decoding import Decoding, decode
from mlxlin.generate.prompts import prompt_tokens, room
from mlxlin.generate.reading import chunk_length, prefill
from mlxlin.generate.records import Completion, Finish, Piece, Progress, Stats, Step
from mlxlin.generate.streaming import stream
from mlxlin.generate.text import pieces

__all__ = [
    "Completion",
    "Decoding",
    "Finish",
    "Piece",
    "Progress",
    "Stats",
    "Step",
    "batch",
    "chunk_length",
    "decode",
    "pieces",
    "prefill",
    "prompt_tokens",
    "room",
    "stream",
]
