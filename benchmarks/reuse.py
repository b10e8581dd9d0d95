"""What a conversation costs in prompt tokens: a script of ten replies under a template that drops earlier thoughts.

    python benchmarks/reuse.py            # with mlx-lm beside it where that is installed (group `peers`)

The shipped model talks through a chat template that, as those of thinking models do, keeps a thought only in the turn
that is being answered. Every reply is a given thought and the model's own greedy answer. The script also retries, takes
back and edits. Counted are the prompt tokens evaluated, which costs the same on every machine, against the fewest that
any scheme could do with: what the prompt has not in common with anything read before, one token at least.

mlx-lm is driven as its server drives it: prompts in segments (system, messages, thinking tail), the cache of each
segment and of each reply kept in its `LRUPromptCache`, its own `BatchGenerator`. The tail is told apart as with a
vocabulary that has a token for <think>, which the shipped model's has not.

Ends with 1 where an answer differs from that of reading everything again, or where mlxlin evaluates more than 1.1 times
the fewest tokens.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlxlin
from mlxlin.backend import mx
from mlxlin.loader import load
from mlxlin.timeline import common_prefix

LIMIT = 1.1
ANSWER = 32  # tokens of an answer at most
SYSTEM = "You are a helpful assistant on a small machine. You answer in one short sentence."
TEMPLATE = """\
{%- set ns = namespace(last=0) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- for m in messages -%}<|im_start|>{{ m.role }}
{% if m.role == 'assistant' and m.reasoning_content and loop.index0 > ns.last -%}
<think>
{{ m.reasoning_content }}
</think>

