"""What a comparison leaves: runs in a file, ratios of the same round, and tables."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from rich.console import Console
from rich.table import Table

from ...core.errors import ConfigError
from ...measure.records import Latency

# What a comparison must share with an earlier one that it goes on with.
MATCHED = (
    "model", "temperature", "machine", "threads", "max_tokens", "num_prompts", "streams", "prompts"
)  # fmt: skip
LATENCIES = ("ttft", "tpot", "itl")
OURS = "draftline"
OUR_PLAIN, OUR_DEFAULT = f"{OURS}, plain", f"{OURS}, default"
VLLM_PLAIN = "vLLM, plain"
# Parts of the names of servers whose weights are not the float32 of all others.
NARROW = ("Q8_0", "Q4_1")


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerRun:
    """One round of one server at one number of streams.

    prompts  label of the set of prompts
    seconds  from the first request sent to the last answer
    ttft, tpot, itl  seconds; itl is between parts of a stream, which may hold several tokens or,
             of one pass, stand in several parts; None where nothing is streamed
    cpu_s    processor seconds of the server's processes; None where the system does not tell
    tau      tokens a pass of the target
    answers  a digest of every answer, in the order of the prompts
    """

    round: int
    prompts: str
    streams: int
    server: str
    num_requests: int
    num_tokens: int
    seconds: float
    ttft: Latency | None
    tpot: Latency | None
    itl: Latency | None
    cpu_s: float | None
    tau: float
    answers: tuple[str, ...]

    @property
    def rate(self) -> float:
        """Tokens a second of all streams."""
        return self.num_tokens / self.seconds

    @property
    def cpu_ms_per_token(self) -> float | None:
        """Processor milliseconds of the server for each token, prompts included."""
        return None if self.cpu_s is None else 1e3 * self.cpu_s / self.num_tokens

    @property
    def is_ours(self) -> bool:
        """Whether draftline answered."""
        return family(self.server) == OURS

    def fields(self) -> dict[str, Any]:
        """For JSON; seconds to five digits."""
        found = asdict(self)
        for name in LATENCIES:
            if found[name] is not None:
                found[name] = {key: float(f"{one:.5g}") for key, one in found[name].items()}
        for name in ("seconds", "cpu_s", "tau"):
            if found[name] is not None:
                found[name] = float(f"{found[name]:.5g}")
        return found | {"answers": " ".join(self.answers)}

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> Self:
        """What `fields` wrote."""
        latencies = {
            name: None if fields[name] is None else Latency(**fields[name]) for name in LATENCIES
        }
        return cls(**{**fields, **latencies, "answers": tuple(fields["answers"].split())})


def family(server: str) -> str:
    """Who wrote it: what stands before the comma."""
    return server.partition(",")[0]


@dataclass(slots=True)
class Comparison:
    """`about` says what was compared where; `runs` in the order in which they were made."""

    about: dict[str, Any]
    runs: list[PeerRun] = field(default_factory=list)

    def has(self, turn: int, server: str, cells: Sequence[tuple[str, int]]) -> bool:
        """Whether a round has all of these (prompts, streams) of a server."""
        known = {
            (run.prompts, run.streams)
            for run in self.runs
            if run.round == turn and run.server == server
        }
        return known >= set(cells)

    def cell(self, prompts: str, streams: int) -> dict[str, dict[int, PeerRun]]:
        """Runs by server and round, in the order in which servers first ran."""
        found: dict[str, dict[int, PeerRun]] = {}
        for run in self.runs:
            if (run.prompts, run.streams) == (prompts, streams):
                found.setdefault(run.server, {})[run.round] = run
        return found

    @property
    def labels(self) -> list[str]:
        """Sets of prompts, in the order given."""
        return list(self.about["prompts"])

    @property
    def loads(self) -> list[int]:
        """Numbers of streams, rising."""
        return sorted(self.about["streams"])

    @property
    def servers(self) -> list[str]:
        """Peers before draftline, each family in the order of its first runs."""
        names = list(dict.fromkeys(run.server for run in self.runs))
        families = list(dict.fromkeys(map(family, names)))
        families.sort(key=lambda name: name == OURS)
        return sorted(names, key=lambda name: families.index(family(name)))

    def write(self, path: Path) -> None:
        """Write it, one run a line; what was there stays until all is written."""
        head = json.dumps(self.about, indent=1).removesuffix("\n}")
        lines = ",\n".join(f"  {json.dumps(run.fields())}" for run in self.runs)
        partial = path.with_suffix(".partial")
        partial.write_text(f'{head},\n "runs": [\n{lines}\n ]\n}}\n', encoding="utf-8")
        partial.replace(path)


def read_comparison(path: Path) -> Comparison:
    """What `Comparison.write` wrote. Raises `ConfigError` for anything else."""
    try:
        about = json.loads(path.read_text(encoding="utf-8"))
        runs = [PeerRun.from_fields(fields) for fields in about.pop("runs")]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError("results", f"{path} holds no comparison: {error!r}") from error
    return Comparison(about, runs)


def resumed(path: Path, about: Mapping[str, Any]) -> Comparison:
    """The comparison in `path`, to go on with. Raises `ConfigError` if it compared something else.

    Servers and rounds may be others; what `about` says of them is added.
    """
    found = read_comparison(path)
    for key in MATCHED:
        # What was written is compared as it was read: JSON has no tuples.
        if json.loads(json.dumps(about[key])) != found.about.get(key):
            raise ConfigError("resume", f"{path} is of other {key}: {found.about.get(key)}")
    commands = {**found.about.get("commands", {}), **about["commands"]}
    return Comparison({**found.about, **about, "commands": commands}, found.runs)


@dataclass(frozen=True, slots=True)
class Ratio:
    """Tokens a second over another server's, one a round; `other` is the one met most often."""

    rounds: tuple[float, ...]
    other: str

    @property
    def median(self) -> float:
        """Over rounds."""
        return statistics.median(self.rounds)

    @property
    def spread(self) -> tuple[float, float]:
        """Least and most."""
        return min(self.rounds), max(self.rounds)


