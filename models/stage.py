"""A pipeline stage: a contiguous span of a model's layers over its own paged KV cache."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..core.candidates import Verdict
from ..core.types import Int32, StepInput, StepOutput, TopTokens
from ..kernels.dispatch import Machine
from ..kernels.sampling_dispatch import choose_sampling
from .attention_backend import AttentionBackend, SdpaBackend, choose_backend
from .attention_op import attending
from .compiled_layers import CompiledLayers, prepare
from .model_info import head_dim, num_kv_heads
from .model_slice import ModelSlice, load_slice
from .paged_kv import PagedKv
from .partition import LayerSpan
from .rotary import RotaryTable
from .sampling_backend import choose_sampler
from .verdicts import verdicts, with_verdicts
from .warm_up import warm_up

NO_ROWS = np.empty(0, dtype=np.int32)


def load_stage(  # noqa: PLR0913 - one parameter a setting
    model_path: str | Path, span: LayerSpan, num_blocks: int, block_size: int,
    dtype: str = "float32", *, device: str = "cpu",
    compile_cache: str | Path | None = None, attention: str = "auto",
) -> Stage:  # fmt: skip
    """Load the layers of `span` from a Hugging Face folder or hub id, with an empty KV cache.

    `attention` is a backend of `kernels/dispatch.py`, or auto. With `compile_cache` the layers
    become one compiled graph with attention of its own, kept in that folder, and run once.
    Raises `CheckpointError` for a folder that cannot be used, `ConfigError` for a wrong setting.
    """
    is_triton = choose_sampling(Machine.of(device)) == "triton"
    fused = is_triton and attention != "sdpa" and compile_cache is None
    part = load_slice(model_path, span, dtype, device, fused=fused)
    kv = PagedKv(
        len(part.layers), num_blocks * block_size, num_kv_heads(part.config),
        head_dim(part.config), dtype=part.dtype, device=device,
    )  # fmt: skip
    if compile_cache is None:
        num_heads = part.config.num_attention_heads
        backend, _ = choose_backend(kv, part.dtype, block_size, num_heads, attention)
        return Stage(part, kv, block_size, attention=backend)
    part = prepare(part, compile_cache)
    stage = Stage(part, kv, block_size, CompiledLayers(part))
    warm_up(stage)
    return stage


class Stage:
    """Runs steps, in the order of the calls, on one span of layers. Owns the span's KV cache."""

    def __init__(
        self, part: ModelSlice, kv: PagedKv, block_size: int,
        compiled: CompiledLayers | None = None, attention: AttentionBackend | None = None,
    ) -> None:  # fmt: skip
        """Without `attention` it is torch's own."""
        self.kv = kv
        self.block_size = block_size
        self._part = part
        self._compiled = compiled
        self._attention = attention or SdpaBackend(kv, block_size)
        self._sampler = choose_sampler(part.device)
        self._softcap = getattr(part.config, "final_logit_softcapping", None)
        like = torch.empty(0, dtype=part.dtype, device=part.device)
        layer_types = [kind for kind in part.layer_types if kind is not None]
        self._rotary = RotaryTable(part.rotary, layer_types, like, flat=part.fast)

    @property
    def is_first(self) -> bool:
        """Whether `run` embeds tokens; it takes no hidden states then."""
        return self._part.embed is not None

    @property
    def hidden_size(self) -> int:
        """Columns of hidden states."""
        return self._part.config.hidden_size

    @property
    def is_last(self) -> bool:
        """Whether `run` answers with a `StepOutput`."""
        return self._part.head is not None

    @torch.inference_mode()
    def run(self, step: StepInput, hidden: Tensor | None = None) -> Tensor | StepOutput:
        """Hidden states [rows, hidden_size] for the next stage, or what the last stage answers.

        `hidden` is what the stage before returned; None on the first. Moves KV first, then writes
        the KV of the step's rows.
        """
        hidden = self._hidden(step, hidden)
        return self._output(step, hidden) if self.is_last else hidden

    @torch.inference_mode()
    def logits(self, step: StepInput, hidden: Tensor | None, rows: Int32) -> Tensor:
        """Unprocessed float32 logits [len(rows), vocabulary] of these rows; last stage only.

        Runs the step as `run` does.
        """
        return self._logits(self._hidden(step, hidden), rows)

    def _hidden(self, step: StepInput, hidden: Tensor | None) -> Tensor:
        part = self._part
        if len(step.moves):
            self._attention.move(self._tensor(step.moves))
        if part.embed is not None:
            hidden = part.embed(self._tensor(step.token_ids))
        assert hidden is not None
        assert len(hidden) == len(step.token_ids)
        if not len(hidden):
            return hidden
        positions = self._tensor(step.positions)
        rotations = self._rotary.rotations(positions, int(step.positions.max()))
        states = hidden.to(part.device)
        if self._compiled is not None:
            with attending(step, self.kv, self.block_size):
                return self._compiled(states, rotations)
        attention = self._attention.begin(step)
        if not part.fast:
            states = states.unsqueeze(0)
        for layer, kind in zip(part.layers, part.layer_types, strict=True):
            states = layer.forward(
                states,
                attention_mask=attention,
                position_embeddings=rotations[kind if kind in rotations else None],
                position_ids=positions[None],
            )
        return states if part.fast else states[0]

    def _output(self, step: StepInput, hidden: Tensor) -> StepOutput:
        wanted = [
            array for array in (step.logits_rows, step.probe_rows, step.scored_rows) if len(array)
        ]
        rows = wanted[0] if len(wanted) == 1 else np.unique(np.concatenate((*wanted, NO_ROWS)))
        logits = self._logits(hidden, rows)

        def of(wanted: Int32) -> Tensor:
            # Not copied where drafters and answers want the same rows.
            if wanted is rows or np.array_equal(wanted, rows):
                return logits
            return logits[self._tensor(np.searchsorted(rows, wanted))]

        asked = _probed(of(step.probe_rows), step.probe_top_k)
        targets, scores = np.empty(0, dtype=np.int32), np.empty(0, dtype=np.float32)
        found = None
        if len(step.logits_rows):
            edited = self._sampler.edit(of(step.logits_rows), step.edits)
            targets, probes = _on_host(self._sampler.choose(edited, step.sampling), asked)
            targets, found = _verified(targets, edited, step)
        else:
            probes = asked.cpu().numpy()
        log_probs = top = scored_top = entropies = None
        if len(step.scored_rows):
            laws = torch.log_softmax(of(step.scored_rows), dim=-1)
            scores = _log_probs(laws, self._tensor(step.scored_tokens))
            scored_top = _top(laws, step.num_top)
        if step.with_log_probs:
            laws = torch.log_softmax(of(step.logits_rows), dim=-1)
            log_probs = _log_probs(laws, self._tensor(targets))
            top = _top(laws, step.num_top)
        if step.with_entropies:
            laws = torch.log_softmax(of(step.logits_rows), dim=-1)
            entropies = torch.special.entr(laws.exp()).sum(dim=-1).cpu().numpy()
        return StepOutput(
            step.step_id, targets, probes, scores, log_probs, top, scored_top, entropies, found
        )

    def _logits(self, hidden: Tensor, rows: Int32) -> Tensor:
        part = self._part
        assert part.norm is not None
        assert part.head is not None
        if len(rows) != len(hidden) or (rows != np.arange(len(rows))).any():
            hidden = hidden[self._tensor(rows)]
        logits = part.head(part.norm(hidden)).float()
        if self._softcap is not None:
            logits = torch.tanh(logits / self._softcap) * self._softcap
        return logits

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array.astype(np.int64)).to(self._part.device)


