"""Settings, commands and flags that draftline had once, and what to use in place of each.

`checked_settings.py` and `drafting/drafter_options.py` refuse settings, `deploy/cli/` the others.
"""

from __future__ import annotations

from collections.abc import Mapping

# Keys of an engine's or a server's settings, and their flags.
REMOVED_SETTINGS: Mapping[str, str] = {
    "head_features": "leave it out: stages hand on the states that heads read",
}
# Options of drafters.
REMOVED_OPTIONS: Mapping[str, str] = {
    "chat_template": "leave it out: drafters read the served model's prompt as text",
    "ahead": "use tree: dynamic or sequoia, which bring more in the same time",
    "ahead_outcomes": "it was of ahead, which left, too",
    "replay_features": "leave it out: a head drafts from the states that come",
    "token_map": "leave it out: a head drafts all tokens of its output head",
}
REMOVED_COMMANDS: Mapping[str, str] = {
    "trace": "open the file of --trace-steps in ui.perfetto.dev",
    "train blockwise": "use train medusa, whose heads are published",
    "train token-map": "heads draft all tokens of their output head",
}
# Flags by their command, of those that were no settings.
REMOVED_FLAGS: Mapping[tuple[str, str], str] = {
    ("doctor", "--sizes"): "the table is in docs/operations.md (Sizing)",
    ("doctor", "--stages"): "docs/operations.md (Sizing) has estimates, draftline bench measures",
    ("doctor", "--context"): "docs/operations.md (Sizing) has estimates, draftline bench measures",
    ("doctor", "--redis-env"): "draftline corpus stats --store URL says whether Redis is reached",
    ("bench", "--token-map"): "leave it out: heads draft all tokens of their output head",
    ("doctor", "--address"): "run it on a node of the cluster, or set RAY_ADDRESS",
}
# Values of a key, of any section.
REMOVED_VALUES: Mapping[tuple[str, str], str] = {
    **{("acceptance", rule): "use rejection" for rule in ("block", "traversal", "k_seq")},
    **{
        ("draws", kind): "leave draws out: auto draws without replacement"
        for kind in ("with_replacement", "without_replacement")
    },
    ("weights", "int4"): "use int8, which drafts what plain weights do",
    ("vocabulary", "union"): "use tli, which accepts as much",
    ("kind", "cascade"): "list its drafters themselves: their drafts become one tree",
    ("stage_transport", "compiled_graph"): "leave stage_transport out: sockets are faster",
    ("compile", "on"): "use auto: own operators are faster without a graph around them",
}


def removed_value(key: str, value: object) -> str | None:
    """Why a value that a key once had is refused, and what to use; None: it never left."""
    if isinstance(value, bool):
        # YAML reads a bare on or off as a boolean.
        value = "on" if value else "off"
    if isinstance(value, str) and (key, value) in REMOVED_VALUES:
        return f"{value!r} was removed; {REMOVED_VALUES[key, value]}"
    return None
