"""What the heads of the last stage take of its thread in a step, beside their networks.

    python -m draftline.benchmarks.heads.stage_host --before FOLDER

A feature head of one tiny layer with random weights, so that what is left is work of the host: the
walk, features that wait, slots, and what stands around the passes. Every request verifies a chain
of 4 nodes of which 2 are accepted. Drafts of one node are wanted of all requests, or of none.

`FOLDER` holds another version of the package as `draftline`, with this file in it: both are run by
turns, each in a process of its own. Processor time of the thread, which other processes change
least; the median of a round's steps, and of all rounds the least.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from ...core.arrays import Int32
from ...core.proposals import FeatureLayers
from ...core.reach import EVERY_REACH
from ...core.steps import HeadTask, SamplingRows, StepInput, StepTrees, prompt_step
from ...core.tree.kernels import pack
from ...drafters.heads.drafter import network_of
from ...drafters.heads.last_stage import LastStageHead, LastStageHeadSpec
from ...drafters.heads.options import HeadOptions
from ...measure.records.record import machine
from ...models.heads.feature_head import FeatureHead
from ...models.heads.formats.feature_head_config import FeatureHeadConfig
from ...models.heads.shared_parts import SharedParts
from ...models.load.model_info import ModelInfo
from ...models.stage.stage_heads import LastStageParts, StageHeads

PACKAGE = Path(__file__).parents[2]
RESULTS = PACKAGE / "benchmarks" / "results" / "stage_host.json"
HIDDEN_SIZE, VOCAB_SIZE = 32, 64
REQUESTS = (1, 8, 64)
NUM_NODES, NUM_ACCEPTED = 4, 2
CONTEXT_LEN, BLOCK_SIZE, NUM_STEPS = 128, 16, 60
NUM_ROWS = 1 + NUM_NODES


def stage_heads(num_slots: int) -> StageHeads:
    """One tiny head."""
    torch.manual_seed(0)
    config = FeatureHeadConfig(
        fusion="linear", hidden_size=HIDDEN_SIZE, intermediate_size=32, num_heads=1,
        num_kv_heads=1, head_dim=HIDDEN_SIZE, vocab_size=VOCAB_SIZE,
        feature_size=HIDDEN_SIZE,
    )  # fmt: skip
    embed = nn.Embedding(VOCAB_SIZE, HIDDEN_SIZE).requires_grad_(requires_grad=False)
    lm_head = nn.Linear(HIDDEN_SIZE, VOCAB_SIZE, bias=False).requires_grad_(requires_grad=False)
    head = FeatureHead(config).eval().requires_grad_(requires_grad=False)
    info = ModelInfo(Path(), "none", VOCAB_SIZE, HIDDEN_SIZE, 1, 1, HIDDEN_SIZE, 4096, (), None)
    given = FeatureLayers((0,), HIDDEN_SIZE)
    spec = LastStageHeadSpec("head", Path(), info, given, HeadOptions(tree="chain"), 16)
    parts = LastStageParts(
        embed, nn.Identity(), lm_head, None, torch.float32, torch.device("cpu"), num_slots,
        BLOCK_SIZE,
    )  # fmt: skip
    shared = SharedParts(embed, nn.Identity(), lm_head, None)
    return StageHeads([LastStageHead(spec, network_of(head, shared), (0,), parts)])


def steps_of(num_requests: int, *, are_wanted: bool) -> tuple[int, list[tuple[StepInput, Int32]]]:
    """Slots that they need, and steps of requests that decode with their target tokens."""
    last_len = CONTEXT_LEN + (1 + NUM_ACCEPTED) * NUM_STEPS + NUM_ROWS
    width = -(-last_len // BLOCK_SIZE)
    tables = np.arange(num_requests * width, dtype=np.int32).reshape(num_requests, width)
    places = tuple(range(num_requests)) if are_wanted else ()
    task = HeadTask("head", places, (1,) * len(places), (EVERY_REACH,) * len(places))
    rows = np.arange(num_requests * NUM_ROWS, dtype=np.int32)
    starts = np.arange(num_requests + 1, dtype=np.int32) * np.int32(NUM_ROWS)
    tokens = np.tile(np.arange(NUM_ROWS, dtype=np.int32), num_requests)
    # The token behind each node of a chain, but for the last one that is accepted.
    targets = tokens + 1
    targets[NUM_ACCEPTED::NUM_ROWS] = VOCAB_SIZE - 1
    masks = np.concatenate([pack(np.tri(NUM_ROWS, dtype=np.bool_)).ravel()] * num_requests)
    found = []
    for number in range(NUM_STEPS):
        context = np.full(num_requests, CONTEXT_LEN + (1 + NUM_ACCEPTED) * number, dtype=np.int32)
        positions = context.repeat(NUM_ROWS) + tokens
        slots = tables[rows // NUM_ROWS, positions // BLOCK_SIZE] * BLOCK_SIZE
        slots = (slots + positions % BLOCK_SIZE).astype(np.int32)
        step = replace(
            prompt_step(1, BLOCK_SIZE), step_id=number, token_ids=tokens, positions=positions,
            slots=slots, request_starts=starts, context_lens=context, block_tables=tables,
            trees=StepTrees(masks, starts, slots, positions, num_requests), logits_rows=rows,
            sampling=SamplingRows.greedy(positions.astype(np.int64) + 1),
            request_keys=tuple(range(num_requests)),
            head_tasks=(task,),
            following_tokens=np.empty(0, dtype=np.int32),
        )  # fmt: skip
        found.append((step, targets))
    return tables.size * BLOCK_SIZE, found


@torch.inference_mode()
def median_us(num_requests: int, *, are_wanted: bool) -> float:
    """Microseconds of the thread a step, the first fourth of the steps left out."""
    num_slots, steps = steps_of(num_requests, are_wanted=are_wanted)
    heads = stage_heads(num_slots)
    states = torch.randn(num_requests * NUM_ROWS, HIDDEN_SIZE)

    def features(wanted: Int32) -> Tensor:
        return states[torch.from_numpy(wanted.astype(np.int64))]

    taken = []
    for step, targets in steps:
        start = time.thread_time()
        [drafts] = heads.draft(step, targets, None, features)
        taken.append(time.thread_time() - start)
        assert len(drafts.proposals) == are_wanted * num_requests
    return 1e6 * statistics.median(taken[NUM_STEPS // 4 :])


def cells() -> Iterator[tuple[str, int, bool]]:
    """Name, requests and whether drafts are wanted."""
    for are_wanted in (False, True):
        for count in REQUESTS:
            yield f"{count} {'wanted' if are_wanted else 'not wanted'}", count, are_wanted


def round_of(folder: Path) -> dict[str, float]:
    """One round of the package that a folder holds, in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONSAFEPATH": "1"}
    command = [sys.executable, "-m", "draftline.benchmarks.heads.stage_host", "--child"]
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    return json.loads(done.stdout)


