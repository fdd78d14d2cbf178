"""`draftline train data` of chats: turns, answers and what a template makes of them."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
from draftline.core.errors import ConfigError
from draftline.core.request.output import RequestMetrics, RequestOutput
from draftline.core.request.sampling_params import SamplingParams
from draftline.deploy.cli.main import app
from draftline.deploy.cli.train.job import DataJob
from draftline.deploy.cli.train.texts import Texts, read_temperatures, temperature_of
from draftline.deploy.engine.async_engine import AsyncEngine
from draftline.measure.prompts import BenchPrompt
from draftline.training.heads.distilled_texts import DistilledText, read_texts
from support.fakes.fake_engine import CHAT_TEMPLATE, byte_tokenizer
from typer.testing import CliRunner

CHAT = BenchPrompt("c", "Hi?", further_turns=("And?", "Then?"), system="Be brief.")
# Thoughts of earlier answers are left out, as templates of thinking models do.
FORGETFUL = CHAT_TEMPLATE.replace(
    "{{ message.content }}", "{{ message.content.split('|')[-1] if not loop.last else '' }}"
).replace("else ''", "else message.content")


COUNTS = RequestMetrics(prompt_tokens=1, generated_tokens=1, num_steps=1, num_draft_tokens=0)


class ScriptedEngine:
    """Says what a function of the prompt's text says."""

    def __init__(self, says: Callable[[str], str], template: str, max_model_len: int) -> None:
        self.tokenizer: Any = byte_tokenizer()
        self.tokenizer.chat_template = template
        self.max_model_len = max_model_len
        self.asked: list[tuple[str, SamplingParams]] = []
        self._says = says

    async def generate(self, prompt: Sequence[int], params: SamplingParams) -> RequestOutput:
        """A whole answer."""
        text = self.tokenizer.decode(prompt)
        self.asked.append((text, params))
        answer = self._says(text)
        ids = self.tokenizer(answer)["input_ids"][: params.max_tokens]
        return RequestOutput(
            request_id="0", prompt_token_ids=tuple(prompt), token_ids=tuple(ids), text=answer,
            sources=(), finish_reason="stop", metrics=COUNTS,
        )  # fmt: skip


def make(
    prompt: BenchPrompt | None, says: Callable[[str], str] = lambda _: "thought|Yes.\n", *,
    template: str = CHAT_TEMPLATE, max_model_len: int = 400, **fields: Any,
) -> tuple[list[DistilledText], ScriptedEngine]:  # fmt: skip
    engine = ScriptedEngine(says, template, max_model_len)
    job = DataJob(output=Path("out"), model="chats", max_tokens=20, **fields)
    texts = Texts(cast("AsyncEngine", engine), job, 0, 0.7)
    return asyncio.run(texts.chat(prompt)), engine


def shown(text: DistilledText, engine: ScriptedEngine) -> str:
    """The text, with each answer in brackets."""
    parts, at = [], 0
    for start, end in text.answers:
        parts += [engine.tokenizer.decode(text.tokens[at:start])]
        parts += [f"[{engine.tokenizer.decode(text.tokens[start:end])}]"]
        at = end
    return "".join([*parts, engine.tokenizer.decode(text.tokens[at:])])


def test_a_chat_is_one_text_whose_answers_are_the_targets() -> None:
    [text], engine = make(CHAT, turns=2)
    assert shown(text, engine) == (
        "<system>Be brief.\n<user>Hi?\n<assistant>[thought|Yes.\n]\n"
        "<user>And?\n<assistant>[thought|Yes.\n]"
    )
    assert [params.temperature for _, params in engine.asked] == [0.7, 0.7]


def test_another_text_begins_where_the_template_renders_an_answer_otherwise() -> None:
    texts, engine = make(CHAT, template=FORGETFUL, turns=2)
    assert [shown(text, engine) for text in texts] == [
        "<system>Be brief.\n<user>Hi?\n<assistant>[thought|Yes.\n]",
        "<system>Be brief.\n<user>Hi?\n<assistant>Yes.\n\n<user>And?\n<assistant>[thought|Yes.\n]",
    ]


