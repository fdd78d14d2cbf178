"""`draftline bench` where the target answers chats."""

from __future__ import annotations

import pytest
from draftline.deploy.cli.bench import job as bench_job
from draftline.deploy.cli.bench.endpoints import bench_prompts
from draftline.deploy.cli.bench.job import BenchJob


def test_the_bundled_chats_have_two_turns() -> None:
    chats = bench_prompts(None, is_chat=True)
    assert len(chats) == len({chat.name for chat in chats}) == 24
    assert all(chat.text and len(chat.further_turns) == 1 for chat in chats)
    assert bench_prompts(None)[0].text not in {chat.text for chat in chats}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, (True, 2, False)),
        ({"turns": 1, "ignore_eos": True}, (True, 1, True)),
        ({"chat": False}, (False, 1, True)),
        ({"base_url": "http://127.0.0.1:8000"}, (False, 1, True)),
    ],
)
def test_chats_are_the_default_of_a_target_that_answers_them(
    given: dict[str, object], expected: tuple[bool, int, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_job, "answers_chats", lambda model: model == "chatty")
    job = BenchJob(**given).for_target("chatty", given)  # pyright: ignore[reportArgumentType]
    assert (job.chat, job.turns, job.ignore_eos) == expected
    own = BenchJob(**given)  # pyright: ignore[reportArgumentType]
    assert own.for_target("demo", given) == own
