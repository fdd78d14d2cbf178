"""Times of a cost profile, and pipelines and links that take them."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from draftline.cluster.config import DrafterConfig, EngineConfig
from draftline.cluster.drafting.hub import DrafterHub
from draftline.cluster.drafting.local_drafter import LocalDrafter
from draftline.cluster.engine.assembly import plan_model
from draftline.core.arrays import Span
from draftline.core.errors import ConfigError
from draftline.core.proposals import Proposal, Query
from draftline.core.steps import HeadDrafts, StepInput, StepOutput, prompt_step
from draftline.drafters.heads.last_stage import LastStageHeadSpec
from draftline.measure.simulate.cost_profile import (
    CostProfile,
    bundled_profiles,
    read_cost_profile,
)
from draftline.measure.simulate.host_clock import HostClock, HostLoop
from draftline.measure.simulate.simulation import Simulation, SlowedPipeline
from draftline.measure.simulate.slowed_drafter import DraftTimes, SlowedDrafter, slowed, times_of
from support.fakes.fake_drafters import CountingDrafter, ScriptedDrafter
from support.fakes.fake_engine import byte_tokenizer
from support.inputs.mtp_checkpoint import write_mtp_checkpoint
from support.servers.hub_session import LIMITS, HubSession

# A memory of 1,000 bytes and a processor of 100 operations a second, both half used.
DEVICE = {
    "bandwidth": 1000, "bandwidth_share": 0.5, "operations": 100, "operations_share": 0.5,
    "attention_share": 0.1,
}  # fmt: skip
PROFILE = CostProfile.model_validate(
    {
        "name": "toy", "num_stages": 2, "device": DEVICE,
        "target": {
            "bytes": 100, "head_bytes": 20, "operations": 1, "kv_bytes": 1,
            "attention_operations": 0.1, "pass_s": 0.05,
        },
        "hop_s": 0.01, "row_bytes": 5, "link": 100,
        "drafters": {
            "griffin": {"bytes": 10, "operations": 1, "pass_s": 0.01},
            "mtp": {"bytes": 20, "operations": 1, "pass_s": 0.01},
            "specformer": {"bytes": 10, "operations": 1, "is_parallel": True},
        },
        "sources": {"all": "made up"},
    }
)  # fmt: skip
GRIFFIN = DraftTimes(PROFILE, "griffin")


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


@pytest.mark.parametrize(
    ("quantization", "share"),
    # A scale of 4 bytes, and of int4 a zero point, for 128 weights of 2 bytes.
    [("none", 1.0), ("int8", 132 / 256), ("fp8", 132 / 256), ("int4", 69 / 256)],
)
def test_rounded_weights_are_read_faster(quantization: str, share: float) -> None:
    whole = PROFILE.model_copy(update={"num_stages": 1})
    target = whole.rounded(quantization).target
    # The output head stays as it is.
    assert target.bytes == pytest.approx(20 + 80 * share)
    saved = (whole.target.bytes - target.bytes) / 500
    for rows in (1, 40):
        left = whole.stage_s(rows, 7) - whole.rounded(quantization).stage_s(rows, 7)
        assert left == pytest.approx(saved)
    assert whole.rounded(quantization).drafters == whole.drafters


@pytest.mark.parametrize("name", bundled_profiles())
def test_bundled_profiles_say_where_their_numbers_are_from(name: str) -> None:
    profile = read_cost_profile(name)
    given = {"device", "target", "target.pass_s", "drafters"}
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
        (PROFILE.model_dump_json().replace('"num_stages":2', '"num_stages":0'), "num_stages"),
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


def at_its_time(clock: HostClock, work: Coroutine[None, None, None]) -> None:
    """Run it on a loop of this clock."""
    loop = HostLoop(clock)
    try:
        loop.run_until_complete(work)
    finally:
        loop.close()


def unworked() -> HostClock:
    """A clock for which this machine's own work takes next to no time."""
    return HostClock(1e6)


@dataclass
class QuickStage:
    """Answers at once."""

    drafts: tuple[HeadDrafts, ...] = ()
    num_blocks: int = 4

    def launch(self, step: StepInput, hidden: None) -> Callable[[], StepOutput]:
        assert hidden is None
        none = np.empty(0, dtype=np.int32)
        output = StepOutput(step.step_id, none, head_drafts=self.drafts)
        return lambda: output


@dataclass
class QuickSpec:
    heads: tuple[LastStageHeadSpec, ...] = ()
    drafts: tuple[HeadDrafts, ...] = ()

    def build(self) -> QuickStage:
        return QuickStage(self.drafts)


def test_steps_pass_the_stages_one_behind_the_other() -> None:
    clock = unworked()
    pipeline = SlowedPipeline([QuickSpec()], PROFILE, clock)
    assert (pipeline.num_stages, pipeline.max_in_flight, pipeline.num_blocks) == (2, 3, 4)
    ends: list[float] = []
    spans: list[tuple[Span, ...]] = []

    async def run(step_id: int) -> None:
        step = replace(prompt_step(1, 16), step_id=step_id, is_traced=True)
        output = await pipeline.submit(step)
        assert output.step_id == step_id
        ends.append(clock())
        spans.append(output.stage_spans)

    async def three() -> None:
        await asyncio.gather(*(run(index) for index in range(3)))

    at_its_time(clock, three())
    stage_s = PROFILE.stage_s(1, 0)
    # The first waits for two stages; each further one leaves a stage's time later.
    assert ends == pytest.approx([(2 + index) * stage_s for index in range(3)], rel=1e-2)
    assert np.ravel(spans[1]) == pytest.approx(stage_s * np.array([1, 2, 2, 3]), rel=1e-2)


