"""A stage's layers by draftline's CPU kernels, with several tokens of each request in a step.

The kernels (`kernels/cpu/source/step.cpp`) read the step from thread-local state, which `computing`
sets. Without drafts, a step has one token a request, and the engine's overhead may take longer than
the pass. A stage that holds the whole model then feeds each token back into its first layer.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import PretrainedConfig

from ...core.arrays import Bool, Int32, UInt8
from ...core.errors import ConfigError
from ...core.progress import Progress, unseen
from ...core.step.builder import kv_slots
from ...core.steps import MultiStepInput, StepInput, StepTrees, TreeRows
from ...core.tree.tree import unpack, visible_columns
from ...kernels.cpu.build import are_loaded, library_path, load_cpu_ops
from ...kernels.sampling.sampler import Sampler
from ..attention.step_attention import PagedKv
from ..device import to_device
from ..layers.cpu_layers import CpuLayers, cpu_obstacle
from ..layers.fast_modules import Rotation
from ..layers.model_slice import ModelSlice, embedded, is_table
from ..layers.weight_memory import held_bytes
from ..recurrence.state_pool import StatePool
from .options import StageOptions
from .plain_path import HiddenStateTaps, layer_input, no_taps, rotary_table

logger = logging.getLogger(__name__)

NOT_USED = "event=cpu_kernels_not_used reason=%s; torch's kernels run"


def load_kernels_for(
    config: PretrainedConfig, dtype: str, device: torch.device, options: StageOptions,
    progress: Progress = unseen,
) -> bool:  # fmt: skip
    """Load the CPU kernels if a stage of the model is to run by them; the first call compiles them.

    Where they cannot be used, the log says why. Raises `ConfigError` (`batch_invariant`) if that
    setting requires them.
    """
    is_required = options.batch_invariant == "on"
    if device.type != "cpu" or (options.compile == "off" and not is_required):
        return False
    obstacle = cpu_obstacle(config, dtype, device)
    if options.attention != "auto":
        obstacle = f"attention is {options.attention}"
    level = logging.INFO
    if obstacle is None:
        obstacle, level = _load(options, progress), logging.WARNING
    if obstacle is None:
        return True
    if is_required:
        raise ConfigError("batch_invariant", f"on needs the CPU kernels on a CPU: {obstacle}")
    logger.log(level, NOT_USED, obstacle)
    return False


def load_part_kernels(
    device: torch.device, options: StageOptions, progress: Progress = unseen
) -> bool:
    """Load the CPU kernels for what they compute of other decoders: layers that keep states, of
    any dtype, and experts. Where they cannot be built, the log says why.
    """
    if device.type != "cpu" or options.compile == "off":
        return False
    obstacle = _load(options, progress)
    if obstacle is not None:
        logger.warning(NOT_USED, obstacle)
    return obstacle is None


def _load(options: StageOptions, progress: Progress) -> str | None:
    """Why it failed."""
    try:
        _load_from(Path(options.compile_cache).expanduser(), progress)
    except (ConfigError, OSError) as error:
        return str(error)
    return None


def _load_from(folder: Path, progress: Progress) -> None:
    if are_loaded() or library_path(folder).exists():
        load_cpu_ops(folder)
        return
    logger.info("event=cpu_kernels_build folder=%s", folder)
    begin = time.perf_counter()
    load_cpu_ops(folder, progress)
    logger.info("event=cpu_kernels_built seconds=%.1f", time.perf_counter() - begin)


class DecodedTokens(NamedTuple):
    """What `CpuPath.decode` found.

    tokens  int32 [passes, rows]; -1 in the only pass after a row that is not finite
    states  float32 [passes, rows, output_size of the taps]; None: not wanted
    """

    tokens: Int32
    states: Tensor | None


class CpuPath:
    """Runs all layers in one call. The kernels must be loaded; they take over the weights."""

    def __init__(
        self, part: ModelSlice, kv: PagedKv, block_size: int, taps: HiddenStateTaps | None = None
    ) -> None:
        """Takes as long as copying the weights. The modules of `part` cannot run afterwards."""
        self.part, self.kv, self.block_size = part, kv, block_size
        # Its kernels know no layers that keep any.
        self.states: StatePool | None = None
        self.taps = taps or no_taps(part)
        self._rotary = rotary_table(part)
        self._layers = CpuLayers(part)
        self._embed = part.embed
        kept = " ".join(f"{kind}:{count}" for kind, count in self._layers.num_weights.items())
        logger.info("event=cpu_kernels_used layers=%d weights=%r", len(part.layers), kept)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights, as the kernels keep them."""
        return held_bytes(self._embed, self._layers)

    def move(self, moves: Int32) -> None:
        """Copy slots of the cache, int32 [m, 2] (from, to). All are read first."""
        self.kv.move(to_device(moves, self.part.device))

    def hidden_states(self, step: StepInput, hidden: Tensor | None) -> Tensor:
        """Run a step's layers: [rows, input_size] to [rows, output_size] of the taps."""
        states = layer_input(self.part, step, hidden)
        if not len(states):
            return states.new_empty(0, self.taps.output_size)
        tables = self._rotary.tables_of(int(step.positions.max()))
        with computing(step, self.kv, self.block_size):
            return self.taps.run_at_once(
                states, lambda states, stops: self._layers(states, tables, stops)
            )

    def normed(self, hidden: Tensor) -> Tensor:
        """The last layer's states [rows, hidden_size] as the output head reads them."""
        return self._layers.normed(hidden)

    def projected(self, normed: Tensor) -> Tensor:
        """float32 [rows, vocabulary] of normed states, by the output head."""
        return self._layers.project(normed.contiguous())

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [rows, vocabulary] of the last layer's states [rows, hidden_size]."""
        return self._layers.logits(hidden, self.part.softcap)

    @property
    def decodes_several(self) -> bool:
        """Whether the stage holds the whole model, as `decode` needs."""
        return self.part.embed is not None and self.part.head is not None

    def decode(
        self, step: StepInput, wanted: MultiStepInput, rows: tuple[Int32, Int32],
        sampler: Sampler, *, with_states: bool,
    ) -> DecodedTokens:  # fmt: skip
        """The tokens of all passes of `rows`. Fewer if all answers end, or the next pass has logits
        that are not finite.

        Each token equals that of a single step, as the noise uses the positions of the rows. On
        return, the cache has the KV of all rows but the last.

        rows    `following_rows` of the step
        """
        assert self._embed is not None
        slots, positions = rows
        tables, recorded = self._rotary.tables_of(int(positions.max()) + 1), None
        if with_states:
            recorded = torch.empty(*slots.shape, self.taps.output_size)
        with computing(step, self.kv, self.block_size):
            if is_table(self._embed) and step.sampling.is_unfiltered:
                tokens = self._layers.decode(
                    step.token_ids, slots, positions, self._embed, self.part.softcap,
                    step.sampling, wanted.end_ids, tables, self.taps.stops, recorded,
                )  # fmt: skip
            else:
                tokens = self._pass_by_pass(step, wanted.end_ids, rows, tables, recorded, sampler)
        return DecodedTokens(tokens, None if recorded is None else recorded[: len(tokens)])

    def _pass_by_pass(
        self,
        step: StepInput,
        end_ids: Int32,
        rows: tuple[Int32, Int32],
        tables: Mapping[str | None, Rotation],
        recorded: Tensor | None,
        sampler: Sampler,
    ) -> Int32:
        """int32 [passes, rows], for models with another embedding or sampling than the fused
        kernel's."""
        assert self._embed is not None
        slots, positions = rows
        decoded = np.empty(slots.shape, dtype=np.int32)
        has_ended = np.zeros(slots.shape[1], dtype=np.bool_)
        tokens, sampling = step.token_ids, step.sampling
        index = 0
        for index in range(len(slots)):
            if index:
                advance(slots[index], positions[index])
                sampling = replace(sampling, position=step.sampling.position + index)
            states = embedded(self._embed, to_device(tokens, self.part.device))
            if recorded is None:
                hidden = self._layers(states, tables)
            else:
                recorded[index] = self._layers(states, tables, self.taps.stops)
                hidden = recorded[index, :, : self.part.config.hidden_size]
            logits = self.logits(hidden)
            tokens = decoded[index] = sampler.choose(logits, sampling).numpy()
            if (tokens < 0).any():
                return decoded[: max(index, 1)]
            has_ended |= (tokens[:, None] == end_ids).any(axis=1)
            if has_ended.all():
                break
        return decoded[: index + 1]


