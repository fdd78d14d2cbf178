"""What int8 weights, FP8 caches and bfloat16 change: logits and greedy tokens against float32.

Held-out prompts are read once by each variant of the bundled target; nothing is generated, so that
one other token does not change all that follow. FP8 is read by the reference operators, which are
exact where Triton's are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import typer
from transformers.utils import logging as transformers_logging

from ...core.arrays import Int32
from ...core.steps import prompt_step
from ...deploy.cli.demo.held_out_prompts import held_out_prompts
from ...kernels.attention.spec import AttentionShape
from ...models.attention.kernel_attention import KernelBackend
from ...models.layers.model_slice import load_slice
from ...models.load.model_info import read_model_info
from ...models.load.partition import LayerSpan
from ...models.stage.memory import make_kv
from ...models.stage.stage import Stage
from ...models.text.tokenizer import load_tokenizer

BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Variant:
    """A way to keep numbers; fields as the engine's settings."""

    name: str
    dtype: str = "float32"
    quantization: str = "none"
    kv_cache_dtype: str = "auto"


@dataclass(frozen=True, slots=True)
class Quality:
    """Against float32.

    mean_error   mean of |logit - its logit|
    spread       standard deviation of its logits, for comparison
    agreement    share of the rows with the same most probable token
    """

    variant: str
    mean_error: float
    spread: float
    agreement: float
    num_rows: int


VARIANTS = (
    Variant("bfloat16", dtype="bfloat16"),
    Variant("int8 weights", quantization="int8"),
    Variant("fp8 cache", kv_cache_dtype="fp8"),
    Variant("int8 weights, fp8 cache", quantization="int8", kv_cache_dtype="fp8"),
)


def main(prompts: int = 64) -> None:
    """Print a table."""
    transformers_logging.disable_progress_bar()
    torch.set_num_threads(1)
    print(f"{'variant':26}{'mean |error|':>14}{'spread':>9}{'same token':>12}{'rows':>8}")
    for found in measure("demo", VARIANTS, prompt_ids("demo", prompts)):
        print(
            f"{found.variant:26}{found.mean_error:14.4f}{found.spread:9.2f}"
            f"{found.agreement:12.2%}{found.num_rows:8}"
        )


def prompt_ids(model: str, count: int) -> list[Int32]:
    """Token ids of the first held-out prompts."""
    info = read_model_info(model)
    tokenizer = load_tokenizer(info.path)
    texts = [prompt.text for prompt in held_out_prompts(count)]
    return [np.array(tokenizer.encode(text)[: info.max_context_len], np.int32) for text in texts]


def measure(model: str, variants: Sequence[Variant], prompts: Sequence[Int32]) -> list[Quality]:
    """The quality of each variant of a model on prompts of token ids."""
    expected = _logits(model, Variant("float32"), prompts)
    return [_quality(one.name, _logits(model, one, prompts), expected) for one in variants]


def _quality(name: str, found: torch.Tensor, expected: torch.Tensor) -> Quality:
    return Quality(
        name,
        float((found - expected).abs().mean()),
        float(expected.std()),
        float((found.argmax(-1) == expected.argmax(-1)).float().mean()),
        len(expected),
    )


def _logits(model: str, variant: Variant, prompts: Sequence[Int32]) -> torch.Tensor:
    """float32 [tokens of all prompts, vocabulary]."""
    info = read_model_info(model)
    span = LayerSpan(0, info.num_layers, info.num_layers)
    part = load_slice(model, span, variant.dtype, quantization=variant.quantization)
    num_blocks = -(-max(map(len, prompts)) // BLOCK_SIZE)
    kv = make_kv(part, num_blocks, BLOCK_SIZE, variant.kv_cache_dtype)
    shape = AttentionShape(part.config.num_attention_heads, info.num_kv_heads, info.head_dim)
    attention = None if kv.scales is None else KernelBackend(kv, BLOCK_SIZE, shape, "reference")
    stage = Stage(part, kv, BLOCK_SIZE, attention=attention)
    return torch.cat([_prompt_logits(stage, tokens) for tokens in prompts])


def _prompt_logits(stage: Stage, tokens: Int32) -> torch.Tensor:
    step = replace(prompt_step(len(tokens), BLOCK_SIZE), token_ids=tokens)
    return stage.logits(step, None, np.arange(len(tokens), dtype=np.int32))


if __name__ == "__main__":
    typer.run(main)
