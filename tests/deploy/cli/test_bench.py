"""`draftline bench` and `draftline lossless` from the command line, on real engines."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import httpx
import pytest
from draftline.cluster.config import EngineConfig
from draftline.core.errors import ConfigError
from draftline.core.request.output import Delta
from draftline.deploy.cli import main as cli
from draftline.deploy.cli.bench import endpoints as bench_endpoints
from draftline.deploy.cli.bench import run as bench_run
from draftline.deploy.cli.bench import run as lossless_run
from draftline.deploy.cli.bench.suites import RULES, bundled_heads
from draftline.measure.clients.endpoint import TARGET_ONLY, Setting
from draftline.measure.clients.http_endpoint import HttpEndpoint
from draftline.measure.runs.lossless import ChiSquare, check_first_token
from draftline.models.load.bundled import demo_path
from support.fakes.fake_engine import FakeEngine
from support.fakes.recorded_progress import RecordedProgress
from support.servers.api_in_process import serving
from support.servers.served_model import served_model
from transformers import AutoTokenizer
from typer.testing import CliRunner

DRAFTERS = '[{"kind": "prompt_lookup"}, {"kind": "spectra"}]'
PLAIN = Setting(TARGET_ONLY, ())
runner = CliRunner()


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    rows = [{"name": "a", "prompt": "abcabcabc"}, {"task_id": "b", "prompt": "x = 1\nx = "}]
    path.write_text("\n".join(map(json.dumps, [*rows, {"name": "long", "prompt": "y" * 250}])))
    return path


@pytest.mark.parametrize("shared", [[], ["--one-engine"]])
def test_bench_of_an_engine(
    checkpoint: Path, prompts: Path, tmp_path: Path, shared: list[str]
) -> None:
    output, plots = tmp_path / "out" / "b.json", tmp_path / "plots"
    arguments = ["bench", str(checkpoint), "--speculative-config", DRAFTERS, *shared]
    arguments += ["--prompts", str(prompts), "--num-prompts", "3", "--max-tokens", "12"]
    arguments += ["--rounds", "1", "--concurrency", "2", "--temperature", "0.5"]
    arguments += ["--output", str(output), "--plots", str(plots)]
    result = runner.invoke(cli.app, arguments)
    assert result.exit_code == 0, result.output
    assert "2 prompts (1 too long for the context left out), 12 tokens each" in result.output
    assert "all answers are the same" in result.output
    data = json.loads(output.read_text())
    assert list(data["settings"]) == ["target", "prompt_lookup", "spectra", "all"]
    assert data["settings"]["target"]["tau"] == 1
    assert data["settings"]["all"]["all_rounds"]["num_tokens"] == 24
    assert data["of"]["one_engine"] is bool(shared)
    assert {path.name for path in plots.iterdir()} >= {"speed.png", "latency.png"}


def test_progress_of_a_bench(
    checkpoint: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    progress = RecordedProgress()
    monkeypatch.setattr(bench_run, "progress", progress)
    monkeypatch.setattr(bench_endpoints, "progress", progress)
    arguments = ["bench", str(checkpoint), "--speculative-config", '[{"kind": "prompt_lookup"}]']
    arguments += ["--prompts", str(prompts), "--num-prompts", "2", "--max-tokens", "4"]
    arguments += ["--rounds", "1", "--record", str(tmp_path / "recording.jsonl")]
    result = runner.invoke(cli.app, arguments)
    assert result.exit_code == 0, result.output
    # Two engines; a warm-up and a round of both; answers, and predictions for one drafter.
    assert [(work.label, work.total, work.done) for work in progress.works] == [
        ("starting", 2, 2), ("bench", 8, 8), ("recording", 2, 2),
        ("recording the target's predictions", 2, 2),
    ]  # fmt: skip


def test_a_replay_commits_as_much_as_the_target_did(
    checkpoint: Path, prompts: Path, tmp_path: Path
) -> None:
    """Whatever asks the target for nothing but its tokens drafts the same without a target."""
    recording, output = tmp_path / "recording.jsonl", tmp_path / "b.json"
    drafters = '[{"kind": "prompt_lookup"}, {"kind": "anpd"}, {"kind": "suffix"}]'
    drafters = f'{{"drafters": {drafters}, "node_budget": "full"}}'
    common = [str(checkpoint), "--speculative-config", drafters, "--rounds", "1"]
    common += ["--output", str(output)]
    asked = ["--prompts", str(prompts), "--num-prompts", "2", "--max-tokens", "40"]
    asked += ["--temperature", "0.7", "--seed", "5", "--record", str(recording)]
    found = []
    for arguments in (asked, ["--replay", str(recording)]):
        result = runner.invoke(cli.app, ["bench", *common, *arguments])
        assert result.exit_code == 0, result.output
        assert "all answers are the same" in result.output
        settings = json.loads(output.read_text())["settings"]
        found.append({name: one["all_rounds"]["counts"] for name, one in settings.items()})
    assert found[0] == found[1]
    assert found[0]["all"]["drafted"]


def test_a_replay_knows_what_the_target_said_off_the_text(
    checkpoint: Path, prompts: Path, tmp_path: Path
) -> None:
    """Drafters that ask for predictions find those that the same setting was given before."""
    recording, output = tmp_path / "recording.jsonl", tmp_path / "b.json"
    drafters = '[{"kind": "lookahead"}, {"kind": "spectra"}, {"kind": "token_recycling"}]'
    drafters = f'{{"drafters": {drafters}, "node_budget": "full"}}'
    common = [str(checkpoint), "--speculative-config", drafters, "--rounds", "1"]
    common += ["--drafters", "lookahead,spectra,token_recycling", "--output", str(output)]
    asked = ["--prompts", str(prompts), "--num-prompts", "2", "--max-tokens", "24"]
    found = []
    for arguments in ([*asked, "--record", str(recording)], ["--replay", str(recording)]):
        result = runner.invoke(cli.app, ["bench", *common, *arguments])
        assert result.exit_code == 0, result.output
        settings = json.loads(output.read_text())["settings"]
        found.append({name: one["all_rounds"]["counts"] for name, one in settings.items()})
    assert found[0] == found[1]
    answers = [json.loads(line) for line in recording.read_text().splitlines()[1:]]
    assert all(answer["off_text"] for answer in answers)


def test_a_replay_of_another_model_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    recording = tmp_path / "recording.jsonl"
    recording.write_text('{"version": 1}\n')
    result = runner.invoke(cli.app, ["bench", str(checkpoint), "--replay", str(recording)])
    assert isinstance(result.exception, ConfigError)
    assert "is no recording of draftline bench" in str(result.exception)


def test_conversations_keep_their_answers(checkpoint: Path, tmp_path: Path) -> None:
    path, output = tmp_path / "p.jsonl", tmp_path / "b.json"
    rows = [
        {"question_id": 1, "category": "qa", "turns": ["ab", "cd"]},
        {"question_id": 2, "category": "math", "turns": ["x = 1"]},
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    arguments = ["bench", str(checkpoint), "--speculative-config", '[{"kind": "suffix"}]']
    arguments += ["--prompts", str(path), "--num-prompts", "2", "--max-tokens", "9", "--turns", "2"]
    result = runner.invoke(cli.app, [*arguments, "--rounds", "1", "--output", str(output)])
    assert result.exit_code == 0, result.output
    assert "all answers are the same" in result.output
    data = json.loads(output.read_text())
    assert data["load"]["turns"] == 2
    serve = data["settings"]["suffix"]["serve"]
    # Prompts of two letters, of two, nine answered, two and three others, and of five.
    assert (serve["completed"], serve["total_output_tokens"]) == (3, 27)
    assert serve["total_input_tokens"] > 2 + (2 + 9 + 2) + 5
    [target, _] = data["taus"]
    assert set(target["by_category"]) == {"qa", "math"}


def test_a_trace_of_chats_is_asked_as_it_was(tmp_path: Path) -> None:
    """Through the template, at the times of the trace, with answers as long as its own."""
    path, output = tmp_path / "trace.jsonl", tmp_path / "b.json"
    answers = ("Hello there.", "Yes, it is so.")
    chats = (["Hi.", answers[0], "Bye.", "Bye."], ["So?", answers[1]])
    rows = [
        {
            "timestamp": 3.0 + 0.1 * index,
            "conversations": [
                {"from": "gpt" if place % 2 else "human", "value": text}
                for place, text in enumerate(chat)
            ],
        }
        for index, chat in enumerate(chats)
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    arguments = ["bench", "demo", "--speculative-config", '[{"kind": "suffix"}]', "--rounds", "1"]
    arguments += ["--prompts", str(path), "--num-prompts", "2", "--no-warm-up", "--turns", "2"]
    arguments += ["--chat", "--dataset-times", "--dataset-lengths", "--output", str(output)]
    result = runner.invoke(cli.app, arguments)
    assert result.exit_code == 0, result.output
    assert "at their own times" in result.output
    assert "all answers are the same" in result.output
    serve = json.loads(output.read_text())["settings"]["suffix"]["serve"]
    tokenizer = AutoTokenizer.from_pretrained(demo_path())
    sizes = [len(tokenizer(answer)["input_ids"]) for answer in answers]
    # Both turns of the first, and the only one of the second.
    assert (serve["completed"], serve["total_output_tokens"]) == (3, 2 * sizes[0] + sizes[1])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--dataset", "gsm8k"], "dataset: needs the dataset's file"),
        (["--profile", "paper"], "profile: belongs to a suite"),
        (["--heads", "a=b"], "heads: belongs to a suite: --suite heads"),
        (["--suite-rows", "a"], "suite-rows: belongs to a suite"),
        (["--cost-profile", "h100"], "cost-profile: cannot read h100"),
        (["--small-model", "model-0.5b"], "small-model: belongs to simulated times"),
        (["--host-slowdown", "9"], "host-slowdown: belongs to simulated times"),
        (
            ["--cost-profile", "8b-h100", "--request-rate", "2"],
            "cost-profile: skips idle time",
        ),
        (["--cost-profile", "8b-h100", "--small-model", "x"], "has no 'x'; has: model, model-0.5b"),
        (["--cost-profile", "8b-h100", "--one-engine"], "cost-profile: needs engines of its own"),
        (["--dataset-times"], "dataset-times: the prompts tell no times"),
        (["--dataset-lengths"], "dataset-lengths: the prompts have no answers"),
        (["--turns", "2", "--record", "r"], "record: and --replay hold single answers"),
        (["--base-url", "http://localhost:1", "--dataset-lengths"], "dataset-lengths: needs the"),
        (["--suite", "spectra", "--drafters", "all"], "suite: brings its own drafters"),
        (["--base-url", "http://localhost:1", "--record", "r"], "record: needs an engine"),
    ],
)
def test_a_suite_that_cannot_run_is_refused(flags: list[str], message: str) -> None:
    result = runner.invoke(cli.app, ["bench", *flags])
    assert isinstance(result.exception, ConfigError)
    assert message in str(result.exception)


@pytest.mark.full
def test_the_suite_of_spectra(checkpoint: Path, prompts: Path, tmp_path: Path) -> None:
    output = tmp_path / "b.json"
    arguments = ["bench", str(checkpoint), "--suite", "spectra", "--prompts", str(prompts)]
    arguments += ["--num-prompts", "2", "--max-tokens", "12", "--rounds", "1"]
    result = runner.invoke(cli.app, [*arguments, "--output", str(output)])
    assert result.exit_code == 0, result.output
    assert "left out, without a store or small model: paper: REST" in result.output
    content = json.loads(output.read_text())
    rows = {"ANPD", "Lookahead", "CORE"}
    wanted = {f"{profile}: {row}" for profile in ("paper", "draftline") for row in rows}
    assert wanted | {"target"} <= content["settings"].keys()
    assert "paper: RETRIEVAL" not in content["settings"]
    taus = {row["name"]: row["tau"] for row in content["taus"]}
    assert taus.keys() == content["settings"].keys()
    assert taus["paper: CORE"]["low"] <= taus["paper: CORE"]["high"]


def test_a_suite_of_one_profile(checkpoint: Path, prompts: Path) -> None:
    arguments = ["bench", str(checkpoint), "--suite", "spectra", "--prompts", str(prompts)]
    arguments += ["--num-prompts", "1", "--max-tokens", "4", "--rounds", "1", "--no-warm-up"]
    result = runner.invoke(cli.app, [*arguments, "--profile", "draftline", "--one-engine"])
    assert result.exit_code == 0, result.output
    assert "draftline: CORE" in result.output
    assert "paper:" not in result.output
    result = runner.invoke(cli.app, [*arguments, "--one-engine"])
    assert "one-engine: profiles other than draftline need engines" in str(result.exception)


@pytest.mark.parametrize(
    "profile", [pytest.param([], marks=pytest.mark.full), ["--cost-profile", "8b-h100"]]
)
def test_the_suite_of_heads(tmp_path: Path, profile: list[str]) -> None:
    """All of it as it runs here, some rows in simulated times."""
    output = tmp_path / "b.json"
    arguments = ["bench", "demo", "--suite", "heads", "--heads", "again=demo-griffin", *profile]
    arguments += ["--num-prompts", "1", "--max-tokens", "12", "--rounds", "1", "--no-warm-up"]
    arguments += ["--suite-rows", "griffin *;again tree"] if profile else []
    result = runner.invoke(cli.app, [*arguments, "--output", str(output)])
    assert result.exit_code == 0, result.output
    assert ("simulated times: 8B on one H100" in result.output) is bool(profile)
    content = json.loads(output.read_text())
    taus = {row["name"]: row["tau"]["value"] for row in content["taus"]}
    names = (*bundled_heads(), "again")
    rows = {f"{name} {form}" for name in names for form in ("chain", "tree")}
    rows |= {"small model", "training-free", "everything merged"}
    assert taus.keys() == {
        "target", *({"griffin chain", "griffin tree", "again tree"} if profile else rows)
    }  # fmt: skip
    assert taus["griffin tree"] == taus["again tree"] > 1.5
    speeds = {name: one["output_throughput"] for name, one in content["settings"].items()}
    own = content["settings"]["griffin chain"]
    assert own["kappa"] > 0.5
    assert own["theta"] == pytest.approx(own["kappa"] / own["speedup"])
    assert content["settings"]["target"]["kappa"] is None
    # A token takes 6.3 ms there.
    assert not profile or speeds["target"] < 160


@pytest.mark.parametrize("model", ["demo", "demo-hybrid"])
def test_rows_of_a_suite_are_chosen_by_name(model: str) -> None:
    arguments = ["bench", model, "--suite", "model-drafters", "--num-prompts", "1"]
    arguments += ["--max-tokens", "4", "--rounds", "1", "--no-warm-up", "--suite-rows"]
    result = runner.invoke(cli.app, [*arguments, "static tree, coupled; same ch*n"])
    assert result.exit_code == 0, result.output
    assert "rounds of: target, same chain, static tree, coupled\n" in result.output
    result = runner.invoke(cli.app, [*arguments, "same"])
    assert "suite-rows: no row 'same'; there are: target; same chain" in str(result.exception)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("flags", "known", "further"),
    [
        pytest.param(
            ["--temperature", "1"],
            {"TLI tree", "SLEM chain", "SLRS"},
            {*RULES},
            marks=pytest.mark.full,
        ),
        (["--cost-profile", "8b-h100", "--suite-rows", "same *"], set(), set()),
    ],
    ids=["sampled", "simulated"],
)
def test_the_suite_of_model_drafters(
    tmp_path: Path, flags: list[str], known: set[str], further: set[str]
) -> None:
    output = tmp_path / "b.json"
    arguments = ["bench", "demo", "--suite", "model-drafters", *flags, "--num-prompts", "1"]
    arguments += ["--max-tokens", "8", "--rounds", "1", "--no-warm-up", "--output", str(output)]
    result = runner.invoke(cli.app, arguments)
    assert result.exit_code == 0, result.output
    content = json.loads(output.read_text())
    rows = {row["name"] for row in content["taus"]}
    assert rows >= {"target", "same tree", "same tree + SLEM tree", *known, *further}
    assert rows & ({*RULES} - further) == set()


def test_a_target_of_another_tokenizer_has_the_rows_of_other_vocabularies(checkpoint: Path) -> None:
    arguments = ["bench", str(checkpoint), "--suite", "model-drafters", "--num-prompts", "1"]
    arguments += ["--max-tokens", "4", "--rounds", "1", "--no-warm-up", "--suite-rows", "TLI chain"]
    result = runner.invoke(cli.app, arguments)
    assert result.exit_code == 0, result.output
    assert "left out, without a store or small model: same chain, same tree" in result.output
    assert "rounds of: target, TLI chain\n" in result.output


@pytest.mark.parametrize("heads", ["griffin", "a=", "a=x,a=y"])
def test_heads_that_cannot_be_read_are_named(heads: str) -> None:
    result = runner.invoke(cli.app, ["bench", "demo", "--suite", "heads", "--heads", heads])
    assert isinstance(result.exception, ConfigError)
    assert "heads: must be NAME=FOLDER" in str(result.exception)


class WrongEngine(FakeEngine):
    """Answers one letter less well if it has drafters."""

    def __init__(self, config: EngineConfig, **_: object) -> None:
        super().__init__("aabb" if config.drafters else "aaba")

    async def stream(
        self, prompt: Any, params: Any = None, options: Any = None, *, request_id: str | None = None
    ) -> AsyncGenerator[Delta, None]:
        ids = self.tokenizer.encode(prompt)
        async for delta in super().stream(ids, params, options, request_id="r"):
            yield delta


def test_bench_fails_on_a_wrong_answer(monkeypatch: pytest.MonkeyPatch, prompts: Path) -> None:
    monkeypatch.setattr(bench_endpoints, "AsyncEngine", WrongEngine)
    arguments = ["bench", "--speculative-config", '[{"kind": "spectra"}]', "--rounds", "1"]
    arguments += ["--prompts", str(prompts), "--num-prompts", "1", "--max-tokens", "4"]
    result = runner.invoke(cli.app, arguments)
    assert result.exit_code == 1
    assert "ANSWERS DIFFER: 1 differences" in result.output
    assert "spectra, prompt a, position 3" in result.output
    assert "NO NEAR-TIE" in result.output


@pytest.mark.net
@pytest.mark.timeout(300)
def test_bench_and_lossless_of_a_server(checkpoint: Path, prompts: Path, tmp_path: Path) -> None:
    report = tmp_path / "lossless.json"
    short = ["--prompts", str(prompts), "--num-prompts", "1", "--max-tokens", "8"]
    arguments = ["--speculative-config", DRAFTERS, "--api-processes", "0"]
    with served_model(str(checkpoint), *arguments) as served:
        url = served.url.removesuffix("/v1")
        flags = ["--rounds", "1", "--request-rate", "50", "--drafters", "spectra+prompt_lookup"]
        bench = runner.invoke(cli.app, ["bench", "--base-url", url, *short, *flags])
        lossless = runner.invoke(
            cli.app,
            ["lossless", "--base-url", url, *short, "--seeds", "8", "--output", str(report)],
        )
        unknown = runner.invoke(cli.app, ["lossless", "--base-url", url, "--drafters", "medusa"])
    assert bench.exit_code == 0, bench.output
    assert "50 a second" in bench.output
    assert "spectra+prompt_lookup" in bench.output
    assert lossless.exit_code == 0, lossless.output
    assert "no difference" in lossless.output
    data = json.loads(report.read_text())
    assert data["drafters"] == ["prompt_lookup", "spectra"]
    assert data["seeds"]["num_seeds"] == 8
    assert "'medusa' is not there" in str(unknown.exception)


def test_lossless_of_an_engine(
    checkpoint: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    progress = RecordedProgress()
    monkeypatch.setattr(lossless_run, "progress", progress)
    report = tmp_path / "lossless.json"
    arguments = ["lossless", str(checkpoint), "--prompts", str(prompts), "--num-prompts", "3"]
    arguments += ["--max-tokens", "12", "--seeds", "20", "--output", str(report)]
    result = runner.invoke(cli.app, [*arguments, "--speculative-config", DRAFTERS])
    assert result.exit_code == 0, result.output
    assert "20 of 20 seeds draw the same tokens" in result.output
    assert "no difference" in result.output
    data = json.loads(report.read_text())
    assert data["drafters"] == ["prompt_lookup", "spectra"]
    assert data["model"] == str(checkpoint)
    # One of three has no room in the context; three samplings, the target and three ways to draft.
    assert {check["num_answers"] for check in data["checks"]} == {2}
    assert len(data["checks"]) == 3 * (2 * 4 - 1)
    assert [(work.label, work.total) for work in progress.works] == [
        ("starting", 1), ("answers", 3 * 2 * 4 * 2), ("seeds", 40), ("first tokens", 20),
    ]  # fmt: skip
    # Of a model that likes all tokens alike.
    assert "20 draws are too few" in data["first_token"]["skipped"]


def test_lossless_of_an_engine_drafts_where_it_does_not_pay(
    checkpoint: Path, prompts: Path, tmp_path: Path
) -> None:
    """Without options, greedy answers, which repeat themselves, are drafted for in every step that
    has a match, so that the checks prove something. Sampled ones hardly repeat with random weights.
    """
    output = tmp_path / "lossless.json"
    arguments = ["lossless", str(checkpoint), "--prompts", str(prompts), "--num-prompts", "2"]
    arguments += ["--max-tokens", "64", "--seeds", "2", "--drafters", "all"]
    result = runner.invoke(cli.app, [*arguments, "--output", str(output)])
    assert result.exit_code == 0, result.output
    checks = json.loads(output.read_text())["checks"]
    drafted = [
        check["num_drafted"]
        for check in checks
        if check["sampling"] == "greedy" and check["setting"] == "all"
    ]
    assert len(drafted) == 2
    assert all(count > 32 for count in drafted), drafted


def test_lossless_fails_on_a_wrong_answer(monkeypatch: pytest.MonkeyPatch, prompts: Path) -> None:
    class Wrong(FakeEngine):
        """Answers otherwise where drafts are asked for."""

        def __init__(self, _config: EngineConfig) -> None:
            super().__init__("aabb")

        async def stream(
            self, prompt: Any, params: Any = None, options: Any = None, *, request_id: str = "r"
        ) -> AsyncGenerator[Delta, None]:
            self._answer = tuple(self.tokenizer.encode("aaba" if options.speculative else "aabb"))
            ids = self.tokenizer.encode(prompt)
            async for delta in super().stream(ids, params, options, request_id=request_id):
                yield delta

    monkeypatch.setattr(lossless_run, "AsyncEngine", Wrong)
    arguments = ["lossless", "--prompts", str(prompts), "--num-prompts", "1", "--seeds", "2"]
    result = runner.invoke(cli.app, [*arguments, "--max-tokens", "4"])
    assert result.exit_code == 1, result.output
    assert "NOT LOSSLESS" in result.output


def test_a_model_without_drafters_has_nothing_to_compare(checkpoint: Path) -> None:
    result = runner.invoke(cli.app, ["lossless", str(checkpoint), "--speculative-config", "[]"])
    assert isinstance(result.exception, ConfigError)
    assert "drafters: there are none, so nothing can differ" in str(result.exception)


async def test_first_tokens_of_a_server_follow_its_probabilities() -> None:
    async with (
        serving(demo_path()) as client,
        HttpEndpoint("http://test", http_client=client) as endpoint,
    ):
        found = await check_first_token(await endpoint.connect(), PLAIN, seeds=60)
        few = await check_first_token(endpoint, PLAIN, seeds=2)
    assert isinstance(found, ChiSquare)
    assert (found.num_draws, found.num_bins) == (60, 3)
    assert found.p_value > 0.01
    assert few == "2 draws are too few to tell the likely tokens apart"


async def test_first_tokens_that_do_not_are_found(client: httpx.AsyncClient) -> None:
    """The fake engine says 0.78 of its token, and always gives it."""
    async with HttpEndpoint("http://test", http_client=client) as endpoint:
        found = await check_first_token(await endpoint.connect(), PLAIN, seeds=200)
    assert isinstance(found, ChiSquare)
    assert not found.is_sound


def test_a_server_that_does_not_answer_is_named() -> None:
    for command in ("bench", "lossless"):
        result = runner.invoke(cli.app, [command, "--base-url", "http://127.0.0.1:9"])
        assert "base-url: http://127.0.0.1:9/v1/ does not answer" in str(result.exception)
