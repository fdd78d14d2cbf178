"""The rows of the suite of model drafters: one small model in many ways, and models together.

All drafts have at most as many levels and, all drafters of a row together, as many nodes. Where
drafts have a price, under a cost profile, models stop by what a level brings and takes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ....cluster.config import DrafterConfig
from ....measure.clients.setting import Setting

TREE_NODES, DEPTH, TOP_K = 32, 6, 6
GOODPUT = "goodput"
# Rows that a rule other than `coupled` decides about: the rule, and which of `_RULED` drafts.
RULES: Mapping[str, tuple[str, str]] = {
    "chain, rejection": ("rejection", "drawn-chain"),
    "tree of draws, rejection": ("rejection", "drawn-tree"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRows:
    """The drafters and the settings of the suite, by what there is for the target.

    same        small model of the target's tokenizer
    other       one of another tokenizer
    alphabet    one of single bytes or letters
    is_sampled  whether there is a temperature, without which all rules are alike
    is_timed    whether a cost profile says how long drafts take
    """

    same: str
    other: str
    alphabet: str
    is_sampled: bool
    is_timed: bool

    def drafters(self) -> Iterator[DrafterConfig]:
        """All that settings name."""
        yield self._model("same-chain", self.same)
        yield self._model("same-tree", self.same, **_DYNAMIC)
        for vocabulary in ("tli", "slem"):
            yield self._model(f"{vocabulary}-chain", self.other, vocabulary=vocabulary)
            yield self._model(f"{vocabulary}-tree", self.other, vocabulary=vocabulary, **_DYNAMIC)
        yield self._model("slrs", self.alphabet, vocabulary="slrs")
        yield self._model("full-tree", self.same, **_STATIC)
        if self.is_sampled:
            yield self._model("drawn-chain", self.same)
            yield self._model("drawn-tree", self.same, **_STATIC)

    def settings(self) -> Iterator[Setting]:
        """Each way alone, then drafters together, then rules beside `coupled`."""
        yield Setting("same chain", ("same-chain",))
        yield Setting("same tree", ("same-tree",))
        for vocabulary in ("tli", "slem"):
            for form in ("chain", "tree"):
                yield Setting(f"{vocabulary.upper()} {form}", (f"{vocabulary}-{form}",))
        yield Setting("SLRS", ("slrs",))
        yield Setting("same tree + TLI tree", ("same-tree", "tli-tree"))
        yield Setting("same tree + SLEM tree", ("same-tree", "slem-tree"))
        yield Setting("TLI tree + SLEM tree", ("tli-tree", "slem-tree"))
        yield Setting("static tree, coupled", ("full-tree",))
        if self.is_sampled:
            for name, (rule, drafter) in RULES.items():
                yield Setting(name, (drafter,), acceptance=rule)

    @property
    def _own(self) -> Mapping[str, Any]:
        """Options of every model."""
        return {"stop": GOODPUT} if self.is_timed else {}

    def _model(self, name: str, model: str, **options: Any) -> DrafterConfig:
        given = {"max_nodes": TREE_NODES, "num_tokens": DEPTH, **self._own, **options}
        return DrafterConfig(kind="model", name=name, model=model, **given)


# EAGLE-2's tree, and the static one of the highest expected acceptance, as large as is allowed:
# nodes of the same ranks, whatever was drawn.
_DYNAMIC: Mapping[str, Any] = {"tree": "dynamic", "top_k": TOP_K}
_STATIC: Mapping[str, Any] = {"tree": "sequoia", "tree_size": "full"}
