"""What a comparison with other servers leaves: its file, ratios, tables, picture."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from draftline.benchmarks.pages import replaced
from draftline.benchmarks.peers import rounds
from draftline.benchmarks.peers.plan import PeerCell, Start
from draftline.benchmarks.peers.plot import RESULTS, read_lines, write_docs, write_picture
from draftline.benchmarks.peers.report import (
    OUR_DEFAULT,
    OUR_PLAIN,
    VLLM_PLAIN,
    Comparison,
    PeerRun,
    best_setting,
    least,
    markdown_rates,
    plain_to_vllm,
    print_comparison,
    read_comparison,
    resumed,
    same_answers,
    to_best_peer,
    to_narrow_weights,
)
from draftline.benchmarks.peers.rounds import Asked, Turn, run_turns
from draftline.benchmarks.peers.servers import ServerSpec
from draftline.benchmarks.peers.target import Target
from draftline.core.errors import ConfigError, DraftlineError
from draftline.measure.records import Latency
from rich.console import Console

ASKED = Asked(Target("demo"), 16)
LATENCY = Latency(0.02, 0.01, 0.03)
ABOUT: dict[str, Any] = {
    "model": "demo",
    "temperature": 0.0,
    "machine": {"processor": "P", "cores": 2, "python": "3", "torch": "2", "transformers": "5"},
    "vllm": "0.32",
    "llama_cpp": None,
    "threads": 1,
    "max_tokens": 16,
    "num_prompts": 2,
    "streams": [8, 1],
    "prompts": {"code": {"count": 9, "digest": "d"}},
    "commands": {VLLM_PLAIN: "vllm"},
}


def run(server: str, rate: float, turn: int = 0, streams: int = 1, **fields: Any) -> PeerRun:
    base = PeerRun(
        round=turn, prompts="code", streams=streams, server=server, num_requests=2, num_tokens=32,
        seconds=32 / rate, ttft=LATENCY, tpot=LATENCY, itl=LATENCY, cpu_s=0.064, tau=2.0,
        answers=("ab", "cd"),
    )  # fmt: skip
    return replace(base, **fields)


def comparison(*runs: PeerRun) -> Comparison:
    return Comparison(dict(ABOUT), list(runs))


def rates(server: str, *by_round: float) -> list[PeerRun]:
    return [run(server, rate, turn) for turn, rate in enumerate(by_round)]


def test_ratios_are_of_the_same_round_and_to_the_best_peer_of_it() -> None:
    found = comparison(
        *rates(VLLM_PLAIN, 100, 50, 80),
        *rates("vLLM, suffix", 80, 100, 100),
        *rates(OUR_PLAIN, 110, 60, 72),
        *rates(OUR_DEFAULT, 150, 130, 90),
    )
    best = to_best_peer(found, "code", 1)
    assert best is not None
    assert best.rounds == pytest.approx((1.5, 1.3, 0.9))
    assert best.other == "vLLM, suffix"
    assert best.median == pytest.approx(1.3)
    assert best.spread == pytest.approx((0.9, 1.5))
    plain = plain_to_vllm(found, "code", 1)
    assert plain is not None
    assert plain.rounds == pytest.approx((1.1, 1.2, 0.9))
    assert least([best, None, plain]) == pytest.approx(1.1)
    assert least([None]) is None
    assert to_best_peer(found, "code", 8) is None


def test_a_round_that_a_peer_missed_settles_nothing() -> None:
    """One that runs once, as transformers does, counts where it ran."""
    found = comparison(
        *rates(VLLM_PLAIN, 100, 100, 100),
        *rates("vLLM, suffix", 200, 200, 200)[::2],
        run("transformers, plain", 400),
        *rates(OUR_DEFAULT, 200, 200, 200),
    )
    ratio = to_best_peer(found, "code", 1)
    assert ratio is not None
    assert ratio.rounds == pytest.approx((0.5, 1.0))
    assert plain_to_vllm(found, "code", 1) is None


def test_the_best_setting_may_be_another_one_in_each_round() -> None:
    found = comparison(
        *rates(VLLM_PLAIN, 100, 100), *rates(OUR_PLAIN, 80, 150), *rates(OUR_DEFAULT, 120, 90)
    )
    ratio = best_setting(found, "code", 1)
    assert ratio is not None
    assert ratio.rounds == pytest.approx((1.2, 1.5))


def test_narrow_weights_are_a_comparison_of_their_own() -> None:
    found = comparison(
        run(VLLM_PLAIN, 100), run("llama.cpp, Q4_1 plain", 300), run(OUR_DEFAULT, 150)
    )
    best, narrow = (ratio(found, "code", 1) for ratio in (to_best_peer, to_narrow_weights))
    assert best is not None
    assert narrow is not None
    assert best.rounds == pytest.approx((1.5,))
    assert narrow.rounds == pytest.approx((0.5,))
    assert narrow.other == "llama.cpp, Q4_1 plain"


def test_sampled_answers_of_others_are_not_compared() -> None:
    found = comparison(run(OUR_PLAIN, 1), run(VLLM_PLAIN, 1), run(OUR_DEFAULT, 1))
    found.about["temperature"] = 0.7
    assert same_answers(found, found.runs[1]) is None
    assert same_answers(found, found.runs[2]) == (2, 2)


def test_answers_are_compared_within_a_round() -> None:
    found = comparison(
        run(OUR_PLAIN, 1),
        run(OUR_PLAIN, 1, 1, answers=("x", "y")),
        run(VLLM_PLAIN, 1, answers=("ab", "zz")),
    )
    assert same_answers(found, found.runs[2]) == (1, 2)
    assert same_answers(found, run(VLLM_PLAIN, 1, 1)) == (0, 2)
    assert same_answers(found, run(VLLM_PLAIN, 1, 2)) is None
    assert same_answers(found, run(VLLM_PLAIN, 1, streams=8)) is None


def test_the_file_reads_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "peers.json"
    silent = run("transformers, plain", 30, ttft=None, tpot=None, itl=None, cpu_s=None, answers=())
    found = comparison(run(OUR_PLAIN, 12.5), silent)
    found.write(path)
    again = read_comparison(path)
    assert again.about == ABOUT
    assert again.runs[0] == found.runs[0]
    assert again.runs[1].rate == pytest.approx(30, rel=1e-4)
    assert replace(again.runs[1], seconds=silent.seconds) == silent
    comparison().write(path)
    assert read_comparison(path).runs == []
    path.write_text('{"servers": []}')
    with pytest.raises(ConfigError, match="holds no comparison"):
        read_comparison(path)


def test_only_the_same_comparison_is_resumed(tmp_path: Path) -> None:
    path = tmp_path / "peers.json"
    comparison(run(OUR_PLAIN, 12.5)).write(path)
    more = resumed(path, {**ABOUT, "streams": (8, 1), "commands": {OUR_PLAIN: "draftline"}})
    assert more.about["commands"] == {VLLM_PLAIN: "vllm", OUR_PLAIN: "draftline"}
    assert len(more.runs) == 1
    with pytest.raises(ConfigError, match="is of other max_tokens: 16"):
        resumed(path, {**ABOUT, "max_tokens": 128})


def start(*streams: int) -> Start:
    return Start((), tuple(PeerCell("code", count, ()) for count in streams))


def test_what_was_measured_is_not_measured_again_and_each_turn_is_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    specs = [ServerSpec(name, ()) for name in ("a", "b", "c")]
    turns = rounds.make_turns([[start(1, 8)]] * 2, specs, transformers=False)
    measured: list[tuple[int, str]] = []

    def measure(turn: Turn, asked: Asked, _logs: Path) -> list[PeerRun]:
        assert asked is ASKED
        measured.append((turn.round, turn.server))
        if turn.server == "c" and turn.round == 0:
            raise DraftlineError("it fell")
        return [run(turn.server, 10, turn.round, streams) for _, streams in turn.cells]

    monkeypatch.setattr(rounds, "_measure", measure)
    found = comparison(run("a", 1), run("a", 1, streams=8))
    kept: list[int] = []
    console = Console(file=io.StringIO(), width=110)
    failed = run_turns(found, turns, ASKED, lambda: kept.append(len(found.runs)), tmp_path, console)
    assert measured == [(0, "b"), (0, "c"), (1, "b"), (1, "c"), (1, "a")]
    assert kept == [4, 6, 8, 10]
    assert failed == ["round 1: c: it fell"]
    assert len(found.cell("code", 1)["b"]) == 2
    measured.clear()
    assert run_turns(found, turns, ASKED, lambda: None, tmp_path, console) == failed
    assert measured == [(0, "c")]


def lines(text: str) -> list[str]:
    return [" ".join(line.split()) for line in text.splitlines()]


def test_the_tables() -> None:
    found = comparison(
        *rates(OUR_PLAIN, 10, 30, 20),
        *rates(OUR_DEFAULT, 40, 40, 40),
        *rates(VLLM_PLAIN, 10, 20, 20),
        run("transformers, plain", 5, streams=8, ttft=None, itl=None, tpot=None, cpu_s=None),
    )
    console = Console(file=io.StringIO(), width=120)
    print_comparison(found, console)
    assert isinstance(console.file, io.StringIO)
    shown = lines(console.file.getvalue())
    assert "vLLM, plain 1 20.0 (10.0 - 20.0) 10.0 30.0 10.0 30.0 2.00 2.00 6 of 6" in shown
    assert "transformers, plain 8 5.0 (5.0 - 5.0) - - - - - 2.00 -" in shown
    assert "code: draftline, default / best peer: least 2.00 (1: 2.00 (2.00-4.00))" in shown
    rows = markdown_rates(found).splitlines()
    assert rows == [
        "| code, tokens/s | 1 stream | 8 streams |",
        "|---|---|---|",
        "| vLLM, plain | 20 | - |",
        "| transformers, plain | - | 5 |",
        "| draftline, plain | 20 | - |",
        "| draftline, default | 40 | - |",
        "| **draftline, default / best peer** | 2.00 (2.00-4.00) | - |",
        "| **draftline, best setting / best peer** | 2.00 (2.00-4.00) | - |",
        "| **draftline, plain / vLLM, plain** | 1.00 (1.00-1.50) | - |",
    ]


def test_pages_are_written_between_their_marks(tmp_path: Path) -> None:
    begin, end = "<!-- peers: begin -->", "<!-- peers: end -->"
    page = f"# Results\n\n{begin}\nold\n{end}\nrest\n"
    once = replaced(page, "new", "peers")
    assert once == f"# Results\n\n{begin}\n\nnew\n\n{end}\nrest\n"
    assert replaced(once, "new", "peers") == once
    with pytest.raises(ConfigError, match="has no lines"):
        replaced("# Results\n", "new", "peers")
    (tmp_path / "results.md").write_text(page)
    found = comparison(run(OUR_PLAIN, 10), run(VLLM_PLAIN, 10))
    write_docs(found, tmp_path, "peers")
    text = (tmp_path / "results.md").read_text()
    assert "old" not in text
    assert "| draftline, plain | 10 | - |" in text
    assert "Model demo; one round; greedy, float32; 16 tokens an answer; P, 1 thread a mod" in text
    found.about["kept_weights"] = True
    write_docs(found, tmp_path, "peers")
    text = (tmp_path / "results.md").read_text()
    assert "greedy, float32, draftline with the file's 8 or 4 bits; 16 tokens" in text


@pytest.mark.parametrize("name", ["peers.json", "peers-smollm2.json"])
def test_the_documentation_holds_the_tables_of_the_results(name: str) -> None:
    page = (RESULTS.parents[2] / "docs" / "results.md").read_text("utf-8")
    assert markdown_rates(read_comparison(RESULTS.with_name(name))) in page


def test_the_picture_shows_every_server_in_every_panel(tmp_path: Path) -> None:
    found = read_comparison(RESULTS)
    for label in found.labels:
        named: Sequence[str] = [line.name for line in read_lines(found, label)]
        assert {OUR_PLAIN, VLLM_PLAIN, "transformers, plain"} <= set(named)
        assert named == [name for name in found.servers if name in named]
    plain = next(line for line in read_lines(found, found.labels[0]) if line.name == OUR_PLAIN)
    assert list(plain.rates) == found.loads
    pytest.importorskip("matplotlib")
    write_picture(found, tmp_path / "peers.png")
    assert (tmp_path / "peers.png").stat().st_size > 0