def _probed(logits: Tensor, count: int) -> Tensor:
    """The most probable tokens of each row, int32 [rows, count]."""
    if not len(logits) or not count:
        return torch.empty(len(logits), count, dtype=torch.int32, device=logits.device)
    return logits.topk(count, dim=-1).indices.to(torch.int32)


def _verified(
    targets: Int32, edited: Tensor, step: StepInput
) -> tuple[Int32, tuple[Verdict, ...] | None]:
    """What a rule decides where there is one, and the targets with what it commits."""
    if step.verification is None:
        return targets, None
    found = verdicts(edited, step.sampling, step.verification)
    # So that log-probabilities are those of what is committed.
    return with_verdicts(targets, step.verification, found), found


def _on_host(chosen: Tensor, asked: Tensor) -> tuple[Int32, Int32]:
    """Both int32 tensors by one copy from the device, which waits for it."""
    if not asked.numel():
        return chosen.cpu().numpy(), asked.cpu().numpy()
    numbers = torch.cat((chosen, asked.flatten())).cpu().numpy()
    return numbers[: len(chosen)], numbers[len(chosen) :].reshape(asked.shape)


def _log_probs(laws: Tensor, tokens: Tensor) -> np.ndarray:
    """Log-probability of one token a row, float32 [rows]."""
    return laws.gather(-1, tokens[:, None])[:, 0].cpu().numpy()


def _top(laws: Tensor, count: int) -> TopTokens | None:
    if not count:
        return None
    best = laws.topk(count, dim=-1)
    return TopTokens(best.indices.to(torch.int32).cpu().numpy(), best.values.cpu().numpy())
