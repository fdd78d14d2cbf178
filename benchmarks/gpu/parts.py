"""The parts of the benchmark, each in a process of its own, within a time limit.

What ends a process or hangs in it (a fault of the device, a driver that answers no more) costs the
part's last figure, and no other part. Processes are forked from one that has imported everything
and touched no device.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from .findings import Findings, free_memory, load_findings, save_findings
from .instruments.clock import Clock, Repeats, TimeBudget
from .measure.attention import measure_attention
from .measure.products import measure_products
from .measure.rates import measure_rates
from .measure.sampling import measure_sampling
from .measure.states import measure_states
from .measure.steps import measure_part, measure_whole
from .plan import FULL_PLAN, TINY_PLAN
from .setting import GpuSetting

Part = Callable[[GpuSetting, Findings], None]
# Measures one part, somewhere, and adds what it finds.
RunPart = Callable[[str, Part, Findings], None]
RATES = "rates"


def measure_all(
    wanted: Sequence[str], budget: TimeBudget, findings: Findings, run: RunPart,
    after_each: Callable[[str], None],
) -> None:  # fmt: skip
    """Fill `findings` by the parts that are wanted; `after_each` hears every part that has ended.

    The rates come first, wanted or not: nothing has a floor without them.
    """
    for name, part in PARTS.items():
        if name != RATES and name not in wanted:
            continue
        if name != RATES and findings.rates is None:
            findings.skip(name, "the rates of the device are not known")
        elif name != RATES and budget.is_over():
            findings.skip(name, "the time was used up")
        else:
            run(name, part, findings)
            after_each(name)


def run_here(setting: GpuSetting) -> RunPart:
    """Measures parts in this process."""

    def run(name: str, part: Part, findings: Findings) -> None:
        findings.attempt(name, lambda: part(setting, findings))
        free_memory()

    return run


def measure_demo(setting: GpuSetting, findings: Findings) -> None:
    """The bundled model end to end, where the packages that the engine needs are installed."""
    _measure_if_possible("demo", setting, findings)


def measure_heads(setting: GpuSetting, findings: Findings) -> None:
    """Drafts of heads, where the packages that drafters need are installed."""
    _measure_if_possible("heads", setting, findings)


def _measure_if_possible(name: str, setting: GpuSetting, findings: Findings) -> None:
    try:
        module = import_module(f".measure.{name}", __package__)
    except ModuleNotFoundError as error:
        findings.skip(name, f"{error}; pip install draftline")
        return
    getattr(module, f"measure_{name}")(setting, findings)


PARTS: dict[str, Part] = {
    RATES: measure_rates,
    "attention": measure_attention,
    "sampling": measure_sampling,
    "products": measure_products,
    "states": measure_states,
    "heads": measure_heads,
    "steps": measure_whole,
    "stage": measure_part,
    "demo": measure_demo,
}


# Behind the limit, for the process to write where it hangs.
GRACE_S = 10.0
TINY_REPEATS = Repeats(warm=1, least=3, most=5, seconds=0.05)


@dataclass(frozen=True, slots=True)
class SettingFacts:
    """What makes a `GpuSetting` in any process; `start` by `time.monotonic`, which all share."""

    device: str
    is_tiny: bool
    attention: str
    block_size: int
    seconds: float
    start: float

    def setting(self) -> GpuSetting:
        """Where and how everything is measured, from the same start."""
        device = torch.device(self.device)
        if device.type == "cuda" and device.index is not None:
            # Streams, events and launches of Triton are those of the current device.
            torch.cuda.set_device(device)
        torch.manual_seed(0)
        return GpuSetting(
            plan=TINY_PLAN if self.is_tiny else FULL_PLAN,
            clock=Clock(device, TINY_REPEATS if self.is_tiny else Repeats()),
            budget=TimeBudget(self.seconds, start=self.start),
            attention=self.attention,
            block_size=self.block_size,
        )


class PartProcesses:
    """Runs parts one after the other, each in a new process.

    state     file that hands findings from process to process
    limit_s   of a part
    method    how processes begin
    """

    def __init__(
        self, facts: SettingFacts, state: Path, limit_s: float, method: str = "forkserver"
    ) -> None:
        self._facts, self._state, self._limit_s = facts, state, limit_s
        self._context = multiprocessing.get_context(method)
        self._context.set_forkserver_preload([f"{__package__}.parts"])

    def run(self, name: str, part: Part, findings: Findings, on_figure: Callable[[], None]) -> None:
        """Add what the part finds; how the process ended, if not by itself, is a failure of it.

        `on_figure` is called whenever there is more in `findings`.
        """
        save_findings(self._state, findings)
        written = self._state.stat().st_mtime_ns
        context: Any = self._context
        process = context.Process(
            target=_run_part, args=(name, part, self._facts, self._state, self._limit_s)
        )
        process.start()
        deadline = time.monotonic() + self._limit_s + GRACE_S
        while process.is_alive() and time.monotonic() < deadline:
            process.join(0.2)
            now = self._state.stat().st_mtime_ns
            if now != written:
                written = now
                load_findings(self._state, findings)
                on_figure()
        is_late = process.is_alive()
        if is_late:
            process.kill()
        process.join()
        load_findings(self._state, findings)
        if process.exitcode != 0:
            code = process.exitcode
            told = "beyond its time, or by a fault" if code == 1 else f"with status {code}"
            findings.fail(name, "hung, and was ended" if is_late else f"its process ended {told}")


def _run_part(name: str, part: Part, facts: SettingFacts, state: Path, limit_s: float) -> None:
    faulthandler.enable()
    faulthandler.dump_traceback_later(limit_s, exit=True)
    findings = Findings()
    load_findings(state, findings)
    findings.on_change = lambda: save_findings(state, findings)
    setting = facts.setting()
    findings.attempt(name, lambda: part(setting, findings))
    save_findings(state, findings)
    faulthandler.cancel_dump_traceback_later()
    sys.stdout.flush()
