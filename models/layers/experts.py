"""The experts of a mixture, whose weights are kept as they are stored.

transformers' mixtures call their experts in one way (`use_experts_implementation`): states, the
experts of each row and their shares. A module of this file stands in the place of such experts. On
CPUs with draftline's kernels one operator computes them, of float32 stages and of weights of any
kind; elsewhere experts of quantised weights are computed one after the other, those that are used.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from math import inf
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import PretrainedConfig

from ...core.errors import CheckpointError
from ...kernels.cpu.build import Vectors, vectors
from ...kernels.cpu.experts import Activation, ExpertMatrix, Gate, run_experts, stacked
from ...kernels.cpu.packed_linear import PackedWeight, pack_quantized, pack_weights, placed
from ...kernels.dispatch import Machine, load_quantized_linear, runs_triton
from ...kernels.quantized.kept_weight import KeptWeight, keep_weight
from ..load.checkpoint import WeightFiles
from ..load.expert_weights import ExpertPart, StoredExperts
from ..load.quantized_layouts import QuantizedWeight
from ..load.rounding import rounded
from ..load.supported import empty_model
from .linear_layers import NONE

# Names of parameters: the matrices of all experts, and what their biases add to it.
UP, DOWN, BIAS = ("gate_up_proj", "up_proj"), "down_proj", "_bias"


def is_expert_matrix(model: nn.Module, name: str) -> bool:
    """Whether a parameter has a matrix of each of a layer's experts."""
    owner, _, attribute = name.rpartition(".")
    if attribute not in (*UP, DOWN):
        return False
    return getattr(model.get_submodule(owner), attribute).ndim == 3


def can_compute_experts(dtype: str, device: str) -> bool:
    """Whether draftline's CPU kernels compute experts of such stages."""
    return torch.device(device).type == "cpu" and dtype == "float32"


def has_experts(config: PretrainedConfig) -> bool:
    """Whether layers of a model have experts that those of this file can take the place of."""
    modules = list(empty_model(config).modules())
    return any(hasattr(one, DOWN) and expert_obstacle(one) is None for one in modules)


def expert_obstacle(module: Any) -> str | None:
    """Why draftline's experts cannot stand in the place of a module with matrices of experts."""
    if not all(hasattr(module, name) for name in ("is_transposed", "has_gate", "num_experts")):
        return "they are called in a way of their own"
    if getattr(module, "has_post_expert_norm", False):
        return "each is followed by a norm"
    own = {up_name(module), DOWN}
    own |= {name + BIAS for name in own} if module.has_bias else set()
    if own != {name for name, _ in module.named_parameters()}:
        return "they have further weights"
    return None


def gate_of(module: Any) -> Gate | None:
    """What stands between the products of `expert_obstacle`'s modules; None: nothing known.

    Found by trying: the module's own function of some numbers says which of the known ones it is.
    """
    numbers = torch.cat([torch.linspace(-40, 40, 81), torch.tensor([-900.0, -90.0, 90.0, 900.0])])
    if not module.has_gate:
        found = module.act_fn(numbers)
        one = Gate(Activation.SQUARED_RELU)
        return one if torch.allclose(one(numbers, None), found) else None
    left, right = (one.flatten() for one in torch.meshgrid(numbers, numbers, indexing="ij"))
    both = torch.stack([left, right], dim=0 if module.is_concatenated else 1).flatten()
    found = module._apply_gate(both)  # noqa: SLF001 - transformers' interface
    for limit in _numbers(module, "limit", "swiglu_limit", plain=inf):
        known = [Gate(Activation.GELU_TANH, limit=limit)]
        for alpha in _numbers(module, "alpha", "swiglu_alpha", plain=1.0):
            known += [Gate(Activation.SWISH, alpha, limit, shift) for shift in (0.0, 1.0)]
        for one in known:
            if torch.allclose(one(left, right), found, rtol=1e-4, atol=1e-4):
                return one
    return None


def _numbers(module: Any, *names: str, plain: float) -> list[float]:
    found = [getattr(module, name, None) for name in names]
    return [plain, *(float(one) for one in found if isinstance(one, int | float))]


# Reads the parts of each expert's matrix, from the first expert on; called again where a first
# attempt to keep them fails.
ReadExperts = Callable[[], Iterable[Sequence[ExpertPart]]]


