"""`draftline train KIND --dry-run`: what a run needs, without the run."""

from __future__ import annotations

from accelerate import PartialState
from rich.console import Console

from ....training.heads.step_measure import measure_step
from ....training.heads.trainer import HELD_OUT_TEXTS, HeadRun
from ..progress import span
from .job import HeadJob

MB, GB = 1e6, 1e9
# Of a parameter: itself, its gradient and AdamW's two means, all float32.
TRAINED_BYTES = 16


def print_dry_run(run: HeadRun, kind: str, job: HeadJob, console: Console) -> None:
    """Sizes of the network, the texts and the target's states, and the time of a step, measured on
    texts of the run. Trains the network of `run` for that. Of several processes the first prints.

    Raises what the target's stages raise.
    """
    measure = measure_step(run)
    parameters = sum(parameter.numel() for parameter in run.network.parameters())
    num_tokens = sum(len(text.tokens) for text in run.trained_texts)
    state_bytes = run.target.state_bytes
    tokens_s = measure.num_tokens / measure.states_s
    both_s = measure.states_s + measure.training_s
    where = "on this GPU" if run.accelerator.device.type == "cuda" else "in this process"
    told = [
        f"trained: {kind}, {parameters:,} parameters, {parameters * TRAINED_BYTES / MB:,.0f} MB "
        "with gradients and the optimizer's state",
        f"target: {job.model}, {_place(job)}",
        f"texts: {len(run.trained_texts):,} with {num_tokens:,} tokens; "
        f"{HELD_OUT_TEXTS} more are held out",
        f"states: {state_bytes:,} bytes a token in float32, {state_bytes // 2:,} in 16 bits",
        f"step: {measure.num_texts} texts, {measure.num_tokens:,} tokens, "
        f"{measure.num_tokens * state_bytes / MB:,.1f} MB of states",
        f"time: {both_s:.2f} s a step, {measure.states_s:.2f} s of it for the states "
        f"({tokens_s:,.0f} tokens or {tokens_s * state_bytes / MB:,.1f} MB a second); "
        f"{job.num_steps:,} steps in {span(both_s * job.num_steps)}",
        f"memory: {measure.peak_bytes / GB:.1f} GB at most {where}",
    ]
    if run.accelerator.is_main_process:
        console.print("\n".join(told))
    PartialState().destroy_process_group()


def _place(job: HeadJob) -> str:
    stages = job.stages
    if stages is None:
        return "whole in this process, float32"
    count = stages.pipeline_parallel_size
    rounded = "" if stages.quantization == "none" else f", {stages.quantization} weights"
    number = "1 stage" if count == 1 else f"{count} stages"
    return f"{number} ({stages.backend}), dtype {stages.dtype}{rounded}"
