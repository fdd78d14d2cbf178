"""A pipeline stage: a contiguous span of a model's layers over its own paged KV cache."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ...core.arrays import Int32
from ...core.errors import ConfigError
from ...core.progress import Progress, unseen
from ...core.steps import MultiStepInput, StepInput, StepOutput
from ...kernels.dispatch import Machine
from ..attention.backend import AttentionBackend, SdpaBackend, choose_backend
from ..attention.kernel_attention import KernelBackend, TileOptions
from ..attention.operator import attending
from ..attention.step_attention import PagedKv
from ..device import to_device
from ..layers.fast_modules import RotaryTable
from ..layers.model_slice import ModelSlice, embedded, load_slice, run_layers
from ..load.partition import LayerSpan
from ..sampling import choose_sampler, uses_fused_modules
from .feature_taps import FeatureTaps
from .graph_runner import Capture, CudaCapture, GraphRunner
from .invariance import invariant_options, invariant_slice
from .memory import CudaMemory, fitting_blocks, make_kv
from .multi_step import MultiStepDecoder, following_rows
from .operator_switch import OperatorSwitch, begin_switch
from .options import GraphOptions, StageOptions
from .output_vocabulary import LogitsMap, OutputVocabulary, with_pruned_head
from .pending_output import PendingOutput, launch_answer, wanted_rows
from .stage_heads import LastStageParts, MakeHeads, StageHeads
from .warm_up import capture, warm_kernels

if TYPE_CHECKING:
    from ..layers.own_layers import OwnLayers


def load_stage(
    model_path: str | Path, span: LayerSpan, num_blocks: int | None, block_size: int,
    dtype: str = "float32", *, device: str = "cpu",
    attention: str = "auto", options: StageOptions | None = None,
    make_heads: MakeHeads | None = None, progress: Progress = unseen,
) -> Stage:  # fmt: skip
    """Load the layers of `span` from a Hugging Face folder or hub id, with an empty KV cache.

    Without `num_blocks` the options limit how far the cache fills a GPU. `attention` is a shorthand
    for options with no other field. With `compile: auto`, the CPU kernels run supported layers, as
    soon as they are built. `make_heads` is for the last stage. Raises `CheckpointError` for a
    folder that cannot be used, `ConfigError` for a wrong setting.
    """
    options = options or StageOptions(attention=attention)
    _check_taps(options, span)
    is_invariant = options.batch_invariant == "on" and torch.device(device).type != "cpu"
    if is_invariant:
        options = invariant_options(options, Machine.of(device))
    fused = uses_fused_modules(device, options.attention)
    part = load_slice(
        model_path, span, dtype, device, options.quantization, fused=fused, progress=progress
    )
    part = with_pruned_head(part, options.output)
    taps = FeatureTaps(options.feature_layers, span, part.config.hidden_size)
    if is_invariant:
        part = invariant_slice(part)
    tiles = TileOptions(max_requests=options.max_requests, fixed_lines=is_invariant)

    def stage_of(num_blocks: int) -> Stage:
        kv = make_kv(part, num_blocks, block_size, options.kv_cache_dtype)
        num_heads = part.config.num_attention_heads
        backend, _ = choose_backend(
            kv, part.dtype, block_size, num_heads, options.attention, tiles=tiles
        )
        stage = Stage(part, kv, block_size, attention=backend)
        stage.taps = taps
        stage.use_heads(make_heads)
        stage.use_output(options.output)
        return stage

    if num_blocks is None:
        num_blocks = fitting_blocks(stage_of, block_size, options, CudaMemory(part.device))
    stage = stage_of(num_blocks)
    switch = begin_switch(part, options)
    if switch is not None:
        stage.use_own_operators(switch)
    if part.device.type == "cuda":
        _prepare_gpu(stage, options.graphs, part.device)
    return stage


def _prepare_gpu(stage: Stage, graphs: GraphOptions | None, device: torch.device) -> None:
    """Compile all kernels that serving may use, and capture graphs if the stage supports them."""
    stage.compile_kernels()
    if graphs is not None and stage.can_be_captured:
        capture(stage.use_graphs(graphs, CudaCapture(device)))


def _check_taps(options: StageOptions, span: LayerSpan) -> None:
    layers = options.feature_layers
    if any(not -1 <= layer < span.num_layers for layer in layers):
        raise ConfigError(
            "feature_layers",
            f"{list(layers)} are not layers of a model that has {span.num_layers}",
        )


class Stage:
    """Runs steps, in the order of the calls, on one span of layers. Owns the span's KV cache."""

    def __init__(
        self,
        part: ModelSlice,
        kv: PagedKv,
        block_size: int,
        attention: AttentionBackend | None = None,
    ) -> None:
        """Without `attention`, torch's own is used."""
        self.kv = kv
        self.block_size = block_size
        self._part = part
        self._attention = attention or SdpaBackend(kv, block_size)
        self._sampler = choose_sampler(part.device)
        self._softcap = part.softcap
        like = torch.empty(0, dtype=part.dtype, device=part.device)
        layer_types = [kind for kind in part.layer_types if kind is not None]
        self._rotary = RotaryTable(part.rotary, layer_types, like, flat=part.fast)
        self._graphs: GraphRunner | None = None
        self._own: OwnLayers | None = None
        self._multi_step: MultiStepDecoder | None = None
        self._switch: OperatorSwitch | None = None
        self._heads: StageHeads | None = None
        self._logits_map: LogitsMap | None = None
        num_layers = len(part.layers)
        whole = LayerSpan(0, num_layers, num_layers)
        # Replaced before the first step and before graphs are captured.
        self.taps = FeatureTaps((), whole, part.config.hidden_size)

    def use_heads(self, make: MakeHeads | None) -> None:
        """Use heads that draft at the end of the steps, from the features of its taps; None: no
        heads.

        Raises the errors of `make`.
        """
        part = self._part
        if make is not None:
            assert part.head is not None
            parts = LastStageParts(
                part.embed, self._normed, self._projected, self._softcap, part.dtype,
                part.device, self.kv.num_slots, self.block_size,
            )  # fmt: skip
            self._heads = StageHeads(make(parts))

    def use_output(self, output: OutputVocabulary | None) -> None:
        """Return logits for the ids of `output`, whose rows its head has; None: for the head's
        ids."""
        self._logits_map = None if output is None else LogitsMap(output, self._part.device)

    @property
    def kv_bytes(self) -> int:
        """Bytes of the KV cache, with that of its heads."""
        return self.kv.num_bytes + (0 if self._heads is None else self._heads.kv_bytes)

    def use_own_operators(self, switch: OperatorSwitch) -> None:
        """Run the layers by CPU kernels as soon as `switch` has them ready."""
        self._switch = switch
        self._switch_if_ready()

    @property
    def runs_own_operators(self) -> bool:
        """Whether the CPU kernels run the layers."""
        return self._own is not None

    @property
    def decodes_several(self) -> bool:
        """Whether it supports multi-step decoding (`StepInput.multi_step`)."""
        return self._multi_step is not None

    def use_graphs(self, options: GraphOptions, capture: Capture) -> GraphRunner:
        """The runner of steps that fit, from now on; the caller captures its graphs."""
        assert isinstance(self._attention, KernelBackend)
        self._graphs = GraphRunner(
            self._part, self._rotary, self._attention, self.taps, options, capture
        )
        return self._graphs

    def compile_kernels(self) -> None:
        """Compile every kernel that serving may use; does nothing without draftline's kernels.

        The KV cache must be empty, and is empty afterwards.
        """
        if isinstance(self._attention, KernelBackend):
            logits_map = self._logits_map
            size = self._part.config.vocab_size if logits_map is None else logits_map.size
            warm_kernels(self, self._attention.share, size)

    @property
    def can_be_captured(self) -> bool:
        """Whether its attention supports CUDA graphs, as draftline's kernels do."""
        return isinstance(self._attention, KernelBackend)

    @property
    def is_first(self) -> bool:
        """Whether `run` embeds tokens; it takes no hidden states then."""
        return self._part.embed is not None

    def empty_hidden(self, num_rows: int) -> Tensor:
        """Zeros for hidden states that `run` takes: [num_rows, input_size] of its taps."""
        size = (num_rows, self.taps.input_size)
        return torch.zeros(size, dtype=self._part.dtype, device=self._part.device)

    @property
    def num_blocks(self) -> int:
        """KV blocks of the cache."""
        return self.kv.num_slots // self.block_size

    def reset(self) -> None:
        """Clear the KV cache."""
        self.kv.data.zero_()
        if self._heads is not None:
            self._heads.reset()

    @property
    def is_last(self) -> bool:
        """Whether `run` answers with a `StepOutput`."""
        return self._part.head is not None

    @torch.inference_mode()
    def run(self, step: StepInput, hidden: Tensor | None = None) -> Tensor | StepOutput:
        """Hidden states [rows, output_size] for the next stage, or the last stage's `StepOutput`.

        `hidden` is what the stage before returned; None on the first. Moves KV first, then writes
        the KV of the step's rows.
        """
        result = self.launch(step, hidden)
        return result if isinstance(result, Tensor) else result()

    @torch.inference_mode()
    def launch(self, step: StepInput, hidden: Tensor | None = None) -> Tensor | PendingOutput:
        """The hidden states of `run`; on the last stage a function that waits for its result.

        On a GPU the host may launch the next step before it waits; the function may be called by
        another thread.
        """
        if step.multi_step is not None:
            output = self._decode(step, step.multi_step)
            return lambda: output
        hidden = self._hidden(step, hidden)
        if not self.is_last:
            return hidden
        rows, states = wanted_rows(step), hidden

        def features(wanted: Int32) -> Tensor:
            return self.taps.features(states[to_device(wanted, states.device)], self._normed)

        logits = self._logits(self._own_states(hidden), rows)
        return launch_answer(
            step, rows, logits, self._sampler, features=features, heads=self._heads
        )

    @torch.inference_mode()
    def logits(self, step: StepInput, hidden: Tensor | None, rows: Int32) -> Tensor:
        """Unprocessed float32 logits [len(rows), vocabulary] of these rows; last stage only.

        Runs the step as `run` does.
        """
        return self._logits(self._own_states(self._hidden(step, hidden)), rows)

    def _own_states(self, hidden: Tensor) -> Tensor:
        return hidden[:, : self._part.config.hidden_size]

    def _normed(self, hidden: Tensor) -> Tensor:
        if self._own is not None:
            return self._own.normed(hidden)
        assert self._part.norm is not None
        return self._part.norm(hidden)

    def _projected(self, normed: Tensor) -> Tensor:
        if self._own is not None:
            return self._own.project(normed.contiguous())
        assert self._part.head is not None
        return self._part.head(normed)

    def _switch_if_ready(self) -> None:
        if self._switch is not None and self._switch.is_ready:
            self._own = self._switch.make(self._part)
            self._switch = None
            embed = self._part.embed
            if self._own is not None and embed is not None and self.is_last:
                self._multi_step = MultiStepDecoder(self._own, embed, self._softcap, self._sampler)

    def _hidden(self, step: StepInput, hidden: Tensor | None) -> Tensor:
        # Only between two steps, so that all layers of a step use the same kernels.
        self._switch_if_ready()
        part = self._part
        if len(step.moves):
            self._move(step.moves)
        if self._graphs is not None:
            replayed = self._graphs.run(step, hidden)
            if replayed is not None:
                # A copy, since the next stage may still read it when this one runs the next step.
                return replayed if self.is_last else replayed.clone()
        if part.embed is not None:
            hidden = embedded(part.embed, to_device(step.token_ids, part.device))
        assert hidden is not None
        assert len(hidden) == len(step.token_ids)
        if not len(hidden):
            return hidden.new_empty(0, self.taps.output_size)
        if self._own is not None:
            own, tables = self._own, self._rotary.tables_of(int(step.positions.max()))
            with attending(step, self.kv, self.block_size):
                return self.taps.run(hidden, lambda states, span: own(states, tables, span))
        positions = to_device(step.positions, part.device)
        rotations = self._rotary.rotations(positions, int(step.positions.max()))
        states = hidden.to(part.device, non_blocking=True)
        attention = self._attention.begin(step)
        return self.taps.run(
            states,
            lambda states, span: run_layers(
                part, states, positions, rotations, attention, span=span
            ),
        )

    def _move(self, moves: Int32) -> None:
        self._attention.move(to_device(moves, self._part.device))
        if self._heads is not None:
            self._heads.move(moves)

    def _decode(self, step: StepInput, wanted: MultiStepInput) -> StepOutput:
        assert self._multi_step is not None
        if len(step.moves):
            self._attention.move(to_device(step.moves, self._part.device))
        tables = self._rotary.tables_of(int(step.positions.max()) + wanted.num_tokens)
        rows, said = following_rows(step, wanted.num_tokens, self.block_size), None
        if self._heads is not None and not self.taps.needs_layers:
            shape = wanted.num_tokens, len(step.token_ids), self._part.config.hidden_size
            said = torch.empty(shape)
        with attending(step, self.kv, self.block_size):
            output = self._multi_step.run(step, wanted.end_ids, rows, tables, said)
        if self._heads is not None:
            features = None
            if said is not None:
                states = self.taps.features(said.flatten(0, 1), self._normed)
                features = states.unflatten(0, said.shape[:2])
            self._heads.decoded(step, rows, output, features)
        return output

    def _logits(self, hidden: Tensor, rows: Int32) -> Tensor:
        if len(rows) != len(hidden) or (rows != np.arange(len(rows))).any():
            hidden = hidden[to_device(rows, self._part.device)]
        logits = self._head_logits(hidden)
        return logits if self._logits_map is None else self._logits_map(logits)

    def _head_logits(self, hidden: Tensor) -> Tensor:
        part = self._part
        if self._own is not None:
            return self._own.logits(hidden, self._softcap)
        assert part.norm is not None
        assert part.head is not None
        logits = part.head(part.norm(hidden)).float()
        if self._softcap is not None:
            logits = torch.tanh(logits / self._softcap) * self._softcap
        return logits
