"""A pipeline stage: a contiguous span of a model's layers over its own paged KV cache."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ...core.arrays import Int32
from ...core.errors import ConfigError
from ...core.progress import Progress, unseen
from ...core.steps import MultiStepInput, StepInput, StepOutput
from ...kernels.dispatch import Machine
from ...kernels.sampling.sampler import choose_sampler
from ..attention.backend import choose_backend
from ..attention.kernel_attention import KernelBackend, TileOptions
from ..attention.step_attention import PagedKv
from ..device import to_device
from ..layers.model_slice import load_slice, with_pruned_head
from ..load.checkpoint import read_config, resolve_model_path
from ..load.partition import LayerSpan
from ..load.supported import naming, runs_by_layers
from .cpu_path import CpuPath, following_rows, load_kernels_for
from .gpu_path import (
    CudaCapture,
    GraphPath,
    invariant_options,
    invariant_slice,
    uses_fused_modules,
)
from .memory import CudaMemory, fitting_blocks, make_kv
from .options import OutputVocabulary, StageOptions
from .pending_output import PendingOutput, launch_answer, wanted_rows
from .plain_path import ComputePath, HiddenStateTaps, PlainPath
from .self_check import check_kind
from .stage_heads import LastStageParts, MakeHeads, StageHeads
from .warm_up import capture, warm_kernels


def load_stage(
    model_path: str | Path, span: LayerSpan, num_blocks: int | None, block_size: int,
    dtype: str = "float32", *, device: str = "cpu",
    attention: str = "auto", options: StageOptions | None = None,
    make_heads: MakeHeads | None = None, progress: Progress = unseen,
) -> Stage:  # fmt: skip
    """Load the layers of `span` from a Hugging Face folder or hub id, with an empty KV cache.

    Here is decided how the stage computes, once. On a CPU the CPU kernels run the layers that they
    support, with `compile: auto`; the first start waits until they are compiled. On a GPU
    draftline's kernels run them, by CUDA graphs if `options.graphs` says so. Else torch does. Kinds
    of models of which more than the layers is needed run by transformers' own forward, once a small
    copy has shown that it gives the same (`self_check.py`).

    Without `num_blocks` the options limit how far the cache fills a GPU. `attention` is a shorthand
    for options with no other field. `make_heads` is for the last stage. Raises `CheckpointError`
    for a folder that cannot be used, `ConfigError` for a wrong setting.
    """
    options = options or StageOptions(attention=attention)
    _check_taps(options, span)
    config = read_config(model_path)
    if not runs_by_layers(config):
        with naming(resolve_model_path(model_path), config):
            check_kind(config)
    is_invariant = options.batch_invariant == "on" and torch.device(device).type != "cpu"
    if is_invariant:
        options = invariant_options(options, Machine.of(device))
    fused = uses_fused_modules(device, options.attention)
    part = load_slice(
        model_path, span, dtype, device, options.quantization, fused=fused, progress=progress
    )
    if options.output is not None:
        part = with_pruned_head(part, options.output.rows)
    if is_invariant:
        part = invariant_slice(part)
    taps = HiddenStateTaps(options.feature_layers, span, part.config.hidden_size)
    tiles = TileOptions(max_requests=options.max_requests, fixed_lines=is_invariant)

    def plain_path(num_blocks: int) -> PlainPath:
        kv = make_kv(part, num_blocks, block_size, options.kv_cache_dtype)
        num_heads = part.config.num_attention_heads
        wants_torch = part.forward is not None and part.forward.wants_torch
        wanted = "sdpa" if wants_torch else options.attention
        backend, _ = choose_backend(kv, part.dtype, block_size, num_heads, wanted, tiles=tiles)
        return PlainPath(part, kv, block_size, backend, taps)

    def stage_of(path: ComputePath) -> Stage:
        return Stage(path, make_heads, options.output)

    if num_blocks is None:
        num_blocks = fitting_blocks(
            lambda count: stage_of(plain_path(count)), block_size, options, CudaMemory(part.device)
        )
    path = plain_path(num_blocks)
    if load_kernels_for(part, options, progress):
        return stage_of(CpuPath(part, path.kv, block_size, taps))
    is_plain = part.forward is not None or part.device.type != "cuda"
    if is_plain or not isinstance(path.attention, KernelBackend):
        return stage_of(path)
    if options.graphs is None:
        stage = stage_of(path)
        warm_kernels(stage, path.attention.share, stage.vocab_size)
        return stage
    graphs = GraphPath(
        part, path.kv, block_size, path.attention, taps, options.graphs, CudaCapture(part.device)
    )
    stage = stage_of(graphs)
    warm_kernels(stage, path.attention.share, stage.vocab_size)
    capture(graphs)
    return stage


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
        path: ComputePath,
        make_heads: MakeHeads | None = None,
        output: OutputVocabulary | None = None,
    ) -> None:
        """`make_heads` makes the heads that draft at the end of the steps, from the features of
        the taps. `output`: ids that logits are for, whose rows the stage's head has; None: the
        head's own.

        Raises the errors of `make_heads`.
        """
        self.path = path
        self._sampler = choose_sampler(path.part.device)
        self._output = output
        if output is not None:
            self._columns = torch.from_numpy(output.columns).to(path.part.device)
        self._heads = None if make_heads is None else self._made(make_heads)

    def _made(self, make_heads: MakeHeads) -> StageHeads:
        path, part = self.path, self.path.part
        assert part.head is not None
        parts = LastStageParts(
            part.embed, path.normed, path.projected, part.softcap, part.dtype, part.device,
            path.kv.num_slots, path.block_size,
        )  # fmt: skip
        return StageHeads(make_heads(parts))

    @property
    def kv(self) -> PagedKv:
        """Its KV cache, without that of its heads."""
        return self.path.kv

    @property
    def block_size(self) -> int:
        """Slots of a block of the cache."""
        return self.path.block_size

    @property
    def kv_bytes(self) -> int:
        """Bytes of the KV cache, with that of its heads."""
        return self.kv.num_bytes + (0 if self._heads is None else self._heads.kv_bytes)

    @property
    def vocab_size(self) -> int:
        """Ids that its logits are for."""
        return self.path.part.config.vocab_size if self._output is None else self._output.size

    @property
    def decodes_several(self) -> bool:
        """Whether it supports several tokens a request in a step (`StepInput.multi_step`)."""
        return isinstance(self.path, CpuPath) and self.path.decodes_several

    @property
    def is_first(self) -> bool:
        """Whether `run` embeds tokens; it takes no hidden states then."""
        return self.path.part.embed is not None

    def empty_hidden(self, num_rows: int) -> Tensor:
        """Zeros for hidden states that `run` takes: [num_rows, input_size] of its taps."""
        size = (num_rows, self.path.taps.input_size)
        return torch.zeros(size, dtype=self.path.part.dtype, device=self.path.part.device)

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
        return self.path.part.head is not None

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
        states = self._hidden(step, hidden)
        if not self.is_last:
            return states
        path, rows = self.path, wanted_rows(step)

        def features(wanted: Int32) -> Tensor:
            return path.taps.features(states[to_device(wanted, states.device)], path.normed)

        return launch_answer(
            step, rows, self._logits(states, rows), self._sampler,
            features=features, heads=self._heads,
        )  # fmt: skip

    @torch.inference_mode()
    def logits(self, step: StepInput, hidden: Tensor | None, rows: Int32) -> Tensor:
        """Unprocessed float32 logits [len(rows), vocabulary] of these rows; last stage only.

        Runs the step as `run` does.
        """
        return self._logits(self._hidden(step, hidden), rows)

    def _hidden(self, step: StepInput, hidden: Tensor | None) -> Tensor:
        self._move(step.moves)
        return self.path.hidden_states(step, hidden)

    def _move(self, moves: Int32) -> None:
        if not len(moves):
            return
        self.path.move(moves)
        if self._heads is not None:
            self._heads.move(moves)

    def _decode(self, step: StepInput, wanted: MultiStepInput) -> StepOutput:
        assert isinstance(self.path, CpuPath)
        self._move(step.moves)
        rows = following_rows(step, wanted.num_tokens, self.block_size)
        tokens, features = self.path.decode(
            step, wanted, rows, self._sampler, with_features=self._heads is not None
        )
        # Decoding stops at a row that is not finite.
        not_finite = np.flatnonzero(tokens[0] < 0).astype(np.int32)
        if len(not_finite):
            tokens = np.maximum(tokens, np.int32(0))
        output = StepOutput(
            step.step_id,
            tokens[0],
            decoded=np.ascontiguousarray(tokens.T),
            not_finite=not_finite if len(not_finite) else None,
        )
        if self._heads is not None:
            self._heads.decoded(step, rows, output, features)
        return output

    def _logits(self, hidden: Tensor, rows: Int32) -> Tensor:
        """Of these rows, whose own states come before those of the taps."""
        hidden = hidden[:, : self.path.part.config.hidden_size]
        if len(rows) != len(hidden) or (rows != np.arange(len(rows))).any():
            hidden = hidden[to_device(rows, self.path.part.device)]
        logits = self.path.logits(hidden)
        if self._output is None:
            return logits
        mapped = logits.new_full((len(logits), self._output.size), -torch.inf)
        mapped[:, self._columns] = logits
        return mapped
