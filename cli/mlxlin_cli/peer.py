"""Other programs as subjects of a benchmark, each in a process of its own, talked to in JSON lines.

A worker says hello with its versions, then answers one line per trial. It imports nothing of mlxlin but this, so that
the peer runs as it is installed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from mlxlin.bench import Trial

PREFILL_STEP = 2048  # mlx-lm's default


class Worker:
    """The near end: a `mlxlin.bench.Subject` that runs elsewhere. Also a context manager, which ends it.

    Args:
        name: of the subject in tables.
        command: starts the worker.
        environment: what the worker sees; None for everything seen here.

    Raises:
        UnsupportedError: the peer is not installed or refuses the model, in its own words.
    """

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        self.name = name
        # a session of its own: Ctrl-C is for us, and the worker ends when its input does
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            start_new_session=True,
        )
        self.about: dict[str, Any] = self._answer()

    def trial(self, prompt: Sequence[int], count: int, turn: Sequence[int]) -> Trial:
        """See `mlxlin.bench.Subject`."""
        from mlxlin.bench import Trial

        assert self._process.stdin is not None
        request = {"prompt": list(prompt), "count": count, "turn": list(turn)}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = self._answer()
        lists: dict[str, Any] = {name: tuple(answer[name]) for name in ("token_seconds", "tokens")}
        return Trial(**(answer | lists))

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()

    def _answer(self) -> dict[str, Any]:
        import mlxlin

        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        answer: dict[str, Any] = json.loads(line) if line else {"error": f"ended with code {self._process.wait()}"}
        if "error" in answer:
            self._process.communicate()
            raise mlxlin.UnsupportedError(f"{self.name}: {answer['error']}", answer.get("hint", ""))
        return answer


class Peer(Protocol):
    """The far end: what a worker serves."""

    about: dict[str, Any]

    def trial(self, prompt: list[int], count: int, turn: list[int]) -> dict[str, Any]:
        """The fields of `mlxlin.bench.Trial`."""


def serve(make: Callable[[], Peer]) -> None:
    """Answer trials from standard input until it ends; what the peer prints goes to standard error."""
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answers:
        os.dup2(2, 1)

        def answer(value: dict[str, Any]) -> None:
            answers.write(json.dumps(value) + "\n")
            answers.flush()

        try:
            peer = make()
            answer(peer.about)
            for line in sys.stdin:
                answer(peer.trial(**json.loads(line)))
        except ModuleNotFoundError as error:
            package = str(error.name).replace("_", "-")
            answer({"error": f"{package} is not installed here.", "hint": f"pip install {package}"})
        except Exception as error:  # whatever goes wrong in the peer is told at the near end
            answer({"error": f"{type(error).__name__}: {error}"})


class MlxLm:
    """mlx-lm: prefill in its own steps, decoding in its own loop (`generate_step`).

    Args:
        folder: a checkpoint.
        dtype: what to compute in.
        fast_blas: give its MLX the BLAS that mlxlin uses on Linux.
    """

    def __init__(self, folder: str, dtype: str, fast_blas: bool = False) -> None:
        import mlx.core as mx

        if fast_blas:
            from mlxlin.blas import install

            install()
        import importlib.metadata

        from mlx_lm import load  # type: ignore[import-not-found]

        # it knows a text-only checkpoint under the name of the multimodal one around it
        kind = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))["model_type"]
        self._model, _ = load(folder, model_config={"model_type": str(kind).removesuffix("_text")})
        self._model.set_dtype(getattr(mx, dtype))
        mx.eval(self._model.parameters())
        self.about = {name: importlib.metadata.version(name) for name in ("mlx-lm", "mlx")} | {"fast_blas": fast_blas}

    def trial(self, prompt: list[int], count: int, turn: list[int]) -> dict[str, Any]:
        import mlx.core as mx
        from mlx_lm.generate import generate_step  # type: ignore[import-not-found]
        from mlx_lm.models.cache import KVCache, make_prompt_cache  # type: ignore[import-not-found]

        cache = make_prompt_cache(self._model)
        mx.clear_cache()
        mx.reset_peak_memory()
        start = time.perf_counter()
        logits = self._read(prompt, cache)
        read = time.perf_counter() - start
        keys_values = [layer for layer in cache if isinstance(layer, KVCache)]
        kv_bytes = sum(2 * layer.keys.nbytes // layer.keys.shape[2] * layer.offset for layer in keys_values)
        state_bytes = sum(layer.nbytes for layer in cache if not isinstance(layer, KVCache))
        tokens, times = [int(mx.argmax(logits))], []
        for token, _ in generate_step(mx.array(tokens), self._model, max_tokens=count, prompt_cache=cache):
            times.append(time.perf_counter())
            tokens.append(int(token))
        mx.eval([layer.state for layer in cache])
        start = time.perf_counter()
        self._read(turn, cache)
        return {
            "prefill_seconds": read,
            "token_seconds": [moment - times[0] for moment in times],
            "turn_seconds": time.perf_counter() - start,
            "reused_tokens": 0,
            "state_bytes": state_bytes,
            "kv_bytes": kv_bytes,
            "peak_bytes": mx.get_peak_memory(),
            "tokens": tokens[:count],
        }

    def _read(self, prompt: list[int], cache: list[Any]) -> Any:
        """The evaluated logits behind `prompt`; all but its last token in steps, as `generate_step` does it."""
        import mlx.core as mx

        tokens = mx.array(prompt)[None]
        for start in range(0, len(prompt) - 1, PREFILL_STEP):
            self._model(tokens[:, start : min(start + PREFILL_STEP, len(prompt) - 1)], cache=cache)
            mx.eval([layer.state for layer in cache])
            mx.clear_cache()
        logits = self._model(tokens[:, -1:], cache=cache)[:, -1]
        mx.eval(logits, [layer.state for layer in cache])
        return logits


def environment(**extra: str) -> dict[str, str]:
    """What a worker sees: everything seen here, and the packages of this mlxlin first on its path."""
    import mlxlin

    roots = {str(Path(file).resolve().parents[1]) for file in (mlxlin.__file__, __file__)}
    path = os.pathsep.join([*sorted(roots), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    return {**os.environ, "PYTHONPATH": path, **extra}


def mlx_lm_worker(folder: str, dtype: str, *, fast_blas: bool = False) -> Worker:
    """Start mlx-lm on a checkpoint folder."""
    flags = ["--fast-blas"] if fast_blas else []
    name = "mlx-lm + fast BLAS" if fast_blas else "mlx-lm"
    return Worker(name, [sys.executable, "-m", "mlxlin_cli.peer", folder, dtype, *flags], environment())


if __name__ == "__main__":
    serve(lambda: MlxLm(sys.argv[1], sys.argv[2], fast_blas="--fast-blas" in sys.argv[3:]))
