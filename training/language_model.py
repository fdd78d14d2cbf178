"""Trains one small language model on a token stream, resumably."""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from ..core.progress import Progress, unseen
from .muon import Muon

# Tokens of held-out text that evaluate each checkpoint.
HELD_OUT_SAMPLE = 16 * 1024


class Phase(NamedTuple):
    """From the fraction `start` of the steps on, a batch is `rows` sequences of `window` tokens."""

    start: float
    window: int
    rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingPlan:
    """Length and settings of a run.

    phases     short windows first, whose batches mix more files and need less attention work; long
               ones last, for the further positions; batches grow as gradient noise matters more
    more_from  from this fraction of the steps on, batches come from the larger stream
    matrix_lr  peak learning rate of the layers' matrices, which Muon trains
    peak_lr    that of everything else, which AdamW trains
    compile    False where compiling a step takes longer than it saves
    """

    num_steps: int
    phases: tuple[Phase, ...] = (
        Phase(0.0, 128, 8),
        Phase(0.25, 128, 16),
        Phase(0.7, 512, 4),
        Phase(0.9, 1024, 2),
    )
    more_from: float = 19 / 30
    matrix_lr: float = 0.01
    peak_lr: float = 6e-3
    weight_decay: float = 0.1
    warmup_fraction: float = 0.02
    seed: int = 0
    checkpoint_every: int = 200
    compile: bool = True

    def phase(self, step: int) -> Phase:
        """The phase at `step`."""
        return next(
            phase for phase in reversed(self.phases) if step >= phase.start * self.num_steps
        )

    def tokens_before(self, step: int) -> int:
        """Tokens read by the steps before `step`."""
        phases = (self.phase(earlier) for earlier in range(step))
        return sum(phase.window * phase.rows for phase in phases)

    def lr_factor(self, step: int) -> float:
        """Share of the peak learning rates at `step`: warm-up, then linearly to zero."""
        done = (step + 0.5) / self.num_steps
        return min(done / self.warmup_fraction, (1 - done) / (1 - self.warmup_fraction))


@dataclass(frozen=True, slots=True, eq=False)
class TokenStreams:
    """Documents as int64 [tokens], each after an end-of-text token.

    first     read from the start of the run
    more      read in the later part of the run: the same documents and others
    held_out  never trained on
    """

    first: np.ndarray
    more: np.ndarray
    held_out: np.ndarray


class LossRow(NamedTuple):
    """One line of a run's `loss.csv`; losses in nats a token."""

    step: int
    tokens: int
    loss: float
    held_out_loss: float


def train(
    config: PreTrainedConfig,
    texts: TokenStreams,
    plan: TrainingPlan,
    run_dir: Path,
    progress: Progress = unseen,
) -> PreTrainedModel:
    """Train from scratch, or from the last checkpoint in `run_dir`; returns the float32 model.

    Appends a `LossRow` to `run_dir/loss.csv` at every checkpoint.
    """
    torch.manual_seed(plan.seed)
    model = AutoModelForCausalLM.from_config(config)
    _initialize(model)
    forward = torch.compile(model, dynamic=False) if plan.compile else model
    optimizers = _optimizers(model, plan)
    step = _resume(run_dir, model, optimizers)
    with progress(run_dir.name, total=plan.num_steps, unit="steps", done=step) as work:
        while step < plan.num_steps:
            is_late = step >= plan.more_from * plan.num_steps
            batch = _batch(texts.more if is_late else texts.first, plan, step)
            loss = _train_step(forward, optimizers, batch, plan.lr_factor(step))
            step += 1
            work.advance(note=f"loss {loss:.3f}")
            if step % plan.checkpoint_every == 0 or step == plan.num_steps:
                # The model is untrained at positions that no batch has reached yet.
                window = plan.phase(step - 1).window
                held_out_loss = evaluate(model, texts.held_out[:HELD_OUT_SAMPLE], window)
                row = LossRow(step, plan.tokens_before(step), loss, held_out_loss)
                _checkpoint(run_dir, model, optimizers, row)
    return model


@torch.no_grad()
def evaluate(model: PreTrainedModel, tokens: np.ndarray, window: int = 1024) -> float:
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
def _initialize(model: PreTrainedModel) -> None:
    """Initialise matrices so that they keep the variance of their inputs.

    transformers' fixed 0.02 suits wide models. Here the first layers' outputs would dominate the
    embeddings, and hundreds of steps would be lost.
    """
    for name, param in model.named_parameters():
        if param.ndim == 2:
            param.normal_(std=param.shape[1] ** -0.5)
        if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
            param.mul_((2 * model.config.num_hidden_layers) ** -0.5)
        if name.endswith("dt_bias"):
            # Step sizes of a gated delta rule from 0.001 to 0.1, as published models begin: heads
            # that remember long beside heads that forget soon.
            param.copy_(torch.logspace(-3, -1, len(param)).expm1().log())


def _optimizers(model: nn.Module, plan: TrainingPlan) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices, AdamW for the rest."""
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, param in model.named_parameters():
        is_embedding = "embed_tokens" in name or "lm_head" in name
        (others if param.ndim != 2 or is_embedding else matrices).append(param)
    return [
        Muon(matrices, plan.matrix_lr, plan.weight_decay),
        torch.optim.AdamW(others, lr=plan.peak_lr, betas=(0.9, 0.99), weight_decay=0.0, fused=True),
    ]


def _train_step(
    forward: Callable[..., Any],
    optimizers: Sequence[torch.optim.Optimizer],
    batch: Tensor,
    lr_factor: float,
) -> float:
    logits = forward(input_ids=batch[:, :-1], use_cache=False).logits
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
    loss.backward()
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = optimizer.defaults["lr"] * lr_factor
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return loss.item()


def _batch(stream: np.ndarray, plan: TrainingPlan, step: int) -> Tensor:
    """Windows [sequences, window + 1] of one step; an epoch reads each window once, shuffled."""
    _, window, rows = plan.phase(step)
    num_windows = (len(stream) - 1) // window
    epoch, first = divmod(plan.tokens_before(step) // window, num_windows)
    order = np.random.default_rng((plan.seed, window, epoch)).permutation(num_windows)
    starts = order[(first + np.arange(rows)) % num_windows, None] * window
    return torch.from_numpy(stream[starts + np.arange(window + 1)])


def _resume(run_dir: Path, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> int:
    path = run_dir / "checkpoint.pt"
    if not path.exists():
        return 0
    state = torch.load(path)
    model.load_state_dict(state["model"])
    for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(saved)
    return state["step"]


def _checkpoint(
    run_dir: Path, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], row: LossRow
) -> None:
    run_dir.mkdir(parents=True, exist_ok=True)
    state = {
        "model": model.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in optimizers],
        "step": row.step,
    }
    # Written to a temporary file and renamed, so that a checkpoint is never incomplete.
    torch.save(state, run_dir / "checkpoint.new")
    (run_dir / "checkpoint.new").rename(run_dir / "checkpoint.pt")
    with (run_dir / "loss.csv").open("a", newline="") as file:
        csv.writer(file).writerow(row)