def following_rows(step: StepInput, num_passes: int, block_size: int) -> tuple[Int32, Int32]:
    """KV slots and positions of the rows of each pass, int32 [num_passes, rows] each."""
    positions = step.positions + np.arange(num_passes, dtype=np.int32)[:, None]
    owners = np.tile(np.arange(len(step.positions), dtype=np.int32), len(positions))
    slots = kv_slots(step.block_tables, owners, positions.ravel(), block_size)
    return slots.reshape(positions.shape), positions


NONE = np.empty(0, dtype=np.int32)


@contextmanager
def computing(step: StepInput, kv: PagedKv, block_size: int) -> Iterator[None]:
    """A context in which this thread's CPU kernels compute `step`."""
    columns = columns_of(step)
    torch.ops.draftline.begin_step(
        kv.data,
        block_size,
        _tensor(step.slots),
        _tensor(step.positions),
        _tensor(step.request_starts),
        _tensor(step.context_lens),
        _tensor(step.block_tables),
        _tensor(columns.starts),
        _tensor(columns.slots),
        _tensor(columns.positions),
        torch.from_numpy(columns.visible),
    )
    try:
        yield
    finally:
        torch.ops.draftline.end_step()


def advance(slots: Int32, positions: Int32) -> None:
    """Within `computing`, advance a step with one row a request to the next rows, int32 [requests].

    The previous rows become context, and their KV is written.
    """
    torch.ops.draftline.advance_step(_tensor(slots), _tensor(positions))


