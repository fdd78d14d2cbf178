"""The rows of the suite of heads: beside each other, and beside what needs no training.

Dynamic trees as EAGLE-2 has them (arXiv 2406.16858): 60 nodes, 6 levels, 10 children a node.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from ....cluster.config import DrafterConfig
from ....core.errors import ConfigError
from ....measure.clients.setting import Setting
from ....models.load.bundled import BUNDLED_HEADS

TREE_NODES, DEPTH, TOP_K = 60, 6, 10
CHAIN, TREE = "chain", "tree"
SMALL_MODEL, UNTRAINED, MERGED = "small model", "training-free", "everything merged"


@dataclass(frozen=True, slots=True)
class HeadRows:
    """The drafters and the settings of the suite, by what there is for the target.

    heads        folders of trained heads, by the names of their rows, in the order of the table
    merged       names of those that are in the row of everything
    small_model  folder or name of a small model of the target's tokenizer
    store        retrieval store
    """

    heads: Mapping[str, str]
    merged: Collection[str]
    small_model: str | None = None
    store: str | None = None

    def drafters(self) -> Iterator[DrafterConfig]:
        """All that settings name."""
        for name, folder in self.heads.items():
            own = {"model": folder, "num_tokens": DEPTH}
            yield _drafter("head", f"{name}-{CHAIN}", tree="chain", **own)
            yield _drafter("head", f"{name}-{TREE}", top_k=TOP_K, **own)
        if self.small_model is not None:
            yield _drafter(
                "model", "model", model=self.small_model, tree="dynamic", top_k=TOP_K,
                num_tokens=DEPTH,
            )  # fmt: skip
        yield _drafter("suffix", "suffix", num_tokens=16)
        yield _drafter("spectra", "spectra", guess_len=16)
        yield _drafter("token_recycling", "token_recycling")
        if self.store is not None:
            yield _drafter("retrieval", "retrieval", store=self.store)

    def settings(self) -> Iterator[Setting]:
        """Chains, then trees, of every head; then the others, and all together."""
        for form in (CHAIN, TREE):
            for name in self.heads:
                yield Setting(f"{name} {form}", (f"{name}-{form}",))
        trees = [f"{name}-{TREE}" for name in self.heads if name in self.merged]
        small = [] if self.small_model is None else ["model"]
        if small:
            yield Setting(SMALL_MODEL, tuple(small))
        untrained = ["suffix", "spectra", "token_recycling"]
        untrained += [] if self.store is None else ["retrieval"]
        yield Setting(UNTRAINED, tuple(untrained))
        yield Setting(MERGED, (*trees, *small, *untrained))


def bundled_heads() -> dict[str, str]:
    """The heads of the bundled model, by the names of their rows."""
    return {name.removeprefix("demo-"): name for name in BUNDLED_HEADS}


def read_heads(text: str) -> dict[str, str]:
    """Folders by name, of `NAME=FOLDER` parted by commas. Raises `ConfigError`."""
    heads: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, mark, folder = part.partition("=")
        if not (name and mark and folder) or name in heads:
            raise ConfigError("heads", f"must be NAME=FOLDER, each name once, not {part!r}")
        heads[name] = folder
    return heads


def _drafter(kind: str, name: str, **options: object) -> DrafterConfig:
    return DrafterConfig(kind=kind, name=name, max_nodes=TREE_NODES, **options)
