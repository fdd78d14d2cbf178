"""Servers of a pool that die, pause, slow down or stop: how soon requests have drafts elsewhere.

    python -m draftline.benchmarks.serving.pool_moves [--rounds 3] [--requests 8]

An engine of this process drafts with two servers. While requests run, one server is disturbed; for
each request that it has, the time until the first answer of the other one counts, which has the
whole text by then, and for every step since, how long it waited for drafts. Prints a table and
writes JSON.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, cast

import typer
from rich.console import Console
from rich.table import Table

from ...actors.drafter_process import MODULE
from ...actors.server.child_server import ChildServer
from ...cluster.config import DrafterConfig, EngineConfig
from ...cluster.drafting.pooled_channel import SHUNNED
from ...cluster.engine.trace_file import read_trace
from ...cluster.links.link import (
    DrafterLink,
    DrafterMessage,
    DrafterReport,
    DraftSeconds,
    LinkEvents,
)
from ...cluster.links.pool import AnyLink, DrafterPool
from ...cluster.links.tokens import new_token
from ...core.errors import DrafterError
from ...core.proposals import Proposal
from ...core.request.sampling_params import RequestOptions, SamplingParams
from ...deploy.cli.demo.held_out_prompts import held_out_prompts
from ...deploy.engine.engine import AsyncEngine
from ...measure.records.record import machine

RESULTS = Path(__file__).parents[1] / "results" / "pool_moves.json"
TOKEN_VARIABLE = "DRAFTLINE_POOL_MOVES_TOKEN"
VICTIM, OTHER = "0", "1"
START_TIMEOUT_S = 300.0
CASE_TIMEOUT_S = 60.0
# A server that was slow is given nothing for a while, longer each time.
WELL_TIMEOUT_S = 60.0 + SHUNNED.max_delay_s
# A fiftieth of the time is left to a server that is slowed.
STOPPED_S, GOING_S = 0.25, 0.005


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One disturbance, in seconds.

    moved_s  until each request of the server had drafts of the other, ascending
    longest_wait_s, mean_wait_s  of a step for drafts, since
    same     whether all texts are those of plain decoding
    """

    fault: str
    moved_s: tuple[float, ...]
    longest_wait_s: float
    mean_wait_s: float
    same: bool


@dataclass(slots=True)
class Watch:
    """Which server has which request, and when each drafted for it first."""

    holders: dict[str, str] = field(default_factory=dict)
    drafted_at: dict[tuple[str, str], float] = field(default_factory=dict)


class WatchedLink:
    """A link whose messages are noted; implements `LinkEvents` for it."""

    def __init__(self, link: Any, key: str, watch: Watch) -> None:
        self._link, self._key, self._watch = link, key, watch
        self._events: LinkEvents | None = None
        self._asked: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._link, name)

    def connect(self, events: LinkEvents) -> None:
        """See `DrafterLink`."""
        self._events = events
        self._link.connect(self)

    def send(self, message: DrafterMessage) -> None:
        """See `DrafterLink`."""
        for request in message.opens:
            self._watch.holders[request.request_id] = self._key
        self._asked = [query.request_id for query in message.queries]
        self._link.send(message)

    def ready(self) -> None:
        """See `LinkEvents`."""
        self._told.ready()

    def told(self, num_others: int, *, is_draining: bool) -> None:
        """See `LinkEvents`."""
        self._told.told(num_others, is_draining=is_draining)

    def failed(self, error: DrafterError) -> None:
        """See `LinkEvents`."""
        self._told.failed(error)

    def answered(
        self,
        proposals: Sequence[Proposal],
        report: DrafterReport | None = None,
        seconds: DraftSeconds | None = None,
    ) -> None:
        """See `LinkEvents`."""
        now = time.monotonic()
        for request_id in self._asked:
            self._watch.drafted_at.setdefault((request_id, self._key), now)
        self._told.answered(proposals, report, seconds)

    @property
    def _told(self) -> LinkEvents:
        assert self._events is not None
        return self._events


@contextmanager
def _signalled(pid: int, number: int) -> Iterator[None]:
    os.kill(pid, number)
    yield


@contextmanager
def _slowed(pid: int) -> Iterator[None]:
    is_over = threading.Event()

    def stop_and_go() -> None:
        while not is_over.is_set():
            os.kill(pid, signal.SIGSTOP)
            is_over.wait(STOPPED_S)
            os.kill(pid, signal.SIGCONT)
            is_over.wait(GOING_S)

    thread = threading.Thread(target=stop_and_go)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


FAULTS: dict[str, Callable[[int], Any]] = {
    "killed": lambda pid: _signalled(pid, signal.SIGKILL),
    "paused": lambda pid: _signalled(pid, signal.SIGSTOP),
    "slowed": _slowed,
    "stops": lambda pid: _signalled(pid, signal.SIGTERM),
}


class Servers:
    """Two drafter servers of this process at ports that stay the same."""

    def __init__(self, drafter: dict[str, Any]) -> None:
        self.token = new_token()
        self.kind: str = drafter["kind"]
        self._settings = json.dumps(drafter)
        self._ports: dict[str, int] = {}
        self._children: dict[str, ChildServer] = {}
        for key in (VICTIM, OTHER):
            self.start(key)

    def start(self, key: str) -> None:
        """Start one, in the place of the one before it."""
        if key in self._children:
            self._children[key].kill()
        port = str(self._ports.get(key, 0))
        arguments = ("--config", "-", "--end-with-stdin", "--target", "demo", "--port", port)
        child = ChildServer(key, MODULE, arguments, self._settings, self.token)
        self._children[key] = child
        self._ports[key] = child.wait_ready(START_TIMEOUT_S)

    @property
    def addresses(self) -> list[str]:
        """Of both, the victim's first."""
        return [f"127.0.0.1:{self._ports[key]}" for key in (VICTIM, OTHER)]

    @property
    def victim(self) -> int:
        """The process that is disturbed."""
        return self._children[VICTIM].pid

    def stop(self) -> None:
        """End both."""
        for child in self._children.values():
            child.kill()


