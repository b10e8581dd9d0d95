"""llama.cpp as a peer of peers.py: `xllamacpp`, a prebuilt wheel of llama.cpp and its server, driven in token ids.

It computes as installed, with its own number of threads and batch sizes, but keeps keys and values in float32 and
nothing from one prompt to the next. Times are the server's own, so that they hold nothing of what lies between it and
Python. The wheel is built for any x86-64 with AVX2: a llama.cpp built on the machine it runs on can be faster.
"""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from gguf_export import text_config

from mlxlin_cli.peer import Worker, environment, serve

NAMES = {"llama.cpp": "f32", "llama.cpp-bf16": "bf16", "llama.cpp-q8_0": "q8_0"}


class LlamaCpp:
    """The far end.

    Args:
        folder: a checkpoint; it is exported for llama.cpp first.
        weights: what its matrices are stored as. Others than "f32" are other weights, for orientation only.
        context: tokens that a conversation can have.

    Raises:
        ValueError: no model that can be exported.
    """

    def __init__(self, folder: Path, weights: str, context: int) -> None:
        import gguf  # noqa: F401 (the export needs it; said here if it is missing)
        import xllamacpp

        self._config = text_config(folder)
        params = xllamacpp.CommonParams()
        params.n_ctx, params.fit_params = context, False
        params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        params.cache_ram_mib = params.n_ctx_checkpoints = 0  # no copies of states for later prompts
        params.cache_idle_slots = False
        params.verbosity = 1  # errors
        with tempfile.TemporaryDirectory() as temporary:  # read or mapped once the server is there
            path = Path(temporary) / "model.gguf"
            # in a process of its own, whose memory does not count here
            export = [sys.executable, str(Path(__file__).with_name("gguf_export.py")), str(folder), str(path)]
            subprocess.run([*export, "--weights", weights], check=True)
            params.model.path = str(path)
            self._server = xllamacpp.Server(params)
        self.about = {
            "xllamacpp": importlib.metadata.version("xllamacpp"),
            "weights": weights,
            "cpu": " ".join(re.findall(r"(\w+) = 1", xllamacpp.get_system_info())),
            "threads": params.cpuparams.n_threads,
        }

    def trial(self, prompt: list[int], count: int, turn: list[int]) -> dict[str, Any]:
        import resource

        tokens, timings = self._complete(prompt, count, reuse=False)
        first = timings[0]
        state_bytes, kv_bytes = cache_sizes(self._config, len(prompt))
        # the last token generated has not been read; without it, the turn is all there is to read
        _, (after, *_) = self._complete(prompt + tokens[:-1] + turn, 1, reuse=True)
        if after["prompt_n"] != len(turn):
            raise RuntimeError(f"read {after['prompt_n']} tokens for a turn of {len(turn)}")
        return {
            "prefill_seconds": first["prompt_ms"] / 1e3,
            "token_seconds": [(timing["predicted_ms"] - first["predicted_ms"]) / 1e3 for timing in timings],
            "turn_seconds": after["prompt_ms"] / 1e3,
            "reused_tokens": first["cache_n"],
            "state_bytes": state_bytes,
            "kv_bytes": kv_bytes,
            "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            * (1 if sys.platform == "darwin" else 1024),
            "tokens": tokens,
        }

    def _complete(self, prompt: list[int], count: int, *, reuse: bool) -> tuple[list[int], list[dict[str, Any]]]:
        """Greedy tokens behind `prompt`, and the server's clock at each of them."""
        request = {
            "prompt": prompt,
            "n_predict": count,
            "temperature": 0.0,
            "samplers": ["temperature"],
            "cache_prompt": reuse,
            "stream": True,
            "timings_per_token": True,
        }
        answers: list[dict[str, Any]] = []
        self._server.handle_completions(request, answers.append)
        for answer in answers:
            if "choices" not in answer:
                raise RuntimeError(str(answer))
        # the export spells token 17 as "<17>"
        pieces = [(re.findall(r"<(\d+)>", answer["choices"][0]["text"]), answer["timings"]) for answer in answers]
        told = [(int(ids[0]), timing) for ids, timing in pieces if len(ids) == 1]
        if len(told) != count:
            raise RuntimeError(f"generated {len(told)} tokens one by one instead of {count}")
        return [token for token, _ in told], [timing for _, timing in told]


def cache_sizes(config: dict[str, Any], length: int) -> tuple[int, int]:
    """Bytes of the recurrent part, and of keys and values behind `length` tokens, by their shapes in float32."""
    kinds = config["layer_types"]
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    values = config["linear_num_value_heads"] * config["linear_value_head_dim"]
    inputs = (config["linear_conv_kernel_dim"] - 1) * (2 * keys + values)
    state = kinds.count("linear_attention") * (inputs + config["linear_key_head_dim"] * values)
    pair = 2 * config["num_key_value_heads"] * config["head_dim"]
    return 4 * state, 4 * kinds.count("full_attention") * pair * length


def llama_worker(name: str, folder: Path, context: int) -> Worker:
    """Start llama.cpp on a checkpoint, as one of NAMES."""
    weights = NAMES[name]
    shown = "llama.cpp" if weights == "f32" else f"llama.cpp {weights}"
    return Worker(shown, [sys.executable, __file__, str(folder), weights, str(context)], environment())


if __name__ == "__main__":
    serve(lambda: LlamaCpp(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])))
