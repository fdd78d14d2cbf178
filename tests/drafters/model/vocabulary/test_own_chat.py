"""A drafter's own chat template: its prompt stays as the template wrote it, the answer follows."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from draftline.core.chat_turns import MAX_CHAT_CHARS, MAX_TURNS, ChatTurn, check_turns
from draftline.core.errors import ConfigError, RequestError
from draftline.core.proposals import Commit, DraftRequest, Query
from draftline.core.request.sampling_params import RequestOptions
from draftline.drafters.model.drafter import ModelDrafter, load_model_drafter
from draftline.drafters.model.options import ModelOptions
from draftline.drafters.model.vocabulary.mapped import IntersectionVocabulary
from draftline.drafters.model.vocabulary.overlap import map_vocabularies
from draftline.drafters.model.vocabulary.own_chat import NO_PROMPT, OwnChat, OwnPrompt
from draftline.drafters.model.vocabulary.retokenizer import Retokenizer, complete_len
from draftline.drafters.model.vocabulary.written import WrittenText
from draftline.models.load.model_info import read_model_info
from draftline.models.text.tokenizer import load_tokenizer
from hypothesis import given
from hypothesis import strategies as st
from support.tools.tiny_tokenizers import byte_level_bpe, single_bytes, unigram, vocabulary

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}[assistant]\n{% endif %}"
)
CHAT = (ChatTurn("system", "be brief"), ChatTurn("user", "a secret cat"))
KINDS: dict[str, Callable[[], Any]] = {
    "bpe": lambda: byte_level_bpe(other=True), "unigram": unigram, "bytes": single_bytes,
}  # fmt: skip
# Prompts that end in a special token, in a line's end and within a word.
ENDS = ("</s>", "[assistant]\n", "the answer: re")
PARTS = st.sampled_from(["the", " cat", "\n", "\n\n    ", "turn", " self", "höhe", " ", "_", "12"])


def request(ids: list[int], chat: tuple[ChatTurn, ...] = CHAT, **fields: Any) -> DraftRequest:
    prompt = np.array(ids, dtype=np.int32)
    return DraftRequest("r", prompt, fields.pop("prompt_len", len(ids)), 0.0, 1, chat=chat)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("end", ENDS)
@given(answer=st.lists(PARTS, max_size=12), split=st.integers(0, 12))
def test_the_answer_follows_a_prompt_that_never_changes(
    kind: str, end: str, answer: list[str], split: int
) -> None:
    target, own = byte_level_bpe(), KINDS[kind]()
    target_vocabulary, draft = vocabulary(target), vocabulary(own)
    prompt = own.encode(f"read this {end}", add_special_tokens=False)
    ids = target.encode("<user>read this</user>")
    said = [target_vocabulary.encode(part) for part in answer]
    begun = [token for part in said[:split] for token in part]
    text = WrittenText(
        draft, target_vocabulary, Retokenizer(draft), [*ids, *begun], OwnPrompt(prompt, len(ids))
    )
    for part in said[split:]:
        before = list(text.tokens)
        kept = text.extend(part)
        assert kept >= len(prompt)
        assert text.tokens[:kept] == before[:kept]
    assert text.tokens[: len(prompt)] == prompt
    whole = "".join(answer).encode()
    written = draft.bytes_of(text.tokens[len(prompt) :])
    # Some put a space before the first word behind a special token.
    assert written in (whole, b" " + whole)
    assert text.held == whole[complete_len(whole) :]
    # What drafts are encoded behind are the target's committed ids.
    assert text.committed == [*ids, *(token for part in said for token in part)][-16:]


def test_tli_reads_its_own_prompt_and_then_token_by_token() -> None:
    target, own = vocabulary(byte_level_bpe()), vocabulary(unigram())
    shared = map_vocabularies(own, target, len(own.surfaces), len(target.surfaces))
    chat = OwnChat(unigram(), len(own.surfaces), TEMPLATE)
    mapped = IntersectionVocabulary(shared, own, target, chat)
    assert mapped.reads_chat
    prompt, answer = target.encode("the question"), target.encode(" cat")
    text = mapped.text(request([*prompt, *answer], prompt_len=len(prompt)))
    expected = chat.tokens([turn._asdict() for turn in CHAT])
    assert text.tokens[: len(expected)] == expected
    assert own.bytes_of(text.tokens[len(expected) :]) == b" cat"
    told_nothing = mapped.text(request([*prompt, *answer], chat=()))
    assert own.bytes_of(told_nothing.tokens) == b"the question cat"


def test_a_template_s_special_tokens_are_the_drafter_s_own() -> None:
    own = unigram()
    ids = OwnChat(own, len(own), TEMPLATE).tokens([turn._asdict() for turn in CHAT])
    assert ids[0] == own.bos_token_id
    assert ids.count(own.eos_token_id) == len(CHAT)
    assert str(own.decode(ids, skip_special_tokens=True)).endswith("[assistant]\n")


@pytest.mark.parametrize(
    ("template", "size"),
    [
        ("{{ raise_exception('no ' + messages[1].content) }}", 10_000),
        ("{{ messages[7].content.parts }}", 10_000),
        ("{% if unclosed %}", 10_000),
        # Nothing at all, and tokens that the model has no row for.
        ("", 10_000),
        (TEMPLATE, 40),
    ],
)
def test_a_chat_that_a_template_refuses_is_read_as_text(
    template: str, size: int, caplog: pytest.LogCaptureFixture
) -> None:
    chat = OwnChat(unigram(), size, template, "tiny")
    with caplog.at_level(logging.INFO):
        assert [chat.prompt(request([1, 2])) for _ in range(3)] == [NO_PROMPT] * 3
    assert [record.getMessage() for record in caplog.records] == [
        "drafter=tiny event=chat_template_refused"
    ]


def test_a_template_that_never_ends_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    module = "draftline.drafters.model.vocabulary.own_chat"
    monkeypatch.setattr(f"{module}.RENDER_TIMEOUT_S", 0.05)
    loop = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    chat = OwnChat(unigram(), 10_000, loop)
    assert chat.prompt(request([1], tuple(CHAT[:1]) * 40)) == NO_PROMPT


def other_drafter(**options: Any) -> ModelDrafter:
    given = ModelOptions(device="cpu", **{"vocabulary": "slem", **options})
    target = read_model_info("demo")
    return load_model_drafter("demo-drafter-other-vocab", "small", given, target)


@pytest.mark.parametrize("vocabulary", ["slem", "tli"])
def test_a_drafter_drafts_behind_its_own_template_s_tokens(vocabulary: str, tmp_path: Path) -> None:
    """As if it had been given that text; and also where it is opened again within the answer."""
    file = tmp_path / "own.jinja"
    file.write_text("{% for m in messages %}# {{ m.content }}\n{% endfor %}def ", "utf-8")
    own = load_tokenizer("demo-drafter-other-vocab")
    target = load_tokenizer("demo")
    chat = (ChatTurn("user", "Read the lines of a file."),)
    prompt = own.encode("# Read the lines of a file.\ndef ", add_special_tokens=False)
    ids, answer = target.encode("<|user|> Lines of a file!"), target.encode("read_lines(")
    drafter = other_drafter(vocabulary=vocabulary, chat_template=str(file))
    assert drafter.reads_chat
    drafter.open(request(ids, chat))
    state = drafter._requests.find("r")
    assert state is not None
    assert state.tokens == prompt
    [first] = drafter.propose([Query("r", len(ids), 8)])
    first.check(4096)
    drafter.observe([Commit("r", len(ids), np.array(answer, dtype=np.int32))])
    assert state.tokens[: len(prompt)] == prompt
    [later] = drafter.propose([Query("r", len(ids) + len(answer), 8)])
    assert len(later.tokens)
    again = other_drafter(vocabulary=vocabulary, chat_template=str(file))
    again.open(request([*ids, *answer], chat, prompt_len=len(ids)))
    [same] = again.propose([Query("r", len(ids) + len(answer), 8)])
    assert same.tokens.tolist() == later.tokens.tolist()
    # Whoever reads the target's words reads, and says, something else.
    text = other_drafter(vocabulary=vocabulary, chat_template="target")
    assert not text.reads_chat
    text.open(request(ids, chat))
    state = text._requests.find("r")
    assert state is not None
    assert state.tokens != prompt
    assert text.propose([Query("r", len(ids), 8)])[0].tokens.tolist() != first.tokens.tolist()


def test_options_that_cannot_be_are_refused(tmp_path: Path) -> None:
    assert other_drafter().reads_chat
    with pytest.raises(ConfigError, match="chat_template"):
        ModelOptions(chat_template="")
    with pytest.raises(ConfigError, match="chat_template"):
        other_drafter(chat_template=str(tmp_path / "nowhere.jinja"))
    broken = tmp_path / "broken.jinja"
    broken.write_text("{% for", "utf-8")
    with pytest.raises(ConfigError, match="chat_template"):
        other_drafter(chat_template=str(broken))
    with pytest.raises(ConfigError, match="served model's own tokens"):
        load_model_drafter(
            "demo-drafter",
            options=ModelOptions(chat_template="own"),
            target=read_model_info("demo"),
        )


@pytest.mark.parametrize(
    "turns",
    [
        [ChatTurn("user", "a list")],
        (ChatTurn("tool", "a"),),
        (ChatTurn("user", 5),),  # type: ignore[arg-type]
        (("user", "a plain tuple"),),
        (ChatTurn("user", "a"),) * (MAX_TURNS + 1),
        (ChatTurn("user", "a" * MAX_CHAT_CHARS), ChatTurn("user", "b")),
        (ChatTurn("user", "half \ud83d"),),
    ],
)
def test_what_is_no_chat_is_refused(turns: Any) -> None:
    with pytest.raises(RequestError, match="chat"):
        check_turns(turns)
    with pytest.raises(RequestError, match="chat"):
        RequestOptions(chat=turns)


def test_the_longest_chat_is_taken_and_never_shown() -> None:
    turns = (ChatTurn("user", "secret" * (MAX_CHAT_CHARS // 6)),)
    assert "secret" not in repr(RequestOptions(chat=turns))