class Run:
    """One engine over two servers, disturbed again and again."""

    def __init__(self, servers: Servers, num_requests: int, tokens: int, trace: Path) -> None:
        self._servers = servers
        self._trace = trace
        self._watch = Watch()
        self._prompts = [prompt.text for prompt in held_out_prompts(num_requests)]
        self._params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        os.environ[TOKEN_VARIABLE] = servers.token
        drafter = DrafterConfig(
            kind=servers.kind,
            transport="grpc",
            address=servers.addresses,
            token_env=TOKEN_VARIABLE,
        )
        self.config = EngineConfig(
            model="demo",
            drafters=(drafter,),
            node_budget="full",
            multi_step_ms=0,
            trace_steps=trace,
        )
        self._engine = AsyncEngine(self.config, links=self._watched)
        self._plain: list[tuple[int, ...]] = []

    async def measure(self, faults: Sequence[str], note: Callable[[Case], None]) -> None:
        """All cases, one after the other."""
        await self._engine.start()
        try:
            self._plain = await self._texts(RequestOptions(speculative=False))
            for fault in faults:
                await self._both_well()
                note(await self._case(fault))
                await asyncio.to_thread(self._servers.start, VICTIM)
        finally:
            await self._engine.close()

    async def _both_well(self) -> None:
        """Wait until requests may go to both servers; an idle engine does not connect."""
        short = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
        async with asyncio.timeout(WELL_TIMEOUT_S):
            while self._engine.stats().drafters[0].servers < len(self._servers.addresses):
                await self._engine.generate(self._prompts[0], short)
                await asyncio.sleep(0.1)

    async def _case(self, fault: str) -> Case:
        self._watch.holders.clear()
        self._watch.drafted_at.clear()
        texts = asyncio.ensure_future(self._texts(RequestOptions()))
        watch = self._watch
        await self._until(
            lambda: len({request for request, _ in watch.drafted_at}) == len(self._prompts)
        )
        begun_at, since = time.time(), time.monotonic()
        moving = [name for name, key in watch.holders.items() if key == VICTIM]
        with FAULTS[fault](self._servers.victim):
            await self._until(
                lambda: texts.done() or all((name, OTHER) in watch.drafted_at for name in moving)
            )
            same = await texts == self._plain
        moved = [watch.drafted_at[name, OTHER] - since for name in moving]
        steps = [one for one in read_trace(self._trace) if one.planned_at >= begun_at]
        waits = [step.draft_wait_s for step in steps]
        return Case(
            fault=fault,
            moved_s=tuple(sorted(round(seconds, 3) for seconds in moved)),
            longest_wait_s=round(max(waits), 4),
            mean_wait_s=round(sum(waits) / len(waits), 4),
            same=same,
        )

    async def _texts(self, options: RequestOptions) -> list[tuple[int, ...]]:
        running = (self._engine.generate(prompt, self._params, options) for prompt in self._prompts)
        return [output.token_ids for output in await asyncio.gather(*running)]

    async def _until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(CASE_TIMEOUT_S):
            while not condition():  # noqa: ASYNC110 - links tell nobody
                await asyncio.sleep(0.01)

    def _watched(self, links: Sequence[AnyLink]) -> Sequence[AnyLink]:
        [pool] = links
        assert isinstance(pool, DrafterPool)
        for key, link in pool.links.items():
            # What it does not note itself is the link's own.
            pool.links[key] = cast("DrafterLink", WatchedLink(link, key, self._watch))
        return links


def main(
    *,
    rounds: Annotated[int, typer.Option(help="How often each fault happens.")] = 3,
    requests: Annotated[int, typer.Option(help="Requests that run at the fault.")] = 8,
    tokens: Annotated[int, typer.Option(help="Tokens of each.")] = 400,
    drafter: Annotated[
        str, typer.Option(help="The servers' drafter, as JSON.")
    ] = '{"kind": "model", "model": "demo-drafter"}',
    output: Annotated[Path, typer.Option(help="JSON of the results.")] = RESULTS,
) -> None:
    """Run all cases against one engine."""
    cases: list[Case] = []
    servers = Servers(json.loads(drafter))
    try:
        with tempfile.TemporaryDirectory() as folder:
            run = Run(servers, requests, tokens, Path(folder) / "steps.jsonl")
            report = {
                "command": "python -m draftline.benchmarks.serving.pool_moves "
                f"--rounds {rounds} --requests {requests} --tokens {tokens} --drafter '{drafter}'",
                "machine": machine().fields(),
                "versions": {"draftline": metadata.version("draftline")},
                "load_average_before": os.getloadavg(),
                "draft_deadline_s": run.config.draft_deadline_ms / 1000,
            }
            asyncio.run(run.measure([*FAULTS] * rounds, cases.append))
    finally:
        servers.stop()
    done = report | {"cases": [asdict(case) for case in cases]}
    output.write_text(json.dumps(done, indent=1) + "\n")
    Console().print(_table(cases))


def _table(cases: Sequence[Case]) -> Table:
    table = Table("server", "requests", "first moved s", "last moved s", "longest wait ms", "same")
    for case in cases:
        first, last = (case.moved_s[0], case.moved_s[-1]) if case.moved_s else ("", "")
        wait_ms = f"{1000 * case.longest_wait_s:.1f}"
        shown = (case.fault, len(case.moved_s), first, last, wait_ms, case.same)
        table.add_row(*map(str, shown))
    return table


if __name__ == "__main__":
    typer.run(main)
