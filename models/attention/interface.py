"""draftline's attention as a function of transformers' attention interface."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface

from .kernel_attention import StepKernels
from .step_attention import StepAttention

NAME = "draftline"


def paged_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor,
    attention_mask: StepAttention | StepKernels, **options: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Write the rows' KV, then attend over all that each row sees.

    `query` [1, heads, rows, head_dim]; `key` and `value` [1, kv_heads, rows, head_dim]; options
    `scaling`, `sliding_window` and `softcap` as the model gives them. What the layers call their
    attention mask is the step itself: every model hands it through untouched.
    Returns [1, rows, heads, head_dim].
    """
    step = attention_mask
    layer: int = module.draftline_layer  # pyright: ignore[reportAssignmentType]
    step.write_heads(layer, key[0].transpose(0, 1), value[0].transpose(0, 1))
    out = step.attend(
        layer, query[0].transpose(0, 1), options["scaling"], options.get("sliding_window"),
        options.get("softcap"),
    )  # fmt: skip
    return out.unsqueeze(0), None


AttentionInterface.register(NAME, paged_attention)
