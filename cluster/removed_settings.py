"""Settings, commands and flags that draftline had once, and what to use in place of each.

`checked_settings.py` and `drafting/drafter_options.py` refuse settings, `deploy/cli/` the others.
"""

from __future__ import annotations

from collections.abc import Mapping

# Keys of an engine's or a server's settings, and their flags.
REMOVED_SETTINGS: Mapping[str, str] = {
    "head_features": "leave it out: stages hand on the states that heads read",
    "graph_capture_s": "leave it out: graphs are captured for up to 60 s",
    "trace_steps_max_mb": "leave it out: a trace keeps the newest 256 MB",
    "max_header_bytes": "leave it out: 32 KiB of headers are read",
    "max_header_count": "leave it out: 100 headers are read",
    "header_timeout_s": "leave it out: headers have 10 s to come",
    "write_timeout_s": "leave it out: a client that reads nothing for 30 s is disconnected",
    "max_unread_bytes": "leave it out: 8 MiB of an answer wait for a slow reader",
    "cors_allow_methods": "leave it out: pages of other sites may GET and POST",
    "cors_allow_method": "leave it out: pages of other sites may GET and POST",
    "max_ongoing_requests": "leave it out: a replica takes max_num_seqs and max_queued_requests",
    "router_load_tokens": "leave it out: a running request counts as 64 tokens of a prompt",
    "health_check_period_s": "leave it out: Ray Serve asks once a second",
    "health_check_timeout_s": "leave it out: three checks without an answer for 5 s replace it",
    "replica_timeout_s": "leave it out: a replica that is silent for 5 s is lost to its requests",
    "resume_tries": "leave it out: a request may lose three replicas; resume: off ends it at once",
    "resume_timeout_s": "leave it out: a request may be without a replica for 120 s",
    "drain_s": "leave it out: a pool's server that stops goes on for 10 s",
    **dict.fromkeys(
        (
            "max_json_values",
            "max_json_depth",
            "max_content_parts",
            "max_tools",
            "max_tools_bytes",
            "max_stop_texts",
            "max_stop_chars",
            "max_stop_chars_total",
            "max_listed_tokens",
            "max_logit_biases",
            "max_grammar_bytes",
            "max_choices",
            "max_logprob_entries",
            "max_answer_logprobs",
            "max_detokenize_tokens",
            "max_bad_words",
            "max_named_drafters",
        ),
        "leave it out: this limit of a request is fixed (docs/operations.md, Limits)",
    ),
}
# Options of drafters.
REMOVED_OPTIONS: Mapping[str, str] = {
    "chat_template": "leave it out: drafters read the served model's prompt as text",
    "ahead": "use tree: dynamic or sequoia, which bring more in the same time",
    "ahead_outcomes": "it was of ahead, which left, too",
    "replay_features": "leave it out: a head drafts from the states that come",
    "token_map": "leave it out: a head drafts all tokens of its output head",
    "capacity": "leave it out: 15 continuations of each token are kept",
    "max_keys": "leave it out: 65,536 keys of each request are kept",
    "refine_threshold": "leave it out: it is 0.1, as in the paper",
    "all_offsets": "leave it out: n-grams of the pool are learned from its first token on",
    "window": "leave it out: the latest 32,768 or 65,536 tokens count",
    "max_tables": "leave it out: the 16 tables used last are kept",
    "max_vocab": "leave it out: token ids below 2^20 are learned",
    "max_spec_offset": "use max_spec_factor",
    "max_namespaces": "leave it out: answers of the latest 32 namespaces are kept",
    "oversample": "leave it out: four times the nodes are looked up",
    "block_size": "leave it out: a KV block of a small model has 16 tokens",
    "prefill_chunk": "leave it out: a pass has at most 256 rows",
    "max_tokens": "leave it out: a head keeps the latest 8,192 tokens",
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
    ("compile", "on"): "use auto: the CPU kernels are faster without a graph around them",
}


def removed_value(key: str, value: object) -> str | None:
    """Why a value that a key once had is refused, and what to use; None: it never left."""
    if isinstance(value, bool):
        # YAML reads a bare on or off as a boolean.
        value = "on" if value else "off"
    if isinstance(value, str) and (key, value) in REMOVED_VALUES:
        return f"{value!r} was removed; {REMOVED_VALUES[key, value]}"
    return None
