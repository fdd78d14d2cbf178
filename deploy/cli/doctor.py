"""`draftline doctor`: what this machine has, and what draftline would pick on it."""

# ruff: noqa: PLC0415 - the command line's help must not wait for torch

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.table import Table

from ... import __version__
from ...cluster.config import MTP, EngineConfig
from ...cluster.engine.assembly import CPU_CACHE_TOKENS, num_states
from ...core.arrays import Float32, Int32
from ...core.errors import CheckpointError, ConfigError
from ...core.proposals import Commit, DraftRequest, FeatureRows, Query
from ...models.load.bundled import BUNDLED_NAMES, demo_path
from ...models.stage.options import StageOptions
from ..ray_serve.runtime import quiet_libraries
from ..settings.settings import ServerConfig
from .demo.prompts import held_out_prompts
from .progress import progress

if TYPE_CHECKING:
    from ...drafters.heads.reading_trial import ProbingDrafter

HELD_OUT_TEXT = Path(__file__).parents[1] / "assets" / "prompts" / "held_out.txt"
PACKAGES = ("torch", "transformers", "ray", "grpcio", "redis", "fastapi", "openai")


@dataclass(frozen=True, slots=True)
class Finding:
    """One line: whether it is fine, and whether draftline works without it."""

    subject: str
    text: str
    ok: bool = True
    needed: bool = True


def run_doctor(console: Console, model: str, quantization: str = "none") -> int:
    """Print all findings, of the target `model` too; 1 if something needed is missing, else 0.

    With a `quantization` also what it does to the target's perplexity.
    """
    quiet_libraries()
    weights = partial(_weights, model), partial(_accuracy, model, quantization)
    checks = (_system, _packages, _devices, _services, _models, *weights, _choices)
    return print_findings(console, [finding for check in checks for finding in check()])


def run_drafter_doctor(console: Console, drafter: str, model: str) -> int:
    """Print what a drafter's checkpoint is; 1 if it does not fit the model, else 0.

    Raises `CheckpointError` if it is none.
    """
    quiet_libraries()
    return print_findings(console, [*_drafter(drafter, model)])


def print_findings(console: Console, findings: Sequence[Finding]) -> int:
    """One line each; 1 if something needed is missing, else 0."""
    table = Table(box=None, show_header=False, pad_edge=False)
    for finding in findings:
        mark = "ok" if finding.ok else ("missing" if finding.needed else "note")
        style = {"ok": "green", "missing": "red", "note": "yellow"}[mark]
        table.add_row(f"[{style}]{mark}[/]", finding.subject, finding.text)
    console.print(table)
    return int(any(finding.needed and not finding.ok for finding in findings))


def _drafter(drafter: str, model: str) -> Iterator[Finding]:
    if drafter == MTP:
        yield from _own_layer(model)
        return
    from ...models.heads.checkpoint_kind import CheckpointKind
    from ...models.heads.load_head import misfits, read_head_checkpoint
    from ...models.heads.medusa import MedusaConfig
    from ...models.load.checkpoint import resolve_head_path
    from ...models.load.model_info import read_model_info

    is_bundled_model = drafter in BUNDLED_NAMES
    checkpoint = read_head_checkpoint(
        demo_path(drafter) if is_bundled_model else resolve_head_path(drafter)
    )
    if checkpoint.kind is CheckpointKind.CAUSAL_LM:
        yield from _small_model(drafter, model)
        return
    millions = checkpoint.num_parameters / 1e6
    yield Finding("drafter", f"{checkpoint.kind}, {millions:.1f} M parameters, {drafter}")
    config = checkpoint.config
    if config is None:
        yield Finding("network", f"draftline has none for kind {checkpoint.kind}", ok=False)
        return
    parts = (
        f"{config.draft_length} tokens at once"
        if isinstance(config, MedusaConfig)
        else (f"{config.num_heads} heads of {config.head_dim} ({config.num_kv_heads} of keys)")
    )
    yield Finding("network", f"{config.hidden_size} wide, {parts}")
    target = read_model_info(model)
    layers = ", ".join(map(str, config.layers_of(target.num_layers)))
    what = f"the outputs of layers {layers}" if layers else "the last hidden state, normed"
    yield Finding("features", f"{what}, of {config.feature_size}")
    reasons = misfits(config, target)
    yield Finding(f"fits {model}", "; ".join(reasons) or "its sizes are the target's", not reasons)
    if len(checkpoint.readings) > 1:
        yield _reading(checkpoint.folder, model, can_draft=not reasons)
    yield from _weights(model)