class VisibleColumns(NamedTuple):
    """The columns that rows of a step's trees see besides the context.

    starts            int32 [requests + 1] start of each request's columns
    slots, positions  int32 [columns]
    visible           uint8  of each request rows * columns: whether the row sees the column
    """

    starts: Int32
    slots: Int32
    positions: Int32
    visible: UInt8


def columns_of(step: StepInput) -> VisibleColumns:
    """The columns that rows of the step's trees see; none for prompt chunks."""
    return _own_columns(step.trees) if isinstance(step.trees, StepTrees) else _columns(step)


def _own_columns(trees: StepTrees) -> VisibleColumns:
    """For columns that are the rows of the step's first requests."""
    starts = trees.starts.copy()
    num_columns = starts[trees.num_trees]
    starts[trees.num_trees :] = num_columns
    visible = visible_columns(trees.ancestors, np.diff(starts[: trees.num_trees + 1]))
    return VisibleColumns(starts, trees.slots[:num_columns], trees.positions[:num_columns], visible)


def _columns(step: StepInput) -> VisibleColumns:
    trees = [tree for tree in step.trees if tree is not None]
    lens = [0 if tree is None else len(tree.slots) for tree in step.trees]
    return VisibleColumns(
        np.cumsum([0, *lens], dtype=np.int32),
        np.concatenate([NONE, *(tree.slots for tree in trees)]),
        np.concatenate([NONE, *(tree.positions for tree in trees)]),
        np.concatenate([NONE, *map(_visible, trees)], dtype=np.uint8, casting="unsafe"),
    )


def _visible(tree: TreeRows) -> Bool:
    return unpack(tree.ancestors, len(tree.slots)).ravel()


def _tensor(array: np.ndarray) -> Tensor:
    # torch warns about read-only arrays, such as those received in messages.
    if array.dtype != np.int32 or not array.flags.carray:
        array = np.array(array, dtype=np.int32)
    return torch.from_numpy(array)
