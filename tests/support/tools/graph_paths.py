"""Graphs for a stage that was loaded without."""

from __future__ import annotations

from draftline.models.attention.kernel_attention import KernelBackend
from draftline.models.stage.gpu_path import Capture, GraphPath
from draftline.models.stage.options import GraphOptions
from draftline.models.stage.plain_path import PlainPath
from draftline.models.stage.stage import Stage


def use_graphs(stage: Stage, options: GraphOptions, capture: Capture) -> GraphPath:
    """The stage's path from now on; the caller captures its graphs."""
    path = stage.path
    assert isinstance(path, PlainPath)
    assert isinstance(path.attention, KernelBackend)
    graphs = GraphPath(
        path.part, path.kv, path.block_size, path.attention, path.taps, options, capture,
        path.states,
    )  # fmt: skip
    stage.path = graphs
    return graphs
