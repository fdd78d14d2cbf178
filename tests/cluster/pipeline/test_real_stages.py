"""A model over Ray actors answers what it answers in one piece in this process."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from draftline.actors.kept_actors import KeptStages, LocalSupervisor
from draftline.cluster.config import TransportName
from draftline.cluster.pipeline.local_pipeline import LocalPipeline
from draftline.cluster.pipeline.ray_pipeline import RayPipeline
from draftline.cluster.transport.stage_spec import StageSpec
from draftline.models.load.partition import partition_layers
from support.inputs.steps import BLOCK_SIZE, PagedRequest, make_step
from support.tools.tiny_models import SIZES, VOCAB_SIZE, save_tiny_model

NUM_BLOCKS = 16
TWO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
PROMPT = np.random.default_rng(3).integers(2, VOCAB_SIZE, 2 * BLOCK_SIZE + 1).astype(int).tolist()


def specs(folder: Path, num_stages: int, device: str = "cpu") -> list[StageSpec]:
    return [
        StageSpec(
            model_path=str(folder),
            span=span,
            num_blocks=NUM_BLOCKS,
            block_size=BLOCK_SIZE,
            hidden_size=SIZES["hidden_size"],
            num_cpus=0.5,
            device=device,
            num_gpus=1.0 if device == "cuda" else 0.0,
        )
        for span in partition_layers(folder, num_stages)
    ]


@pytest.mark.cluster
@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize(
    ("transport", "device"),
    [
        pytest.param("auto", "cpu", marks=pytest.mark.full),
        pytest.param("distributed", "cuda", marks=[pytest.mark.gpu, TWO_GPUS]),
        pytest.param("nccl", "cuda", marks=[pytest.mark.gpu, TWO_GPUS]),
    ],
)
async def test_two_actors_answer_as_one_stage_here(
    transport: TransportName, device: str, tmp_path: Path
) -> None:
    folder = save_tiny_model("llama", tmp_path)
    local = LocalPipeline([spec.build() for spec in specs(folder, 1)])
    remote = RayPipeline(
        specs(folder, 2, device), KeptStages(LocalSupervisor()), transport=transport
    )
    request = PagedRequest(range(1, 5))
    start = len(PROMPT)
    steps = [
        make_step([request.chunk(PROMPT, 0)], step_id=0),
        make_step([request.tree([5, 6, 7, 8], [-1, 0, 0, 1], start)], step_id=1),
        # Commit node 2 in the place of node 1, then go on below it.
        make_step([request.chunk([9], start + 2)], moves=[[*request.slots(start + 2, 1),
                  *request.slots(start + 1, 1)]], step_id=2),
    ]  # fmt: skip
    await local.start()
    await remote.start()
    assert len(remote.memory) == 2
    (whole,) = local.memory
    assert (*map(sum, zip(*remote.memory, strict=True)),) == whole
    waiting = [remote.submit(step) for step in steps]
    for step, answer in zip(steps, waiting, strict=True):
        expected = await local.submit(step)
        assert (await answer).target_tokens.tolist() == expected.target_tokens.tolist()
    await remote.close()
