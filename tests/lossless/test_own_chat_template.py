"""Drafters that read chats by a template of their own: texts stay the target's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from draftline import DrafterConfig, Engine, EngineConfig, SamplingParams
from draftline.core.chat_turns import ChatTurn
from draftline.core.request.sampling_params import RequestOptions
from draftline.models.text.tokenizer import load_tokenizer

PLAIN = RequestOptions(speculative=False)
# Its prompts share no word with the target's, but for the messages; one message it refuses.
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if 'trap' in m.content %}"
    "{{ raise_exception(m.content) }}{% endif %}<<{{ m.role }}>> {{ m.content }}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}<<assistant>>\n\n{% endif %}"
)
CHATS = (
    (ChatTurn("user", "Read the lines of a file."),),
    (ChatTurn("system", "Höhe, \U0001f600"), ChatTurn("user", "Sort a list of names\n\n\n")),
    (ChatTurn("user", "a trap"),),
    (ChatTurn("user", "one"), ChatTurn("assistant", "two"), ChatTurn("user", "import os")),
)
WAYS: dict[str, dict[str, Any]] = {
    "slem, in process": {"vocabulary": "slem"},
    "tli, in process": {"vocabulary": "tli"},
    "slem tree, grpc": {"vocabulary": "slem", "tree": "dynamic", "transport": "grpc"},
    "slem, pool": {"vocabulary": "slem", "transport": "grpc", "servers": 2},
}

# A server's chats and a tree's are those of another way, too.
LONG = ("slem tree, grpc",)


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("templates") / "own.jinja"
    file.write_text(TEMPLATE, "utf-8")
    return str(file)


@pytest.mark.net
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "way",
    [pytest.param(way, marks=pytest.mark.full if way in LONG else ()) for way in WAYS],
)
def test_texts_are_those_of_plain_decoding(
    way: str, template: str, caplog: pytest.LogCaptureFixture
) -> None:
    drafter = DrafterConfig(
        kind="model", model="demo-drafter-other-vocab", chat_template=template, **WAYS[way]
    )
    config = EngineConfig(
        model="demo", node_budget="full", draft_deadline_ms=5000, drafters=(drafter,)
    )
    prompts = [_prompt(chat) for chat in CHATS]
    with Engine(config) as engine:
        for temperature in (0.0, 0.8):
            params = SamplingParams(max_tokens=24, temperature=temperature, seed=3, ignore_eos=True)
            for prompt, chat in zip(prompts, CHATS, strict=True):
                [plain] = engine.generate([prompt], params, PLAIN)
                [drafted] = engine.generate([prompt], params, replace(RequestOptions(), chat=chat))
                assert drafted.token_ids == plain.token_ids
        [stats] = engine.stats().drafters
    assert stats.proposals > 0
    # A busy machine's servers may miss a deadline.
    assert stats.errors == 0 or "transport" in WAYS[way]
    # Wherever it runs, it was told the chats, and tells nothing of them.
    assert "event=chat_template_refused" in caplog.text
    assert "a trap" not in caplog.text


def _prompt(chat: tuple[ChatTurn, ...]) -> str:
    messages = [turn._asdict() for turn in chat]
    return str(
        load_tokenizer("demo").apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
    )
