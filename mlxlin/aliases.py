"""Short names for checkpoints on the hub, and which of them fit a machine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Known:
    """A checkpoint worth a short name: hub id, weights in billions (all, and used per token), what it is."""

    repo: str
    billions: float
    active: float
    about: str


# The numbers are the model's own, rounded; they decide only what is suggested.
ALIASES = {
    "qwen3.5-0.8b": Known("Qwen/Qwen3.5-0.8B", 0.8, 0.8, "gated delta net hybrid, chat"),
    "qwen3.5-2b": Known("Qwen/Qwen3.5-2B", 2.0, 2.0, "gated delta net hybrid, chat"),
    "qwen3.5-4b": Known("Qwen/Qwen3.5-4B", 4.0, 4.0, "gated delta net hybrid, chat"),
    "qwen3.5-9b": Known("Qwen/Qwen3.5-9B", 9.0, 9.0, "gated delta net hybrid, chat"),
    "qwen3.5-27b": Known("Qwen/Qwen3.5-27B", 28.0, 28.0, "gated delta net hybrid, chat"),
    "qwen3.5-35b-a3b": Known("Qwen/Qwen3.5-35B-A3B", 35.0, 3.0, "gated delta net hybrid with experts, chat"),
    "qwen3.6-27b": Known("Qwen/Qwen3.6-27B", 28.0, 28.0, "gated delta net hybrid, chat"),
    "qwen3.8-27b": Known("Qwen/Qwen3.8-27B", 28.0, 28.0, "gated delta net hybrid, chat"),
    "qwen3-next-80b": Known("Qwen/Qwen3-Next-80B-A3B-Instruct", 80.0, 3.0, "gated delta net hybrid with experts, chat"),
    "olmo-hybrid-7b": Known("allenai/Olmo-Hybrid-7B", 7.0, 7.0, "gated delta net hybrid, base model"),
    "kimi-linear-48b": Known("moonshotai/Kimi-Linear-48B-A3B-Instruct", 48.0, 3.0, "KDA hybrid with experts, chat"),
    "ling-3.0-tiny": Known("inclusionAI/Ling-3.0-tiny", 7.9, 1.3, "KDA hybrid with experts, chat"),
    "ring-mini-linear": Known("inclusionAI/Ring-mini-linear-2.0", 16.0, 1.6, "lightning hybrid with experts, chat"),
    "nemotron-3-nano-4b": Known("nvidia/NVIDIA-Nemotron-3-Nano-4B-BF16", 4.0, 4.0, "Mamba-2 hybrid, chat"),
    "nemotron-nano-9b": Known("nvidia/NVIDIA-Nemotron-Nano-9B-v2", 9.0, 9.0, "Mamba-2 hybrid, chat"),
    "nemotron-3-nano-30b": Known(
        "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", 32.0, 3.6, "Mamba-2 hybrid with experts, chat"
    ),
    "granite-4-h-micro": Known("ibm-granite/granite-4.0-h-micro", 3.0, 3.0, "Mamba-2 hybrid, chat"),
    "granite-4-h-tiny": Known("ibm-granite/granite-4.0-h-tiny", 7.0, 1.0, "Mamba-2 hybrid with experts, chat"),
    "granite-4-h-small": Known("ibm-granite/granite-4.0-h-small", 32.0, 9.0, "Mamba-2 hybrid with experts, chat"),
    "falcon-h1-0.5b": Known("tiiuae/Falcon-H1-0.5B-Instruct", 0.5, 0.5, "Mamba-2 beside attention, chat"),
    "falcon-h1-1.5b": Known("tiiuae/Falcon-H1-1.5B-Instruct", 1.5, 1.5, "Mamba-2 beside attention, chat"),
    "falcon-h1-7b": Known("tiiuae/Falcon-H1-7B-Instruct", 7.6, 7.6, "Mamba-2 beside attention, chat"),
    "lfm2-350m": Known("LiquidAI/LFM2-350M", 0.4, 0.4, "gated convolution hybrid, chat"),
    "lfm2.5-1.2b": Known("LiquidAI/LFM2.5-1.2B-Instruct", 1.2, 1.2, "gated convolution hybrid, chat"),
    "lfm2.5-8b-a1b": Known("LiquidAI/LFM2.5-8B-A1B", 8.3, 1.5, "gated convolution hybrid with experts, chat"),
    "lfm2-24b-a2b": Known("LiquidAI/LFM2-24B-A2B", 24.0, 2.3, "gated convolution hybrid with experts, chat"),
    "rwkv7-0.4b": Known("fla-hub/rwkv7-0.4B-world", 0.4, 0.4, "RWKV-7, base model"),
    "rwkv7-1.5b": Known("fla-hub/rwkv7-1.5B-world", 1.5, 1.5, "RWKV-7, base model"),
    "rwkv7-2.9b": Known("fla-hub/rwkv7-2.9B-world", 2.9, 2.9, "RWKV-7, base model"),
    "gla-1.3b": Known("fla-hub/gla-1.3B-100B", 1.3, 1.3, "gated linear attention, base model"),
    "gla-2.7b": Known("fla-hub/gla-2.7B-100B", 2.7, 2.7, "gated linear attention, base model"),
    "delta-net-1.3b": Known("fla-hub/delta_net-1.3B-100B", 1.3, 1.3, "delta net, base model"),
    "retnet-1.3b": Known("fla-hub/retnet-1.3B-100B", 1.3, 1.3, "retention, base model"),
}
_BITS = (16, 8, 6, 4)
_OVERHEAD = 1.1  # scales of quantised weights, the state, temporaries
_SHARE = 0.7  # of a machine's memory that a model may take beside everything else


@dataclass(frozen=True)
class Suggestion:
    """A checkpoint that fits: at `bits` per weight it takes about `nbytes` of memory."""

    alias: str
    known: Known
    bits: int
    nbytes: int


def suggest(memory: int) -> list[Suggestion]:
    """What fits into `memory` bytes, the largest first, each with the most bits that fit."""
    found = []
    for alias, known in ALIASES.items():
        for bits in _BITS:
            nbytes = int(known.billions * 1e9 * bits / 8 * _OVERHEAD)
            if nbytes <= memory * _SHARE:
                found.append(Suggestion(alias, known, bits, nbytes))
                break
    return sorted(found, key=lambda s: s.known.billions, reverse=True)
