"""Values of the option `vocabulary`, and which options they go with."""

from __future__ import annotations

from ....core.errors import ConfigError

VOCABULARY_AUTO, SAME, SLEM, TLI, SLRS = "auto", "same", "slem", "tli", "slrs"
VOCABULARIES = (VOCABULARY_AUTO, SAME, SLEM, TLI, SLRS)


def check_tree(vocabulary: str, tree: str) -> None:
    """Raise `ConfigError` where drafts of this kind are no trees of this kind."""
    if vocabulary == SLRS and tree != "chain":
        raise ConfigError("tree", f"must be chain where vocabulary is {vocabulary}, not {tree}")
    if vocabulary == SLEM and tree == "sequoia":
        raise ConfigError(
            "tree", "sequoia learns by rank, and texts have none: vocabulary slem takes dynamic"
        )
