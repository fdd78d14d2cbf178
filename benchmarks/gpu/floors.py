"""The least that a computation must move and multiply, and how long a device takes for that.

A floor counts what cannot be left out: every weight once, the cached keys and values of every
request once. Activations, logits and what rows see of their own tree are not counted.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepTraffic:
    """Bytes read and written in device memory, and floating-point operations of matrix products."""

    num_bytes: int
    flops: int

    @property
    def intensity(self) -> float:
        """Operations for each byte."""
        return self.flops / self.num_bytes


@dataclass(frozen=True, slots=True)
class DeviceRates:
    """What a device does in a second at best: bytes, and floating-point operations."""

    num_bytes: float
    flops: float

    def floor_s(self, work: StepTraffic) -> float:
        """Seconds that the work takes at least."""
        return max(work.num_bytes / self.num_bytes, work.flops / self.flops)

    def bound(self, work: StepTraffic) -> str:
        """What the floor is made of: `bytes` or `flops`."""
        is_memory = work.num_bytes / self.num_bytes >= work.flops / self.flops
        return "bytes" if is_memory else "flops"


@dataclass(frozen=True, slots=True)
class HeadShape:
    """Attention heads of a layer; `itemsize` is the bytes of a number in the cache."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    itemsize: int = 2

    @property
    def kv_bytes(self) -> int:
        """Key and value of one token in one layer."""
        return 2 * self.num_kv_heads * self.head_dim * self.itemsize


@dataclass(frozen=True, slots=True)
class StageShape:
    """What is fixed about a stage: its layers, and whether it embeds and has the head."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    heads: HeadShape
    vocab_size: int
    has_embed: bool = True
    has_head: bool = True

    @property
    def matrix_params(self) -> int:
        """Weights that every row is multiplied with."""
        heads = self.heads
        projected = (2 * heads.num_heads + 2 * heads.num_kv_heads) * heads.head_dim
        layer = self.hidden_size * (projected + 3 * self.intermediate_size)
        head = self.vocab_size * self.hidden_size if self.has_head else 0
        return self.num_layers * layer + head

    @property
    def read_params(self) -> int:
        """Weights that every step reads: the matrices and the norms, no embedding."""
        norms = 2 * self.num_layers + int(self.has_head)
        return self.matrix_params + norms * self.hidden_size

    @property
    def kv_bytes(self) -> int:
        """KV of one token in all layers."""
        return self.num_layers * self.heads.kv_bytes


def step_work(shape: StageShape, batch: int, rows_each: int, context_len: int) -> StepTraffic:
    """A step of `batch` requests with `rows_each` rows behind `context_len` cached tokens each."""
    rows, itemsize = batch * rows_each, shape.heads.itemsize
    # Rows of the embedding, or hidden states of the stage before; and those for the next stage.
    states = 1 if shape.has_head else 2
    num_bytes = (
        itemsize * shape.read_params
        + itemsize * rows * shape.hidden_size * states
        + shape.kv_bytes * (batch * context_len + rows)
    )
    products = 2 * rows * shape.matrix_params
    seen = shape.num_layers * _attention_flops(shape.heads, rows, context_len)
    return StepTraffic(num_bytes, products + seen)


def attention_work(heads: HeadShape, batch: int, rows_each: int, context_len: int) -> StepTraffic:
    """One layer's attention: queries and results, and each request's keys and values once."""
    rows = batch * rows_each
    lines = 2 * rows * heads.num_heads * heads.head_dim * heads.itemsize
    cached = heads.kv_bytes * (batch * context_len + rows)
    return StepTraffic(lines + cached, _attention_flops(heads, rows, context_len))


def sampling_work(rows: int, vocab_size: int, itemsize: int = 4) -> StepTraffic:
    """Choosing a token for each row: its logits are read once."""
    return StepTraffic(rows * vocab_size * itemsize, 0)


@dataclass(frozen=True, slots=True)
class StateHeads:
    """Heads of a layer that keeps states, in float32."""

    num_heads: int
    num_key_heads: int
    key_dim: int
    value_dim: int


def states_work(heads: StateHeads, batch: int, rows: int) -> StepTraffic:
    """States of all requests read and written once, and products of each row with them."""
    state = heads.num_heads * heads.key_dim * heads.value_dim
    return StepTraffic(2 * 4 * batch * state, 2 * 2 * rows * state)


def copy_work(num_bytes: int) -> StepTraffic:
    """A copy of so many bytes, which are read and written."""
    return StepTraffic(2 * num_bytes, 0)


def product_work(size: int, itemsize: int = 2) -> StepTraffic:
    """The product of two square matrices."""
    return StepTraffic(3 * size * size * itemsize, 2 * size**3)


def _attention_flops(heads: HeadShape, rows: int, context_len: int) -> int:
    return 4 * heads.num_heads * heads.head_dim * rows * context_len
