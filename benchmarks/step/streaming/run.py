"""One engine under one load: real scheduling, drafters and trees; stages and answers replayed.

Time is that of the host's processor where it works and skipped where it waits
(`measure/simulate/host_clock.py`), so a loaded machine measures what an idle one does.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from ....cluster.config import HEAD, DrafterConfig, EngineConfig
from ....cluster.drafting.factory import build_drafter, keeps_answers
from ....cluster.drafting.hub import AnyDrafter, DrafterHub
from ....cluster.drafting.local_drafter import LocalDrafter
from ....cluster.drafting.replies import DrafterLimits
from ....cluster.engine.assembly import measure_step_cost
from ....cluster.links.link import DrafterMessage, DraftSeconds, LinkEvents, is_report_due
from ....cluster.links.service import DrafterSession
from ....core.engine import EngineCore
from ....core.errors import DrafterError, DraftlineError
from ....core.interfaces import FeatureDrafter
from ....core.kv_cache import BlockPool
from ....core.proposals import MAX_PROBE_ROWS, MAX_PROBE_ROWS_OF_ALL
from ....core.request.output import Delta
from ....core.request.request import Request
from ....core.request.sampling_params import RequestOptions, SamplingParams
from ....core.request.stop import SilentStream, StopRule
from ....core.scheduler import Scheduler, SchedulerLimits
from ....core.speculation.policy import SpeculationPolicy
from ....measure.replay.recording import RecordedAnswer, Recording
from ....measure.simulate.cost_profile import CostProfile
from ....measure.simulate.host_clock import HostClock, HostLoop
from ....measure.simulate.slowed_drafter import DraftTimes, slowed, times_of
from ....models.load.model_info import read_model_info
from .cases import DRAFTERS, MODES, TREE_NODES, Found, StreamingLoad
from .replayed_stages import Fate, ReplayedStages, RunStep, StageTimes, TextFeatures


class ApartLink:
    """Of a drafter on a device of its own: it drafts in this process and at once; the answer comes
    when the profile's drafter would have given it, and the engine goes on meanwhile.
    """

    def __init__(self, local: LocalDrafter, times: DraftTimes, clock: HostClock) -> None:
        assert times.are_known, "its time is the profile's"
        drafter = local.drafter
        self.name = drafter.name
        self.max_nodes = local.max_nodes
        self.keeps_answers = local.keeps_answers
        # Of the layers that are handed out, which are the only head's.
        self.reads_features = isinstance(drafter, FeatureDrafter)
        self._session = DrafterSession(slowed(drafter, times, clock, self._work))
        self._worked_s = 0.0
        self._clock = clock
        self._events: LinkEvents | None = None
        self._timer: asyncio.TimerHandle | None = None

    def connect(self, events: LinkEvents) -> None:
        """See `DrafterLink`."""
        self._events = events
        events.ready()

    def send(self, message: DrafterMessage) -> None:
        """See `DrafterLink`."""
        events, sent_at = self._events, self._clock()
        assert events is not None
        self._worked_s = 0.0
        try:
            proposals, _ = self._session.run(message)
            report = self._session.report() if is_report_due(message) else None
        except DraftlineError as error:
            events.failed(DrafterError(str(error)))
            return
        seconds = self._worked_s
        self._timer = asyncio.get_running_loop().call_at(
            max(sent_at + seconds, self._clock()),
            events.answered,
            proposals,
            report,
            DraftSeconds(propose_s=seconds),
        )

    def _work(self, seconds: float) -> None:
        """The profile's drafter works for so long, beside the engine."""
        self._worked_s += seconds

    def unanswered(self) -> None:
        """See `DrafterLink`."""

    def disconnect(self) -> None:
        """See `DrafterLink`."""
        if self._timer is not None:
            self._timer.cancel()
        self._session.close()

    async def close(self) -> None:
        """See `DrafterLink`."""
        self.disconnect()


def drafter_of(
    config: DrafterConfig, engine: EngineConfig, clock: HostClock, profile: CostProfile
) -> AnyDrafter:
    """A new drafter of these settings; those that the profile has work beside the host."""
    drafter, times = build_drafter(config, engine), times_of(config, profile)
    local = LocalDrafter(drafter, config.max_nodes, keeps_answers(config))
    if times.are_known:
        return ApartLink(local, times, clock)
    return replace(local, drafter=slowed(drafter, times, clock))


BLOCK_SIZE, NUM_BLOCKS = 16, 4096
MAX_STEP_ROWS = 512
START_S = 10.0


@dataclass(slots=True)
class _Heard:
    """Of one answer: its tokens, and when the last of them came."""

    answer: RecordedAnswer
    tokens: list[int] = field(default_factory=list)
    at: float = 0.0


