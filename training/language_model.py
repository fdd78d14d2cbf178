"""Trains one small Llama-architecture language model on a token stream, resumably."""

from __future__ import annotations

import csv
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingPlan:
    """Length of the run. An optimiser step reads one batch of `batch_tokens` tokens.

    The window is `short_window` tokens at first and the full context for the last
    `long_fraction` of the steps: attention over short windows is cheaper, and the late long
    windows teach the positions beyond. A batch holds at least one window.
    """

    num_steps: int
    batch_tokens: int = 512
    short_window: int = 512
    long_window: int = 1024
    long_fraction: float = 0.15
    peak_lr: float = 1e-3
    weight_decay: float = 0.1
    warmup_fraction: float = 0.02
    seed: int = 0
    checkpoint_every: int = 200

    def window(self, step: int) -> int:
        """Tokens a sequence at `step`."""
        late = step >= self.num_steps * (1 - self.long_fraction)
        return self.long_window if late else self.short_window

    def rows(self, step: int) -> int:
        """Sequences of the batch at `step`."""
        return max(1, self.batch_tokens // self.window(step))

    def lr(self, step: int) -> float:
        """Learning rate at `step`: warm-up, then linearly to zero."""
        done = (step + 0.5) / self.num_steps
        return self.peak_lr * min(
            done / self.warmup_fraction, (1 - done) / (1 - self.warmup_fraction)
        )


class LossRow(NamedTuple):
    """One line of a run's `loss.csv`; losses in nats a token."""

    step: int
    tokens: int
    loss: float
    held_out_loss: float


def train(
    config: LlamaConfig,
    stream: np.ndarray,
    held_out: np.ndarray,
    plan: TrainingPlan,
    run_dir: Path,
) -> LlamaForCausalLM:
    """Train from scratch, or from the last checkpoint in `run_dir`; returns the float32 model.

    `stream` int64 [tokens] is all documents, each after an end-of-text token. Appends a `LossRow`
    to `run_dir/loss.csv` at every checkpoint.
    """
    torch.manual_seed(plan.seed)
    model = LlamaForCausalLM(config)
    _initialize(model)
    forward = torch.compile(model, dynamic=False)
    optimizer = _optimizer(model, plan)
    step = _resume(run_dir, model, optimizer)
    with _progress() as progress:
        task = progress.add_task(run_dir.name, total=plan.num_steps, completed=step)
        while step < plan.num_steps:
            batch = _batch(stream, plan, step)
            loss = _train_step(forward, optimizer, batch, plan.lr(step))
            step += 1
            progress.update(task, completed=step, description=f"{run_dir.name} loss {loss:.3f}")
            if step % plan.checkpoint_every == 0 or step == plan.num_steps:
                held_out_loss = evaluate(model, held_out[: 16 * plan.long_window])
                tokens = sum(plan.rows(i) * plan.window(i) for i in range(step))
                row = LossRow(step, tokens, loss, held_out_loss)
                _checkpoint(run_dir, model, optimizer, row)
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


@torch.no_grad()
def _initialize(model: LlamaForCausalLM) -> None:
    """Every matrix keeps the variance of what it multiplies.

    transformers' fixed 0.02 suits wide models: here the embeddings would drown in what the first
    layers add, and the first hundreds of steps be lost.
    """
    for name, param in model.named_parameters():
        if param.ndim == 2:
            param.normal_(std=param.shape[1] ** -0.5)
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            param.mul_((2 * model.config.num_hidden_layers) ** -0.5)


def _progress() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total} steps"),
        TimeRemainingColumn(),
    )


def _optimizer(model: nn.Module, plan: TrainingPlan) -> torch.optim.AdamW:
    matrices = [p for p in model.parameters() if p.ndim == 2]
    gains = [p for p in model.parameters() if p.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": plan.weight_decay},
        {"params": gains, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=plan.peak_lr, betas=(0.9, 0.95), fused=True)


def _train_step(
    forward: Callable[..., Any], optimizer: torch.optim.Optimizer, batch: Tensor, lr: float
) -> float:
    logits = forward(input_ids=batch[:, :-1], use_cache=False).logits
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
    loss.backward()
    for group in optimizer.param_groups:
        torch.nn.utils.clip_grad_norm_(group["params"], 1.0)
        group["lr"] = lr
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.item()


def _batch(stream: np.ndarray, plan: TrainingPlan, step: int) -> Tensor:
    """Windows [sequences, window + 1] of one step; an epoch reads each window once, shuffled."""
    window, rows = plan.window(step), plan.rows(step)
    num_windows = (len(stream) - 1) // window
    epoch, first = divmod(step * rows, num_windows)
    order = np.random.default_rng((plan.seed, window, epoch)).permutation(num_windows)
    starts = order[(first + np.arange(rows)) % num_windows, None] * window
    return torch.from_numpy(stream[starts + np.arange(window + 1)])


def _resume(run_dir: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    path = run_dir / "checkpoint.pt"
    if not path.exists():
        return 0
    state = torch.load(path)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return state["step"]


def _checkpoint(
    run_dir: Path, model: nn.Module, optimizer: torch.optim.Optimizer, row: LossRow
) -> None:
    run_dir.mkdir(parents=True, exist_ok=True)
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "step": row.step,
    }
    # Written aside and renamed, so that a kill never leaves half a checkpoint.
    torch.save(state, run_dir / "checkpoint.new")
    (run_dir / "checkpoint.new").rename(run_dir / "checkpoint.pt")
    with (run_dir / "loss.csv").open("a", newline="") as file:
        csv.writer(file).writerow(row)
