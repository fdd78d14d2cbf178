"""draftline beside vLLM, llama.cpp and transformers: same prompts, model, threads and client.

    python -m draftline.benchmarks.peers [--model smollm2] [--temperature 0.7] [--install]
        [--llama-server FILE] [--head FOLDER] [--prompts bundled --prompts humaneval=FILE]
        [--prompt-tokens 256] [--streams 1,4,8,16,32,64] [--rounds 3] [--resume]

No prefix is shared, and no prompt asked twice of one start of a server: some draft from earlier
answers. A chat model is asked in chats, whose answers end where they end. Every server answers
through its OpenAI endpoint, streamed to the client of `draftline bench`, at each number of streams;
only one runs at a time. In a round all take turns, each round begins with another one, and has its
own prompts. transformers runs in this process, plain, once. All weights are float32, but for those
of llama.cpp's servers that say otherwise in their names, and draftline's of a quantised file, which
it keeps as they are. Prints tables, and writes benchmarks/results/peers.json (with the model's
name, if another, in the file's) after every turn; `--resume` goes on with what stands there.
`--install` first makes vLLM's environment with pip, in build/.
"""

from __future__ import annotations

import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from gguf import GGMLQuantizationType
from rich.console import Console

from ...core.errors import ConfigError, DraftlineError
from ...kernels.cpu.build import load_cpu_ops
from ...measure.records import machine
from ...models.load.quantized_layouts import KEPT_FILE
from ...models.stage.options import StageOptions
from .catalogue import Peers, chosen, known_servers, shown
from .gguf_file import write_checkpoint
from .plan import BUNDLED, PromptSets, digest, make_starts, read_sets
from .report import NARROW, Comparison, print_comparison, resumed
from .rounds import TRANSFORMERS, Asked, Turn, estimate, make_turns, run_turns
from .servers import HOW_TO, WIDE, LlamaBinary, PeerEnvironment, ServerSpec
from .target import MAX_MODEL_LEN, Target

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
BUILD = ROOT / "build"
LOGS = BUILD / "peers-logs"


def main(  # noqa: PLR0913 - one parameter a flag
    *,
    model: Annotated[str, typer.Option(help="Model of all servers.")] = "demo",
    temperature: Annotated[float, typer.Option(help="0: greedy.")] = 0.0,
    prompts: Annotated[
        list[str] | None, typer.Option(help="`bundled`, or LABEL=FILE; may be given several times.")
    ] = None,
    num_prompts: Annotated[int, typer.Option(help="Least prompts for each number of streams.")] = 8,
    tokens: Annotated[int, typer.Option(help="Tokens of an answer; of a chat's, at most.")] = 128,
    prompt_tokens: Annotated[
        int | None,
        typer.Option(
            help="Most tokens of a prompt; default: as many as have room. A long one "
            "is mostly prefill, which drafts do not change."
        ),
    ] = None,
    rounds: Annotated[int, typer.Option(help="Times that every server runs.")] = 3,
    streams: Annotated[str, typer.Option(help="Requests at once.")] = "1,4,8,16,32,64",
    threads: Annotated[int, typer.Option(help="Threads of each server's model.")] = 1,
    servers: Annotated[
        list[str] | None,
        typer.Option(help="Part of servers' names, several times; '' is all. Default: the main."),
    ] = None,
    install: Annotated[bool, typer.Option("--install", help="Make vLLM's environment.")] = False,
    environment: Annotated[Path, typer.Option(help="Folder of vLLM's environment.")] = BUILD
    / "peers-venv",
    llama_server: Annotated[Path | None, typer.Option(help="llama.cpp's llama-server.")] = None,
    head: Annotated[
        Path | None, typer.Option(help="Folder of an EAGLE-3 head, in the published form.")
    ] = None,
    eager: Annotated[bool, typer.Option("--eager", help="vLLM does not compile.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with --output.")] = False,
    output: Annotated[
        Path | None, typer.Option(help="JSON of the results; default: peers.json, as above.")
    ] = None,
) -> None:
    """Compare servers of one model."""
    torch.set_num_threads(threads)
    # Whoever ends this ends the server that runs, as Ctrl-C does.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    console = Console(width=120, highlight=False)
    vllm = PeerEnvironment(environment, "cuda" if torch.cuda.is_available() else "cpu")
    if install and vllm.version() is None:
        vllm.install()
    target = Target(model)
    file = output or RESULTS / (
        f"peers{'' if target.is_bundled else f'-{target.folder.name}'}.json"
    )
    asked = Asked(target, tokens, temperature)
    room = MAX_MODEL_LEN - tokens
    sets = read_sets(target, prompts or [BUNDLED], min(room, prompt_tokens or room))
    loads = [int(count) for count in streams.split(",")]
    plans = [make_starts(sets, loads, num_prompts, seed) for seed in range(rounds)]
    with tempfile.TemporaryDirectory() as models:
        llama = None if llama_server is None else LlamaBinary(llama_server)
        peers = Peers(target, vllm, llama, Path(models), threads, eager, head)
        specs = _specs(peers, servers or [], console)
        turns = make_turns(
            plans,
            [spec for spec in specs.values() if spec is not None],
            transformers=TRANSFORMERS in specs,
        )
        about = _about(peers, asked, sets) | {
            "num_prompts": num_prompts,
            "prompt_tokens": prompt_tokens,
            "streams": loads,
            "commands": {
                name: shown(spec, peers, ROOT) for name, spec in specs.items() if spec is not None
            },
        }
        comparison = resumed(file, about) if resume and file.exists() else Comparison(about)
        _prepare(peers, specs, console)
        _print_estimate(turns, rounds, asked, console)
        failed = run_turns(comparison, turns, asked, lambda: comparison.write(file), LOGS, console)
    print_comparison(comparison, console)
    console.print(machine().line(), *failed, sep="\n")
    if failed:
        raise typer.Exit(1)