class StreamingRun:
    """An engine, and `together` requests of it as long as there are answers to replay."""

    def __init__(
        self,
        load: StreamingLoad,
        mode: str,
        recording: Recording,
        answers: Sequence[RecordedAnswer],
        times: StageTimes,
        profile: CostProfile,
        clock: HostClock,
    ) -> None:
        self._load, self._mode, self._recording = load, mode, recording
        self._left = list(answers)
        self._clock = clock
        drafters: Sequence[DrafterConfig] = () if mode == "plain" else DRAFTERS[load.drafters]
        config = EngineConfig(model=recording.model, drafters=tuple(drafters))
        features = [
            TextFeatures(recording.model, str(one.options["model"]), answers)
            for one in drafters
            if one.kind == HEAD
        ]
        self.stages = ReplayedStages(answers, load.stages, times, clock, *features)
        info = read_model_info(config.model)
        self._hub = DrafterHub(
            [drafter_of(drafter, config, clock, profile) for drafter in drafters],
            DrafterLimits(vocab_size=info.vocab_size, max_probe_rows=MAX_PROBE_ROWS),
            budget_s=config.draft_deadline_ms / 1000,
            clock=clock,
        )
        limits = SchedulerLimits(
            max_running=load.together,
            max_waiting=load.together,
            max_step_rows=MAX_STEP_ROWS,
            max_tree_nodes=TREE_NODES,
            max_probe_rows=MAX_PROBE_ROWS_OF_ALL,
            num_groups=self.stages.max_in_flight,
            share_prefixes=False,
        )
        self._policy = SpeculationPolicy()
        self._core = EngineCore(
            self.stages, self._hub, Scheduler(BlockPool(NUM_BLOCKS, BLOCK_SIZE), limits),
            self._policy, clock, pipelined_trees=MODES[mode],
        )  # fmt: skip
        self._running: dict[str, _Heard] = {}
        # Tokens, and seconds that their requests waited for them, while all requests decode.
        self._num_tokens, self._decoding_s = 0, 0.0
        self._began_at: float | None = None
        self._ended_at: float | None = None

    async def run(self) -> Found:
        """Answer until too few requests are left."""
        self._policy.cost = await measure_step_cost(
            self.stages, MAX_STEP_ROWS, BLOCK_SIZE, self._clock
        )
        self.stages.steps.clear()
        await self._hub.start(START_S)
        worked_s = self._clock.worked_s
        while self._ended_at is None:
            while self._left and len(self._running) < self._load.together:
                self._add(self._left.pop(0))
            if len(self._running) < self._load.together:
                self._ended_at = self._clock()
                break
            if self._began_at is None:
                worked_s = self._clock.worked_s
            await self._core.step()
        host_s = self._clock.worked_s - worked_s
        for name in list(self._running):
            self._core.cancel(name)
        while self._core.has_work:
            await self._core.step()
        await self._hub.stop()
        return self._found(host_s)

    def _add(self, answer: RecordedAnswer) -> None:
        most, temperature = len(answer.answer_ids), self._recording.temperature
        params = SamplingParams(max_tokens=most, temperature=temperature, ignore_eos=True)
        self._running[answer.name] = _Heard(answer)
        request = Request(
            request_id=answer.name,
            prompt_ids=np.array(answer.prompt_ids, dtype=np.int32),
            params=params,
            seed=answer.seed,
            max_tokens=most,
            sink=partial(self._hear, answer.name),
            options=RequestOptions(speculative=self._mode != "plain"),
        )
        self._core.add(request, StopRule(params, (), most, SilentStream()))

    def _hear(self, name: str, event: Delta | DraftlineError) -> None:
        assert isinstance(event, Delta), event
        if self._ended_at is not None:
            return
        heard, now = self._running[name], self._clock()
        if self._began_at is not None and heard.tokens:
            self._num_tokens += len(event.token_ids)
            self._decoding_s += now - max(heard.at, self._began_at)
        heard.tokens += event.token_ids
        heard.at = now
        if event.finish_reason is not None:
            assert tuple(heard.tokens) == heard.answer.answer_ids, "the text has changed"
            del self._running[name]
        if self._began_at is None and all(one.tokens for one in self._running.values()):
            self._began_at = now

    def _found(self, host_s: float) -> Found:
        assert self._began_at is not None
        assert self._ended_at is not None
        begin, end = self._began_at, self._ended_at
        steps = [step for step in self.stages.steps if begin <= step.spans[0][0] < end]
        fates = [fate for step in steps for part in step.parts for fate in part.fates]
        num_slices = fates.count(Fate.ROOT)
        num_nodes = max(len(fates) - num_slices, 1)
        rate = self._load.together * self._num_tokens / self._decoding_s
        return Found(
            mode=self._mode,
            tokens_s=rate,
            tau=rate * (end - begin) / max(num_slices, 1),
            rows=len(fates) / max(num_slices, 1),
            right=fates.count(Fate.RIGHT) / num_nodes,
            refused=fates.count(Fate.REFUSED) / num_nodes,
            killed=fates.count(Fate.KILLED) / num_nodes,
            idle=1 - sum(last - first for first, last in map(_first_span, steps)) / (end - begin),
            host=host_s / (end - begin),
        )


def _first_span(step: RunStep) -> tuple[float, float]:
    return step.spans[0]


def measure(
    load: StreamingLoad,
    mode: str,
    recording: Recording,
    answers: Sequence[RecordedAnswer],
    times: StageTimes,
    profile: CostProfile,
    slowdown: float,
) -> tuple[Found, Sequence[RunStep]]:
    """Replay these answers in one mode."""
    clock = HostClock(slowdown)
    loop = HostLoop(clock)
    gc.collect()
    gc.disable()
    try:
        run = StreamingRun(load, mode, recording, answers, times, profile, clock)
        return loop.run_until_complete(run.run()), run.stages.steps
    finally:
        gc.enable()
        loop.close()