class KeptExperts(nn.Module):
    """Stands in the place of transformers' experts, and computes those that are used one by one."""

    def __init__(self, like: Any, dtype: torch.dtype, device: torch.device) -> None:
        """`like`: the experts whose place it takes, and whose activation it calls."""
        super().__init__()
        # Not as a module of this one: its weights stay on the meta device.
        self._like, self._dtype = (like,), dtype
        self.num_experts: int = like.num_experts
        self._up = up_name(like)
        self._matrices: dict[str, list[tuple[KeptWeight | Tensor, ...]]] = {}
        implementation = "triton" if runs_triton(Machine.of(device)) else "reference"
        self._quantized = load_quantized_linear(implementation)

    def put(self, name: str, read: ReadExperts) -> None:
        """Take the matrices of a parameter's name."""
        self._matrices[name] = [tuple(map(self._kept, parts)) for parts in read()]

    def kinds(self) -> set[str]:
        """Of the weights, for display."""
        return {
            part.kind if isinstance(part, KeptWeight) else f"{part.dtype}".removeprefix("torch.")
            for matrix in self._matrices.values()
            for parts in matrix
            for part in parts
        }

    def _kept(self, part: ExpertPart) -> KeptWeight | Tensor:
        if isinstance(part, Tensor):
            return part.contiguous()
        kept = keep_weight(part.codes, part.scales, part.zeros, part.group_of, part.minima)
        return part.dequantized(self._dtype) if kept is None else kept

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """[rows, hidden] of the same: the shares of each row's experts, summed.

        top_k_index    int64 [rows, choices]  experts; others than there are add nothing
        top_k_weights  [rows, choices]
        """
        [like] = self._like
        activated = like._apply_gate if like.has_gate else like.act_fn  # noqa: SLF001 - transformers' interface
        results = hidden_states.new_zeros(*top_k_index.shape, hidden_states.shape[-1])
        for expert in top_k_index.unique().tolist():
            if 0 <= expert < self.num_experts:
                rows, places = (top_k_index == expert).nonzero(as_tuple=True)
                between = activated(self._product(self._up, expert, hidden_states[rows]))
                results[rows, places] = self._product(DOWN, expert, between)
        return (results * top_k_weights[..., None]).sum(dim=1).to(hidden_states.dtype)

    def _product(self, name: str, expert: int, x: Tensor) -> Tensor:
        """`x` [rows, inputs] -> [rows, outputs] of an expert."""
        outs = [
            self._quantized(x, part) if isinstance(part, KeptWeight) else linear(x, part)
            for part in self._matrices[name][expert]
        ]
        out = outs[0] if len(outs) == 1 else torch.cat(outs, dim=-1)
        bias: Tensor | None = getattr(self, name + BIAS, None)
        return out if bias is None else out + bias[expert]


class CpuExperts(nn.Module):
    """The same by draftline's CPU kernels, in float32. They must be loaded."""

    def __init__(self, like: Any, gate: Gate) -> None:
        """`gate`: that of `like`, whose place it takes."""
        super().__init__()
        self.num_experts: int = like.num_experts
        self._gate, self._up = gate, up_name(like)
        self._is_interleaved = like.has_gate and not like.is_concatenated
        self._matrices: dict[str, ExpertMatrix] = {}

    def put(self, name: str, read: ReadExperts) -> None:
        """Take the matrices of a parameter's name; in float32 where their kinds differ."""
        stacks: list[PackedWeight | None] = [None]
        widths: tuple[int, ...] = ()
        own, wide = vectors(), vectors().widening
        for keep in (
            partial(_packed, own), partial(_packed, wide), partial(_packed, wide, narrow=False),
            _widened,
        ):  # fmt: skip
            if None not in stacks:
                break
            by_expert = [
                [(keep(one), len_of(one)) for one in self._parts(name, parts)] for parts in read()
            ]
            widths = tuple(width for _, width in by_expert[0])
            by_part = zip(*by_expert, strict=True)
            stacks = [stacked([packed for packed, _ in part]) for part in by_part]
        self._matrices[name] = ExpertMatrix(tuple(placed(one) for one in stacks if one), widths)

    def kinds(self) -> set[str]:
        """Of the weights, for display."""
        return {stack.kind for matrix in self._matrices.values() for stack in matrix.stacks}

    def _parts(self, name: str, parts: Sequence[ExpertPart]) -> Sequence[ExpertPart]:
        """Gates before the others."""
        if not self._is_interleaved or name != self._up:
            return parts
        [both] = parts
        return [_of_rows(both, torch.arange(first, len_of(both), 2)) for first in (0, 1)]

    @cached_property
    def _both(self) -> tuple[ExpertMatrix, ExpertMatrix]:
        """With their biases, which are set after `put`."""
        up, down = (getattr(self, name + BIAS, None) for name in (self._up, DOWN))
        if up is not None and self._is_interleaved:
            up = torch.cat([up[:, ::2], up[:, 1::2]], dim=1)
        return self._matrices[self._up]._replace(bias=up), self._matrices[DOWN]._replace(bias=down)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """As `KeptExperts.forward`."""
        return run_experts(
            hidden_states, top_k_index, top_k_weights.float(), self.num_experts, *self._both,
            self._gate,
        )  # fmt: skip


