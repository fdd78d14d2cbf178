"""Trains a head or a student on texts that its target generated; can resume when interrupted."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from math import nan
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor, nn

from ...core.errors import ConfigError
from ...core.progress import Progress, unseen
from ...models.heads.dflash import DFlash
from ...models.heads.feature_head import FeatureHead
from ...models.heads.load_head import Head, build_head, has_target_rows, take_target_rows
from ...models.heads.medusa import Medusa
from ...models.load.model_info import read_model_info
from .anchored_blocks import BlockPlan
from .distilled_texts import DistilledText
from .feature_passes import PassPlan, begin_vocabulary, frequent_tokens
from .kept_states import KeptStates
from .learning_rate import LearningRate
from .mask_rows import MaskPlan
from .objectives import Draw, Network, NetworkConfig, objective_of
from .processes import mean_count, mean_value, text_generator
from .student import Divergence, Student, StudentConfig
from .target import HiddenStates, Target, TextBatch

CHECKPOINT, LOG, LOSSES = "checkpoint.pt", "log.csv", "losses.csv"
# Number of held-out texts that evaluate a checkpoint.
HELD_OUT_TEXTS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadPlan:
    """Length and settings of a run.

    texts_per_step   of all devices together
    window           most tokens of a text
    eps              of AdamW
    noise            uniform noise on the target's features, up to half of this for a text of 512
                     tokens
    clip             bound of each gradient
    divergence       of a student from the target
    mixed_precision  in the passes; weights stay float32
    kept_bytes       most of the target's states on disk, in 16 bits, for later epochs
    """

    num_steps: int
    texts_per_step: int = 8
    window: int = 512
    rate: LearningRate
    eps: float = 1e-8
    noise: float = 0.2
    clip: float = 0.5
    passes: PassPlan = field(default_factory=PassPlan)
    blocks: BlockPlan = field(default_factory=BlockPlan)
    masks: MaskPlan = field(default_factory=MaskPlan)
    divergence: Divergence = "forward"
    mixed_precision: Literal["no", "bf16"] = "no"
    checkpoint_every: int = 100
    seed: int = 0
    kept_bytes: int = 0


class HeadRun:
    """A head or a student in training: the network, its target and its optimizer."""

    def __init__(
        self, config: NetworkConfig, target_folder: Path, texts: Sequence[DistilledText],
        plan: HeadPlan, states: HiddenStates | None = None, initial: Head | None = None,
    ) -> None:  # fmt: skip
        """Before the first step. Arguments and errors as of `train_head`."""
        # Set explicitly: otherwise accelerate treats CPU processes as independent.
        is_cpu = not torch.accelerator.is_available()
        self.accelerator = Accelerator(mixed_precision=plan.mixed_precision, cpu=is_cpu)
        num_processes = self.accelerator.num_processes
        if plan.texts_per_step < num_processes:
            raise ConfigError(
                "texts_per_step",
                f"is {plan.texts_per_step}, fewer than the {num_processes} processes of the run, "
                "each of which needs one",
            )
        torch.manual_seed(plan.seed)
        device, num_layers = self.accelerator.device, read_model_info(target_folder).num_layers
        self.plan = plan
        kept = partial(KeptStates, max_bytes=plan.kept_bytes) if plan.kept_bytes else None
        self.target = Target(target_folder, device, config.layers_of(num_layers), states, kept)
        self.network = _begun(config, self.target, texts, device, initial)
        self.optimizer = torch.optim.AdamW(
            self.network.parameters(), lr=plan.rate.peak, betas=(0.9, 0.95), eps=plan.eps
        )
        self._objective = objective_of(
            self.network, plan.passes, plan.blocks, plan.masks, plan.divergence
        )
        self.trained_texts, self._held_out = texts[:-HELD_OUT_TEXTS], texts[-HELD_OUT_TEXTS:]

    def texts(self, step: int) -> list[DistilledText]:
        """This process's texts of a step."""
        return _texts_of(self.trained_texts, self.plan, step, self.accelerator)

    def inputs(self, first: int) -> Iterator[tuple[TextBatch, Draw]]:
        """This process's part of each step from `first` on. The target's states of a step are
        launched before the step before it is handed out, so that other processes compute them
        meanwhile.
        """
        ahead: Callable[[], tuple[TextBatch, Draw]] | None = None
        for step in range(first, self.plan.num_steps):
            following = self.launch(step)
            if ahead is not None:
                yield ahead()
            ahead = following
        if ahead is not None:
            yield ahead()

    def launch(self, step: int) -> Callable[[], tuple[TextBatch, Draw]]:
        """As `inputs`, of one step; the returned function waits for them."""
        chosen = self.texts(step)
        places = _places(self.plan, step, self.accelerator)
        wait = self.target.launch(chosen, self.plan.window)

        def inputs() -> tuple[TextBatch, Draw]:
            with self.accelerator.autocast():
                batch = wait()
            batch, uniform = _drawn(batch, chosen, places, self.plan)
            return batch, Draw(step / self.plan.num_steps, uniform)

        return inputs

    def learn(self, batch: TextBatch, draw: Draw) -> float:
        """Add gradients to the network's parameters; returns the loss of all processes."""
        with self.accelerator.autocast():
            return mean_value(self._objective.learn(self.target, batch, draw))

    def update(self, step: int) -> None:
        """Change the parameters by the mean gradient of all processes, which is cleared."""
        _step(self.network, self.optimizer, self.plan, step, self.accelerator)

    def acceptance(self) -> list[float]:
        """The share of accepted drafts at each depth of a greedy chain on the held-out texts."""
        # As many at once as in a step, whose memory a run has in any case.
        size = self.plan.texts_per_step
        counts = []
        for first in range(0, len(self._held_out), size):
            texts = self._held_out[first : first + size]
            batch = self.target.batch(texts, self.plan.window)
            counts.append(self._objective.acceptance(self.target, batch))
        follows, accepted = np.array(counts).sum(axis=0).T
        return [round(share, 4) for share in (accepted / follows.clip(min=1)).tolist()]