def test_a_draft_takes_the_time_of_the_profile_s() -> None:
    clock = unworked()
    kinds = ("griffin", "specformer", "suffix")
    drafters = [
        LocalDrafter(slowed(CountingDrafter(kind, 2), DraftTimes(PROFILE, kind), clock))
        for kind in kinds
    ]
    hub = DrafterHub(drafters, LIMITS, clock=clock)

    async def draft() -> None:
        await hub.start()
        session = HubSession(hub)
        proposals = await session.step(1)
        assert all(one.tokens.tolist() == session.expected(2) for one in proposals)
        await hub.stop()

    at_its_time(clock, draft())
    seconds = {stats.name: stats.propose_s for stats in hub.stats()}
    assert seconds["griffin"] == pytest.approx(2 * 0.05)
    assert seconds["specformer"] == pytest.approx(0.04)
    # What copies text takes the host's own time.
    assert seconds["suffix"] < 1e-4
    assert clock() == pytest.approx(0.14, rel=1e-2)


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


def test_a_draft_takes_the_passes_that_its_model_took() -> None:
    clock = unworked()
    drafter = PassingDrafter("model", 1)
    hub = DrafterHub([LocalDrafter(slowed(drafter, GRIFFIN, clock))], LIMITS, clock=clock)

    async def draft() -> None:
        await hub.start()
        await HubSession(hub).step(1)
        await hub.stop()

    at_its_time(clock, draft())
    [stats] = hub.stats()
    assert stats.propose_s == pytest.approx(3 * 0.05)
    # It sees what they take while it drafts, and no longer than the engine does.
    assert drafter.read_s == pytest.approx(3 * 0.05)
    assert drafter.clock() == pytest.approx(clock())


def test_a_drafter_that_fails_takes_no_time_and_is_counted() -> None:
    def fail(_query: Query) -> Proposal:
        raise ValueError("no")

    clock = unworked()
    drafter = slowed(ScriptedDrafter(fail), DraftTimes(PROFILE, "specformer"), clock)
    hub = DrafterHub([LocalDrafter(drafter)], LIMITS, clock=clock)

    async def draft() -> None:
        await hub.start()
        assert await HubSession(hub).step(1) == []
        await hub.stop()

    at_its_time(clock, draft())
    [stats] = hub.stats()
    assert (stats.errors, stats.propose_s) == (1, 0.0)
    # This machine's own work takes next to none.
    assert clock() < 1e-4


def test_an_engine_gets_the_profile_s_stages() -> None:
    simulation = Simulation(PROFILE)
    config = EngineConfig(model="demo", pipeline_parallel_size=3, draft_deadline_ms=10)
    changed = simulation.config(config)
    assert (changed.pipeline_parallel_size, changed.draft_deadline_ms) == (1, 10)

    kinds = {
        "griffin": DrafterConfig(kind="head", model="demo-griffin"),
        "suffix": DrafterConfig(kind="suffix"),
        "model": DrafterConfig(kind="model"),
    }
    assert [times_of(one, PROFILE).kind for one in kinds.values()] == [*kinds]


def test_heads_of_the_last_stage_take_the_times_of_their_kind(tmp_path: Path) -> None:
    folder = write_mtp_checkpoint(tmp_path, "glm4_moe")
    byte_tokenizer().save_pretrained(folder)
    drafters = [DrafterConfig(kind="mtp")]
    (spec,) = plan_model(EngineConfig(model=str(folder), drafters=drafters)).specs
    tokens, parents = np.array([[5, 6, 7], [-1, 0, 0]], dtype=np.int32)
    tree = Proposal("mtp", tokens, parents, np.zeros(3, dtype=np.float32))
    drafts = HeadDrafts("mtp", 99.0, (tree,), num_levels=2)
    pipeline = SlowedPipeline([QuickSpec(spec.heads, (drafts,))], PROFILE, clock := unworked())

    async def run() -> None:
        output = await pipeline.submit(replace(prompt_step(1, 16), is_traced=True))
        [timed] = output.head_drafts
        # Its wider level has two rows.
        assert timed.seconds == pytest.approx(PROFILE.draft_s("mtp", 2, 2))

    at_its_time(clock, run())
    expected = 2 * PROFILE.stage_s(1, 0) + PROFILE.draft_s("mtp", 2, 2)
    assert clock() == pytest.approx(expected, rel=1e-2)
    assert all("mtp" in read_cost_profile(name).drafters for name in bundled_profiles())


def test_another_thread_reads_what_the_clock_s_own_read_last() -> None:
    clock = unworked()

    async def wait() -> None:
        await asyncio.sleep(3.0)

    thread = threading.Thread(target=at_its_time, args=(clock, wait()))
    began_at = time.monotonic()
    thread.start()
    thread.join()
    assert clock() == pytest.approx(3.0, rel=1e-2)
    # Nobody waited for it.
    assert time.monotonic() - began_at < 2.0


def test_small_models_take_the_times_of_the_entry_that_is_named() -> None:
    profile = PROFILE.model_copy(update={"drafters": {"model-2": PROFILE.drafters["griffin"]}})
    config = DrafterConfig(kind="model", model="demo-drafter")
    drafters = [LocalDrafter(PassingDrafter("model", 1))]
    [local] = Simulation(profile, "model-2").drafters([config], drafters)
    assert isinstance(local, LocalDrafter)
    assert isinstance(local.drafter, SlowedDrafter)
    assert local.drafter.times.kind == "model-2"
    with pytest.raises(ConfigError, match="toy has no 'model-3'; has: model-2"):
        Simulation(profile, "model-3")
