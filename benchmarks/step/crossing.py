"""At which all-reduce time do pipeline stages answer one stream as soon as tensor parallelism?

    python -m draftline.benchmarks.step.crossing

Under tensor parallelism all GPUs read their share of the weights at once, and wait for two
all-reduces a layer. Pipeline stages read all weights, one stage after the other. This prints, by
the cost profiles of a 70B, the time of an all-reduce of one row at which both take as long for one
stream, tensor parallelism without drafts. Speed-ups by drafts are those of SmolLM2's answers,
`simulated-smollm2-TEMPERATURE-PROFILE.json` in `benchmarks/results/`.

`nccl-tests` measures all-reduces of your machines: `all_reduce_perf -b 16K -e 1M -f 2 -g GPUS`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import typer
from rich.console import Console
from rich.table import Table

from ...measure.simulate.cost_profile import CostProfile, products_s, read_cost_profile

RESULTS = Path(__file__).parents[1] / "results"
PROFILES = ("70b-2-h200", "70b-4-h200", "70b-8-h200")
NUM_LAYERS = 80
REDUCES_A_LAYER = 2
ALL = "all"
TEMPERATURES = {"t0": "greedy", "t1": "T = 1"}


def main() -> None:
    """Print the table."""
    table = Table("GPUs", "drafts of the stages", "ms a token", "equal at an all-reduce of, us",
                  box=None, pad_edge=False)  # fmt: skip
    for name in PROFILES:
        profile = read_cost_profile(name)
        plain_s = profile.num_stages * profile.stage_s(1, 0)
        for label, speedup in [("none", 1.0), *_speedups(name)]:
            token_s = plain_s / speedup
            equal_s = reduce_s(profile, token_s)
            table.add_row(
                str(profile.num_stages), label, f"{1e3 * token_s:.1f}",
                f"{1e6 * equal_s:.0f}" if equal_s > 0 else "always sooner",
            )  # fmt: skip
    Console(width=110, highlight=False).print(table)


def reduce_s(profile: CostProfile, step_s: float) -> float:
    """Seconds of an all-reduce with which a step of one row takes so long under tensor parallelism
    without drafts; below 0 if it takes longer without any."""
    read_s = products_s(profile.device, profile.target, 1) / profile.num_stages
    return (step_s - read_s - profile.target.pass_s) / (NUM_LAYERS * REDUCES_A_LAYER)


def _speedups(profile: str) -> Iterator[tuple[str, float]]:
    for temperature, when in TEMPERATURES.items():
        path = RESULTS / f"simulated-smollm2-{temperature}-{profile}.json"
        if path.exists():
            settings = json.loads(path.read_text("utf-8"))["settings"]
            yield f"all drafters, {when}", settings[ALL]["speedup"]


if __name__ == "__main__":
    typer.run(main)
