"""The bundled demo models and their retrieval store."""

from __future__ import annotations

from pathlib import Path

from ...core.errors import CheckpointError

FOLDER = Path(__file__).parents[2] / "deploy" / "assets" / "models"
DEMO_STORE = FOLDER / "demo-store"
# Targets of one tokenizer, which is that of `demo-drafter` and of the store.
BUNDLED_TARGETS = ("demo", "demo-hybrid")
BUNDLED_NAMES = (
    *BUNDLED_TARGETS, "demo-drafter", "demo-drafter-other-vocab", "demo-drafter-bytes",
)  # fmt: skip
# Heads of `demo`.
BUNDLED_HEADS = ("demo-griffin", "demo-specformer", "demo-dflash")


def demo_path(name: str = "demo") -> Path:
    """Folder of a bundled model. Raises `CheckpointError` if the name is none of them."""
    known = BUNDLED_NAMES + BUNDLED_HEADS
    if name not in known:
        raise CheckpointError(f"no bundled model {name!r}; there are {', '.join(known)}")
    return FOLDER / name
