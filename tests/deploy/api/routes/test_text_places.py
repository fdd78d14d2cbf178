"""`text_offset` is a place in the text that a client has: whole, streamed, with any drafters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from draftline.core.request.output import TokenLogProb
from draftline.deploy.api.output.completions import CompletionLogprobs
from draftline.models.text.tokenizer import TokenBytes
from hypothesis import given
from hypothesis import strategies as st
from support.fakes.fake_engine import FakeEngine, byte_tokenizer
from support.servers.api_in_process import serving, streamed_choices
from support.tools.tiny_tokenizers import unigram
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerBase

COMPLETIONS = "/v1/completions"
SIZES = {"max_model_len": 200, "kv_cache_tokens": 1024}


def entries(bytes_of: TokenBytes, ids: list[int], text: str, **options: Any) -> list[int]:
    body = CompletionLogprobs(
        bytes_of, [0], options.pop("echo", None), skip_special_tokens=True, **options
    )
    tokens = [TokenLogProb(token, -1.0) for token in ids]
    return body.add(tokens, text, is_last=True)["text_offset"]


def with_words(tokens: list[str]) -> tuple[TokenBytes, list[int]]:
    """Ids of bytes (`<0xF0>`) and words in a byte-level vocabulary that holds the words."""
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([token for token in tokens if not token.startswith("<0x")])
    byte_ids = {TokenBytes(tokenizer)(index)[0]: index for index in range(256)}
    ids = [
        byte_ids[int(token[3:5], 16)]
        if token.startswith("<0x")
        else tokenizer.convert_tokens_to_ids(token)
        for token in tokens
    ]
    return TokenBytes(tokenizer), ids


def test_tokens_of_one_character_all_begin_where_it_does() -> None:
    bytes_of, ids = with_words(["<0xF0>", "<0x9F>", "<0x99>", "<0x82>", "x1", "yz"])
    assert entries(bytes_of, ids, "🙂x1yz") == [0, 0, 0, 0, 1, 3]


def test_bytes_that_form_no_character_take_the_place_of_their_replacement() -> None:
    bytes_of, ids = with_words(["<0xF0>", "<0x9F>", "x1", "<0x80>", "yz"])
    assert entries(bytes_of, ids, "\ufffdx1\ufffdyz") == [0, 0, 1, 3, 4]


def test_tokens_of_a_text_that_was_cut_stand_at_its_end() -> None:
    bytes_of, ids = with_words(["x1", "yz", "x1"])
    assert entries(bytes_of, ids, "x1y") == [0, 2, 3]


async def test_a_special_token_before_an_echoed_prompt_has_no_width() -> None:
    engine = FakeEngine("ef")
    engine.tokenizer.add_special_tokens({"bos_token": "<s>"})
    bos = engine.tokenizer.bos_token_id
    bytes_of = TokenBytes(engine.tokenizer)
    ids = [bos, *engine.tokenizer.encode("hi", add_special_tokens=False)]
    answer = engine.tokenizer.encode("ef", add_special_tokens=False)
    tokens = [None, *(TokenLogProb(token, -1.0) for token in (*ids[1:], *answer))]

    def offsets(echo: str) -> list[int]:
        body = CompletionLogprobs(bytes_of, ids, echo, skip_special_tokens=True)
        return body.add(tokens, f"{echo}ef", is_last=True)["text_offset"]

    assert offsets("hi") == [0, 0, 1, 2, 3]
    assert offsets("<s>hi") == [0, 3, 4, 5, 6]


@given(
    data=st.data(),
    text=st.text("aé世🙂\ufffd", max_size=12),
    cut=st.integers(0, 4),
)
def test_parts_tell_the_same_as_the_whole(data: st.DataObject, text: str, cut: int) -> None:
    tokenizer = byte_tokenizer()
    bytes_of = TokenBytes(tokenizer)
    ids = tokenizer.encode(text)[: len(text.encode()) - cut]
    said = tokenizer.decode(ids)
    # A stop text may have cut the end, and what may become one comes late.
    said = said[: data.draw(st.integers(0, len(said)))]
    expected = entries(bytes_of, ids, said)
    body = CompletionLogprobs(bytes_of, [0], None, skip_special_tokens=True)
    found: list[int] = []
    while ids:
        count = data.draw(st.integers(1, len(ids)))
        size = data.draw(st.integers(0, len(said)))
        tokens, ids = [TokenLogProb(token, -1.0) for token in ids[:count]], ids[count:]
        part, said = (said[:size], said[size:]) if ids else (said, "")
        found += body.add(tokens, part, is_last=not ids)["text_offset"]
    assert found == expected


def tiny(folder: Path, tokenizer: PreTrainedTokenizerBase) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
        bos_token_id=None, eos_token_id=None, tie_word_embeddings=True,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


async def answered(client: httpx.AsyncClient, *, stream: bool, **fields: Any) -> dict[str, Any]:
    body = {"prompt": "aé🙂 the cat", "max_tokens": 40, "logprobs": 1, "stream": stream}
    response = await client.post(COMPLETIONS, json=body | fields)
    assert response.status_code == 200, response.text
    if not stream:
        return dict(response.json()["choices"][0])
    chunks = streamed_choices(response)
    lists = {
        name: [value for chunk in chunks for value in chunk["logprobs"][name]]
        for name in chunks[0]["logprobs"]
    }
    return chunks[-1] | {"text": "".join(chunk["text"] for chunk in chunks), "logprobs": lists}


@pytest.mark.parametrize("tokenizer", ["byte_level", "byte_fallback"])
async def test_whole_streamed_drafted_and_not_are_the_same(tokenizer: str, tmp_path: Path) -> None:
    """Of random models, whose answers are full of bytes that form no character."""
    folder = tiny(tmp_path, byte_tokenizer() if tokenizer == "byte_level" else unigram())
    async with serving(folder, **SIZES) as client:
        for temperature, echo in ((0.0, False), (1.0, True)):
            fields = {"temperature": temperature, "seed": 4, "echo": echo}
            plain = await answered(client, stream=False, **fields)
            # A stop text out of the answer itself.
            stop = plain["text"][-12:-8]
            for more in ({}, {"stop": [stop]}, {"stop": [stop], "min_tokens": 20}):
                await check_all_ways(client, fields | more)


async def check_all_ways(client: httpx.AsyncClient, fields: dict[str, Any]) -> None:
    expected = await answered(client, stream=False, **fields, speculative={"enabled": False})
    text, offsets = expected["text"], expected["logprobs"]["text_offset"]
    assert offsets == sorted(offsets)
    assert offsets[-1] <= len(text)
    for token, place in zip(expected["logprobs"]["tokens"], offsets, strict=True):
        if token != "</s>" and "\ufffd" not in token and place + len(token) <= len(text):
            # A text does not begin with the space that some tokenizers put before it.
            assert text.startswith(token if place else token.removeprefix(" "), place)
    for speculative, stream in ((False, True), (True, True), (True, False)):
        found = await answered(
            client, stream=stream, **fields, speculative={"enabled": speculative}
        )
        for name in ("text", "finish_reason", "stop_reason"):
            assert found.get(name) == expected.get(name), (name, fields, speculative, stream)
        for name in ("tokens", "text_offset"):
            assert found["logprobs"][name] == expected["logprobs"][name]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_special_token_as_stop_text_ends_the_answer(
    tmp_path: Path, *, stream: bool
) -> None:
    tokenizer = unigram()
    word, end = tokenizer.convert_tokens_to_ids(["e", "</s>"])
    fields = {"temperature": 1.0, "seed": 1, "allowed_token_ids": [word, end], "stop": ["</s>"]}
    async with serving(tiny(tmp_path, tokenizer), **SIZES) as client:
        free = await answered(client, stream=stream, **{**fields, "stop": []})
        assert free["finish_reason"] == "length"
        tokens = free["logprobs"]["tokens"]
        first, second = [index for index, token in enumerate(tokens) if token == "</s>"][:2]
        for least, place in ((0, first), (first + 1, second)):
            for speculative in (True, False):
                found = await answered(
                    client, stream=stream, **fields, min_tokens=least,
                    speculative={"enabled": speculative},
                )  # fmt: skip
                assert (found["finish_reason"], found["stop_reason"]) == ("stop", "</s>")
                assert found["logprobs"]["tokens"] == tokens[: place + 1]
                assert found["text"] == "".join(tokens[: place + 1]).replace("</s>", "")