def _own_layer(model: str) -> Iterator[Finding]:
    """The model's layer for multi-token prediction."""
    import torch

    from ...models.heads.mtp import read_mtp
    from ...models.load.model_info import read_model_info

    target, (device, _) = read_model_info(model), _chosen(model)
    try:
        stored = read_mtp(target, torch.float32, device)
    except ConfigError as error:
        yield Finding("drafter", error.message, ok=False)
        return
    millions, number = stored.num_parameters / 1e6, stored.num_layers
    which = "the layer" if number == 1 else f"the first of {number} layers"
    yield Finding("drafter", f"mtp, {millions:.1f} M parameters, {which} of {model} itself")
    yield Finding("features", f"the last hidden state, normed, of {target.hidden_size}")
    yield from _weights(model)


def _small_model(drafter: str, model: str) -> Iterator[Finding]:
    """How a small model would draft, and with which `vocabulary`."""
    from ...drafters.model.options import ModelOptions
    from ...drafters.model.vocabulary.choice import read_overlap
    from ...models.load.model_info import read_model_info

    info, target = read_model_info(drafter), read_model_info(model)
    yield Finding("drafter", f"kind model, {info.num_layers} layers, {drafter}")
    overlap = read_overlap(info, target)
    if overlap is None:
        yield Finding("vocabulary", f"same: its tokenizer is that of {model}")
        return
    for line in overlap.describe(ModelOptions().num_tokens):
        yield Finding("vocabulary", line)
    yield Finding("vocabulary", f"auto takes {overlap.best}")


def _reading(folder: Path, model: str, *, can_draft: bool) -> Finding:
    """What its config.json leaves open, and which reading fits a few answers of the target."""

    if not can_draft:
        return Finding("config.json", "leaves open how it is read; give its target", ok=False)
    acceptance = probe_head(folder, model)
    [best, *_] = acceptance
    tokens = ", ".join(f"{name} {right:.2f}" for name, right in acceptance.items())
    return Finding(
        "config.json",
        f"leaves open how it is read; take {best} (right tokens of a draft: {tokens})",
    )


def _system() -> Iterator[Finding]:
    yield Finding("draftline", __version__)
    yield Finding(
        "python", f"{platform.python_version()} ({sys.executable})", sys.version_info >= (3, 11)
    )
    yield Finding("machine", f"{platform.platform()}, {os.cpu_count()} CPUs")


def _packages() -> Iterator[Finding]:
    for name in PACKAGES:
        try:
            yield Finding(name, version(name))
        except PackageNotFoundError:
            yield Finding(name, f"not installed; pip install {name}", ok=False)


def _devices() -> Iterator[Finding]:
    import torch

    if not torch.cuda.is_available():
        yield Finding("GPU", "none that torch sees; the CPU is used", ok=False, needed=False)
        return
    for index in range(torch.cuda.device_count()):
        memory = torch.cuda.get_device_properties(index).total_memory / 2**30
        yield Finding("GPU", f"{index}: {torch.cuda.get_device_name(index)}, {memory:.0f} GiB")
    try:
        yield Finding("triton", version("triton"))
    except PackageNotFoundError:
        yield Finding("triton", "not installed; pip install draftline[gpu]", False, needed=False)
    compiler = shutil.which("cc") or shutil.which("gcc")
    missing = "not found; Triton compiles nothing without one: install gcc"
    yield Finding("C compiler", compiler or missing, compiler is not None, needed=False)


