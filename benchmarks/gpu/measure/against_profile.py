"""How near cost profiles come to the steps that a GPU took.

    python -m draftline.benchmarks.gpu.measure.against_profile [--results FILE]

Prints a Markdown table of measured and computed times, by the rows of a step and the text that they
see. The steps are those of `python -m draftline.benchmarks.gpu`, of an 8B and of 20 layers of a
70B; the computed times are those of the bundled profiles, that simulations build on. Needs no GPU.
"""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from ....core.errors import ConfigError
from ....measure.simulate.cost_profile import CostProfile, read_cost_profile
from ..plan import FULL_PLAN, StepCase

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results" / "gpu.json"
# Of the second, a stage is what is measured: 20 of 80 layers.
OF_8B, OF_70B = "8b-h100", "70b-4-h200"
# The profile that has a GPU's data sheet, by what its driver calls it.
GPUS = {"NVIDIA H100 80GB HBM3": OF_8B, "NVIDIA H200": OF_70B}
CASES = {case.name: case for plan in (FULL_PLAN.whole, FULL_PLAN.part) for case in plan.cases}
COLUMNS = ("step", "rows", "measured, ms", "computed, ms", "measured / computed")


@dataclass(frozen=True, slots=True)
class Step:
    """A measured step, seconds, and what a profile says of it."""

    what: str
    case: StepCase
    measured_s: float
    computed_s: float

    @property
    def ratio(self) -> float:
        """Above 1: it took longer than the profile says."""
        return self.measured_s / self.computed_s

    @property
    def row(self) -> tuple[str, ...]:
        """Cells of `COLUMNS`."""
        return (
            f"{self.what}: {self.case.name}", str(self.case.batch * self.case.rows_each),
            f"{1e3 * self.measured_s:.1f}", f"{1e3 * self.computed_s:.1f}", f"{self.ratio:.2f}",
        )  # fmt: skip


def compared(results: dict[str, Any]) -> list[Step]:
    """All steps of a file that `benchmarks.gpu` wrote, in its order.

    Raises `ConfigError` where no bundled profile is of the GPU.
    """
    name = results["device"]["name"]
    if name not in GPUS:
        raise ConfigError("results", f"no bundled profile is of {name}")
    # Measured alone, a stage hands nothing on.
    changes = {"device": read_cost_profile(GPUS[name]).device, "hop_s": 0.0, "row_bytes": 0.0}
    profiles = {
        group.name: read_cost_profile(profile).model_copy(update=changes)
        for group, profile in ((FULL_PLAN.whole, OF_8B), (FULL_PLAN.part, OF_70B))
    }
    return [
        _step(figure, profiles[figure["group"]])
        for figure in results["figures"]
        if figure["group"] in profiles
    ]


def _step(figure: dict[str, Any], profile: CostProfile) -> Step:
    case = CASES[figure["name"]]
    num_rows, num_read = case.batch * case.rows_each, case.batch * case.context_len
    seconds = profile.stage_s(num_rows, num_read, num_rows * case.context_len)
    return Step(figure["group"], case, figure["ms"] / 1e3, seconds)


def main(
    results: Annotated[Path, typer.Option(help="JSON of benchmarks.gpu.")] = RESULTS,
    batches: Annotated[str, typer.Option(help="Steps that are shown, by requests.")] = "1,16",
) -> None:
    """Print the table, and how far computed times are off over all steps."""
    steps = compared(json.loads(results.read_text()))
    shown = {int(batch) for batch in batches.split(",")}
    for row in (COLUMNS, ("---",) * len(COLUMNS)):
        print(f"| {' | '.join(row)} |")
    for step in sorted(steps, key=lambda step: (step.what, step.case.order)):
        if step.case.batch in shown:
            print(f"| {' | '.join(step.row)} |")
    ratios = [step.ratio for step in steps]
    print(
        f"\n{len(steps)} steps: measured / computed {min(ratios):.2f} to {max(ratios):.2f}, "
        f"median {statistics.median(ratios):.2f}"
    )


if __name__ == "__main__":
    typer.run(main)
