"""Any causal language model as transformers loads it, its linear layers rounded where wanted."""

from __future__ import annotations

from collections.abc import Collection
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torch import nn
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from ...core.errors import CheckpointError, ConfigError
from ..layers.int8_linear import Int8Linear
from ..layers.model_slice import DTYPES
from ..load.checkpoint import read_config, resolve_model_path

AUTO, INT8, INT4 = WEIGHTS = ("auto", "int8", "int4")
GROUP_SIZE = 32


def load_hosted_model(model: str | Path, dtype: str, device: str, weights: str = "auto") -> Any:
    """The model, ready to run. Raises `CheckpointError`, or `ConfigError` (`dtype`, `weights`)."""
    if dtype not in DTYPES:
        raise ConfigError("dtype", f"must be one of {', '.join(DTYPES)}, not {dtype!r}")
    folder = resolve_model_path(model)
    config: Any = read_config(folder)
    if getattr(config, "is_encoder_decoder", False):
        raise CheckpointError(f"{folder}: {config.model_type!r} has an encoder; it cannot draft")
    try:
        # Eager attention takes any mask; code of the checkpoint's own is never run.
        whole = AutoModelForCausalLM.from_pretrained(
            folder, dtype=DTYPES[dtype], attn_implementation="eager", local_files_only=True
        )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise CheckpointError(f"{folder} cannot be loaded by transformers: {error}") from error
    whole = whole.eval().to(device)
    round_weights(whole, weights)
    return whole


def round_weights(whole: Any, weights: str) -> None:
    """Keep the weights of linear layers but the head in fewer bits. Raises `ConfigError`."""
    if weights == AUTO:
        return
    head = whole.get_output_embeddings()
    for name, module in list(whole.named_modules()):
        if isinstance(module, Conv1D):
            whole.set_submodule(name, _linear(module))
    linear = {
        name: module
        for name, module in whole.named_modules()
        if isinstance(module, nn.Linear) and module is not head
    }
    if weights == INT4:
        _round_to_4_bits(whole, set(linear))
        return
    for name, module in linear.items():
        rounded = Int8Linear(module.weight.data)
        rounded.bias = module.bias
        whole.set_submodule(name, rounded)


def _linear(module: Any) -> nn.Linear:
    """GPT-2's layer, whose weight is stored the other way."""
    inputs, outputs = module.weight.shape
    linear = nn.Linear(inputs, outputs, device="meta")
    linear.weight = nn.Parameter(module.weight.data.t().contiguous(), requires_grad=False)
    linear.bias = module.bias
    return linear


def require_torchao() -> None:
    """Raise `ConfigError` (`weights`) where it is not installed."""
    if find_spec("torchao") is None:
        raise ConfigError(
            "weights", "int4 needs torchao: pip install 'draftline[quantized]'; int8 needs nothing"
        )


def _round_to_4_bits(whole: Any, names: Collection[str]) -> None:
    # It takes seconds to import, and may not be there.
    require_torchao()
    from torchao.quantization import Int4WeightOnlyConfig, quantize_  # noqa: PLC0415

    config = Int4WeightOnlyConfig(group_size=GROUP_SIZE)
    try:
        quantize_(whole, config, lambda _, name: name in names)
    except (RuntimeError, NotImplementedError, ImportError, ValueError) as error:
        raise ConfigError("weights", f"int4 cannot be had on {whole.device}: {error}") from error
