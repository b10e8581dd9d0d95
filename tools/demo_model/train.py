"""Train the model for a given number of minutes on CPU cores; resumable; the learning rates follow the time used.

Every core runs one single-threaded process on its own rows, and the processes average their gradients once a step:
on a shared machine this wastes far less than threads that meet after every operation.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tools.demo_model.dataset import PROSE_SHARES, Documents, Mixture, RowFiller
from tools.demo_model.model import CONFIG, LanguageModel, masked_loss

LENGTH, BATCH = 512, 4  # rows of a step, over all processes
PROSE_SHARE = 0.36
MUON_RATE, ADAM_RATE = 0.02, 3e-3
WARM_UP_STEPS, DECAY_FROM = 50, 0.35  # constant until this share of the time, then linear to zero
LATE_FROM = 0.8  # from this share of the time on, the chats of draw_late
SAVE_SECONDS = 240.0


class Muon(torch.optim.Optimizer):
    """Momentum orthogonalised by five Newton-Schulz steps (Jordan et al., 2024), for the hidden matrices."""

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        super().__init__(params, {"lr": MUON_RATE})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                momentum.lerp_(p.grad, 0.05)
            updates = [p.grad.lerp(self.state[p]["momentum"], 0.95) for p in group["params"]]
            for p, update in zip(group["params"], share_work(orthogonal, updates), strict=True):
                p.mul_(1 - group["lr"] * 0.05)
                p.add_(update, alpha=-group["lr"] * max(1.0, p.shape[0] / p.shape[1]) ** 0.5)


def orthogonal(update: Tensor) -> Tensor:
    """The nearest matrix with all singular values near one."""
    tall = update.shape[0] > update.shape[1]
    x = update.T if tall else update
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x.T if tall else x


def share_work(function: Callable[[Tensor], Tensor], tensors: list[Tensor]) -> list[Tensor]:
    """``function`` of every tensor; each process computes its share and all get the results."""
    rank, processes = dist.get_rank(), dist.get_world_size()
    results = [function(t) if i % processes == rank else torch.zeros_like(t) for i, t in enumerate(tensors)]
    flat = torch.cat([r.flatten() for r in results])
    dist.all_reduce(flat)
    return [part.view_as(t) for part, t in zip(flat.split([t.numel() for t in tensors]), tensors, strict=True)]


def optimizers(model: nn.Module) -> tuple[Muon, torch.optim.AdamW]:
    """Muon for the hidden matrices, AdamW for embedding, gates, norms and everything small."""
    small = ("embed_tokens", "in_proj_a", "in_proj_b")
    hidden = [p for n, p in model.named_parameters() if p.ndim == 2 and not any(s in n for s in small)]
    chosen = {id(p) for p in hidden}
    rest = [p for p in model.parameters() if id(p) not in chosen]
    return Muon(hidden), torch.optim.AdamW(rest, lr=ADAM_RATE, betas=(0.9, 0.95), weight_decay=0.0, fused=True)


def rate(step: int, elapsed: float) -> float:
    """Factor of both learning rates; elapsed is the used share of the time, 0..1."""
    return min(1.0, (step + 1) / WARM_UP_STEPS) * min(1.0, max(0.0, 1 - elapsed) / (1 - DECAY_FROM))


def held_out_losses(model: LanguageModel, tokens: Path, rows: int) -> dict[str, float]:
    """Loss on held-out documents of each kind, over ``rows`` rows of LENGTH tokens."""
    losses = {}
    for name in ["chat", *(f"prose_{n}" for n in PROSE_SHARES)]:
        filler = RowFiller(Documents.load(tokens / f"{name}_held_out"), LENGTH + 1, np.random.default_rng(0))
        pairs = [filler.row() for _ in range(rows)]
        ids = torch.from_numpy(np.stack([p[0] for p in pairs]).astype(np.int64))
        mask = torch.from_numpy(np.stack([p[1] for p in pairs]).astype(bool))
        with torch.no_grad():
            losses[name] = masked_loss(model, ids, mask).item()
    return losses


def save(path: Path, model: nn.Module, muon: Muon, adam: torch.optim.AdamW, step: int, used: float) -> None:
    """Write a checkpoint in one move, so that a stop in between leaves the old one."""
    state = {
        "model": model.state_dict(),
        "muon": muon.state_dict(),
        "adam": adam.state_dict(),
        "step": step,
        "used": used,
    }
    torch.save(state, path.with_suffix(".tmp"))
    path.with_suffix(".tmp").replace(path)


def average(params: list[nn.Parameter], *numbers: float) -> list[float]:
    """Replace the gradients by their mean over all processes; returns the means of ``numbers``."""
    flat = torch.cat([p.grad.flatten() for p in params if p.grad is not None] + [torch.tensor(numbers)])
    dist.all_reduce(flat)
    *parts, means = (flat / dist.get_world_size()).split([*(p.numel() for p in params), len(numbers)])
    for p, part in zip(params, parts, strict=True):
        p.grad = part.view_as(p)
    return means.tolist()


def run(rank: int, folder: Path, minutes: float, processes: int) -> None:
    """One process of the training; rank 0 prints and saves."""
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)  # decays underflow, and denormal numbers are very slow on a CPU
    dist.init_process_group("gloo", init_method=f"file://{folder / 'rendezvous'}", rank=rank, world_size=processes)
    torch.manual_seed(0)
    model = LanguageModel(CONFIG)
    muon, adam = optimizers(model)
    params, checkpoint, step, used = list(model.parameters()), folder / "checkpoint.pt", 0, 0.0
    if checkpoint.exists():
        state = torch.load(checkpoint)
        for part, name in ((model, "model"), (muon, "muon"), (adam, "adam")):
            part.load_state_dict(state[name])
        step, used = state["step"], state["used"]
    mixture = Mixture(folder / "tokens", LENGTH + 1, BATCH // processes, PROSE_SHARE, seed=1000 * step + rank)
    if rank == 0:
        print(f"{sum(p.numel() for p in params) / 1e6:.2f} M parameters, from step {step}", flush=True)
    budget, last, saved, smooth, tokens = minutes * 60, time.monotonic(), time.monotonic(), math.nan, 0
    started = used
    while used < budget:
        ids, mask = (torch.from_numpy(a) for a in mixture.next(late=used > LATE_FROM * budget))
        loss = masked_loss(model, ids, mask)
        loss.backward()
        now = time.monotonic()
        used, mean_loss = average(params, used + now - last, loss.item())
        last = now
        torch.nn.utils.clip_grad_norm_(adam.param_groups[0]["params"], 1.0)
        for optimizer, base in ((muon, MUON_RATE), (adam, ADAM_RATE)):
            optimizer.param_groups[0]["lr"] = base * rate(step, used / budget)
            optimizer.step()
        model.zero_grad(set_to_none=True)
        step, tokens = step + 1, tokens + BATCH * LENGTH
        smooth = mean_loss if math.isnan(smooth) else 0.98 * smooth + 0.02 * mean_loss
        if rank == 0 and step % 20 == 0:
            print(
                f"{used / 60:.1f} min, step {step}, loss {smooth:.3f}, {tokens / (used - started):.0f} tokens/s",
                flush=True,
            )
        if rank == 0 and (time.monotonic() - saved > SAVE_SECONDS or used >= budget):
            saved = time.monotonic()
            save(checkpoint, model, muon, adam, step, used)
            losses = held_out_losses(model, folder / "tokens", rows=2 if used < budget else 16)
            print("held out", json.dumps({n: round(x, 3) for n, x in losses.items()}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def train(folder: Path, minutes: float, processes: int = 2) -> None:
    """Train from the token files in ``folder/tokens``, or go on from ``folder/checkpoint.pt``."""
    (folder / "rendezvous").unlink(missing_ok=True)
    torch.multiprocessing.spawn(run, (folder, minutes, processes), nprocs=processes)
