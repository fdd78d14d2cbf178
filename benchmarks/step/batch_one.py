"""Batch-1 decoding of held-out prompts: engines by how they compile, and llama.cpp."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...cluster.config import EngineConfig
from ...core.request.sampling_params import SamplingParams
from ...deploy.cli.demo.held_out_prompts import held_out_prompts
from ...deploy.engine.engine import Engine
from ...kernels.cpu.build import load_cpu_ops
from ...models.load.checkpoint import resolve_model_path
from ...models.text.tokenizer import load_tokenizer
from ..peers.llama.llama_peer import LlamaPeer
from .decode import DRAFTERS

# The first set of drafters is that of `draftline serve` when it is told nothing.
SETTINGS = ((), ("suffix", "prompt_lookup"), ("prompt_lookup",), ("prompt_lookup", "spectra"))
COMPILE = ("off", "auto", "on")
LOOKUPS = (0, 5, 10)

# Seconds and token ids of one prompt's answer of so many tokens.
Mode = Callable[[list[int], int], tuple[float, list[int]]]


def decode_rates(
    peer: LlamaPeer | None, prompts: int, tokens: int, rounds: int, cache: str
) -> dict[str, Any]:
    """By mode: tokens a second of every round, equal texts, and medians of ratios to llama.cpp."""
    tokenizer = load_tokenizer(resolve_model_path("demo"))
    # `auto` would run on torch's operators until its own are built.
    load_cpu_ops(Path(cache).expanduser())
    ids = [tokenizer.encode(prompt.text) for prompt in held_out_prompts(prompts)]
    engines = {
        f"{compile_}: {' + '.join(names) or 'plain'}": _engine(names, compile_, cache)
        for names in SETTINGS
        for compile_ in COMPILE
    }
    modes = {f"draftline, compile {name}": _draftline(engine) for name, engine in engines.items()}
    if peer is not None:
        for lookup in LOOKUPS:
            label = f"prompt lookup of {lookup}" if lookup else "plain"
            modes[f"llama.cpp, {label}"] = lambda prompt, count, n=lookup: peer.decode(
                prompt, count, n
            )
    found = _rounds(modes, ids, tokens, rounds)
    for engine in engines.values():
        engine.close()
    _add_ratios(found)
    return found


def _engine(names: tuple[str, ...], compile_: Any, cache: str) -> Engine:
    return Engine(
        EngineConfig(
            model="demo",
            compile=compile_,
            compile_cache=cache,
            # Rounds repeat the prompts, and llama.cpp computes them anew each time.
            enable_prefix_caching=False,
            drafters=[DRAFTERS[name] for name in names],
        )
    )


def _draftline(engine: Engine) -> Mode:
    def mode(prompt: list[int], count: int) -> tuple[float, list[int]]:
        params = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
        start = time.perf_counter()
        [output] = engine.generate([prompt], params)
        return time.perf_counter() - start, list(output.token_ids)

    return mode


def _rounds(
    modes: dict[str, Mode], prompts: list[list[int]], tokens: int, rounds: int
) -> dict[str, Any]:
    rates: dict[str, list[float]] = {name: [] for name in modes}
    texts: dict[str, list[list[int]]] = {}
    for name, mode in modes.items():
        texts[name] = [mode(prompt, tokens)[1] for prompt in prompts[:1]]
    for _ in range(rounds):
        for name, mode in modes.items():
            answers = [mode(prompt, tokens) for prompt in prompts]
            texts[name] = [ids for _, ids in answers]
            seconds = sum(seconds for seconds, _ in answers)
            rates[name].append(sum(len(ids) for ids in texts[name]) / seconds)
    truth = next(iter(texts.values()))
    return {
        name: {
            "tokens_per_second": rates[name],
            "same_texts": sum(a == b for a, b in zip(texts[name], truth, strict=True)),
        }
        for name in modes
    }


def _add_ratios(found: dict[str, Any]) -> None:
    rates = {name: mode["tokens_per_second"] for name, mode in found.items()}
    theirs = [name for name in rates if name.startswith("llama.cpp")]
    if not theirs:
        return
    best = max(theirs, key=lambda name: statistics.median(rates[name]))
    for name, mode in found.items():
        for key, other in (("to_llama_plain", theirs[0]), ("to_llama_best", best)):
            pairs = zip(rates[name], rates[other], strict=True)
            mode[key] = statistics.median(ours / other_rate for ours, other_rate in pairs)
