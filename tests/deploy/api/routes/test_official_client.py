"""The official client of the OpenAI API at a served model, with speculation and without.

Texts must be equal, and what makes them must be used: every drafted run has accepted drafts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import openai
import pytest
from draftline.models.load.bundled import demo_path
from draftline.models.text.tokenizer import bad_word_ids, load_tokenizer
from support.servers.served_model import served_model

pytestmark = [pytest.mark.net, pytest.mark.xdist_group("official_client")]

MODEL = "demo"
PROMPT = "def read_json(path):\n    "
MESSAGES: Any = [{"role": "user", "content": "write a function that reads a file"}]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "kind": {"enum": ["function", "class"]},
        "numbers": {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 3},
    },
    "required": ["name", "kind", "numbers"],
    "additionalProperties": False,
}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA}}
TOOL: Any = {
    "type": "function",
    "function": {"name": "describe", "description": "Describe a thing", "parameters": SCHEMA},
}
# Drafts are verified whatever they cost.
SETTINGS = {
    "model": MODEL,
    "max_model_len": 1024,
    "node_budget": "full",
    "drafters": [{"kind": "spectra"}, {"kind": "model", "model": "demo-drafter"}],
}
PLAIN = {"enabled": False}
DRAFTED = {"enabled": True}
SAMPLING = [{"temperature": 0}, {"temperature": 0.9, "seed": 5, "top_p": 0.95}]


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    settings = tmp_path_factory.mktemp("settings") / "settings.yaml"
    settings.write_text(json.dumps(SETTINGS))
    arguments = ["--config", str(settings), "--ignore-unknown-fields", "--api-processes", "0"]
    with (
        served_model(*arguments) as served,
        openai.OpenAI(base_url=served.url, api_key="none", max_retries=0) as client,
    ):
        yield client


def body(speculative: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"speculative": speculative, **more}


def num_accepted(answer: Any) -> int:
    block = answer.model_extra["metrics"]["speculative_decoding"]
    return block["num_accepted_draft_tokens"]


@pytest.mark.parametrize("sampling", SAMPLING)
def test_completions(client: openai.OpenAI, sampling: dict[str, Any]) -> None:
    def complete(speculative: dict[str, Any], **more: Any) -> Any:
        return client.completions.create(
            model=MODEL, prompt=PROMPT, max_tokens=32, logprobs=2, **sampling, **more,
            extra_body=body(speculative, return_token_ids=True),
        )  # fmt: skip

    plain, drafted = complete(PLAIN), complete(DRAFTED)
    one, other = plain.choices[0], drafted.choices[0]
    assert one.text == other.text
    assert one.model_extra["token_ids"] == other.model_extra["token_ids"]
    assert one.logprobs.tokens == other.logprobs.tokens
    assert one.logprobs.token_logprobs == pytest.approx(other.logprobs.token_logprobs, abs=1e-3)
    assert num_accepted(plain) == 0 < num_accepted(drafted)
    for speculative in (PLAIN, DRAFTED):
        chunks = list(complete(speculative, stream=True))
        assert "".join(chunk.choices[0].text for chunk in chunks) == one.text
        ids = [token for chunk in chunks for token in chunk.choices[0].model_extra["token_ids"]]
        assert ids == one.model_extra["token_ids"]
        told = [token for chunk in chunks for token in chunk.choices[0].logprobs.tokens]
        assert told == one.logprobs.tokens


@pytest.mark.parametrize("sampling", SAMPLING)
def test_chats_with_log_probabilities(client: openai.OpenAI, sampling: dict[str, Any]) -> None:
    def chat(speculative: dict[str, Any], **more: Any) -> Any:
        return client.chat.completions.create(
            model=MODEL, messages=MESSAGES, max_completion_tokens=24, logprobs=True,
            top_logprobs=2, **sampling, **more, extra_body=body(speculative),
        )  # fmt: skip

    plain, drafted = chat(PLAIN), chat(DRAFTED)
    text = plain.choices[0].message.content
    assert drafted.choices[0].message.content == text
    tokens = [one.token for one in plain.choices[0].logprobs.content]
    assert [one.token for one in drafted.choices[0].logprobs.content] == tokens
    for speculative in (PLAIN, DRAFTED):
        chunks = list(chat(speculative, stream=True))
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
        told = [one.token for part in chunks for one in part.choices[0].logprobs.content]
        assert told == tokens


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("strict", [True, False])
def test_a_form(client: openai.OpenAI, sampling: dict[str, Any], strict: bool) -> None:
    form: Any = {**FORMAT, "json_schema": {**FORMAT["json_schema"], "strict": strict}}

    def chat(speculative: dict[str, Any], **more: Any) -> Any:
        return client.chat.completions.create(
            model=MODEL, messages=MESSAGES, max_completion_tokens=120, response_format=form,
            **sampling, **more, extra_body=body(speculative),
        )  # fmt: skip

    text = chat(PLAIN).choices[0].message.content
    assert set(json.loads(text)) == set(SCHEMA["required"])
    assert chat(DRAFTED).choices[0].message.content == text
    for speculative in (PLAIN, DRAFTED):
        chunks = list(chat(speculative, stream=True))
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text


@pytest.mark.parametrize("sampling", SAMPLING)
def test_a_call_that_must_be_made(client: openai.OpenAI, sampling: dict[str, Any]) -> None:
    def chat(speculative: dict[str, Any], **more: Any) -> Any:
        return client.chat.completions.create(
            model=MODEL, messages=MESSAGES, max_completion_tokens=150, tools=[TOOL],
            tool_choice="required", parallel_tool_calls=False, **sampling, **more,
            extra_body=body(speculative),
        )  # fmt: skip

    (call,) = chat(PLAIN).choices[0].message.tool_calls
    assert call.function.name == "describe"
    assert set(json.loads(call.function.arguments)) == set(SCHEMA["required"])
    (drafted,) = chat(DRAFTED).choices[0].message.tool_calls
    assert drafted.function == call.function
    for speculative in (PLAIN, DRAFTED):
        deltas = [
            delta
            for chunk in chat(speculative, stream=True)
            for delta in chunk.choices[0].delta.tool_calls or ()
        ]
        assert "".join(delta.function.arguments or "" for delta in deltas) == (
            call.function.arguments
        )


@pytest.mark.parametrize("sampling", SAMPLING)
def test_bad_words(client: openai.OpenAI, sampling: dict[str, Any]) -> None:
    def complete(speculative: dict[str, Any], **more: Any) -> Any:
        return client.completions.create(
            model=MODEL, prompt=PROMPT, max_tokens=32, **sampling,
            extra_body=body(speculative, **more),
        )  # fmt: skip

    tokenizer = load_tokenizer(demo_path(MODEL))
    free = complete(DRAFTED, return_token_ids=True).choices[0].model_extra["token_ids"]
    pairs = [tuple(free[start : start + 2]) for start in range(len(free) - 1)]
    # Of all pairs those that the tokenizer spells as the answer did.
    words = {pair: tokenizer.decode(pair) for pair in pairs}
    words = {pair: word for pair, word in words.items() if pair in bad_word_ids([word], tokenizer)}
    pair, word = next(iter(words.items()))
    drafted = complete(DRAFTED, bad_words=[word], return_token_ids=True)
    plain = complete(PLAIN, bad_words=[word])
    assert drafted.choices[0].text == plain.choices[0].text
    ids = drafted.choices[0].model_extra["token_ids"]
    assert pair not in pairwise(ids)
    assert num_accepted(drafted) > 0


@pytest.mark.parametrize("sampling", SAMPLING)
def test_responses(client: openai.OpenAI, sampling: dict[str, Any]) -> None:
    wanted = {name: value for name, value in sampling.items() if name != "seed"}
    more = {"seed": sampling["seed"]} if "seed" in sampling else {}

    def respond(speculative: dict[str, Any], **options: Any) -> Any:
        return client.responses.create(
            model=MODEL, input="write a function that reads a file", max_output_tokens=24,
            include=["message.output_text.logprobs"], **wanted, **options,
            extra_body=body(speculative, **more),
        )  # fmt: skip

    plain, drafted = respond(PLAIN), respond(DRAFTED)
    assert plain.output_text == drafted.output_text
    chat = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_completion_tokens=24, **sampling
    )
    assert chat.choices[0].message.content == plain.output_text
    for speculative in (PLAIN, DRAFTED):
        events = list(respond(speculative, stream=True))
        assert [event.sequence_number for event in events] == list(range(len(events)))
        deltas = [one.delta for one in events if one.type == "response.output_text.delta"]
        assert "".join(deltas) == plain.output_text
        assert events[-1].response.output_text == plain.output_text


def test_responses_have_forms_and_calls(client: openai.OpenAI) -> None:
    form: Any = {"format": {"type": "json_schema", "name": "thing", "schema": SCHEMA}}
    texts = {
        client.responses.create(
            model=MODEL, input="a thing", text=form, temperature=0, max_output_tokens=120,
            extra_body=body(speculative),
        ).output_text
        for speculative in (PLAIN, DRAFTED)
    }  # fmt: skip
    assert len(texts) == 1
    assert set(json.loads(texts.pop())) == set(SCHEMA["required"])
    tool: Any = {"type": "function", **TOOL["function"], "strict": False}
    answer = client.responses.create(
        model=MODEL, input="a thing", tools=[tool], temperature=0, max_output_tokens=150,
        tool_choice={"type": "function", "name": "describe"}, parallel_tool_calls=False,
    )  # fmt: skip
    (call,) = answer.output
    assert call.type == "function_call"
    again = client.responses.create(
        model=MODEL,
        input=[
            {"role": "user", "content": "a thing"},
            call.to_dict(),  # pyright: ignore[reportArgumentType]
            {"type": "function_call_output", "call_id": call.call_id, "output": "done"},
        ],
        max_output_tokens=4,
    )
    assert again.usage is not None
    assert again.usage.output_tokens > 0


def test_two_turns(client: openai.OpenAI) -> None:
    first = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_completion_tokens=16, temperature=0
    )
    message: Any = first.choices[0].message
    turn: Any = {"role": "user", "content": "and another"}
    second = client.chat.completions.create(
        model=MODEL, messages=[*MESSAGES, message, turn], max_completion_tokens=8
    )
    assert second.choices[0].message.content is not None
    dumped: Any = message.model_dump()
    client.chat.completions.create(
        model=MODEL, messages=[*MESSAGES, dumped, turn], max_completion_tokens=8
    )


@pytest.mark.parametrize("stream", [False, True])
def test_special_tokens_have_text_where_they_are_kept(client: openai.OpenAI, stream: bool) -> None:
    eos = load_tokenizer(demo_path("demo")).eos_token

    def text(**more: Any) -> str:
        found = client.completions.create(
            model=MODEL, prompt=PROMPT, max_tokens=2, temperature=0, stream=stream,
            logit_bias={"0": 100}, extra_body={"ignore_eos": True, **more},
        )  # fmt: skip
        return "".join(one.choices[0].text for one in (found if stream else [found]))

    assert eos is not None
    assert text() == text(skip_special_tokens=True) == ""
    assert text(skip_special_tokens=False) == eos * 2


def test_what_stopped_an_answer(client: openai.OpenAI) -> None:
    def complete(**more: Any) -> Any:
        return client.completions.create(
            model=MODEL, prompt=PROMPT, max_tokens=24, temperature=0, extra_body=more
        ).choices[0]

    free = complete()
    assert "stop_reason" not in free.model_extra
    stop = free.text[6:9]
    cut = complete(stop=[stop])
    assert cut.text == free.text[: free.text.index(stop)]
    assert cut.model_extra["stop_reason"] == stop
    assert complete(stop=[stop], include_stop_str_in_output=True).text == cut.text + stop
    ids = complete(return_token_ids=True).model_extra["token_ids"]
    assert complete(stop_token_ids=[ids[3]]).model_extra["stop_reason"] == ids[3]


def test_a_prompt_is_scored_alone(client: openai.OpenAI) -> None:
    def score(**more: Any) -> Any:
        return client.completions.create(
            model=MODEL, prompt=PROMPT, echo=True, logprobs=1, temperature=0, **more
        ).choices[0]

    alone, first = score(max_tokens=0), score(max_tokens=1)
    assert alone.text == PROMPT
    count = len(alone.logprobs.tokens)
    assert alone.logprobs.tokens == first.logprobs.tokens[:count]
    assert len(first.logprobs.tokens) == count + 1
    scores = alone.logprobs.token_logprobs
    assert scores[0] is None
    assert scores[1:] == pytest.approx(first.logprobs.token_logprobs[1:count], abs=1e-4)


def test_unknown_fields_are_left_out_where_the_server_is_told_so(client: openai.OpenAI) -> None:
    raw = client.completions.with_raw_response.create(
        model=MODEL, prompt=PROMPT, max_tokens=2, extra_body={"future": 1, "speculative": {"x": 2}}
    )
    assert raw.headers["x-draftline-ignored-fields"] == "future, speculative.x"
    answer: Any = raw.parse()
    assert answer.choices[0].finish_reason == "length"
