"""Tables, JSON and plots of results."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

from draftline.measure.records import run_metrics
from draftline.measure.report.plots import write_plots
from draftline.measure.report.summary import BenchResult, Interval, TauRow, summarise
from draftline.measure.report.tables import print_result
from draftline.measure.runs.matched import Difference, Run
from rich.console import Console
from support.fakes.fake_endpoint import ANSWER, record

RUNS = {
    name: [
        Run((one,), run_metrics([one], seconds))
        for one, seconds in ((record(ANSWER, drafted=name != "target"), taken) for taken in times)
    ]
    for name, times in {"target": (5.0, 10.0, 5.0), "all": (2.5, 4.0, 2.0)}.items()
}
WRONG = Difference(setting="all", prompt="p[0]", position=2, expected="3", found="9")


def printed(result: BenchResult) -> str:
    console = Console(file=io.StringIO(), highlight=False)
    print_result(result, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_speedup_is_the_median_of_ratios_of_the_same_round() -> None:
    target, drafted = summarise(RUNS, "target")
    assert target.rates == (1.0, 0.5, 1.0)
    assert drafted.speedups == (2.0, 2.5, 2.5)
    assert (drafted.speedup, drafted.rate) == (2.5, 2.0)


def test_processor_time_is_told_where_it_was_measured() -> None:
    [target, drafted] = summarise(RUNS, "target")
    assert target.processor_speedups == drafted.processor_speedups == ()
    taken = {"target": (4.0, 4.0, 2.0), "all": (2.0, 1.0, 2.0)}
    runs = {
        name: [replace(run, processor_s=own) for run, own in zip(rounds, taken[name], strict=True)]
        for name, rounds in RUNS.items()
    }
    [target, drafted] = summarise(runs, "target")
    assert target.processor_speedups == (1.0, 1.0, 1.0)
    assert drafted.processor_speedups == (2.0, 4.0, 1.0)
    fields = BenchResult({}, (drafted,), ()).fields()["settings"]["all"]
    assert fields["processor_speedups"] == (2.0, 4.0, 1.0)


def test_the_tables_tell_the_figures() -> None:
    text = printed(BenchResult({}, summarise(RUNS, "target"), ()))
    row = next(line for line in text.splitlines() if line.startswith("all "))
    # Tokens a second, speedup, tau, Mac-TP, Mic-TP: 15 tokens of requests that took 9 s.
    figures = "2.0 (1.2 - 2.5) 2.50x (2.00 - 2.50) 2.00 2.0 1.7 3 of 3"
    assert " ".join(row.split()) == f"all {figures}"
    assert "1000.0 / 1000.0 / 1000.0" in text
    assert "spectra 6 / 18" in text
    assert "all answers are the same under every setting" in text


def test_kappa_and_theta_of_settings_of_one_drafter() -> None:
    """A step of `all` accepts 1 of 3 draft tokens; it is 2.5 times as fast."""
    chain, tree = (
        BenchResult({}, summarise(RUNS, "target"), (), draft_lengths={"all": length})
        for length in (6, 2)
    )
    fields = chain.fields()["settings"]
    assert (fields["all"]["kappa"], fields["all"]["theta"]) == (1.0, 0.4)
    assert fields["target"]["kappa"] is fields["target"]["theta"] is None
    target, own = tree.summaries
    assert tree.kappa(own) == 2 / 3
    assert "all 0.67 0.27" in " ".join(printed(tree).split())
    assert "kappa" not in printed(BenchResult({}, summarise(RUNS, "target"), ()))
    # Nothing was drafted.
    assert tree.kappa(replace(own, whole=target.whole)) == 0.0


def test_a_wrong_answer_is_told_loudly() -> None:
    text = printed(BenchResult({}, summarise(RUNS, "target"), (WRONG,)))
    assert "ANSWERS DIFFER: 1 differences" in text
    assert "all, prompt p[0], position 2: expected 3, found 9" in text


def test_answers_that_were_not_compared_are_not_called_the_same() -> None:
    result = BenchResult({}, summarise(RUNS, "target"), None)
    assert "answers are the same" not in printed(result)
    assert result.faults == []
    assert result.fields()["differences"] is None


def test_json_holds_every_round_and_difference() -> None:
    result = BenchResult({"of": "x"}, summarise(RUNS, "target"), (WRONG,))
    data = json.loads(json.dumps(result.fields()))
    assert data["of"] == "x"
    assert data["settings"]["all"]["tau"] == 2
    assert [one["seconds"] for one in data["settings"]["all"]["rounds"]] == [2.5, 4.0, 2.0]
    assert data["differences"][0]["found"] == "9"


def test_plots_are_pictures(tmp_path: Path) -> None:
    around = Interval(2.0, 1.5, 2.5)
    kinds = dict.fromkeys(("code", "chat"), around)
    taus = tuple(TauRow(name, around, None, kinds) for name in RUNS)
    result = BenchResult({}, summarise(RUNS, "target"), (), taus=taus)
    paths = write_plots(result, tmp_path / "new")
    assert [path.stem for path in paths] == ["speed", "latency", "acceptance", "tau"]
    for path in paths:
        assert path.read_bytes().startswith(b"\x89PNG")
        assert path.stat().st_size > 5000