def _services() -> Iterator[Finding]:
    from .serve.listening import free_port

    redis = shutil.which("redis-server")
    text = redis or "not found; retrieval stores in folders work without it"
    yield Finding("redis-server", text, redis is not None, needed=False)
    server = ServerConfig()
    try:
        yield Finding("port", f"{free_port(server)} is free on {server.host}")
    except ConfigError as error:
        yield Finding("port", f"{error.message}; use --port", ok=False, needed=False)


def _models() -> Iterator[Finding]:
    from ...models.load.model_info import read_model_info

    for name in BUNDLED_NAMES:
        try:
            info = read_model_info(name)
        except CheckpointError as error:
            yield Finding(f"model {name}", str(error), ok=False, needed=name == "demo")
        else:
            yield Finding(
                f"model {name}",
                f"{info.num_layers} layers, vocabulary {info.vocab_size}, "
                f"context {info.max_context_len}",
            )


def _weights(model: str) -> Iterator[Finding]:
    from ...models.layers.weight_memory import read_weight_memory
    from ...models.load.model_info import read_model_info

    subject = f"weights of {model}"
    try:
        device, dtype = _chosen(model)
        memory, info = read_weight_memory(model, device, dtype), read_model_info(model)
    except CheckpointError as error:
        yield Finding(subject, str(error), ok=False)
        return
    stored_as = f"plain {info.dtype}" if memory.stored_as == "plain" else memory.stored_as
    sizes = {name: _size(memory.num_bytes(name)) for name in memory.sizes}
    loaded = sizes.pop("none")
    rounded = ", ".join(f"{name} {size}" for name, size in sizes.items())
    if memory.widened is not None:
        rounded += f"; experts are dequantised: {memory.widened}"
    yield Finding(
        subject,
        f"stored as {stored_as}, {_size(memory.stored_bytes)}; loaded they take {loaded} in "
        f"{dtype} over all stages; by quantization: {rounded}",
    )
    kept = (
        f"latents of {memory.kv.head_dim} + {memory.kv.rotated_dim} numbers"
        if memory.kv.rotated_dim
        else f"keys and values of {memory.kv.num_heads} heads of {memory.kv.head_dim}"
    )
    yield Finding(
        f"KV cache of {model}",
        f"{memory.kv_bytes(dtype) / 2**10:.1f} KiB a token over all stages: {kept}, in "
        f"{memory.num_kv_layers} layer{'s' * (memory.num_kv_layers != 1)}",
    )
    if memory.states:
        yield _states(memory.state_bytes(dtype), model)


def _states(sizes: tuple[int, int], model: str) -> Finding:
    """What layers keep of texts beside keys and values."""
    config = EngineConfig()
    num_slots, num_rows = num_states(config)
    slots, rows = num_slots * sizes[0], num_rows * sizes[1]
    return Finding(
        f"states of {model}",
        f"{_size(sizes[0])} a text over all stages, beside kv_cache_tokens; {_size(slots + rows)} "
        f"for max_num_seqs: {config.max_num_seqs}, as many snapshots, and {num_rows} rows of steps "
        "and trees",
    )


def _chosen(model: str) -> tuple[str, str]:
    """Device and dtype of a model's stages here."""
    from ...models.device import choose_device, choose_dtype
    from ...models.load.model_info import read_model_info

    device = choose_device("auto")
    return device, choose_dtype("auto", device, read_model_info(model).dtype)


# Tokens of the text whose perplexity is computed.
NUM_JUDGED = 512