def _own_folder(folder: Path) -> Path:
    """One that holds this very package as `draftline`."""
    (folder / "draftline").symlink_to(PACKAGE, target_is_directory=True)
    return folder


def _table(found: dict[str, dict[str, float]]) -> Table:
    table = Table("requests, drafts", *(f"{name}, us" for name in found), "ratio", box=None)
    for cell, _, _ in cells():
        figures = [times[cell] for times in found.values()]
        ratio = f"{figures[0] / figures[-1]:.2f}" if len(figures) > 1 else ""
        table.add_row(cell, *(f"{figure:.0f}" for figure in figures), ratio)
    return table


def least(rounds: Sequence[dict[str, float]]) -> dict[str, float]:
    """Of all rounds, cell by cell."""
    return {cell: min(times[cell] for times in rounds) for cell in rounds[0]}


def main(
    before: Annotated[
        Path | None, typer.Option(help="Folder with the older version as draftline.")
    ] = None,
    rounds: Annotated[int, typer.Option(help="Of each version, by turns.")] = 5,
    output: Annotated[Path, typer.Option(help="Where the JSON goes.")] = RESULTS,
    child: Annotated[bool, typer.Option(hidden=True)] = False,
) -> None:
    """Measure one version, or two by turns."""
    torch.set_num_threads(1)
    if child:
        print(json.dumps({name: median_us(n, are_wanted=w) for name, n, w in cells()}))
        return
    with TemporaryDirectory() as folder:
        versions = {} if before is None else {"before": before}
        versions["now"] = _own_folder(Path(folder))
        # What is compiled is kept on disk by a round that does not count.
        runs = [
            {name: round_of(path) for name, path in versions.items()} for _ in range(rounds + 1)
        ]
    found = {name: least([run[name] for run in runs[1:]]) for name in versions}
    console = Console(highlight=False)
    console.print(machine().line())
    console.print(_table(found))
    result = {"machine": machine().line(), "rounds": rounds, "us": found}
    output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