def to_best_peer(comparison: Comparison, prompts: str, streams: int) -> Ratio | None:
    """draftline as it serves by default, over the fastest peer of the same round and weights."""
    cell = comparison.cell(prompts, streams)
    return _ratio(cell.get(OUR_DEFAULT, {}), _peers(cell, narrow=False))


def to_narrow_weights(comparison: Comparison, prompts: str, streams: int) -> Ratio | None:
    """draftline as it serves by default, over the fastest peer with narrow weights."""
    cell = comparison.cell(prompts, streams)
    return _ratio(cell.get(OUR_DEFAULT, {}), _peers(cell, narrow=True))


def _peers(
    cell: Mapping[str, dict[int, PeerRun]], *, narrow: bool
) -> dict[str, dict[int, PeerRun]]:
    return {
        name: runs
        for name, runs in cell.items()
        if family(name) != OURS and any(part in name for part in NARROW) == narrow
    }


def plain_to_vllm(comparison: Comparison, prompts: str, streams: int) -> Ratio | None:
    """draftline without drafters over vLLM without speculation."""
    cell = comparison.cell(prompts, streams)
    others = {VLLM_PLAIN: cell[VLLM_PLAIN]} if VLLM_PLAIN in cell else {}
    return _ratio(cell.get(OUR_PLAIN, {}), others)


def best_setting(comparison: Comparison, prompts: str, streams: int) -> Ratio | None:
    """draftline's fastest setting over the fastest peer of the same round."""
    cell = comparison.cell(prompts, streams)
    ours: dict[int, PeerRun] = {}
    for name, runs in cell.items():
        for turn, run in runs.items() if family(name) == OURS else ():
            if turn not in ours or run.rate > ours[turn].rate:
                ours[turn] = run
    return _ratio(ours, _peers(cell, narrow=False))


def _ratio(
    ours: Mapping[int, PeerRun], others: Mapping[str, Mapping[int, PeerRun]]
) -> Ratio | None:
    """Over the best of `others`; rounds that one of them missed, but ran in another, are left out.

    A peer of a single round (transformers is one) counts in that round only.
    """
    steady = [runs for runs in others.values() if len(runs) > 1]
    ratios, best = [], []
    for turn, run in ours.items():
        rivals = {name: runs[turn] for name, runs in others.items() if turn in runs}
        if not rivals or any(turn not in runs for runs in steady):
            continue
        name = max(rivals, key=lambda one: rivals[one].rate)
        ratios.append(run.rate / rivals[name].rate)
        best.append(name)
    if not ratios:
        return None
    return Ratio(tuple(ratios), Counter(best).most_common(1)[0][0])


def least(ratios: Sequence[Ratio | None]) -> float | None:
    """The smallest median; None without any."""
    known = [ratio.median for ratio in ratios if ratio is not None]
    return min(known, default=None)


NOTHING = "-"
RATIOS = {
    "draftline, default / best peer": to_best_peer,
    "draftline, best setting / best peer": best_setting,
    "draftline, default / llama.cpp with 8 or 4 bits": to_narrow_weights,
    "draftline, plain / vLLM, plain": plain_to_vllm,
}


def sampling(comparison: Comparison) -> str:
    """How tokens were chosen."""
    temperature = comparison.about.get("temperature", 0)
    return f"temperature {temperature:g}" if temperature else "greedy"


def conditions(comparison: Comparison) -> str:
    """How tokens were chosen, and the weights of servers whose names do not say them."""
    kept = ", draftline with the file's 8 or 4 bits" if comparison.about.get("kept_weights") else ""
    return f"{sampling(comparison)}, float32{kept}"


def same_answers(comparison: Comparison, run: PeerRun) -> tuple[int, int] | None:
    """Answers that read as those of draftline without drafters, same round, and how many.

    None where there is nothing to compare: others draw other samples for a seed.
    """
    if comparison.about.get("temperature", 0) and not run.is_ours:
        return None
    base = comparison.cell(run.prompts, run.streams).get(OUR_PLAIN, {}).get(run.round)
    if base is None:
        return None
    same = sum(a == b for a, b in zip(run.answers, base.answers, strict=True))
    return same, len(run.answers)


