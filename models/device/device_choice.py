"""The arithmetic of a model and the device it runs on, where settings leave them open."""

from __future__ import annotations

import torch

from ...core.errors import ConfigError

AUTO = "auto"
HALVES = ("bfloat16", "float16")


def choose_device(setting: str, *, has_gpu: bool | None = None) -> str:
    """cpu or cuda. Raises `ConfigError` (`device`) where cuda is asked for and no GPU is seen.

    has_gpu  by default whether torch sees one here
    """
    has_gpu = torch.cuda.is_available() if has_gpu is None else has_gpu
    if setting == "cuda" and not has_gpu:
        raise ConfigError("device", "is cuda, but torch sees no GPU; use auto or cpu")
    if setting == AUTO:
        return "cuda" if has_gpu else "cpu"
    return setting


def choose_dtype(setting: str, device: str, checkpoint_dtype: str) -> str:
    """The name of the dtype to compute in; on GPUs the checkpoint's where that has 16 bits."""
    if setting != AUTO:
        return setting
    if device == "cpu":
        return "float32"
    return checkpoint_dtype if checkpoint_dtype in HALVES else HALVES[0]
