"""Settings that draftline had once, and what to use in place of each.

They are refused like unknown ones, by a message that says so (`cluster/checked_settings.py`).
"""

from __future__ import annotations

from collections.abc import Mapping

# Keys, of any section, and commands.
REMOVED_KEYS: Mapping[str, str] = {
    "chat_template": "leave it out: drafters read the served model's prompt as text",
    "ahead": "use tree: dynamic or sequoia, which bring more in the same time",
    "ahead_outcomes": "it was of ahead, which left, too",
    "trace": "open the file of --trace-steps in ui.perfetto.dev",
}
# Flags by their command, of those that were no settings (`deploy/cli/main.py` refuses them).
REMOVED_FLAGS: Mapping[tuple[str, str], str] = {
    ("doctor", "--sizes"): "the table is in docs/sizing.md",
    ("doctor", "--stages"): "docs/sizing.md has what to expect, and draftline bench measures it",
    ("doctor", "--context"): "docs/sizing.md has what to expect, and draftline bench measures it",
    ("doctor", "--redis-env"): "draftline corpus stats --store URL says whether Redis is reached",
    ("doctor", "--address"): "run it on a node of the cluster, or set RAY_ADDRESS",
}
# Values of a key.
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


def advice(key: str, value: object = None) -> str | None:
    """What to use in place of a value that a key once had, or of the key; None: it never left."""
    if value is None:
        return f"was removed; {REMOVED_KEYS[key]}" if key in REMOVED_KEYS else None
    if isinstance(value, bool):
        # YAML reads a bare on or off as a boolean.
        value = "on" if value else "off"
    if isinstance(value, str) and (key, value) in REMOVED_VALUES:
        return f"{value!r} was removed; {REMOVED_VALUES[key, value]}"
    return None
