"""`draftline demo`: the served system at work on held-out prompts, with drafting off and on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from ....cluster.engine.assembly import plan_model
from ....core.errors import ConfigError
from ...engine.placement import stages_have_gpu
from ...ray_serve.runtime import quiet_libraries, serve_on_ray
from ...settings.settings import ServeArgs, build_serve_args
from ..serve.command import base_url, describe, with_port
from ..serve.listening import free_port
from .client import DemoClient, DemoRun, DemoSampling, Piece
from .comparison import Comparison
from .held_out_prompts import HeldOutPrompt, held_out_prompts
from .screen import Screen


@dataclass(frozen=True, slots=True)
class DemoJob:
    """How much to show, how its tokens are chosen, and where a picture of it goes."""

    num_prompts: int
    sampling: DemoSampling
    svg: Path | None = None


def run_demo(job: DemoJob) -> int:
    """Run it; 0 if all texts were equal, else 1. Raises `DraftlineError`."""
    if job.svg is not None and not job.svg.absolute().parent.is_dir():
        raise ConfigError("svg", f"folder {job.svg.parent} does not exist")
    quiet_libraries()
    screen = Screen()
    # The parts of a cluster: two stages, and the default drafters (docs/decisions.md).
    args = build_serve_args(
        {"model": "demo", "pipeline_parallel_size": 2, "backend": "ray", "server": {"port": 0}}
    )
    plan_model(args.engine, has_gpu=stages_have_gpu(args.engine))
    screen.line(describe(args))
    results = _serve_and_compare(with_port(args, free_port(args.server)), screen, job)
    screen.table(results, job.sampling)
    if job.svg is not None:
        screen.save_svg(job.svg)
    return 0 if all(result.is_equal for result in results) else 1


def _serve_and_compare(args: ServeArgs, screen: Screen, job: DemoJob) -> list[Comparison]:
    with ExitStack() as stack:
        with screen.phase("starting Ray, two stages and the drafters (half a minute)"):
            stack.enter_context(serve_on_ray(args))
            client = DemoClient(base_url(args), args.model_name, job.sampling)
            stack.callback(client.close)
            prompts = held_out_prompts(job.num_prompts)
            for speculative in (False, True):
                _drain(client.stream(prompts[0].text, DemoRun(), speculative=speculative))
        screen.legend([drafter.source for drafter in args.engine.drafters])
        results = compare_all(client, prompts, screen)
        with screen.phase("shutting down"):
            stack.close()
    return results


def compare_all(
    client: DemoClient, prompts: Sequence[HeldOutPrompt], screen: Screen
) -> list[Comparison]:
    """Complete every prompt plainly, then with drafts, which is what the screen shows."""
    results = []
    for prompt in prompts:
        plain, drafted = DemoRun(), DemoRun()
        _drain(client.stream(prompt.text, plain, speculative=False))
        printer = screen.stream(prompt, len(prompts))
        for piece in client.stream(prompt.text, drafted, speculative=True):
            printer.show_piece(piece)
        printer.finish()
        results.append(Comparison(prompt.name, plain, drafted))
    return results


def _drain(pieces: Iterable[Piece]) -> None:
    for _ in pieces:
        pass