def train_head(
    config: NetworkConfig, target_folder: Path, texts: Sequence[DistilledText], plan: HeadPlan,
    run_dir: Path, *, states: HiddenStates | None = None, initial: Head | None = None,
    progress: Progress = unseen,
) -> Network:  # fmt: skip
    """Train a head or a student from its beginning, or from the last checkpoint in `run_dir`, where
    it also logs.

    states   computes what is read of the target; None: the whole target is loaded here
    initial  a head of this config to begin with

    The last texts are held out. Every checkpoint adds a row to `log.csv`: its step, its loss, and
    the acceptance at each depth of a greedy chain on the held-out texts. It also writes the losses
    of all steps to `losses.csv`. Several processes, of torchrun or `accelerate launch`, share the
    texts of each step, with the same result as one; the first writes. Raises `ConfigError` if the
    checkpoint is of another network, if there are more processes than texts a step, or if processes
    see different folders; and what `states` raises, or a student that is loaded.
    """
    run = HeadRun(config, target_folder, texts, plan, states, initial)
    losses = _resume(run_dir, run.network, run.optimizer)
    if mean_count(len(losses)) != len(losses):
        raise ConfigError(
            "run_dir", f"{run_dir} is not the same to all processes; give a folder that they share"
        )
    is_main = run.accelerator.is_main_process
    shown = progress if is_main else unseen
    with shown(run_dir.name, total=plan.num_steps, unit="steps", done=len(losses)) as work:
        for batch, draw in run.inputs(len(losses)):
            loss = run.learn(batch, draw)
            run.update(len(losses))
            losses.append(loss)
            work.advance(note=f"loss {loss:.3f}")
            is_due = len(losses) % plan.checkpoint_every == 0 or len(losses) == plan.num_steps
            if is_due and is_main:
                _checkpoint(run_dir, run.network, run.optimizer, losses, run.acceptance())
    return run.network


def _places(plan: HeadPlan, step: int, accelerator: Accelerator) -> range:
    """Places of this process's texts of a step, counted over all steps and processes."""
    first = step * plan.texts_per_step
    places = range(first, first + plan.texts_per_step)
    return places[accelerator.process_index :: accelerator.num_processes]


