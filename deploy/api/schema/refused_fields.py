"""Fields of other servers' APIs that draftline knows and does not support, with the values that
change nothing.

Such a field is accepted with a neutral value only: nothing a client asks for is silently ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from ..errors import bad_request


class Refused(NamedTuple):
    """Why a field is refused, and its neutral values beside null."""

    reason: str
    neutral: tuple[Any, ...] = ()


ANYWHERE_REFUSED: dict[str, Refused] = {
    "metadata": Refused("nothing is kept that it could label", ({},)),
    "service_tier": Refused(
        "there is one tier; priority orders requests", ("auto", "default", "standard")
    ),
    "use_beam_search": Refused("beams have no speculative form here", (False,)),
    "length_penalty": Refused("it belongs to beam search", (1,)),
    "early_stopping": Refused("it belongs to beam search", (False,)),
    "logits_processors": Refused("code of a client is not run; see logit_bias", ([],)),
    "repetition_detection": Refused("see frequency_penalty"),
    "thinking_token_budget": Refused("see max_tokens"),
    "prompt_embeds": Refused("prompts are texts or token ids"),
    "logprob_token_ids": Refused("see logprobs", ([],)),
    "return_tokens_as_token_ids": Refused("see return_token_ids", (False,)),
    "truncation_side": Refused("the oldest tokens are cut", ("left",)),
    # Tokenizers of the Rust library, which all models here have, put no spaces there.
    "spaces_between_special_tokens": Refused("it has no effect", (True, False)),
    "request_id": Refused("send the header x-request-id"),
    "kv_transfer_params": Refused("KV stays in this server", ({},)),
    "ec_transfer_params": Refused("no encoder runs here", ({},)),
    "vllm_xargs": Refused("there are no plugins", ({},)),
    "guided_json": Refused("send structured_outputs.json"),
    "guided_regex": Refused("send structured_outputs.regex"),
    "guided_choice": Refused("send structured_outputs.choice"),
    "guided_grammar": Refused("send structured_outputs.grammar"),
    "guided_decoding_backend": Refused("there is one"),
    "guided_whitespace_pattern": Refused("send structured_outputs.regex"),
    "regex": Refused("send structured_outputs.regex"),
    "ebnf": Refused("send structured_outputs.grammar"),
    "json_schema": Refused("send structured_outputs.json or response_format"),
    "stop_regex": Refused("see stop", ([],)),
    "no_stop_trim": Refused("send include_stop_str_in_output", (False,)),
    "lora_path": Refused("there are no adapters"),
    "return_hidden_states": Refused("hidden states stay in the model", (False,)),
}

COMPLETION_REFUSED: dict[str, Refused] = ANYWHERE_REFUSED | {
    "suffix": Refused("the model continues texts, it does not fill them in", ("",)),
}

CHAT_REFUSED: dict[str, Refused] = ANYWHERE_REFUSED | {
    "functions": Refused("send tools", ([],)),
    "function_call": Refused("send tool_choice", ("none", "auto")),
    "modalities": Refused("answers are text", (["text"],)),
    "audio": Refused("answers are text"),
    "prediction": Refused("drafters propose from the text itself"),
    "reasoning_effort": Refused("see chat_template_kwargs"),
    "verbosity": Refused("see max_tokens", ("medium",)),
    "web_search_options": Refused("nothing is searched"),
    "moderation": Refused("nothing is moderated"),
    "echo": Refused("send continue_final_message", (False,)),
    "add_special_tokens": Refused("the chat template writes them", (False,)),
    "mm_processor_kwargs": Refused("prompts are text", ({},)),
    "media_io_kwargs": Refused("prompts are text", ({},)),
}

# They identify the caller or hint at caching, and never change an answer.
IGNORED = (
    "user",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "prompt_cache_options",
)


def drop_refused(body: Mapping[str, Any], refused: Mapping[str, Refused]) -> dict[str, Any]:
    """`body` without ignored and neutral fields; 400 naming a field that asks for something.

    null is neutral for all of them.
    """
    kept = {}
    for name, value in body.items():
        if name in IGNORED:
            continue
        if name not in refused:
            kept[name] = value
        elif value is not None and not any(_same(value, item) for item in refused[name].neutral):
            raise bad_request(name, f"not supported: {_advice(refused[name])}")
    return kept


def _same(value: Any, item: Any) -> bool:
    # True == 1 in Python, and `logprobs: 0` does not mean `logprobs: false`.
    return isinstance(value, bool) == isinstance(item, bool) and value == item


def _advice(refused: Refused) -> str:
    allowed = " or ".join(repr(value) for value in refused.neutral)
    return f"{refused.reason}; leave it out" + (f" or send {allowed}" if allowed else "")