def _accuracy(model: str, quantization: str) -> Iterator[Finding]:
    """The perplexity of a text that the model was not trained on, before and after rounding."""
    if quantization == "none":
        return
    from ...cluster.pipeline.perplexity import perplexity
    from ...models.load.model_info import read_model_info
    from ...models.text.tokenizer import load_tokenizer

    subject = f"quantization: {quantization}"
    try:
        info, chosen = read_model_info(model), _chosen(model)
        # The bundled models know code alone.
        texts = (
            [prompt.text for prompt in held_out_prompts()]
            if model in BUNDLED_NAMES
            else [HELD_OUT_TEXT.read_text(encoding="utf-8").replace("\n", " ")]
        )
        documents = _first_tokens(load_tokenizer(info.path), texts, info.max_context_len)
        exact, rounded = (
            perplexity(model, documents, *chosen, kind, progress) for kind in ("none", quantization)
        )
    except (CheckpointError, ConfigError) as error:
        yield Finding(subject, str(error), ok=False)
        return
    num_tokens = sum(len(document) - 1 for document in documents)
    yield Finding(
        subject,
        f"perplexity of {num_tokens} tokens of held-out text {rounded:.3f}, without {exact:.3f}",
    )


def _first_tokens(tokenizer: Any, texts: Sequence[str], most: int) -> list[Int32]:
    """`NUM_JUDGED` tokens of the texts, at most `most` of each."""
    documents: list[Int32] = []
    left = NUM_JUDGED
    for text in texts:
        tokens = np.array(tokenizer(text).input_ids[: min(left, most)], dtype=np.int32)
        if len(tokens) > 1:
            documents.append(tokens)
            left -= len(tokens)
    return documents


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"


def _choices() -> Iterator[Finding]:
    import torch

    has_gpu = torch.cuda.is_available()
    device, reason = ("cuda", "torch sees a GPU") if has_gpu else ("cpu", "no GPU")
    from ...kernels.dispatch import Machine, choose_attention, flash_obstacle
    from ...models.device import choose_dtype

    dtype = choose_dtype("auto", device, checkpoint_dtype="bfloat16")
    of_halves = "on GPUs, or float16 where a checkpoint is kept in it"
    why = of_halves if has_gpu else "bfloat16 arithmetic is several times slower on CPUs"
    yield Finding("device: auto", f"picks {device}: {reason}")
    yield Finding("dtype: auto", f"picks {dtype}: {why}")
    block_size = EngineConfig.model_fields["block_size"].default
    attention = choose_attention(Machine.of(device), getattr(torch, dtype), block_size)
    yield Finding("attention: auto", f"picks {attention.name}: {attention.reason}")
    against = flash_obstacle(Machine.of(device), getattr(torch, dtype), block_size)
    yield Finding("flash-attn", "is taken for prompts" if against is None else f"no: {against}")
    yield _cpu_kernels(has_gpu=has_gpu)
    yield Finding("CUDA graphs", _graphs(attention.name, has_gpu=has_gpu))
    fills = "fills what weights and states leave of the GPU"
    cache = fills if has_gpu else f"{CPU_CACHE_TOKENS} slots: no GPU"
    yield Finding("kv_cache_tokens", f"by default {cache}")
    yield Finding("stage_transport", f"of Ray stages; auto picks {_transport(has_gpu=has_gpu)}")
    yield Finding("backend", "default local: one process; ray: stages and drafters as actors")


def _cpu_kernels(*, has_gpu: bool) -> Finding:
    from ...kernels.cpu.build import find_compiler, library_path, vectors

    subject = "compile: auto"
    if has_gpu:
        return Finding(subject, "has no effect on a GPU: C++ kernels are of CPUs")
    folder = Path(StageOptions().compile_cache).expanduser()
    kind = f"C++ kernels of {vectors().lanes} lanes for float32 stages"
    if library_path(folder).exists():
        return Finding(subject, f"picks {kind}, built in {folder}")
    try:
        compiler = find_compiler()
    except ConfigError as error:
        return Finding(subject, f"picks torch's own: it {error.message}", False, needed=False)
    return Finding(subject, f"picks {kind}; {compiler} builds them at the first start")


