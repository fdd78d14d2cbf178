"""Options of a stage: how it computes, not which layers it holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...core.arrays import Int64


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphOptions:
    """The steps that graphs are captured for.

    max_rows       rows of the largest step; graphs end at `gpu_path.MOST_ROWS`
    max_requests   requests of a step
    max_positions  positions are below this
    seconds        no capture begins after this time; steps then use the next larger graph
    """

    max_rows: int
    max_requests: int
    max_positions: int
    seconds: float = 60.0


@dataclass(frozen=True, slots=True, eq=False)
class OutputVocabulary:
    """Logits of a model in the ids of another vocabulary: minus infinity for ids that it lacks.

    rows     int64 [n]  of the head: the model's own ids
    columns  int64 [n]  the other vocabulary's ids of these rows, all different
    size     ids of the other vocabulary
    """

    rows: Int64
    columns: Int64
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StageOptions:
    """Settings of one stage; names and values as in the engine's settings.

    attention      a backend of `kernels/dispatch.py`, or auto
    kv_cache_dtype, quantization
    gpu_memory_utilization  share of the GPU's memory in use once the cache fills what is left
    max_rows       rows of the largest step
    max_requests   requests of a step; more are slower. Where layers keep states, requests that run
    num_snapshots  of such states
    num_kept_rows  of trees, of whose rows such layers keep what the states may take in later
    graphs         the steps that CUDA graphs are captured for; None: none are
    compile        off; auto: draftline's C++ kernels on a CPU
    compile_cache  folder that keeps them once built
    batch_invariant  on: a row's result must not depend on other rows; auto: if that costs little
    feature_layers  layers whose outputs drafters read, ascending; -1: the embeddings. The last
                    layer's output is normed
    output         ids of another vocabulary that logits are for; None: the model's own
    """

    attention: str = "auto"
    compile: str = "off"
    compile_cache: str = "~/.cache/draftline/compile"
    batch_invariant: str = "auto"
    kv_cache_dtype: str = "auto"
    quantization: str = "none"
    gpu_memory_utilization: float = 0.9
    max_rows: int = 512
    max_requests: int = 256
    num_snapshots: int = 0
    num_kept_rows: int = 0
    graphs: GraphOptions | None = None
    feature_layers: tuple[int, ...] = ()
    output: OutputVocabulary | None = None


def carried_sizes(
    layers: Sequence[int], before: int, num_layers: int, hidden_size: int
) -> list[int]:
    """Columns of hidden states after the layers up to `before`: their own, and those of the taps in
    `layers` so far. The last layer's tap needs no copy."""
    end = min(before, num_layers - 1)
    num_noted = sum(layer < end for layer in layers) if before else 0
    return [hidden_size, num_noted * hidden_size]
