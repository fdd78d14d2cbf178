"""Trains one small Llama-architecture language model on a token stream, resumably."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from rich.progress import Progress, TextColumn
from rich.progress import BarColumn, TimeRemainingColumn
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from .muon import Muon


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingPlan:
    """Size of the run. One optimiser step reads `batch_tokens` tokens.

    The window is `short_window` tokens at first and the full context for the last
    `long_fraction` of the run: attention over short windows is cheaper, and the late long
    windows teach the positions beyond.
    """

    total_tokens: int
    batch_tokens: int = 3072
    short_window: int = 512
    long_window: int = 1024
    long_fraction: float = 0.15
    matrix_lr: float = 0.015
    vector_lr: float = 3e-3
    warmup_fraction: float = 0.02
    cooldown_fraction: float = 0.5
    seed: int = 0
    checkpoint_every: int = 100

    @property
    def num_steps(self) -> int:
        """Optimiser steps of the whole run."""
        return self.total_tokens // self.batch_tokens

    def window(self, step: int) -> int:
        """Tokens a sequence at `step`."""
        late = step >= self.num_steps * (1 - self.long_fraction)
        return self.long_window if late else self.short_window

    def lr_factor(self, step: int) -> float:
        """Warm-up, constant, then linear cool-down to zero."""
        done = (step + 1) / self.num_steps
        return min(1.0, done / self.warmup_fraction, (1 - done) / self.cooldown_fraction)


def train(
    config: LlamaConfig, documents: list[np.ndarray], held_out: np.ndarray, plan: TrainingPlan,
    run_dir: Path, compile_model: bool = True,
) -> LlamaForCausalLM:  # fmt: skip
    """Train from scratch, or from the last checkpoint in `run_dir`; returns the float32 model.

    `documents` are int token arrays that begin with the end-of-text token. Appends
    `(step, tokens, loss, held_out_loss)` rows to `run_dir/loss.csv`, in nats a token.
    """
    torch.manual_seed(plan.seed)
    model = LlamaForCausalLM(config)
    forward = torch.compile(model, dynamic=False) if compile_model else model
    optimizers = _optimizers(model, plan)
    step = _resume(run_dir, model, optimizers)
    batches = _batches(documents, plan, first_step=step)
    with Progress(TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total} steps"),
                  TimeRemainingColumn()) as progress:  # fmt: skip
        task = progress.add_task(run_dir.name, total=plan.num_steps, completed=step)
        for batch in batches:
            loss = _train_step(forward, optimizers, batch, plan.lr_factor(step))
            step += 1
            progress.update(task, completed=step, description=f"{run_dir.name} loss {loss:.3f}")
            last = step == plan.num_steps
            if step % plan.checkpoint_every == 0 or last:
                row = (step, step * plan.batch_tokens, loss, evaluate(model, held_out[: 8 * 1024]))
                _checkpoint(run_dir, model, optimizers, step, row)
    return model


@torch.no_grad()
def evaluate(model: LlamaForCausalLM, tokens: np.ndarray, window: int = 1024) -> float:
    """Mean negative log-likelihood, nats a token, over consecutive full windows of `tokens`."""
    model.eval()
    count = len(tokens) // window
    losses = []
    for index in range(count):
        ids = torch.from_numpy(tokens[index * window : (index + 1) * window].astype(np.int64))[None]
        losses.append(model(input_ids=ids, labels=ids).loss.item())
    model.train()
    return float(np.mean(losses))


def _optimizers(model: LlamaForCausalLM, plan: TrainingPlan) -> list[torch.optim.Optimizer]:
    inner = [p for p in model.model.layers.parameters() if p.ndim == 2]
    matrices = {id(p) for p in inner}
    others = [p for p in model.parameters() if id(p) not in matrices]
    adam = torch.optim.AdamW(others, lr=plan.vector_lr, betas=(0.9, 0.95), weight_decay=0.0)
    return [Muon(inner, lr=plan.matrix_lr), adam]


def _train_step(
    forward: nn.Module, optimizers: list[torch.optim.Optimizer], batch: Tensor, lr_factor: float
) -> float:
    logits = forward(input_ids=batch[:, :-1], use_cache=False).logits
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
    loss.backward()
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group.setdefault("peak_lr", group["lr"])
            group["lr"] = group["peak_lr"] * lr_factor
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return loss.item()


def _batches(documents: list[np.ndarray], plan: TrainingPlan, first_step: int) -> Iterator[Tensor]:
    """Batches [sequences, window + 1] of steps `first_step` on; the same for the same seed."""
    rng = np.random.default_rng(plan.seed)
    stream = np.empty(0, dtype=np.int64)
    for step in range(plan.num_steps):
        window = plan.window(step)
        rows = plan.batch_tokens // window
        need = rows * window + 1
        while len(stream) < need:
            order = rng.permutation(len(documents))
            stream = np.concatenate([stream, *(documents[i] for i in order)])
        if step >= first_step:
            starts = np.arange(rows)[:, None] * window
            yield torch.from_numpy(stream[starts + np.arange(window + 1)])
        stream = stream[rows * window :]


def _resume(run_dir: Path, model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> int:
    path = run_dir / "checkpoint.pt"
    if not path.exists():
        return 0
    state = torch.load(path)
    model.load_state_dict(state["model"])
    for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(saved)
    return state["step"]


def _checkpoint(
    run_dir: Path, model: nn.Module, optimizers: list[torch.optim.Optimizer], step: int,
    row: tuple[int, int, float, float],
) -> None:  # fmt: skip
    run_dir.mkdir(parents=True, exist_ok=True)
    state = {
        "model": model.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in optimizers],
        "step": step,
    }
    # Written aside and renamed, so that a kill never leaves half a checkpoint.
    torch.save(state, run_dir / "checkpoint.new")
    (run_dir / "checkpoint.new").rename(run_dir / "checkpoint.pt")
    with (run_dir / "loss.csv").open("a", newline="") as file:
        csv.writer(file).writerow(row)
