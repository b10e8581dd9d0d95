"""mlxlin beside other runtimes: one random Qwen3.5-like checkpoint, the same prompts and lengths, one alternating run.

    python benchmarks/peers.py                                    # all peers that are installed
    python benchmarks/peers.py -p 512,2048 -n 64 -r 5 --with mlx-lm,transformers,llama.cpp
    python benchmarks/peers.py --model mlxlin/demo                # another checkpoint, here the one that is shipped

Needs mlxlin with the groups `peers` and `parity` (mlx-lm, llama.cpp; transformers, torch, which also make the random
checkpoint). Every runtime has a process of its own, so that each loads the libraries it is installed with; "mlx-lm +
fast BLAS" is mlx-lm on the BLAS that mlxlin uses on Linux, "llama.cpp" is llama_peer.py. All compute in float32 with
the same weights, and before anything is timed, all must generate the same tokens greedily. Only llama.cpp-bf16 and
llama.cpp-q8_0 have weights of their own, are named for them and not held to that. What was measured is added to
benchmarks/history/.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import importlib.metadata
import importlib.util
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import llama_peer

import mlxlin
from mlxlin_cli.bench import Lengths, save
from mlxlin_cli.peer import Peer, Worker, environment, mlx_lm_worker, serve

HISTORY = Path(__file__).parent / "history"
GATE = 32  # greedy tokens that all subjects must have in common
GATE_PROMPT = 64  # tokens they are generated behind
RANDOM = "random Qwen3.5-like"
PACKAGES = {  # what a peer is in
    "mlx-lm": "mlx_lm",
    "mlx-lm-blas": "mlx_lm",
    "transformers": "transformers",
    **dict.fromkeys(llama_peer.NAMES, "xllamacpp"),
}
SIZES = {
    "vocab_size": 8192,
    "hidden_size": 512,
    "intermediate_size": 1152,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 32768,
}


def make_checkpoint(folder: Path) -> None:
    """A random checkpoint as transformers saves it: six gated-delta-net layers, two of attention."""
    import shutil

    import torch
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    torch.manual_seed(0)
    config = Qwen3_5TextConfig(
        **SIZES,
        full_attention_interval=4,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
        initializer_range=0.05,
    )
    Qwen3_5ForCausalLM(config).to(torch.float32).save_pretrained(folder)
    for file in (Path(mlxlin.__file__).parent / "demo").glob("tokenizer*.json"):  # mlx-lm wants one
        shutil.copy(file, folder)


class Mlxlin:
    """This library, in a worker as the others are."""

    def __init__(self, folder: str) -> None:
        from mlxlin.backend import mx
        from mlxlin.bench import Local
        from mlxlin.loader import load_model
        from mlxlin.recurrences import paths

        model = load_model(folder, dtype=mx.float32)
        self._local = Local(model)
        self.about: dict[str, Any] = {name: importlib.metadata.version(name) for name in ("mlxlin", "mlx")}
        self.about |= {"parameters": model.parameter_count, "weight_bytes": model.nbytes, "vocab": model.vocab_size}
        self.about["path"] = ", ".join(dict.fromkeys(row["path"] for row in paths.table()))

    def trial(self, prompt: list[int], count: int, turn: list[int]) -> dict[str, Any]:
        return dataclasses.asdict(self._local.trial(prompt, count, turn))


class Transformers:
    """transformers on torch, with its own fallbacks in the place of missing kernels."""

    def __init__(self, folder: str) -> None:
        import torch
        from transformers import Qwen3_5ForCausalLM

        self._model = Qwen3_5ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.about = {name: importlib.metadata.version(name) for name in ("transformers", "torch")}

    def trial(self, prompt: list[int], count: int, turn: list[int]) -> dict[str, Any]:
        import resource

        import torch

        with torch.inference_mode():
            start = time.perf_counter()
            logits, cache = self._read(prompt, None)
            read = time.perf_counter() - start
            sizes = _cache_sizes(cache)
            tokens, times = [int(logits.argmax())], []
            for _ in range(count):
                logits, cache = self._read(tokens[-1:], cache)
                times.append(time.perf_counter())
                tokens.append(int(logits.argmax()))
            start = time.perf_counter()
            self._read(turn, cache)
        return {
            "prefill_seconds": read,
            "token_seconds": [moment - times[0] for moment in times],
            "turn_seconds": time.perf_counter() - start,
            "reused_tokens": 0,
            "state_bytes": sizes[0],
            "kv_bytes": sizes[1],
            "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            "tokens": tokens[:count],
        }

    def _read(self, tokens: list[int], cache: Any) -> tuple[Any, Any]:
        import torch

        out = self._model(torch.tensor([tokens]), cache=cache, use_cache=True, logits_to_keep=1)
        return out.logits[0, -1], out.cache


def _cache_sizes(cache: Any) -> tuple[int, int]:
    """Bytes of the recurrent part and of keys and values."""
    import torch

    state = kv = 0
    for layer in cache.layers:
        for name, value in vars(layer).items():
            if isinstance(value, torch.Tensor) and name in ("keys", "values"):
                kv += value.nbytes
            elif isinstance(value, torch.Tensor):
                state += value.nbytes
    return state, kv


SERVED: dict[str, Callable[[str], Peer]] = {"mlxlin": Mlxlin, "transformers": Transformers}


def worker(name: str, folder: Path, context: int) -> Worker:
    """Start one of the runtimes on a checkpoint, for conversations of up to `context` tokens."""
    if name in SERVED:
        return Worker(name, [sys.executable, __file__, "--serve", name, "--model", str(folder)], environment())
    if name in llama_peer.NAMES:
        return llama_peer.llama_worker(name, folder, context)
    return mlx_lm_worker(str(folder), "float32", fast_blas=name == "mlx-lm-blas")


class Names(click.ParamType[tuple[str, ...]]):
    """Peers that are installed here, with commas between."""

    name = "PEER,PEER,..."

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, ...]:
        names = tuple(value.split(","))
        for name in names:
            if name not in PACKAGES:
                self.fail(f"{name!r} is none of {', '.join(PACKAGES)}.", param, ctx)
            if not installed(PACKAGES[name]):
                package = PACKAGES[name].replace("_", "-")
                self.fail(f"{name} is not installed here; pip install {package}", param, ctx)
        return names


def installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def default_names() -> tuple[str, ...]:
    """All peers with the checkpoint's own weights that are installed, and in words which are not."""
    same = [name for name in PACKAGES if llama_peer.NAMES.get(name, "f32") == "f32"]
    found = tuple(name for name in same if installed(PACKAGES[name]))
    missing = [name for name in same if name not in found]
    if missing:
        click.echo(f"not installed here, so left out: {', '.join(missing)}", err=True)
    if not found:
        raise click.ClickException("no peer is installed here; pip install mlx-lm, for example")
    return found