def test_a_system_prompt_stands_in_place_of_the_files() -> None:
    [text], engine = make(CHAT, system_prompt="Shout.")
    assert shown(text, engine).startswith("<system>Shout.\n<user>Hi?")


def test_a_turn_without_room_ends_the_chat() -> None:
    [text], engine = make(CHAT, turns=3, max_model_len=90)
    assert len(text.answers) == 1
    assert len(engine.asked) == 1
    nothing, _ = make(CHAT, max_model_len=30)
    assert nothing == []


def test_a_target_invents_the_turns_that_nobody_gives() -> None:
    def says(prompt: str) -> str:
        return " Why?\n" if prompt.endswith("<user>") else "So."

    [text], engine = make(None, says, turns=2)
    assert shown(text, engine) == "<user>Why?\n<assistant>[So.]\n<user>Why?\n<assistant>[So.]"
    invented = [params for prompt, params in engine.asked if prompt.endswith("<user>")]
    assert [params.temperature for params in invented] == [1.0, 1.0]


def test_a_chat_ends_where_no_further_turn_is_invented() -> None:
    def says(prompt: str) -> str:
        if not prompt.endswith("<user>"):
            return "So."
        return "Why?" if prompt == "<user>" else " "

    [text], engine = make(None, says, turns=3)
    assert shown(text, engine) == "<user>Why?\n<assistant>[So.]"
    [text], engine = make(None, lambda _: "Why?", turns=3, max_model_len=55)
    assert len(text.answers) == 1, "no room for a further turn"


def test_a_target_that_invents_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="prompts: chats invents no turns"):
        make(None, lambda _: " ")
    with pytest.raises(ConfigError, match="changes what users say"):
        make(None, template=CHAT_TEMPLATE.replace("message.content", "message.content|upper"))


@pytest.mark.parametrize("text", ["", "a", "0.7,-1", "0.7;1"])
def test_temperatures_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="temperature"):
        read_temperatures(text)
    assert read_temperatures("0, 0.7") == (0.0, 0.7)


@pytest.mark.parametrize("num_prompts", [1, 2, 3, 4, 6])
def test_each_prompt_gets_each_temperature(num_prompts: int) -> None:
    temperatures = (0.0, 0.7, 1.0)
    found = [temperature_of(number, num_prompts, temperatures) for number in range(3 * num_prompts)]
    for prompt in range(num_prompts):
        assert sorted(found[prompt::num_prompts]) == [0.0, 0.7, 1.0]


def test_invented_prompts_take_turns_with_temperatures() -> None:
    found = [temperature_of(number, None, (0.0, 1.0)) for number in range(4)]
    assert found == [0.0, 1.0, 0.0, 1.0]


def test_the_command_answers_chats_and_goes_on(checkpoint: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(checkpoint, folder)
    template = "{% for message in messages %}{{ message.content }} {% endfor %}"
    (folder / "chat_template.jinja").write_text(template)
    rows = [
        {"messages": [{"role": "user", "content": f"a{row}"}, {"role": "user", "content": "b"}]}
        for row in range(4)
    ]
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, rows)))
    command = [
        "train", "data", "--model", str(folder), "--output", str(tmp_path / "texts"),
        "--prompts", str(tmp_path / "chats.jsonl"), "--max-tokens", "4", "--turns", "2",
        "--max-num-seqs", "3", "--temperature", "0,1",
    ]  # fmt: skip
    for count in ("3", "6"):
        result = CliRunner().invoke(app, [*command, "--num-texts", count])
        assert result.exit_code == 0, result.output
        assert f"{count} texts in" in result.output
    found = read_texts(tmp_path / "texts")
    assert sum(len(text.answers) for text in found) == 12, "two turns of each"
    assert all(0 < end - start <= 4 for text in found for start, end in text.answers)
    # The target may lie over stages of any settings.
    more = [*command, "--num-texts", "8", "--pipeline-parallel-size", "2", "--dtype", "bfloat16"]
    assert CliRunner().invoke(app, more).exit_code == 0
    assert len(read_texts(tmp_path / "texts")) >= 8
    refused = CliRunner().invoke(app, [*command, "--num-texts", "6", "--turns", "1"])
    assert "whose turns is 2, not 1" in str(refused.exception)
