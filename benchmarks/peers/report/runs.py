"""The runs of a comparison, and the file that holds them while it goes on."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from ....core.errors import ConfigError
from ....measure.records.run_metrics import Latency

# What a comparison must share with an earlier one that it goes on with.
MATCHED = ("machine", "threads", "max_tokens", "num_prompts", "streams", "prompts")
LATENCIES = ("ttft", "tpot", "itl")
OURS = "draftline"
OUR_PLAIN, OUR_DEFAULT = f"{OURS}, plain", f"{OURS}, default"
VLLM_PLAIN = "vLLM, plain"


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
