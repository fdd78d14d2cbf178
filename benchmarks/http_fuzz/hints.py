"""Strategies for fields by their names: what makes most requests ones that generate."""

from __future__ import annotations

from hypothesis import strategies as st

from . import hard
from .schema import Strategy
from .values import MARKER, short_texts, texts

ids = st.lists(st.integers(0, 300), min_size=1, max_size=6)
contents = st.one_of(
    texts,
    st.just(MARKER),
    st.lists(texts.map(lambda text: {"type": "text", "text": text}), min_size=1, max_size=3),
)
calls = st.lists(
    st.builds(
        lambda name, arguments: {
            "id": "call_1",
            "type": "function",
            "function": {"name": name, "arguments": arguments},
        },
        hard.tool_names,
        st.sampled_from(["{}", "", "{", f'{{"a": "{MARKER}"}}', "[" * 2000, "NaN", "null"]),
    ),
    max_size=2,
)
message = st.one_of(
    st.builds(
        lambda role, content: {"role": role, "content": content},
        st.sampled_from(["user", "user", "system", "assistant", "developer"]),
        contents,
    ),
    st.builds(
        lambda content, made: {"role": "assistant", "content": content, "tool_calls": made},
        contents | st.none(),
        calls,
    ),
    contents.map(lambda text: {"role": "tool", "tool_call_id": "call_1", "content": text}),
)
inputs = st.one_of(
    texts,
    st.lists(
        st.one_of(
            st.builds(
                lambda role, text: {"role": role, "content": text},
                st.sampled_from(["user", "system", "assistant"]),
                texts,
            ),
            hard.tool_names.map(
                lambda name: {
                    "type": "function_call", "call_id": "a", "name": name, "arguments": "{}"
                }
            ),
            texts.map(
                lambda text: {"type": "function_call_output", "call_id": "a", "output": text}
            ),
        ),
        min_size=1,
        max_size=4,
    ),
)  # fmt: skip
formats = st.one_of(
    st.just({"type": "json_object"}),
    hard.json_schemas.map(
        lambda schema: {"type": "json_schema", "name": "a", "schema": schema, "strict": True}
    ),
)
COMMON: dict[str, Strategy] = {
    "model": st.just("demo"),
    "prompt": hard.prompts,
    "messages": st.lists(message, min_size=1, max_size=4),
    "max_tokens": st.integers(0, 8),
    "max_completion_tokens": st.integers(1, 8),
    "min_tokens": st.integers(0, 8),
    "n": st.sampled_from([1, 1, 1, 2, 3, 20, 257]),
    "best_of": st.just(1),
    "temperature": st.sampled_from([0, 0.7, 1.0, 2.0]),
    "top_p": st.sampled_from([0.01, 0.1, 0.9, 1.0]),
    "top_k": st.sampled_from([-1, 0, 1, 5, 2**31 - 1]),
    "min_p": st.sampled_from([0.0, 0.05, 1.0]),
    "typical_p": st.sampled_from([0.2, 1.0]),
    "seed": st.sampled_from([-1, 0, 1, 2**31, 2**63 - 1]),
    "repetition_penalty": st.sampled_from([1e-3, 0.5, 1.0, 1.2, 2.0]),
    "presence_penalty": st.sampled_from([-2.0, 0.0, 2.0]),
    "frequency_penalty": st.sampled_from([-2.0, 0.0, 2.0]),
    "logprobs": st.sampled_from([True, False, 0, 2, 20, 21]),
    "top_logprobs": st.sampled_from([0, 2, 20]),
    "prompt_logprobs": st.sampled_from([0, 1, 20]),
    "truncate_prompt_tokens": st.sampled_from([-1, 1, 20, 2**31 - 1]),
    "stop": hard.stops,
    "stop_token_ids": ids,
    "allowed_token_ids": ids | st.just(list(range(200))),
    "banned_token_ids": ids | st.just(list(range(500))),
    "bad_words": st.lists(short_texts | st.just(MARKER), max_size=4),
    "logit_bias": hard.logit_biases,
    "structured_outputs": hard.structured_outputs,
    "response_format": hard.response_formats,
    "tools": hard.tools,
    "tool_choice": hard.tool_choices,
    "schema": hard.json_schemas,
    "parameters": hard.json_schemas,
    "priority": st.integers(0, 3),
    "tokens": st.lists(st.integers(0, 600), max_size=30) | st.just([5] * 20_000),
    "drafters": st.lists(
        st.sampled_from(["prompt_lookup", "suffix", "spectra", MARKER]), max_size=3
    ),
}
# As `/v1/responses` spells them.
RESPONSES: dict[str, Strategy] = {
    "input": inputs,
    "max_output_tokens": st.integers(1, 8),
    "tools": hard.flat_tools,
    "tool_choice": hard.flat_tool_choices,
    "text": formats.map(lambda form: {"format": form}),
    "n": st.just(1),
    "include": st.just(["message.output_text.logprobs"]),
    "store": st.just(False),
    "metadata": st.dictionaries(short_texts, short_texts, max_size=2),
}