def print_comparison(comparison: Comparison, console: Console) -> None:
    """One table a set of prompts, and the ratios; latencies are medians over rounds."""
    for label in comparison.labels:
        title = f"{label}: {conditions(comparison)}; medians over rounds"
        table = Table(title=title, box=None)
        table.add_column("server")
        for title in (
            "streams", "tok/s", "(least - most)", "TTFT ms", "p99", "ITL ms", "p99", "CPU ms/tok",
            "tau", "same",
        ):  # fmt: skip
            table.add_column(title, justify="right")
        for streams in comparison.loads:
            cell = comparison.cell(label, streams)
            for name in comparison.servers:
                if name in cell:
                    runs = list(cell[name].values())
                    table.add_row(name, str(streams), *_figures(comparison, runs))
        console.print(table)
        _print_ratios(comparison, label, console)


def _figures(comparison: Comparison, runs: Sequence[PeerRun]) -> list[str]:
    rates = [run.rate for run in runs]
    return [
        f"{statistics.median(rates):.1f}",
        f"({min(rates):.1f} - {max(rates):.1f})",
        *ttft(runs).split(" / "),
        *itl(runs).split(" / "),
        cpu(runs),
        f"{statistics.median(run.tau for run in runs):.2f}",
        same(comparison, runs),
    ]


def _print_ratios(comparison: Comparison, label: str, console: Console) -> None:
    for title, ratio in RATIOS.items():
        found = {streams: ratio(comparison, label, streams) for streams in comparison.loads}
        lowest = least(list(found.values()))
        if lowest is None:
            continue
        parts = ", ".join(f"{streams}: {shown(one)}" for streams, one in found.items() if one)
        console.print(f"{label}: {title}: least {lowest:.2f} ({parts})")


def shown(ratio: Ratio | None) -> str:
    """A median with its least and most, where there are several rounds."""
    if ratio is None:
        return NOTHING
    low, high = ratio.spread
    spread = f" ({low:.2f}-{high:.2f})" if len(ratio.rounds) > 1 else ""
    return f"{ratio.median:.2f}{spread}"


def rate(runs: Sequence[PeerRun]) -> str:
    """Tokens a second of all streams, the median of rounds."""
    return f"{statistics.median(run.rate for run in runs):.0f}"


def ttft(runs: Sequence[PeerRun]) -> str:
    """Milliseconds to the first token, p50 / p99, each the median of rounds."""
    return _latency([run.ttft for run in runs if run.ttft is not None])


def itl(runs: Sequence[PeerRun]) -> str:
    """Milliseconds between parts of a stream, p50 / p99, each the median of rounds."""
    return _latency([run.itl for run in runs if run.itl is not None])


def _latency(rounds: Sequence[Latency]) -> str:
    if not rounds:
        return f"{NOTHING} / {NOTHING}"
    middle = statistics.median(one.median for one in rounds)
    high = statistics.median(one.p99 for one in rounds)
    return f"{1e3 * middle:.1f} / {1e3 * high:.1f}"


def cpu(runs: Sequence[PeerRun]) -> str:
    """Processor milliseconds a token."""
    known = [run.cpu_ms_per_token for run in runs if run.cpu_ms_per_token is not None]
    return f"{statistics.median(known):.2f}" if known else NOTHING


def same(comparison: Comparison, runs: Sequence[PeerRun]) -> str:
    """Equal answers of all rounds."""
    known = [one for one in (same_answers(comparison, run) for run in runs) if one is not None]
    if not known:
        return NOTHING
    return f"{sum(one for one, _ in known)} of {sum(count for _, count in known)}"


def markdown_rates(comparison: Comparison) -> str:
    """A table a set of prompts: tokens a second by server and streams, ratios below."""
    parts = []
    for label in comparison.labels:
        rows = _rows(comparison, label, rate)
        for title, ratio in RATIOS.items():
            found = [ratio(comparison, label, streams) for streams in comparison.loads]
            if any(found):
                rows.append([f"**{title}**", *map(shown, found)])
        parts.append(_markdown(f"{label}, tokens/s", comparison.loads, rows))
    return "\n\n".join(parts)


def _rows(
    comparison: Comparison, label: str, figure: Callable[[Sequence[PeerRun]], str]
) -> list[list[str]]:
    cells = [comparison.cell(label, streams) for streams in comparison.loads]
    return [
        [name, *(figure(list(cell[name].values())) if name in cell else NOTHING for cell in cells)]
        for name in comparison.servers
        if any(name in cell for cell in cells)
    ]


def _markdown(title: str, loads: Iterable[int], rows: Iterable[Sequence[str]]) -> str:
    heads = [f"{count} stream{'s' if count > 1 else ''}" for count in loads]
    lines = [[title, *heads], ["---"] * (len(heads) + 1), *rows]
    return (
        "\n".join(f"| {' | '.join(line)} |" for line in lines)
        .replace("| --- ", "|---")
        .replace("|--- |", "|---|")
    )
