"""A whole model over a paged KV cache, run by transformers' own modules, request after request.

For kinds of models that `models/stage/` does not support. A pass of a request copies the visible
keys and values from the cache's slots into a cache of transformers, and writes those of its rows
back. Slower than a `Stage`, and correct for any model that only caches keys and values.
"""

from __future__ import annotations

from inspect import signature
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache

from ...core.arrays import Int32
from ...core.errors import CheckpointError
from ...core.steps import StepInput, StepOutput, TreeRows
from ...core.tree.tree_loops import unpack
from ..attention.step_attention import PagedKv
from ..layers.int8_linear import NONE
from ..sampling import choose_sampler
from ..stage.output_vocabulary import LogitsMap, OutputVocabulary
from ..stage.pending_output import launch_answer, wanted_rows
from .hosted_model import load_hosted_model
from .self_check import check_pieces, check_trees


def load_hosted_stage(
    model: str | Path, num_blocks: int, block_size: int, *,
    dtype: str = "float32", device: str = "cpu", quantization: str = NONE,
    output: OutputVocabulary | None = None, with_trees: bool = False,
) -> HostedStage:  # fmt: skip
    """Load a Hugging Face folder or hub id of any causal language model.

    quantization  none; int8: weights of linear layers are rounded
    with_trees    whether steps will have trees

    Raises `CheckpointError` for a folder that cannot be used, and for a model whose results over
    pieces of a text, or over trees, differ from those over the text; `ConfigError` for settings.
    """
    whole = load_hosted_model(model, dtype, device, quantization)
    stage = HostedStage(whole, num_blocks, block_size, output)
    try:
        check_pieces(stage, block_size)
        if with_trees:
            check_trees(stage, block_size)
    finally:
        stage.reset()
    return stage