def up_name(module: Any) -> str:
    """Of the parameter with the first product's matrices."""
    return "gate_up_proj" if module.has_gate else "up_proj"


def len_of(part: ExpertPart) -> int:
    """Outputs of a part."""
    return part.shape[0]


def _of_rows(part: ExpertPart, rows: Tensor) -> ExpertPart:
    return part.of_rows(rows) if isinstance(part, QuantizedWeight) else part[rows]


def _packed(wanted: Vectors, part: ExpertPart, *, narrow: bool = True) -> PackedWeight:
    if isinstance(part, Tensor):
        return pack_weights([part.t()], wanted.panel)
    packed = pack_quantized(
        part.codes, part.scales, part.zeros, part.group_of, wanted, part.minima, narrow=narrow
    )
    return packed or _packed(wanted, part.dequantized(torch.float32))


def _widened(part: ExpertPart) -> PackedWeight:
    values = part if isinstance(part, Tensor) else part.dequantized(torch.float32)
    return PackedWeight(_packed(vectors(), values).codes.float())


@dataclass(frozen=True, slots=True)
class ChosenExperts:
    """The experts of a stage, or a model.

    kept     by the name of their module: where their matrices are stored
    widened  layers whose experts would be small, and transformers' own compute, by the reason
    """

    kept: dict[str, list[StoredExperts]]
    widened: Counter[str]

    @property
    def names(self) -> set[str]:
        """Of the matrices that are kept."""
        return {stored.name for matrices in self.kept.values() for stored in matrices}


@dataclass(frozen=True, slots=True)
class ExpertForm:
    """How a stage keeps experts.

    quantization  to which weights are rounded
    by_kernels    by draftline's CPU kernels, where these know their activation; of float32
    """

    dtype: torch.dtype
    device: torch.device
    quantization: str
    by_kernels: bool

    def _gate(self, module: Any) -> Gate | None:
        return gate_of(module) if self.by_kernels else None

    def choose(self, model: nn.Module, names: Iterable[str], files: WeightFiles) -> ChosenExperts:
        """Which experts of a model are kept; `names` are those of parameters."""
        found: dict[str, list[StoredExperts]] = {}
        for name in names:
            if is_expert_matrix(model, name):
                owner = name.rpartition(".")[0]
                module: Any = model.get_submodule(owner)
                found.setdefault(owner, []).append(StoredExperts.of(files, name, module))
        chosen = ChosenExperts({}, Counter())
        for owner, matrices in found.items():
            module = model.get_submodule(owner)
            obstacle = expert_obstacle(module)
            is_small = self.quantization != NONE or any(stored.is_quantized for stored in matrices)
            if obstacle is not None:
                chosen.widened[obstacle] += is_small
            elif is_small or self._gate(module) is not None:
                chosen.kept[owner] = matrices
        return chosen

    def put(
        self, model: nn.Module, owner: str, matrices: Sequence[StoredExperts]
    ) -> KeptExperts | CpuExperts:
        """Put experts in the place of `owner`; their biases may be set later. Raises
        `CheckpointError`."""
        like: Any = model.get_submodule(owner)
        gate = self._gate(like)
        module: KeptExperts | CpuExperts
        if gate is None:
            module = KeptExperts(like, self.dtype, self.device)
        else:
            module = CpuExperts(like, gate)
        for stored in matrices:
            module.put(stored.name.rpartition(".")[2], partial(self._read, stored))
        model.set_submodule(owner, module)
        return module

    def _read(self, stored: StoredExperts) -> Iterator[Sequence[ExpertPart]]:
        try:
            for parts in stored:
                yield [self._part(part) for part in parts]
        except ValueError as error:
            raise CheckpointError(f"{stored.files.folder}: {stored.name}: {error}") from error

    def _part(self, part: ExpertPart) -> ExpertPart:
        if isinstance(part, QuantizedWeight):
            if self.quantization == NONE:
                return part.to(self.device)
            values = part.dequantized(self.dtype)
        else:
            values = part.to(self.device, self.dtype)
        return values if self.quantization == NONE else rounded(values, self.quantization)