{% endif -%}
{{ m.content }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
<think>
{% endif -%}"""
# what the person does before each reply: say something, retry, say something in the place of a message taken back
SCRIPT = [
    ("say", "What is the capital of France?"),
    ("say", "And what is the capital of Japan?"),
    ("say", "Which of the two countries is an island?"),
    ("retry", ""),
    ("say", "What is a cat?"),
    ("undo", "What is a horse, and what do people use it for?"),
    ("say", "Tell me something about the sea."),
    ("edit 2", "And what is the capital of Italy?"),
    ("say", "Who are you?"),
    ("say", "Thank you, that was very helpful."),
]
THOUGHT = (
    "This is question {n}. I should look at what was said before, recall what I know of it, decide what matters, and "
    "then answer in one short sentence as I was told.\n</think>\n\n"
)


class Thinking:
    """A model whose replies begin with a given thought."""

    def __init__(self, model: Any) -> None:
        self.model, self.prompt, self.thought = model, 0, [0]

    def __call__(self, ids: Any, state: Any = None, **options: Any) -> Any:
        logits, after = self.model(ids, state, **options)
        said = int(after.positions[0].item()) - self.prompt
        if logits is not None and 0 <= said < len(self.thought):
            logits = mx.where(mx.arange(logits.shape[-1]) == self.thought[said], 1e4, logits)
        return logits, after

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)


def converse(model: Any, tokenizer: Any, *, reuse: bool) -> tuple[list[list[int]], list[list[int]], list[int]]:
    """Prompt, reply and tokens evaluated of each turn; without `reuse` every prompt is read from the beginning."""
    thinking = Thinking(model)
    talk = mlxlin.Conversation(thinking, tokenizer, system=SYSTEM)  # type: ignore[arg-type]
    prompts, replies, costs = [], [], []
    for number, (action, text) in enumerate(SCRIPT, 1):
        verb, _, turn = action.partition(" ")
        if verb != "say":
            old = talk.edit(int(turn)) if turn else talk.undo()
            text = text or str(old)
        if not reuse:
            talk.timeline = mlxlin.Timeline(thinking)  # type: ignore[arg-type]
        prompt = talk.prompt(text)
        thinking.thought = tokenizer.encode(THOUGHT.format(n=number), bos=False)
        thinking.prompt = len(prompt)
        pieces = list(talk.ask(text, temperature=0.0, max_tokens=len(thinking.thought) + ANSWER))
        stats = pieces[-1].stats
        assert stats is not None
        prompts.append(prompt), replies.append([piece.token for piece in pieces[:-1] if piece.token is not None])
        costs.append(stats.prompt_tokens - stats.reused_tokens)
    return prompts, replies, costs


def fewest(prompts: Sequence[list[int]], replies: Sequence[list[int]]) -> list[int]:
    """Tokens of each prompt that nobody can have read before, at least one."""
    read: list[list[int]] = []
    costs = []
    for prompt, reply in zip(prompts, replies, strict=True):
        known = max((common_prefix(earlier, prompt) for earlier in read), default=0)
        costs.append(max(1, len(prompt) - known))
        read.append(prompt + reply)
    return costs


def converse_mlx_lm(folder: Path, prompts: Sequence[list[int]], tokenizer: Any) -> tuple[list[list[int]], list[int]]:
    """The same prompts through mlx-lm: replies, and tokens evaluated."""
    from mlx_lm import load as load_mlx_lm  # type: ignore[import-not-found]
    from mlx_lm.generate import BatchGenerator  # type: ignore[import-not-found]
    from mlx_lm.models.cache import LRUPromptCache  # type: ignore[import-not-found]

    model, _ = load_mlx_lm(str(folder), model_config={"model_type": "qwen3_5"})
    model.set_dtype(mx.float32)
    caches, generator = LRUPromptCache(), BatchGenerator(model, stop_tokens=[[id] for id in tokenizer.stop_ids])
    system = tokenizer.chat([{"role": "system", "content": SYSTEM}, {"role": "user", "content": ""}])
    thinking = len(tokenizer.encode("<think>\n", bos=False))  # the tail that the template opens a reply with
    replies, costs = [], []
    for number, prompt in enumerate(prompts, 1):
        thought = tokenizer.encode(THOUGHT.format(n=number), bos=False)
        cache, rest = caches.fetch_nearest_cache("model", prompt)
        known = len(prompt) - len(rest)
        tail = len(prompt) - thinking
        ends = [end for end in (common_prefix(system, prompt), tail, len(prompt)) if end > known]
        segments = [prompt[start:end] for start, end in zip([known, *ends], ends, strict=False)]
        generator.insert_segments(
            [segments],
            max_tokens=[len(thought) + ANSWER],
            caches=[cache],
            all_tokens=[prompt[:known]],
            logits_processors=[[Forced(thought)]],
        )
        replies.append(run(generator, caches, ["system", "user"][-len(ends) + 1 :] if len(ends) > 1 else []))
        costs.append(len(rest))
    generator.close()
    return replies, costs


def run(generator: Any, caches: Any, kinds: list[str]) -> list[int]:
    """Generate one reply; the caches at the ends of its prompt's segments and its own are kept, as the server does."""
    reply: list[int] = []
    while True:
        read, generated = generator.next()
        ended = [response.uid for response in read if response.end_of_segment and not response.end_of_prompt]
        for cache, key in generator.extract_cache(ended if kinds else []).values():
            caches.insert_cache("model", key[:], cache, cache_type=kinds.pop(0))
        for response in generated:
            if response.finish_reason != "stop":
                reply.append(response.token)
            if response.finish_reason is not None:
                caches.insert_cache("model", response.all_tokens[:], response.prompt_cache, cache_type="assistant")
                return reply


class Forced:
    """A logits processor of mlx-lm that makes a reply begin with given tokens."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = iter(tokens)

    def __call__(self, _: Any, logits: Any) -> Any:
        token = next(self.tokens, None)
        return logits if token is None else mx.where(mx.arange(logits.shape[-1]) == token, 1e4, logits)


def make_checkpoint(folder: Path) -> None:
    """The shipped model with the thinking template."""
    shutil.copytree(Path(mlxlin.__file__).parent / "demo", folder)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": TEMPLATE}))


def main() -> int:
    """Print the table; 1 where something is not as it must be."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "demo"
        make_checkpoint(folder)
        model, tokenizer = load(folder, dtype=mx.float32)
        prompts, answers, own = converse(model, tokenizer, reuse=True)
        again, expected, stateless = converse(model, tokenizer, reuse=False)
        columns = {"fewest": fewest(prompts, answers), "mlxlin": own, "read again": stateless}
        same = {"mlxlin": prompts == again and answers == expected}
        if importlib.util.find_spec("mlx_lm"):
            name = f"mlx-lm {importlib.metadata.version('mlx-lm')}"
            replies, columns[name] = converse_mlx_lm(folder, prompts, tokenizer)
            same[name] = replies == expected
    show(prompts, columns)
    least, used = sum(columns["fewest"]), sum(own)
    print(f"mlxlin evaluates {used / least:.2f} times the fewest tokens; {LIMIT} is allowed.")
    for name, equal in same.items():
        print(f"{name}: {'the same answers as reading everything again' if equal else 'OTHER ANSWERS'}.")
    return 0 if same["mlxlin"] and used <= LIMIT * least else 1


def show(prompts: Sequence[list[int]], columns: dict[str, list[int]]) -> None:
    """Tokens evaluated, turn by turn."""
    rows = [["reply", "", "prompt", *columns]]
    for number, (action, _) in enumerate(SCRIPT):
        rows.append([str(number + 1), action, str(len(prompts[number])), *(str(c[number]) for c in columns.values())])
    rows.append(["all", "", str(sum(map(len, prompts))), *(f"{sum(costs):,}" for costs in columns.values())])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))


if __name__ == "__main__":
    sys.exit(main())
