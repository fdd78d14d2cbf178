"""Stands for a CUDA graph on a CPU: records the operations of some work, and does them again.

As with a CUDA graph, no Python of the work runs in a replay: numbers and sizes are those of the
capture, and only what tensors hold may differ. Kernels are those of Triton's interpreter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from draftline.models.stage.gpu_path import Work
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime.interpreter import GridExecutor


class Recorder(TorchDispatchMode):
    """Operations of torch and launches of kernels, in their order.

    launches  names of what a GPU would launch: kernels, and operations but views and allocations
    """

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Work] = []
        self.launches: list[str] = []
        self._is_launching = False

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if not self._is_launching:
            if not is_free(func):
                self.launches.append(str(func))
            self.operations.append(lambda: redo(func, args, kwargs or {}, out))
        return out

    def launch(self, name: str, kernel: Callable[[], None]) -> None:
        """Run a kernel; what the interpreter does inside is no operation of the work."""
        self._is_launching = True
        kernel()
        self._is_launching = False
        self.launches.append(name)
        self.operations.append(kernel)


def is_free(func: Any) -> bool:
    """Whether a GPU launches nothing for it: a view, or memory."""
    results = func._schema.returns
    is_view = any(one.alias_info and not one.alias_info.is_write for one in results)
    return is_view or any(name in str(func) for name in ("empty", "_unsafe_view", "detach"))


def redo(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
    """The same operation, its results where they were before; a view is copied onto itself."""
    again = func(*args, **kwargs)
    for new, old in zip(tree_leaves(again), tree_leaves(out), strict=True):
        if isinstance(old, Tensor):
            old.copy_(new)


class NoHostReads(TorchDispatchMode):
    """Raises `RuntimeError` at operations whose result, or its shape, a host would wait for, and at
    copies from one device to another.
    """

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        with self:
            # Without gradients, what is made of other operations comes as one.
            out = func.decompose(*args, **kwargs)
        if out is not NotImplemented:
            return out
        if reads_host(func, args):
            raise RuntimeError(f"{func} waits for the device")
        out = func(*args, **kwargs)
        tensors = [one for one in tree_leaves((args, kwargs, out)) if isinstance(one, Tensor)]
        if len({one.device for one in tensors if one.ndim}) > 1:
            raise RuntimeError(f"{func} copies between devices")
        return out


def reads_host(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether numbers of tensors decide what a host does."""
    if func in (torch.ops.aten.index.Tensor, torch.ops.aten.index_put_.default):
        masks = [one for one in args[1] if one is not None and one.dtype == torch.bool]
        return bool(masks)
    tags = torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape
    return any(tag in func.tags for tag in tags)


class RecordedGraphs:
    """A `Capture`. `num_replays` counts those of each graph, in the order of the captures."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.num_replays: list[int] = []
        self.recorders: list[Recorder] = []
        self._current: Recorder | None = None
        launch = GridExecutor.__call__

        def recording(executor: GridExecutor, *args: Any, **kwargs: Any) -> None:
            if self._current is None:
                launch(executor, *args, **kwargs)
            else:
                name = executor.fn.__name__
                self._current.launch(name, lambda: launch(executor, *args, **kwargs))

        patch.setattr(GridExecutor, "__call__", recording)

    def __call__(self, work: Work) -> Work:
        """As the protocol says."""
        index = len(self.recorders)
        self._current = recorder = Recorder()
        with recorder:
            work()
        self._current = None
        self.recorders.append(recorder)
        self.num_replays.append(0)

        def replay() -> None:
            self.num_replays[index] += 1
            for operation in recorder.operations:
                operation()

        return replay

    def obstacle(self, work: Work) -> str | None:
        """As the protocol says."""
        try:
            with NoHostReads():
                work()
        except RuntimeError as error:
            return str(error)
        return None
