"""`draftline demo`: what it asks the server for, and what it shows of the answers."""

from __future__ import annotations

import functools
import io
import json
import sys
from collections import Counter
from pathlib import Path

import httpx
import pytest
from draftline.core.errors import ConfigError
from draftline.deploy.cli import main as cli
from draftline.deploy.cli.demo import command
from draftline.deploy.cli.demo.command import (
    WIDTH,
    DemoClient,
    DemoComparison,
    DemoJob,
    DemoRun,
    DemoSampling,
    DraftedText,
    Screen,
    compare_all,
    run_demo,
)
from draftline.deploy.cli.demo.prompts import held_out_prompts
from rich.console import Console

SAMPLED = DemoSampling(max_tokens=4, temperature=0.8, seed=3)
GREEDY = DemoSampling(max_tokens=4, temperature=0.0, seed=3)
EVENTS = (
    {
        "choices": [{"text": "a b"}],
        "draftline": {"token_ids": [1, 2], "texts": ["a", " b"], "sources": ["target", "spectra"]},
    },
    {
        "choices": [],
        "metrics": {
            "speculative_decoding": {
                "mean_acceptance_length": 2.0,
                "by_source": {"spectra": {"num_accepted_tokens": 1}},
            }
        },
    },
)


@pytest.fixture
def bodies(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, object]]:
    """What the demo's client sent; each is answered with two tokens, one of them a draft's."""
    received = []

    def answer(request: httpx.Request) -> httpx.Response:
        received.append(json.loads(request.content))
        return httpx.Response(200, text="".join(f"data: {json.dumps(e)}\n\n" for e in EVENTS))

    transport = httpx.MockTransport(answer)
    monkeypatch.setattr(httpx, "Client", functools.partial(httpx.Client, transport=transport))
    return received


def recording_screen() -> tuple[Screen, io.StringIO]:
    """A screen that prints into a buffer."""
    file = io.StringIO()
    return Screen(Console(highlight=False, width=WIDTH, record=True, file=file)), file


@pytest.mark.parametrize(
    ("arguments", "temperature"),
    [([], 0.8), (["--greedy"], 0.0), (["--temperature", "0.6"], 0.6)],
)
def test_samples_unless_told_to_be_greedy(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], temperature: float
) -> None:
    jobs: list[DemoJob] = []
    monkeypatch.setattr(command, "run_demo", lambda job: jobs.append(job) or 0)
    monkeypatch.setattr(sys, "argv", ["draftline", "demo", *arguments])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 0
    assert jobs == [DemoJob(3, DemoSampling(96, temperature, 3), None, "demo")]


def test_both_runs_of_a_prompt_are_asked_for_alike(bodies: list[dict[str, object]]) -> None:
    screen, file = recording_screen()
    client = DemoClient("http://test", "demo", SAMPLED)
    [result] = compare_all(client, held_out_prompts(1), screen)
    plain, drafted = bodies
    assert plain.pop("speculative") == {"enabled": False, "report": True}
    assert drafted.pop("speculative") == {"enabled": True, "report": True}
    assert plain == drafted
    assert (plain["temperature"], plain["seed"], plain["max_tokens"]) == (0.8, 3, 4)
    assert result.is_equal
    assert result.drafted.num_tokens == 2
    assert result.drafted.tau == 2.0
    assert "a b" in file.getvalue()


def test_chat_models_are_asked_questions(bodies: list[dict[str, object]]) -> None:
    screen, _ = recording_screen()
    job = DemoJob(1, SAMPLED, model="smollm2")
    client = DemoClient("http://test", "smollm2", SAMPLED, is_chat=job.is_chat)
    [result] = compare_all(client, job.prompts, screen)
    assert [body["messages"] for body in bodies] == [
        [{"role": "user", "content": job.prompts[0].text}]
    ] * 2
    assert not any(body["ignore_eos"] for body in bodies)
    assert result.drafted.num_tokens == 2
    assert not DemoJob(1, SAMPLED).is_chat


def test_table_shows_what_was_run_and_how() -> None:
    same = DemoComparison("one", _run("x", 1.0, 1.0), _run("x", 0.5, 2.0))
    other = DemoComparison("two", _run("x", 1.0, 1.0), _run("y", 1.0, 1.5))
    screen, file = recording_screen()
    screen.table([same, other], SAMPLED)
    lines = {line.split()[0]: line.split() for line in file.getvalue().splitlines()}
    assert lines["one"] == ["one", "8", "16", "2.00x", "2.00", "yes", "4"]
    assert lines["two"] == ["two", "8", "8", "1.00x", "1.50", "NO", "4"]
    assert lines["all"][4] == "1.71"
    assert "1 of 2 texts are the same" in file.getvalue()
    assert "temperature 0.8, seed 3; --greedy" in file.getvalue()


def test_greedy_runs_say_so() -> None:
    screen, file = recording_screen()
    screen.table([DemoComparison("one", _run("x", 1.0, 1.0), _run("x", 0.5, 2.0))], GREEDY)
    assert file.getvalue().splitlines()[-1].startswith("greedy: ")


def test_picture_holds_the_coloured_streams_and_no_progress(tmp_path: Path) -> None:
    screen, _ = recording_screen()
    with screen.phase("starting"):
        screen.legend(["spectra"])
    printer = screen.stream(held_out_prompts(1)[0], 1)
    printer.show_piece(DraftedText("drafted", "spectra"))
    printer.finish()
    screen.save_svg(tmp_path / "demo.svg")
    picture = (tmp_path / "demo.svg").read_text(encoding="utf-8")
    assert "drafted" in picture
    assert "starting" not in picture


def test_a_picture_in_no_folder_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"svg: folder .* does not exist"):
        run_demo(DemoJob(1, SAMPLED, tmp_path / "none" / "demo.svg"))


def _run(text: str, seconds: float, tau: float) -> DemoRun:
    return DemoRun(text, 8, seconds, tau, Counter(spectra=4))
