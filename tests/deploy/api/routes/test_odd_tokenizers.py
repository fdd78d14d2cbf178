"""Forms, calls, log-probabilities and token ids with odd tokenizers, over a real engine."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from jsonschema import Draft202012Validator
from support.servers.api_in_process import serving, streamed_choices
from support.tools.odd_tokenizers import ODD, with_gaps
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
SIZES = {"max_model_len": 2000, "kv_cache_tokens": 8192}
SCHEMA = {
    "$defs": {
        "Cat": {
            "type": "object",
            "properties": {
                "cat": {"enum": [1, "ab c"]},
                "next": {"anyOf": [{"const": None}, {"const": {"a": "{"}}]},
            },
            "required": ["cat", "next"],
        }
    },
    "$ref": "#/$defs/Cat",
}
CLOSED = {**SCHEMA["$defs"]["Cat"], "additionalProperties": False}
FORMS: list[tuple[dict[str, Any], str]] = [
    ({"regex": "(ab|cat){2} ?[0-9]"}, r"(ab|cat){2} ?[0-9]"),
    ({"choice": ["abc cat", "a\x7fb", "é世"]}, "abc cat|a\x7fb|é世"),
    ({"grammar": 'start: "{" call "}]"\ncall: "abc" | /c+/'}, r"\{(abc|c+)\}\]"),
]
WAYS = [{"stream": stream, "speculative": {"enabled": drafted}}
        for stream in (False, True) for drafted in (False, True)]  # fmt: skip


def saved(folder: Path, tokenizer: PreTrainedTokenizerFast, head: int) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=head, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=2048,
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id, tie_word_embeddings=True,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


async def choice_of(client: httpx.AsyncClient, route: str, body: dict[str, Any]) -> dict[str, Any]:
    """The choice of an answer; of a stream its text, log-probabilities and arguments, joined."""
    response = await client.post(route, json=body)
    assert response.status_code == 200, response.text
    if not body["stream"]:
        return dict(response.json()["choices"][0])
    chunks = streamed_choices(response)
    deltas = [chunk.get("delta", {}) for chunk in chunks]
    calls = [call["function"] for delta in deltas for call in delta.get("tool_calls") or []]
    parts = [part for chunk in chunks for part in (chunk["logprobs"] or {}).get("content") or []]
    return {
        "text": "".join(chunk.get("text") or "" for chunk in chunks),
        "logprobs": {"content": parts},
        "finish_reason": chunks[-1]["finish_reason"],
        "message": {
            "content": "".join(delta.get("content") or "" for delta in deltas),
            "tool_calls": [
                {"function": {"arguments": "".join(call.get("arguments") or "" for call in calls)}}
            ],
        },
    }


@pytest.mark.parametrize("name", ODD)
async def test_every_form_and_log_probabilities(name: str, tmp_path: Path) -> None:
    make, head = ODD[name]
    async with serving(saved(tmp_path, make(), head), **SIZES) as client:
        sampling = {"max_tokens": 120, "temperature": 1.0, "seed": 5}
        for form, expected in FORMS:
            texts = set()
            for way in WAYS:
                body = {"prompt": "ab cat", "structured_outputs": form, **sampling, **way}
                choice = await choice_of(client, COMPLETIONS, body)
                assert choice["finish_reason"] == "stop"
                texts.add(choice["text"])
            assert len(texts) == 1
            assert re.fullmatch(expected, texts.pop()), form
        ask = {"messages": [{"role": "user", "content": "ab cat"}], "logprobs": True, **sampling}
        schema = {"type": "json_schema", "json_schema": {"name": "s", "schema": CLOSED}}
        answers = set()
        for way in WAYS:
            choice = await choice_of(client, CHATS, {**ask, **way, "response_format": schema})
            text = choice["message"]["content"]
            Draft202012Validator(CLOSED).validate(json.loads(text))
            parts = [bytes(part["bytes"] or ()) for part in choice["logprobs"]["content"]]
            # The end of the sequence has a spelling, but no text.
            assert b"".join(parts[:-1]).decode() == text
            answers.add(text)
        assert len(answers) == 1


@pytest.mark.parametrize("name", ODD)
async def test_forced_calls_with_a_composite_root(name: str, tmp_path: Path) -> None:
    make, head = ODD[name]
    tool = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
    async with serving(saved(tmp_path, make(), head), **SIZES) as client:
        found = set()
        for way in WAYS:
            body = {
                "messages": [{"role": "user", "content": "ab"}], "tools": [tool], "seed": 3,
                "tool_choice": {"type": "function", "function": {"name": "f"}}, **way,
            }  # fmt: skip
            choice = await choice_of(client, CHATS, body)
            (call,) = choice["message"]["tool_calls"]
            found.add(call["function"]["arguments"])
        assert len(found) == 1
        Draft202012Validator(CLOSED).validate(json.loads(found.pop()))


async def test_ids_that_exist_are_known_and_no_others(tmp_path: Path) -> None:
    tokenizer = with_gaps()
    known = sorted(tokenizer.get_vocab().values())
    assert known[-1] >= len(tokenizer)
    async with serving(saved(tmp_path, tokenizer, 320), **SIZES) as client:
        response = await client.post("/detokenize", json={"tokens": known})
        assert response.json() == {"prompt": tokenizer.decode(known)}
        for unknown in (0, 110, 199, known[-1] + 1, 319, 320, 2**31 - 1):
            response = await client.post("/detokenize", json={"tokens": [known[0], unknown]})
            assert response.status_code == 400
            error = response.json()["error"]
            assert error["param"] == "tokens"
            assert str(unknown) in error["message"]
        spelled = await client.post("/tokenize", json={"prompt": "cat", "return_token_strs": True})
        assert spelled.json()["token_strs"] == ["cat"]
        ids = tokenizer.encode("ab cat")
        assert min(ids) >= len(tokenizer)
        for body in ({"prompt": ids}, {"prompt": "ab cat"}):
            body |= {"echo": True, "max_tokens": 3, "temperature": 0, "logprobs": 1}
            choice = (await client.post(COMPLETIONS, json=body)).json()["choices"][0]
            assert choice["text"].startswith("ab cat")
            assert choice["logprobs"]["tokens"][:3] == ["ab", " ", "cat"]
        # The model has rows for ids without a token; they have no text that could be echoed.
        gap = {"prompt": [*ids, 110], "max_tokens": 1}
        assert (await client.post(COMPLETIONS, json=gap)).status_code == 200
        for body in (gap | {"echo": True}, {"prompt": [*ids, 320], "max_tokens": 1}):
            response = await client.post(COMPLETIONS, json=body)
            assert response.status_code == 400
            assert response.json()["error"]["param"].startswith("prompt")
