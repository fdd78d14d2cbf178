"""Settings, commands and flags that draftline had once, and what to use in place of each.

`checked_settings.py` and `drafting/options.py` refuse settings, `deploy/cli/` the others.
"""

from __future__ import annotations

from collections.abc import Mapping

# Keys of an engine's or a server's settings, and their flags.
REMOVED_SETTINGS: Mapping[str, str] = {
    "streaming": "use pipelined_trees",
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
    "resume": "leave it out: a request that loses its replica goes on at another one",
    "resume_tries": "leave it out: a request may lose three replicas",
    "resume_timeout_s": "leave it out: a request may be without a replica for 120 s",
    "drain_s": "leave it out: a pool's server that stops goes on for 10 s",
    "prefill_share": "leave it out: long prompts take 0.35 of a step's time beside answers",
    "compile_cache": "leave it out: kernels are kept in ~/.cache/draftline/compile",
    "body_timeout_s": "leave it out: a body has 60 s to arrive",
    "keep_alive_timeout_s": "leave it out: idle connections are closed after 75 s",
    "cors_allow_headers": "leave it out: pages of other sites may send OpenAI's client's headers",
    "cors_allow_header": "leave it out: pages of other sites may send OpenAI's client's headers",
    "cors_allow_credentials": "leave it out: keys are sent as headers, and cookies are not read",
    "keep_actors": "leave it out: stages and drafters on CPUs outlive a replica that dies",
    "request_router": "leave it out: prompts go where fewest tokens must be computed",
    "target_utilization": "leave it out: a pool's server works 0.7 of the time",
    "look_back_period_s": "leave it out: a pool's load is averaged over 30 s",
    "upscale_delay_s": "leave it out: a pool starts servers that were needed for 10 s",
    "downscale_delay_s": "leave it out: a pool stops servers that were not needed for 120 s",
    **dict.fromkeys(
        (
            "max_answers",
            "max_messages",
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
    "max_guesses": "leave it out: a step has at most 15 guesses",
    "forward_first": "leave it out: the backward guess is first; profile: paper has it last",
    "explore_when": "leave it out: the pool explores below 0.1, as in the paper's text",
    "explore_top_k": "leave it out: it is 8, and 64 with profile: paper",
    "seed_from_prompt": "leave it out: the prompt is learned, but not with profile: paper",
    "learn_committed": "leave it out: the answer is learned, but not with profile: paper",
    "sub_ngrams": "leave it out: shorter prefixes are learned, too",
    "keep_prefixes": "leave it out: the longest one is a guess; profile: paper keeps them",
    "forward": "leave it out: both dictionaries guess",
    "backward": "leave it out: both dictionaries guess",
    "pool_from_prompt": "leave it out, and use prompt_lookup for n-grams of the text",
    "tree": "leave it out: suffix drafts trees",
    "share": "leave it out: requests of one namespace and cache salt share a table",
    "context_len": "leave it out: the last 16 tokens are looked up",
    "min_match_len": "leave it out: matches of two tokens or more are proposed",
    "rule": "leave it out, or use profile: paper for REST's",
    "coupled": "leave it out: continuations are ranked with the noise, but not by profile: paper",
    "tree_size": "leave it out: a head's tree is as large as brings most tokens a second",
    "tree_acceptance": "leave it out: acceptance by rank is learned",
    "draws": "leave it out: static trees are draws without replacement",
    "weighs_confidence": "leave it out: confidence ends drafts, see min_confidence",
    "branch": "use tree: dynamic, which branches where it pays",
    "confidence_threshold": "leave it out: it is learned, from 0.4 on",
    "schedule": "use stop: goodput, which goes by measured times",
    "prefix_cache": "leave it out: requests share the KV of equal prefixes",
    "compile": "leave it out: a model drafter on a CPU uses the C++ kernels",
    "max_tokens": "leave it out: a head keeps the latest 8,192 tokens",
    "server": "use transport: grpc and address: [host:port, ...] of drafter servers",
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
    ("corpus", "--histogram"): "the quartiles are printed, and --report has them",
    ("bench", "--fixed-nodes"): "--tree-nodes N --node-budget full verifies N draft tokens always",
    ("dashboard", "--ray-llm"): "leave it out: draftline's dashboard is one of its own",
    ("bench", "--token-map"): "leave it out: heads draft all tokens of their output head",
    ("doctor", "--address"): "run it on a node of the cluster, or set RAY_ADDRESS",
}
# Values of a key, of any section.
REMOVED_VALUES: Mapping[tuple[str, str], str] = {
    **{("acceptance", rule): "use rejection" for rule in ("block", "traversal", "k_seq")},
    ("stop", "schedule"): "use goodput, which goes by measured times",
    ("profile", "between"): "use paper or draftline; the rows between are in benchmarks/results",
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
