"""The byte-level BPE tokenizer and the chat format."""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from tools.demo_model.chats import Chat

VOCAB_SIZE = 4096
END_OF_TEXT, CHAT_START, CHAT_END, PAD = 0, 1, 2, 3
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>"]
SPLIT = (  # as Qwen2: contractions, words with their space, single digits, punctuation, white space
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)


def train(texts: Iterable[str]) -> Tokenizer:
    """Learn a vocabulary of VOCAB_SIZE from texts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def render(chat: Chat, add_generation_prompt: bool = False) -> str:
    """The chat as text, equal to what CHAT_TEMPLATE gives."""
    text = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in chat)
    return text + "<|im_start|>assistant\n" if add_generation_prompt else text


def answer_mask(ids: list[int], assistant: int) -> list[int]:
    """1 for the tokens of the assistant's messages with their <|im_end|>, 0 for all others.

    ``assistant`` is the token that follows <|im_start|> in the assistant's messages; the newline after it is the
    prompt's.
    """
    mask, inside = [0] * len(ids), False
    for i, token in enumerate(ids):
        if inside:
            mask[i] = 1
            inside = token != CHAT_END
        elif i >= 2 and ids[i - 2] == CHAT_START and ids[i - 1] == assistant:
            inside = True
    return mask