class HostedStage:
    """Runs steps as a `Stage` of the whole model does; one thread calls it at a time."""

    def __init__(
        self, whole: Any, num_blocks: int, block_size: int, output: OutputVocabulary | None = None
    ) -> None:
        self._whole = whole
        self._device: torch.device = whole.device
        self._sampler = choose_sampler(self._device)
        self._output = None if output is None else LogitsMap(output, self._device)
        self._rows = None if output is None else torch.from_numpy(output.rows).to(self._device)
        num_layers, num_heads, head_dim, dtype = _cache_sizes(whole)
        self._kv = PagedKv(
            num_layers, num_blocks * block_size, num_heads, head_dim,
            dtype=dtype, device=str(self._device),
        )  # fmt: skip
        self._block_size = block_size
        # Other models derive positions from the cache length, which is wrong for trees.
        self._takes_positions = "position_ids" in signature(whole.forward).parameters

    @property
    def model_type(self) -> str:
        """As the config names it."""
        return self._whole.config.model_type

    @property
    def vocab_size(self) -> int:
        """Ids that it reads."""
        return self._whole.config.vocab_size

    def reset(self) -> None:
        """Clear the cache."""
        self._kv.data.zero_()

    @torch.inference_mode()
    def run(self, step: StepInput, hidden: None = None) -> StepOutput:
        """The answer to a step; see `Stage.run`."""
        assert hidden is None
        assert not len(step.moves), "drafters move nothing"
        rows = wanted_rows(step)
        logits = self._logits(step, rows)
        return launch_answer(step, rows, logits, self._sampler)()

    @torch.inference_mode()
    def all_logits(self, step: StepInput) -> Tensor:
        """Logits float32 [rows, vocabulary] of all rows of a step, in the model's own ids."""
        rows = np.arange(len(step.token_ids), dtype=np.int32)
        return torch.cat([own for own in self._passes(step, rows) if len(own)])

    def _logits(self, step: StepInput, rows: Int32) -> Tensor:
        parts = [own for own in self._passes(step, rows) if len(own)]
        logits = torch.cat(parts) if parts else torch.empty(0, 1, device=self._device)
        if self._output is None or self._rows is None:
            return logits
        return self._output(logits[:, self._rows])

    def _passes(self, step: StepInput, rows: Int32) -> list[Tensor]:
        """Logits of `rows`, request after request."""
        starts = step.request_starts.tolist()
        found = []
        for index, (first, last) in enumerate(pairwise(starts)):
            own = rows[(rows >= first) & (rows < last)] - first
            found.append(self._pass(step, index, slice(first, last), own))
        return found

    def _pass(self, step: StepInput, index: int, own: slice, rows: Int32) -> Tensor:
        """Feed one request's rows; logits of `rows` of them."""
        tree = step.trees[index]
        seen = self._seen_slots(step, index, tree, own)
        cache = self._filled(seen)
        given: dict[str, Any] = {"input_ids": self._put(step.token_ids[own])[None]}
        if self._takes_positions:
            given["position_ids"] = self._put(step.positions[own])[None]
        if tree is not None:
            given["attention_mask"] = self._mask(tree, len(seen), own.stop - own.start)
        out = self._whole(**given, **_cached_in(self._whole, cache))
        self._write(cache, self._put(step.slots[own]))
        return out.logits[0, self._put(rows)].float()

    def _seen_slots(self, step: StepInput, index: int, tree: TreeRows | None, own: slice) -> Int32:
        """Slots of the columns before a request's rows: its context, then earlier nodes."""
        places = np.arange(step.context_lens[index])
        blocks = step.block_tables[index]
        context = blocks[places // self._block_size] * self._block_size + places % self._block_size
        if tree is None:
            return context
        num_before = len(tree.slots) - (own.stop - own.start)
        return np.concatenate([context, tree.slots[:num_before]])

    def _filled(self, slots: Int32) -> DynamicCache:
        cache = DynamicCache()
        places = self._put(slots)
        for layer in range(len(self._kv.layers)):
            pairs = self._kv.gather(layer, places).permute(1, 2, 0, 3)
            cache.update(pairs[0][None], pairs[1][None], layer)
        return cache

    def _write(self, cache: Any, slots: Tensor) -> None:
        for layer, kept in enumerate(cache.layers):
            pair = torch.stack([kept.keys[0, :, -len(slots) :], kept.values[0, :, -len(slots) :]])
            self._kv.write(layer, slots, pair.permute(2, 0, 1, 3).to(self._kv.data.dtype))

    def _mask(self, tree: TreeRows, num_seen: int, num_rows: int) -> Tensor:
        """What is added to the scores, [1, 1, rows, seen + rows]: all of the context is seen."""
        own = unpack(tree.ancestors, len(tree.slots))
        context = np.ones((num_rows, num_seen + num_rows - len(tree.slots)), dtype=np.bool_)
        sees = torch.from_numpy(np.concatenate([context, own], axis=1)).to(self._device)
        dtype = self._kv.data.dtype
        lowest = torch.finfo(dtype).min
        return torch.zeros(sees.shape, dtype=dtype, device=self._device).masked_fill(~sees, lowest)[
            None, None
        ]

    def _put(self, values: Int32) -> Tensor:
        return torch.from_numpy(np.asarray(values, dtype=np.int64)).to(self._device)


def _cached_in(whole: Any, cache: DynamicCache) -> dict[str, Any]:
    """The arguments that pass a cache to a model, under the model's name for it."""
    name = "cache" if "cache" in signature(whole.forward).parameters else "past_key_values"
    return {name: cache, "use_cache": True}


@torch.inference_mode()
def _cache_sizes(whole: Any) -> tuple[int, int, int, torch.dtype]:
    """Layers, heads and width of the keys that a model caches, and their dtype.

    Raises `CheckpointError` for a model that caches anything else.
    """
    tokens = torch.zeros(1, 2, dtype=torch.int64, device=whole.device)
    kind = whole.config.model_type
    try:
        cache = DynamicCache()
        whole(input_ids=tokens, **_cached_in(whole, cache))
        layers: Any = cache.layers
        shapes = {(*layer.keys.shape, *layer.values.shape) for layer in layers}
        [(_, num_heads, _, head_dim, *values)] = shapes
    except (AttributeError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"model_type {kind!r} keeps other states than keys and values; it cannot draft"
        ) from error
    if tuple(values) != (1, num_heads, 2, head_dim):
        raise CheckpointError(f"model_type {kind!r}: keys and values differ in shape")
    return len(layers), num_heads, head_dim, layers[0].keys.dtype