@click.command(help=__doc__)
@click.option("-p", "--prefill", type=Lengths(), default="512,2048", show_default=True)
@click.option("-n", "--tokens", type=int, default=32, show_default=True)
@click.option("-r", "--repetitions", type=int, default=3, show_default=True)
@click.option("--with", "names", type=Names(), help=f"Peers, of {', '.join(PACKAGES)}; by default all that are here.")
@click.option("--model", type=click.Path(exists=True, path_type=Path), help="Another checkpoint.")
@click.option("--serve", "served", type=click.Choice([*SERVED, "checkpoint"]), hidden=True)
def main(
    prefill: tuple[int, ...],
    tokens: int,
    repetitions: int,
    names: tuple[str, ...] | None,
    model: Path | None,
    served: str | None,
) -> None:
    if served == "checkpoint":
        assert model is not None
        make_checkpoint(model)
        return
    if served:
        serve(lambda: SERVED[served](str(model)))
        return
    from mlxlin.bench import TURN

    names = names or default_names()
    context = max(GATE_PROMPT, *prefill) + max(GATE, tokens) + TURN
    with contextlib.ExitStack() as stack:
        folder = model or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if model is None:
            if not (installed("transformers") and installed("torch")):
                raise click.ClickException("transformers and torch make the random checkpoint; or give --model")
            subprocess.run([sys.executable, __file__, "--serve", "checkpoint", "--model", str(folder)], check=True)
        try:
            workers = [stack.enter_context(worker(name, folder, context)) for name in ("mlxlin", *names)]
            compare(workers, model.resolve().name if model else RANDOM, prefill, tokens, repetitions)
        except mlxlin.MlxlinError as error:
            raise click.ClickException(" ".join(map(str, (error, error.hint)))) from error


def compare(workers: list[Worker], name: str, lengths: tuple[int, ...], tokens: int, repetitions: int) -> None:
    """Gate, measure, print, keep."""
    from mlxlin import bench
    from mlxlin_cli.figures import render
    from mlxlin_cli.record import Record, describe_machine

    plan = bench.Plan(lengths, lengths, tokens, repetitions)
    ours = workers[0].about
    common = bench.same_tokens(workers, ours["vocab"], length=GATE_PROMPT, count=GATE)
    if any(common[w.name] < GATE for w in workers if w.about.get("weights", "f32") == "f32"):
        raise click.ClickException(f"not the same greedy tokens, so nothing is timed: {common} of {GATE} in common")

    def report(done: int, total: int) -> None:
        click.echo(f"\r{done} of {total}", err=True, nl=done == total)

    machine, bandwidth = describe_machine(), bench.memory_bandwidth()
    rows = bench.measure(workers, plan, ours["vocab"], progress=report)
    peers = {w.name: {**w.about, "greedy_tokens_in_common": common[w.name]} for w in workers[1:]}
    model = {"name": name, "parameters": ours["parameters"], "dtype": "float32", "bits": None, "path": ours["path"]}
    settings = {"lengths": lengths, "contexts": lengths, "tokens": tokens, "repetitions": repetitions}
    record = Record(machine, model, settings, bandwidth, ours["weight_bytes"], bench.drift(rows), peers, rows)
    click.echo(render(record))
    HISTORY.mkdir(exist_ok=True)
    chip = re.sub(r"\W+", "-", machine["chip"].lower())
    what = [chip, machine["commit"].rstrip("+") or machine["mlxlin"], *([] if name == RANDOM else [name])]
    path = HISTORY / f"{datetime.date.today()}-{'-'.join(what)}.json"
    save(record, path)
    click.echo(f"kept in {path}", err=True)


if __name__ == "__main__":
    main()
