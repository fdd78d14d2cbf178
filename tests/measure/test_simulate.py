"""Times of a cost profile, and pipelines and links that take them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from draftline.cluster.config import DrafterConfig, EngineConfig
from draftline.cluster.drafting.hub import DrafterHub
from draftline.cluster.links.link import DrafterMessage, InprocLink
from draftline.core.errors import ConfigError, DrafterError
from draftline.core.proposals import AheadQuery, Proposal, Query, chain_proposal
from draftline.core.steps import StepInput, StepOutput, prompt_step
from draftline.measure.records.record import Arrival, Record
from draftline.measure.records.run_metrics import run_metrics
from draftline.measure.runs.matched import Run
from draftline.measure.simulate import slowed_pipeline
from draftline.measure.simulate.apart_link import ApartLink
from draftline.measure.simulate.cost_profile import (
    CostProfile,
    bundled_profiles,
    read_cost_profile,
)
from draftline.measure.simulate.scaled_runs import faster
from draftline.measure.simulate.simulation import Simulation, kind_of
from draftline.measure.simulate.slowed_link import SlowedLink
from support.fakes.fake_drafters import (
    CountingDrafter,
    GuessingDrafter,
    ScriptedDrafter,
    following,
)
from support.servers.hub_session import LIMITS, HubSession

# A memory of 1,000 bytes and a processor of 100 operations a second, both half used.
DEVICE = {
    "bandwidth": 1000, "bandwidth_share": 0.5, "operations": 100, "operations_share": 0.5,
    "attention_share": 0.1,
}  # fmt: skip
PROFILE = CostProfile.model_validate(
    {
        "name": "toy", "slowdown": 2, "num_stages": 2, "device": DEVICE,
        "target": {
            "bytes": 100, "operations": 1, "kv_bytes": 1, "attention_operations": 0.1,
            "pass_s": 0.05,
        },
        "hop_s": 0.01, "row_bytes": 5, "link": 100,
        "drafters": {
            "griffin": {"bytes": 10, "operations": 1, "pass_s": 0.01},
            "specformer": {"bytes": 10, "operations": 1, "is_parallel": True},
        },
        "sources": {"all": "made up"},
    }
)  # fmt: skip


def test_a_stage_reads_and_computes() -> None:
    # 100 bytes at 500 a second and an operation at 50, over two stages; then launches, the hop and
    # a row on the link.
    assert PROFILE.stage_s(1, 0) == pytest.approx(0.22 / 2 + 0.05 + 0.01 + 0.05)
    # 50 tokens of the text are read, and a row sees each, for a tenth of an operation at 10.
    assert PROFILE.stage_s(1, 50) == pytest.approx(0.32 / 2 + 0.05 + 0.01 + 0.05)
    assert PROFILE.stage_s(1, 50, 50) == pytest.approx(0.82 / 2 + 0.05 + 0.01 + 0.05)
    assert PROFILE.stage_s(20, 0) == pytest.approx(0.6 / 2 + 0.05 + 0.01 + 1.0)
    alone = PROFILE.model_copy(update={"num_stages": 1})
    assert alone.stage_s(1, 0) == pytest.approx(0.22 + 0.05)


def test_a_draft_takes_a_pass_a_level_unless_it_is_parallel() -> None:
    assert PROFILE.draft_s("griffin", 3, 1) == pytest.approx(3 * (0.04 + 0.01))
    assert PROFILE.draft_s("griffin", 1, 10) == pytest.approx(0.22 + 0.01)
    assert PROFILE.draft_s("specformer", 8, 1) == pytest.approx(0.04)


@pytest.mark.parametrize("name", bundled_profiles())
def test_bundled_profiles_say_where_their_numbers_are_from(name: str) -> None:
    profile = read_cost_profile(name)
    given = {"device", "target", "target.pass_s", "drafters", "slowdown"}
    given |= {f"device.{name}_share" for name in ("bandwidth", "operations", "attention")}
    if profile.num_stages > 1:
        given |= {"hop_s", "row_bytes", "link"}
    given |= {f"drafters.{kind}" for kind in profile.drafters if kind.startswith("model-")}
    assert profile.sources.keys() == given
    # Decoding is bound by memory: a few rows cost little more than one.
    assert profile.stage_s(1, 0) == pytest.approx(profile.stage_s(8, 0), rel=0.06)
    drafts = [profile.draft_s(kind, 1, 1) for kind in profile.drafters]
    assert all(0 < draft < profile.stage_s(1, 0) * profile.num_stages for draft in drafts)


def test_the_8b_profile_decodes_as_fast_as_is_published() -> None:
    """158.3 tokens a second (SGLang, Llama-3.1-8B-Instruct, one H100), texts of some hundreds."""
    assert 1 / read_cost_profile("8b-h100").stage_s(1, 300) == pytest.approx(158.3, rel=0.03)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{}", "name: Field required"),
        (PROFILE.model_dump_json().replace('"hop_s"', '"hops"'), "hops: Extra inputs"),
        (PROFILE.model_dump_json().replace('"slowdown":2.0', '"slowdown":0.5'), "slowdown"),
    ],
)
def test_profiles_that_are_none_are_refused(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "profile.json"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_cost_profile(str(path))
    assert caught.value.field == "cost-profile"
    assert said in str(caught.value)
    with pytest.raises(ConfigError, match="known: 70b-2-h200"):
        read_cost_profile(str(tmp_path / "none.json"))


class QuickPipeline:
    """Answers at once, in the place of stages of this process."""

    def __init__(self, stages: Sequence[object], max_in_flight: int) -> None:
        assert (list(stages), max_in_flight) == ([], 3)

    def submit(self, step: StepInput) -> asyncio.Future[StepOutput]:
        answer: asyncio.Future[StepOutput] = asyncio.get_running_loop().create_future()
        none = np.empty(0, dtype=np.int32)
        answer.set_result(
            StepOutput(step.step_id, none, none.reshape(0, 0), none.astype(np.float32))
        )
        return answer


async def test_steps_pass_the_stages_one_behind_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slowed_pipeline, "LocalPipeline", QuickPipeline)
    quick = PROFILE.model_copy(update={"slowdown": 0.1})
    pipeline = slowed_pipeline.SlowedPipeline([], quick)
    assert (pipeline.num_stages, pipeline.max_in_flight) == (2, 3)
    began_at = time.monotonic()
    ends = []

    async def run(step_id: int) -> None:
        output = await pipeline.submit(replace(prompt_step(1, 16), step_id=step_id))
        assert output.step_id == step_id
        ends.append(time.monotonic() - began_at)

    await asyncio.gather(*(run(index) for index in range(3)))
    stage_s = quick.slowdown * quick.stage_s(1, 0)
    # The first waits for two stages; each further one leaves a stage's time later.
    for index, end in enumerate(ends):
        assert end >= (2 + index) * stage_s * 0.99
    assert pipeline.num_steps == 3


async def test_a_draft_waits_for_that_of_the_profile() -> None:
    links = {
        kind: SlowedLink(InprocLink(CountingDrafter(kind, 2)), kind, PROFILE)
        for kind in ("griffin", "specformer", "suffix")
    }
    hub = DrafterHub([*links.values()], LIMITS)
    await hub.start()
    session = HubSession(hub)
    proposals = await session.step(1)
    assert all(one.tokens.tolist() == session.expected(2) for one in proposals)
    seconds = {stats.name: stats.propose_s for stats in hub.stats()}
    assert seconds["griffin"] >= PROFILE.slowdown * 2 * 0.03 * 0.9
    assert PROFILE.slowdown * 0.02 * 0.9 <= seconds["specformer"] < seconds["griffin"]
    assert [link.num_drafts for link in links.values()] == [1, 1, 1]
    assert links["griffin"].num_late == links["suffix"].num_late == 0
    await hub.stop()


class PassingDrafter(CountingDrafter):
    """A model that takes three passes a draft, whatever it drafts, and reads its clock."""

    num_passes = 0
    clock: Callable[[], float] = staticmethod(time.monotonic)
    read_s = 0.0

    def propose(self, queries: Sequence[Query], deadline: float | None = None) -> list[Proposal]:
        began_at = self.clock()
        self.num_passes += 3
        self.read_s = self.clock() - began_at
        return super().propose(queries, deadline)


async def test_a_draft_takes_the_passes_that_its_model_took() -> None:
    drafter = PassingDrafter("model", 1)
    link = SlowedLink(InprocLink(drafter), "griffin", PROFILE)
    hub = DrafterHub([link], LIMITS)
    await hub.start()
    await HubSession(hub).step(1)
    [stats] = hub.stats()
    assert stats.propose_s >= PROFILE.slowdown * 3 * 0.05 * 0.9
    # It sees what they take while it drafts, and no longer than the engine does.
    assert drafter.read_s == pytest.approx(PROFILE.slowdown * 3 * 0.05, rel=0.2)
    assert drafter.clock() == pytest.approx(time.monotonic(), abs=0.05)
    await hub.stop()


@pytest.mark.parametrize("is_ahead", [False, True])
async def test_the_engine_goes_on_while_a_drafter_of_its_own_device_works(is_ahead: bool) -> None:
    drafter = GuessingDrafter("model", 4)
    link = ApartLink(InprocLink(drafter), "griffin", PROFILE, drafts_ahead=is_ahead)
    assert not link.is_local
    hub = DrafterHub([link], LIMITS)
    await hub.start()
    session = HubSession(hub)
    began_at = time.monotonic()
    [proposal] = await session.step(1)
    assert proposal.tokens.tolist() == session.expected(4)
    draft_s = PROFILE.slowdown * 4 * 0.05
    assert time.monotonic() - began_at >= 0.9 * draft_s
    [first] = link.spans
    assert first.span[1] - first.span[0] >= 0.9 * draft_s
    assert not first.is_ahead
    assert hub.drafts_ahead is is_ahead
    drafter.guesses = [following(session.text[-1], 2).tolist()]
    query = AheadQuery("r", len(session.text), 8, proposal.tokens, proposal.parents)
    hub.draft_ahead([query], {"model": ["r"]})
    assert [one.is_ahead for one in link.spans] == [False, True][: 1 + is_ahead]
    await hub.stop()


async def test_what_is_hurried_has_the_passes_that_were_begun() -> None:
    class Passing(GuessingDrafter):
        num_passes = 0
        clock: Callable[[], float] = staticmethod(time.monotonic)

    drafter = Passing("model", 2)
    drafter.on_pass = lambda: setattr(drafter, "num_passes", drafter.num_passes + 1)
    link = ApartLink(InprocLink(drafter), "griffin", PROFILE, drafts_ahead=True)
    hub = DrafterHub([link], LIMITS)
    await hub.start()
    session = HubSession(hub)
    drafter.guesses = [following(session.text[-1], 2).tolist(), *([40, n] for n in range(49))]
    hub.draft_ahead([AheadQuery("r", 5, 8, *2 * [following(0, 0)])], {"model": ["r"]})
    # Fifty passes were simulated at once, and would take three seconds.
    assert drafter.num_passes == 50
    began_at = time.monotonic()
    [proposal] = await session.step(2)
    assert proposal.tokens.tolist() == session.expected(2)
    assert time.monotonic() - began_at < 1.5
    assert 50 < drafter.num_passes < 75
    assert (link.num_drafts, len(link.spans)) == (1, 1)
    [stats] = hub.stats()
    assert (stats.ahead_used, stats.errors) == (1, 0)
    await hub.stop()


def test_what_takes_longer_than_the_profile_is_counted() -> None:
    def slow(_query: Query) -> Proposal:
        time.sleep(0.1)
        return chain_proposal("slow", following(1, 1))

    class Events:
        def ready(self) -> None: ...

        def failed(self, error: DrafterError) -> None:
            raise error

        def answered(self, proposals: Sequence[Proposal], *_: object) -> None:
            assert len(proposals) == 1

    link = SlowedLink(InprocLink(ScriptedDrafter(slow)), "specformer", PROFILE)
    link.connect(Events())
    link.send(DrafterMessage(1, (), (), (), (Query("r", 1, 4),), 1e9))
    assert (link.num_drafts, link.num_late) == (1, 1)
    simulation = Simulation(PROFILE)
    simulation.add_links([link, SlowedLink(InprocLink(CountingDrafter("m", 1)), "m", PROFILE)])
    assert simulation.late_shares() == (0, 1)
    assert simulation.late_by_drafter() == {link.name: 1}


def test_an_engine_gets_the_profile_s_stages_and_slower_deadlines() -> None:
    simulation = Simulation(PROFILE)
    config = EngineConfig(model="demo", pipeline_parallel_size=3, draft_deadline_ms=10)
    changed = simulation.config(config)
    assert (changed.pipeline_parallel_size, changed.draft_deadline_ms) == (1, 20)
    assert simulation.late_shares() == (0, 0)

    assert kind_of(DrafterConfig(kind="head", model="demo-griffin")) == "griffin"
    assert kind_of(DrafterConfig(kind="suffix")) == "suffix"
    assert kind_of(DrafterConfig(kind="cascade")) == "model"
    links = {
        is_ahead: simulation.links(
            [DrafterConfig(kind="model", ahead=is_ahead)], [InprocLink(CountingDrafter("m", 1))]
        )[0]
        for is_ahead in (False, True)
    }
    assert isinstance(links[True], ApartLink)
    assert not isinstance(links[False], ApartLink)


def test_small_models_take_the_times_of_the_entry_that_is_named() -> None:
    profile = PROFILE.model_copy(update={"drafters": {"model-2": PROFILE.drafters["griffin"]}})
    config = DrafterConfig(kind="model", model="demo-drafter")
    cascade = DrafterConfig(kind="cascade", drafters=[{"kind": "model", "model": "demo-drafter"}])
    links = [InprocLink(PassingDrafter("model", 1)) for _ in range(2)]
    slowed = Simulation(profile, "model-2").links([config, cascade], links)
    assert [link.kind for link in slowed if isinstance(link, SlowedLink)] == ["model-2"] * 2
    with pytest.raises(ConfigError, match="toy has no 'model-3'; has: model-2"):
        Simulation(profile, "model-3")


def test_runs_are_told_in_the_profile_s_times() -> None:
    arrivals = (Arrival(1.0, (1,), ()), Arrival(3.0, (2, 3), ()))
    record = Record(prompt="p", text="abc", num_tokens=3, arrivals=arrivals)
    runs = {"target": [Run((record,), run_metrics([record], 4.0))]}
    [run] = faster(runs, 4)["target"]
    assert run.metrics.output_throughput == pytest.approx(3.0)
    assert (run.records[0].ttft, run.records[0].e2el) == (0.25, 0.75)