def _graphs(attention: str, *, has_gpu: bool) -> str:
    from ...cluster.engine.assembly import GRAPH_CAPTURE_S
    from ...models.stage.gpu_path import rows_of_graphs

    if not has_gpu:
        return "none: no GPU"
    if attention == "sdpa":
        return "none: attention by sdpa cannot be captured"
    config = EngineConfig()
    rows = rows_of_graphs(config.max_num_batched_tokens)
    return (
        f"{len(rows)} for steps of up to {rows[-1]} rows, captured at start within about "
        f"{GRAPH_CAPTURE_S:g} s; larger steps run without"
    )


def _transport(*, has_gpu: bool) -> str:
    import torch

    num_gpus = torch.cuda.device_count() if has_gpu else 0
    if num_gpus < 2:
        return f"distributed: this machine has {num_gpus or 'no'} GPU"
    if not torch.distributed.is_nccl_available():
        return "distributed: torch was built without NCCL"
    return f"nccl: {num_gpus} GPUs, one for each of so many stages"


NUM_PROMPTS, NUM_TOKENS = 6, 40
# A chain's draft of the most levels that heads are asked for by default.
MAX_NODES = 8


def probe_head(folder: Path, model: str) -> dict[str, float]:
    """Mean accepted tokens of a draft by reading, the best first; empty if the config.json leaves
    nothing open.

    Loads the target. Raises `CheckpointError` or `ConfigError`.
    """
    from ...drafters.heads.drafter import load_head_drafter
    from ...drafters.heads.options import HeadOptions
    from ...drafters.heads.reading_trial import ProbingDrafter
    from ...models.load.model_info import read_model_info

    target = read_model_info(model)
    drafter = load_head_drafter(folder, target, options=HeadOptions(tree="chain"))
    if not isinstance(drafter, ProbingDrafter):
        return {}
    for name, (tokens, num_prompt, states) in enumerate(
        _answers(target.path, drafter.feature_layers.layers)
    ):
        follow(drafter, str(name), tokens, num_prompt, states)
    return drafter.acceptance


def follow(
    drafter: ProbingDrafter, name: str, tokens: Sequence[int], num_prompt: int, states: Float32
) -> None:
    """Let a head draft behind each token of an answer.

    tokens  of the prompt, `num_prompt` of them, and the answer
    states  float32 [tokens, width]  that the head reads
    """
    text = np.array(tokens, dtype=np.int32)
    drafter.open(DraftRequest(name, text[:num_prompt], num_prompt, 0.0, 0))
    drafter.observe_features([FeatureRows(name, 0, states[: num_prompt - 1])])
    for length in range(num_prompt, len(text)):
        drafter.propose([Query(name, length, MAX_NODES)])
        drafter.observe_features([FeatureRows(name, length - 1, states[length - 1 : length])])
        drafter.observe([Commit(name, length, text[length : length + 1])])
    drafter.close(name)


def _answers(path: Path, layers: Sequence[int]) -> list[tuple[list[int], int, Float32]]:
    """Tokens of greedy answers, how many of them are the prompt's, and states of the layers."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from ...models.device import choose_device

    device = choose_device("auto")
    # Its stubs type neither `to` nor `generate`.
    loader: Any = AutoModelForCausalLM
    model = loader.from_pretrained(path, dtype="auto").eval().to(device)
    tokenizer = AutoTokenizer.from_pretrained(path)
    answers = []
    for prompt in held_out_prompts(NUM_PROMPTS):
        ids = tokenizer(prompt.text, return_tensors="pt").input_ids.to(device)
        with torch.inference_mode():
            generated = model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False,
                max_new_tokens=NUM_TOKENS,
            )  # fmt: skip
            states = model.base_model(generated, output_hidden_states=True).hidden_states
        # What enters layer k is the output of layer k - 1; the last one's is normed.
        rows = torch.cat([states[layer + 1][0] for layer in layers], dim=-1).float().cpu().numpy()
        answers.append((generated[0].tolist(), ids.shape[1], rows))
    return answers
