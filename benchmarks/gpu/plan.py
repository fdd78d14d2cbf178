"""What is measured: the shapes of real models on a GPU, tiny ones where every line is tried."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any

from transformers import AutoConfig, PretrainedConfig

from ...models.load.model_info import head_dim, num_kv_heads
from ...models.load.partition import LayerSpan
from .floors import HeadShape, StageShape, StateHeads

ITEMSIZE = 2


@dataclass(frozen=True, slots=True)
class StepCase:
    """A decoding step: `nodes` drafted for each request besides its root; 0: one token."""

    batch: int
    nodes: int
    context_len: int

    @property
    def rows_each(self) -> int:
        """Rows of each request."""
        return 1 + self.nodes

    @property
    def order(self) -> tuple[int, ...]:
        """Its place in a table."""
        return self.context_len, self.batch, self.nodes

    @property
    def name(self) -> str:
        """For people."""
        what = f"{self.nodes} nodes" if self.nodes else "1 token"
        return f"batch {self.batch}, {what}, context {_short(self.context_len)}"

    def num_slots(self, block_size: int) -> int:
        """KV slots that it takes."""
        return self.batch * -(-(self.context_len + self.rows_each) // block_size) * block_size


@dataclass(frozen=True, slots=True)
class GpuModelPlan:
    """A stage of random weights, and its steps, the important ones first.

    kind  `model_type`
    """

    name: str
    options: dict[str, Any]
    span: LayerSpan
    cases: tuple[StepCase, ...]
    kind: str = "llama"

    def config(self) -> PretrainedConfig:
        """The model's config."""
        return AutoConfig.for_model(self.kind, **self.options, tie_word_embeddings=False)

    def shape(self) -> StageShape:
        """For the floors."""
        config = self.config()
        return StageShape(
            num_layers=self.span.last - self.span.first,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            heads=HeadShape(
                config.num_attention_heads, num_kv_heads(config), head_dim(config), ITEMSIZE
            ),
            vocab_size=config.vocab_size,
            has_embed=self.span.is_first,
            has_head=self.span.is_last,
        )


@dataclass(frozen=True, slots=True)
class GpuPlan:
    """All of it. `whole` is the model that goals are about, `part` a stage of a larger one.

    one_token, tree   the steps of the goals; `one_token` is also that of host and idle time
    attention_goal    the case whose attention has a goal
    hybrid            a stage of layers that keep states beside some with attention
    """

    whole: GpuModelPlan
    part: GpuModelPlan
    one_token: StepCase
    tree: StepCase
    attention: tuple[StepCase, ...]
    attention_goal: StepCase
    states: tuple[StepCase, ...]
    state_heads: StateHeads
    hybrid: GpuModelPlan
    sampling_rows: int
    sampling_vocab: int
    copy_bytes: int
    product_size: int
    demo_prompts: int
    demo_tokens: int


def _cases(
    batches: tuple[int, ...], nodes: tuple[int, ...], contexts: tuple[int, ...]
) -> tuple[StepCase, ...]:
    """All of them: short contexts and small batches first, the ends of `nodes` before the rest."""
    order = {count: rank for rank, count in enumerate((0, 64, 16, 8, 32, 128))}
    found = [StepCase(*case) for case in product(batches, nodes, contexts)]
    return tuple(
        sorted(
            found,
            key=lambda case: (
                contexts.index(case.context_len) + batches.index(case.batch),
                order.get(case.nodes, len(order)),
            ),
        )
    )


def _short(count: int) -> str:
    return f"{count // 1024}k" if count % 1024 == 0 else str(count)


LLAMA_8B: dict[str, Any] = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
}  # fmt: skip
LLAMA_70B = LLAMA_8B | {
    "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
    "num_attention_heads": 64,
}  # fmt: skip
# Three layers of a gated delta rule to one with attention.
HYBRID: dict[str, Any] = {
    "hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 8,
    "num_attention_heads": 24, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 32000,
    "linear_num_key_heads": 16, "linear_num_value_heads": 48, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "max_position_embeddings": 131072,
}  # fmt: skip
TINY = LLAMA_8B | {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 1024,
}  # fmt: skip
TINY_HYBRID = HYBRID | {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 512, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "max_position_embeddings": 1024,
}  # fmt: skip
FULL_PLAN = GpuPlan(
    whole=GpuModelPlan(
        "Llama-3-8B", LLAMA_8B, LayerSpan(0, 32, 32),
        _cases((1, 4, 16, 64), (0, 8, 16, 32, 64, 128), (1024, 8192, 32768)),
    ),
    part=GpuModelPlan(
        "70B, layers 20-39 of 80", LLAMA_70B, LayerSpan(20, 40, 80),
        _cases((1, 16), (0, 64), (1024, 8192)),
    ),
    one_token=StepCase(1, 0, 1024),
    tree=StepCase(1, 64, 1024),
    attention=(
        *_cases((8, 1), (0, 64), (32768, 8192, 1024)),
        *_cases((64,), (0, 64), (8192, 1024)),
    ),
    attention_goal=StepCase(8, 0, 32768),
    states=_cases((1, 16), (0, 64), (1024,)),
    state_heads=StateHeads(32, 16, 128, 128),
    hybrid=GpuModelPlan(
        "hybrid, 8 layers of a 27B", HYBRID, LayerSpan(0, 8, 8),
        _cases((1, 16), (0, 64), (1024,)), kind="qwen3_5_text",
    ),
    sampling_rows=64,
    sampling_vocab=128_000,
    copy_bytes=4 << 30,
    product_size=8192,
    demo_prompts=4,
    demo_tokens=128,
)  # fmt: skip
TINY_PLAN = GpuPlan(
    whole=GpuModelPlan(
        "tiny", TINY, LayerSpan(0, 4, 4), _cases((1, 4), (0, 8, 64), (64, 256)),
    ),
    part=GpuModelPlan(
        "tiny, layers 1-2 of 4", TINY, LayerSpan(1, 3, 4), _cases((1, 4), (0,), (64,)),
    ),
    one_token=StepCase(1, 0, 64),
    tree=StepCase(1, 64, 64),
    attention=_cases((2,), (0, 8), (256,)),
    attention_goal=StepCase(2, 0, 256),
    states=_cases((2,), (0, 8), (64,)),
    state_heads=StateHeads(4, 2, 16, 16),
    hybrid=GpuModelPlan(
        "tiny hybrid", TINY_HYBRID, LayerSpan(0, 4, 4), _cases((2,), (0, 8), (64,)),
        kind="qwen3_5_text",
    ),
    sampling_rows=4,
    sampling_vocab=1000,
    copy_bytes=1 << 22,
    product_size=128,
    demo_prompts=2,
    demo_tokens=24,
)  # fmt: skip
