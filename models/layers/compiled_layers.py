"""The layers of a stage as one graph of torch.compile, dynamic in the number of rows.

Attention is an operator of its own (`models/attention/operator.py`), so that the graph sees neither
the length of a context nor the shape of a tree: one graph serves all steps.
"""

from __future__ import annotations

import os
import sysconfig
import types
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.fx.experimental._config as shape_config
from torch import Tensor, nn
from torch._dynamo import mark_dynamic
from torch._dynamo.exc import TorchDynamoException

from ...core.errors import ConfigError
from ...kernels.cpu.build import FIX, load_cpu_ops
from .compiled_modules import PackedLinear, make_compilable
from .fast_modules import FastLinear, Rotation
from .model_slice import ModelSlice

# torch's own variable of where compiled graphs are kept.
GRAPH_CACHE = "TORCHINDUCTOR_CACHE_DIR"
# Runs layers by spans, given hidden states and a function that does: what is noted between them.
AroundLayers = Callable[[Tensor, Callable[[Tensor, slice], Tensor]], Tensor]
BACKEND: str | Callable[..., Any] = "inductor"


def prepare(part: ModelSlice, cache: str | Path) -> ModelSlice:
    """The slice with modules that `CompiledLayers` can compile; `part` must not be used afterwards.

    What is compiled is kept in the folder `cache`. Raises `ConfigError` (`compile`)
    where the model, the number format, the device or the machine's tools do not allow it.
    """
    if not part.fast:
        kind, dtype = part.config.model_type, str(part.dtype).removeprefix("torch.")
        raise ConfigError(
            "compile", f"on supports float32 on a CPU, not {kind} in {dtype} on {part.device}; "
            "set dtype: float32 and device: cpu, or compile: off",
        )  # fmt: skip
    _check_headers()
    folder = Path(cache).expanduser()
    load_cpu_ops(folder)
    os.environ.setdefault(GRAPH_CACHE, str(folder / "graphs"))
    head = PackedLinear(part.head) if isinstance(part.head, FastLinear) else part.head
    return replace(part, layers=tuple(map(make_compilable, part.layers)), head=head)


def _check_headers() -> None:
    """What inductor writes includes Python's; the operators themselves do not."""
    headers = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if not headers.exists():
        raise ConfigError(
            "compile", f"on needs Python's C headers, and there is no {headers}; install them "
            f"(Debian, Ubuntu: apt install python3-dev) {FIX}",
        )  # fmt: skip


class CompiledLayers:
    """Runs a prepared slice's layers; the first call compiles, for every number of rows."""

    def __init__(self, part: ModelSlice, *, cpp_wrapper: bool = True) -> None:
        """`cpp_wrapper` lets inductor write the calls of the kernels in C++ too."""
        self._layers = part.layers
        self._layer_types = part.layer_types
        self._run = _compiled(cpp_wrapper)
        self._is_compiled = False

    def __call__(
        self, states: Tensor, rotations: dict[str | None, Rotation], around: AroundLayers
    ) -> Tensor:
        """What `around`, which is compiled with the layers, makes of hidden states; within
        `attending`. It is the same in all calls.

        Raises `ConfigError` where the compiler fails.
        """
        if self._is_compiled:
            return self._run(self._layers, self._layer_types, states, rotations, around)
        return self._first_run(states, rotations, around)

    def _first_run(
        self, states: Tensor, rotations: dict[str | None, Rotation], around: AroundLayers
    ) -> Tensor:
        for tensor in (states, *(half for pair in rotations.values() for half in pair)):
            mark_dynamic(tensor, 0)
        try:
            # One row is a number of rows like any other, and not a graph of its own.
            with shape_config.patch(backed_size_oblivious=True):  # pyright: ignore[reportAttributeAccessIssue]
                out = self._run(self._layers, self._layer_types, states, rotations, around)
        except TorchDynamoException as error:
            reason = " ".join(str(error).strip().split("\n")[:2])
            raise ConfigError("compile", f"on failed: {reason}; {FIX}") from error
        self._is_compiled = True
        return out


def _compiled(cpp_wrapper: bool) -> Callable[..., Tensor]:
    """`_forward` compiled for one stage.

    Everything but the number of rows is constant, so no guard is worth its time. Compiled code is
    found by its code object alone then: each stage has one of its own.
    """
    forward = types.FunctionType(_forward.__code__.replace(), _forward.__globals__)
    options: dict[str, Any] = {"guard_filter_fn": torch.compiler.skip_all_guards_unsafe}
    if BACKEND == "inductor":
        options["cpp_wrapper"] = cpp_wrapper
    return torch.compile(forward, fullgraph=True, dynamic=False, backend=BACKEND, options=options)


def _forward(
    layers: tuple[nn.Module, ...], layer_types: tuple[str | None, ...], states: Tensor,
    rotations: dict[str | None, Rotation], around: AroundLayers,
) -> Tensor:  # fmt: skip
    def run(states: Tensor, span: slice) -> Tensor:
        for layer, kind in zip(layers[span], layer_types[span], strict=True):
            states = layer.forward(
                states,
                attention_mask=None,
                position_embeddings=rotations[kind if kind in rotations else None],
                position_ids=None,
            )
        return states

    return around(states, run)