def _specs(peers: Peers, parts: Sequence[str], console: Console) -> dict[str, ServerSpec | None]:
    """What is compared, by name; transformers has no command."""
    if peers.vllm.version() is None:
        console.print(f"no vLLM in {peers.vllm.folder}: left out; --install installs it")
    if peers.llama is None:
        console.print(HOW_TO)
    elif peers.llama.version() is None:
        raise ConfigError("llama-server", f"{peers.llama.path} does not run")
    known: dict[str, ServerSpec | None] = {**known_servers(peers), TRANSFORMERS: None}
    return {name: known[name] for name in chosen(list(known), parts)}


def _about(peers: Peers, asked: Asked, sets: PromptSets) -> dict[str, Any]:
    return {
        "model": peers.target.name,
        "is_chat": peers.target.is_chat,
        "temperature": asked.temperature,
        "machine": machine().fields(),
        "vllm": peers.vllm.version(),
        "vllm_eager": peers.eager,
        "llama_cpp": None if peers.llama is None else peers.llama.version(),
        "kept_weights": (peers.target.folder / KEPT_FILE).is_file(),
        "threads": peers.threads,
        "max_tokens": asked.tokens,
        "prompts": {
            label: {"count": len(prompts), "digest": digest(prompts)}
            for label, prompts in sets.items()
        },
    }


def _prepare(peers: Peers, specs: Mapping[str, ServerSpec | None], console: Console) -> None:
    """Make what servers would otherwise make while they are measured."""
    target = peers.target
    if peers.llama is not None:
        for weights in (WIDE, *NARROW) if target.is_chat else (WIDE,):
            file = peers.models / f"{target.folder.name}-{weights}.gguf"
            write_checkpoint(target.folder, file, GGMLQuantizationType[weights])
        if target.assistant is not None:
            name = f"{target.assistant.name}-{WIDE}.gguf"
            write_checkpoint(target.assistant, peers.models / name)
    if any(name.startswith("draftline") for name in specs):
        try:
            load_cpu_ops(Path(StageOptions().compile_cache).expanduser())
        except DraftlineError as error:
            console.print(f"draftline runs without its CPU kernels: {error}")


def _print_estimate(turns: Sequence[Turn], rounds: int, asked: Asked, console: Console) -> None:
    first = estimate([turn for turn in turns if turn.round == 0], asked)
    console.print(
        f"about {first / 60:.0f} minutes for the first round, "
        f"{estimate(turns, asked) / 60:.0f} for all {rounds}; {len(turns)} starts"
    )


if __name__ == "__main__":
    typer.run(main)
