"""The names of tensors of layers for multi-token prediction, which checkpoints hold beside their
own layers."""

from __future__ import annotations

import re
from typing import Any

# Qwen3-Next's `mtp.`, MiMo's `model.mtp.`.
NAMED = re.compile(r"^(?:model\.)?mtp\.")
# DeepSeek-V3 and GLM-4.5 count on from the last layer.
NUMBERED = re.compile(r"^model\.layers\.(\d+)\.")
# Layers of either.
LAYER = re.compile(r"\blayers\.(\d+)\.")
# How configs say their number.
COUNTS = ("num_mtp_layers", "num_nextn_predict_layers")


def is_of_mtp(name: str, config: Any) -> bool:
    """Whether a tensor belongs to an MTP layer of a model with this config."""
    if NAMED.match(name):
        return True
    number = NUMBERED.match(name)
    if number is None:
        return False
    first = config.num_hidden_layers
    count = next((found for one in COUNTS if (found := getattr(config, one, None))), 0)
    return first <= int(number[1]) < first + count


def mtp_layer(name: str) -> str | None:
    """The number of the MTP layer that such a tensor belongs to; None: what all layers share."""
    layer = LAYER.search(name)
    return None if layer is None else layer[1]