def _texts_of(
    texts: Sequence[DistilledText], plan: HeadPlan, step: int, accelerator: Accelerator
) -> list[DistilledText]:
    """This process's texts of a step; an epoch reads each text once, shuffled."""
    places, count = _places(plan, step, accelerator), len(texts)
    orders = {
        epoch: np.random.default_rng((plan.seed, epoch)).permutation(count)
        for epoch in {place // count for place in places}
    }
    return [texts[orders[place // count][place % count]] for place in places]


def _drawn(
    batch: TextBatch, texts: Sequence[DistilledText], places: Sequence[int], plan: HeadPlan
) -> tuple[TextBatch, Tensor]:
    """Features with noise, which makes the head robust to its own errors (EAGLE); and float32
    [texts, length], random numbers from 0 to 1.

    Both depend only on the plan's seed and each text's place in the run.
    """
    uniform, features = torch.zeros(batch.tokens.shape), batch.features.clone()
    for row, (text, place) in enumerate(zip(texts, places, strict=True)):
        generator, length = text_generator(plan.seed, place), min(len(text.tokens), plan.window)
        uniform[row, :length] = torch.rand(length, generator=generator)
        if plan.noise:
            noise = torch.rand(length, features.shape[-1], generator=generator) - 0.5
            features[row, :length] += noise.to(features.device) * (plan.noise * 512 / length)
    return batch._replace(features=features), uniform.to(features.device)


def _step(
    network: Network, optimizer: torch.optim.Optimizer, plan: HeadPlan, step: int,
    accelerator: Accelerator,
) -> None:  # fmt: skip
    for parameter in network.parameters():
        if parameter.grad is not None and accelerator.num_processes > 1:
            parameter.grad = _mean(accelerator, parameter.grad)
    nn.utils.clip_grad_value_(network.parameters(), plan.clip)
    for group in optimizer.param_groups:
        group["lr"] = plan.rate.at(step, plan.num_steps)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def _mean(accelerator: Accelerator, gradient: Tensor) -> Tensor:
    mean = accelerator.reduce(gradient, reduction="mean")
    assert isinstance(mean, Tensor)
    return mean


def _begun(
    config: NetworkConfig, target: Target, texts: Sequence[DistilledText], device: torch.device,
    initial: Head | None,
) -> Network:  # fmt: skip
    """The network before the first step."""
    if isinstance(config, StudentConfig):
        return Student(config).to(device)
    head = build_head(config).to(device)
    if initial is None:
        _initialize(head, target, texts)
    else:
        head.load_state_dict(initial.state_dict())
        take_target_rows(head, target.project)
    if has_target_rows(head.config):
        assert isinstance(head, FeatureHead)
        head.lm_head.requires_grad_(False)
    return head


@torch.no_grad()
def _initialize(head: Head, target: Target, texts: Sequence[DistilledText]) -> None:
    """Initialise matrices so that they keep the variance of their inputs; the layer starts close to
    the identity.

    DFlash's layers do not start so: its masks carry no state to pass through. Output heads and
    embeddings start as copies of the target's.
    """
    output = target.lm_head.get_parameter("weight")
    if isinstance(head, Medusa):
        head.begin_as(output)
        return
    share = 1.0 if isinstance(head, DFlash) else 0.1
    for name, parameter in head.named_parameters():
        if parameter.ndim == 2:
            parameter.normal_(std=parameter.shape[1] ** -0.5)
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            parameter.mul_(share)
        # A DSpark drafter's Markov head starts at zero.
        if name.endswith(("bias", "markov_w2.weight")):
            parameter.zero_()
    if isinstance(head, FeatureHead):
        _begin_as_target(head, target, texts)


def _begin_as_target(head: FeatureHead, target: Target, texts: Sequence[DistilledText]) -> None:
    """Copy the target's embedding, output head and last norm to a head that has its own."""
    config, output = head.config, target.lm_head.get_parameter("weight")
    if config.has_embedding:
        every = torch.arange(config.vocab_size, device=output.device)
        head.embed_tokens.weight.copy_(target.embed(every))
    if config.draft_vocab_size:
        tokens = frequent_tokens(texts, config.vocab_size, config.draft_vocab_size)
        begin_vocabulary(head, tokens, output)
    if config.draft_vocab_size and config.fusion == "pair":
        # The scale that the output head's rows expect. A norm of ones gives its factors, in any
        # parametrisation.
        head.norm.weight.copy_(target.norm(torch.ones_like(head.norm.weight)))


def _resume(run_dir: Path, network: Network, optimizer: torch.optim.Optimizer) -> list[float]:
    """Load the last checkpoint; returns the losses of the completed steps."""
    path = run_dir / CHECKPOINT
    if not path.exists():
        return []
    state = torch.load(path, weights_only=True)
    if state["config"] != asdict(network.config):
        raise ConfigError(
            "run_dir", f"{run_dir} has checkpoints of another network; give another folder"
        )
    network.load_state_dict(state["head"])
    optimizer.load_state_dict(state["optimizer"])
    # Checkpoints of earlier versions have none.
    return state.get("losses", [nan] * int(state["step"]))


def _checkpoint(
    run_dir: Path, network: Network, optimizer: torch.optim.Optimizer, losses: list[float],
    shares: Sequence[float],
) -> None:  # fmt: skip
    run_dir.mkdir(parents=True, exist_ok=True)
    state = {
        "config": asdict(network.config),
        "head": network.state_dict(),
        "optimizer": optimizer.state_dict(),
        "step": len(losses),
        "losses": losses,
    }
    # Written to a temporary file and renamed, so that a checkpoint is never incomplete.
    torch.save(state, run_dir / f"{CHECKPOINT}.new")
    (run_dir / f"{CHECKPOINT}.new").rename(run_dir / CHECKPOINT)
    with (run_dir / LOG).open("a", newline="") as file:
        csv.writer(file).writerow([len(losses), losses[-1], *shares])
    with (run_dir / LOSSES).open("w", newline="") as file:
        csv.writer(file).writerows(enumerate(losses, start=1))


def read_log(run_dir: Path) -> Iterator[list[float]]:
    """The rows of `log.csv`: step, loss, acceptance by depth."""
    with (run_dir / LOG).open(newline="") as file:
        for row in csv.reader(file):
            yield [float(value) for value in row]


def read_losses(run_dir: Path) -> list[float]:
    """The losses of all steps so far; empty if an earlier version wrote no such file."""
    path = run_dir / LOSSES
    if not path.is_file():
        return []
    with path.open(newline="") as file:
        return [float(loss) for _, loss in csv.reader(file)]
