"""A pipeline stage: a contiguous span of a model's layers over its own paged KV cache.

`Stage` runs steps; the functions below it make the last stage's answer: target tokens, and the
requested log-probabilities.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from ...core.arrays import Float32, Int32
from ...core.interfaces import StageMemory
from ...core.steps import (
    NO_LOG_PROB_OUTPUT,
    NO_LOG_PROBS,
    NO_PROBES,
    HeadDrafts,
    LogProbOutput,
    MultiStepInput,
    StepInput,
    StepOutput,
    TopTokens,
    VerificationResult,
)
from ...core.verify.walk import accepted_rows
from ...kernels.sampling.sampler import Sampler, choose_sampler
from ..attention.step_attention import PagedKv
from ..device import HostCopy, to_device
from .acceptance_rules import verification_results, with_verification_results
from .cpu_path import CpuPath, following_rows
from .gpu_path import GraphPath
from .options import OutputVocabulary
from .plain_path import ComputePath
from .stage_heads import LastStageParts, MakeHeads, StageHeads

# Waits for the result of a launched step; called once, in any thread.
PendingOutput = Callable[[], StepOutput]


class Stage:
    """Runs steps, in the order of the calls, on one span of layers. Owns the span's KV cache."""

    def __init__(
        self,
        path: ComputePath,
        make_heads: MakeHeads | None = None,
        output: OutputVocabulary | None = None,
    ) -> None:
        """`make_heads` makes the heads that draft at the end of the steps, from the features of
        the taps. `output`: ids that logits are for, whose rows the stage's head has; None: the
        head's own.

        Raises the errors of `make_heads`.
        """
        self.path = path
        self._sampler = choose_sampler(path.part.device)
        self._output = output
        if output is not None:
            self._columns = torch.from_numpy(output.columns).to(path.part.device)
        self._heads = None if make_heads is None else self._made(make_heads)

    def _made(self, make_heads: MakeHeads) -> StageHeads:
        path, part = self.path, self.path.part
        assert part.head is not None
        parts = LastStageParts(
            part.embed, path.normed, path.projected, part.softcap, part.dtype, part.device,
            path.kv.num_slots, path.block_size,
            path.capture if isinstance(path, GraphPath) else None,
        )  # fmt: skip
        return StageHeads(make_heads(parts), self._features)

    @property
    def kv(self) -> PagedKv:
        """Its KV cache, without that of its heads."""
        return self.path.kv

    @property
    def block_size(self) -> int:
        """Slots of a block of the cache."""
        return self.path.block_size

    @property
    def kv_bytes(self) -> int:
        """Bytes of the KV cache, with that of its heads."""
        return self.kv.num_bytes + (0 if self._heads is None else self._heads.kv_bytes)

    @property
    def memory(self) -> StageMemory:
        """Bytes of its weights, KV cache and states."""
        states = self.path.states
        kept = 0 if states is None else states.num_bytes
        return StageMemory(self.path.weight_bytes, self.kv_bytes, kept)

    @property
    def vocab_size(self) -> int:
        """Ids that its logits are for."""
        return self.path.part.config.vocab_size if self._output is None else self._output.size

    @property
    def decodes_several(self) -> bool:
        """Whether it supports several tokens a request in a step (`StepInput.multi_step`)."""
        return isinstance(self.path, CpuPath) and self.path.decodes_several

    @property
    def is_first(self) -> bool:
        """Whether `run` embeds tokens; it takes no hidden states then."""
        return self.path.part.embed is not None

    def empty_hidden(self, num_rows: int) -> Tensor:
        """Zeros for hidden states that `run` takes: [num_rows, input_size] of its taps."""
        size = (num_rows, self.path.taps.input_size)
        return torch.zeros(size, dtype=self.path.part.dtype, device=self.path.part.device)

    @property
    def num_blocks(self) -> int:
        """KV blocks of the cache."""
        return self.kv.num_slots // self.block_size

    def reset(self) -> None:
        """Clear the KV cache, and forget the states of all texts."""
        self.kv.data.zero_()
        if self.path.states is not None:
            self.path.states.reset()
        if self._heads is not None:
            self._heads.reset()

    @property
    def is_last(self) -> bool:
        """Whether `run` answers with a `StepOutput`."""
        return self.path.part.head is not None

    @torch.inference_mode()
    def run(self, step: StepInput, hidden: Tensor | None = None) -> Tensor | StepOutput:
        """Hidden states [rows, output_size] for the next stage, or the last stage's `StepOutput`.

        `hidden` is what the stage before returned; None on the first. Moves KV first, then writes
        the KV of the step's rows.
        """
        result = self.launch(step, hidden)
        return result if isinstance(result, Tensor) else result()

    @torch.inference_mode()
    def launch(self, step: StepInput, hidden: Tensor | None = None) -> Tensor | PendingOutput:
        """The hidden states of `run`; on the last stage a function that waits for its result.

        On a GPU the host may launch the next step before it waits; the function may be called by
        another thread.
        """
        if step.multi_step is not None:
            output = self._decode(step, step.multi_step)
            return lambda: output
        states = self._hidden(step, hidden)
        if not self.is_last:
            return states
        rows = wanted_rows(step)
        return launch_answer(
            step, rows, self._logits(states, rows), self._sampler,
            states=states, features_of=self._features, heads=self._heads,
        )  # fmt: skip

    @torch.inference_mode()
    def logits(self, step: StepInput, hidden: Tensor | None, rows: Int32) -> Tensor:
        """Unprocessed float32 logits [len(rows), vocabulary] of these rows; last stage only.

        Runs the step as `run` does.
        """
        return self._logits(self._hidden(step, hidden), rows)

    def _hidden(self, step: StepInput, hidden: Tensor | None) -> Tensor:
        self._move(step.moves)
        return self.path.hidden_states(step, hidden)

    def _features(self, states: Tensor) -> Tensor:
        """float32 [n, width]: what drafters read of n rows of a step's states."""
        return self.path.taps.features(states, self.path.normed)

    def _move(self, moves: Int32) -> None:
        if not len(moves):
            return
        self.path.move(moves)
        if self._heads is not None:
            self._heads.move(moves)

    def _decode(self, step: StepInput, wanted: MultiStepInput) -> StepOutput:
        assert isinstance(self.path, CpuPath)
        self._move(step.moves)
        rows = following_rows(step, wanted.num_tokens, self.block_size)
        with_states = self._heads is not None and bool(step.heads.tasks)
        tokens, states = self.path.decode(
            step, wanted, rows, self._sampler, with_states=with_states
        )
        # Decoding stops at a row that is not finite.
        not_finite = np.flatnonzero(tokens[0] < 0).astype(np.int32)
        if len(not_finite):
            tokens = np.maximum(tokens, np.int32(0))
        output = StepOutput(
            step.step_id,
            tokens[0],
            decoded=np.ascontiguousarray(tokens.T),
            not_finite=not_finite if len(not_finite) else None,
        )
        if self._heads is not None:
            self._heads.decoded(step, rows, output, states)
        return output

    def _logits(self, hidden: Tensor, rows: Int32) -> Tensor:
        """Of these rows, whose own states come before those of the taps."""
        hidden = hidden[:, : self.path.part.config.hidden_size]
        if len(rows) != len(hidden) or (rows != np.arange(len(rows))).any():
            hidden = hidden[to_device(rows, self.path.part.device)]
        logits = self.path.logits(hidden)
        if self._output is None:
            return logits
        mapped = logits.new_full((len(logits), self._output.size), -torch.inf)
        mapped[:, self._columns] = logits
        return mapped


def wanted_rows(step: StepInput) -> Int32:
    """Rows of a step whose logits its answer needs, ascending."""
    every = step.logits_rows, step.probes.rows, step.log_probs.scored_rows
    wanted = [rows for rows in every if len(rows)]
    if len(wanted) == 1:
        return wanted[0]
    return np.unique(np.concatenate((*wanted, np.empty(0, dtype=np.int32))))


def launch_answer(
    step: StepInput, rows: Int32, logits: Tensor, sampler: Sampler, *,
    states: Tensor | None = None, features_of: Callable[[Tensor], Tensor] | None = None,
    heads: StageHeads | None = None,
) -> PendingOutput:  # fmt: skip
    """Enqueue the computation of the answer, and one copy of it to the host.

    logits       float32 [rows, vocabulary], unprocessed, of `wanted_rows`
    states       [rows, ..] of the step
    features_of  float32 [n, width] of n rows of `states`
    heads        of the stage, which draft after the committed tokens

    Waits for the device only if an acceptance rule runs on the host, or if features of accepted
    rows or drafts of heads are wanted.
    """

    def logits_of(wanted: Int32) -> Tensor:
        if not len(wanted):
            return logits[:0]
        # Not copied if drafters and answers want the same rows.
        if wanted is rows or np.array_equal(wanted, rows):
            return logits
        return logits[to_device(np.searchsorted(rows, wanted), logits.device)]

    target_logits = logits_of(step.logits_rows)
    marked, results = _chosen(step, target_logits, sampler)
    # The other results need a token for each row.
    needs_tokens = (
        step.log_probs.of_targets or bool(step.heads.feature_requests) or heads is not None
    )
    targets = marked.clamp(min=0) if needs_tokens else marked
    parts = {
        "target_tokens": marked,
        **_probed(step, logits_of(step.probes.rows)),
        **_scored(step, logits_of(step.log_probs.scored_rows), sampler),
        **_asked_for(step, target_logits, targets, sampler),
    }
    if step.heads.feature_requests:
        assert states is not None
        assert features_of is not None
        accepted = accepted_rows(step, targets.cpu().numpy(), results)
        parts["features"] = features_of(states[to_device(accepted, states.device)])
    drafts: tuple[HeadDrafts, ...] = ()
    if heads is not None and states is not None:
        # Before the next step, which moves the heads' cache of these rows.
        drafts = heads.draft(step, targets.cpu().numpy(), results, states)
    copy = HostCopy(list(parts.values()))

    def wait() -> StepOutput:
        arrays = dict(zip(parts, (tensor.numpy() for tensor in copy.wait()), strict=True))
        tokens, log_probs = arrays["target_tokens"], arrays.get("log_probs")
        not_finite = _not_finite(tokens, log_probs)
        if not_finite is not None:
            tokens = np.maximum(tokens, np.int32(0))
        return StepOutput(
            step.step_id, tokens, arrays.get("probe_ids"), _log_probs(step, arrays),
            verification_results=results, features=arrays.get("features"), head_drafts=drafts,
            not_finite=not_finite,
        )  # fmt: skip

    return wait


def _not_finite(marked: Int32, log_probs: Float32 | None) -> Int32 | None:
    """`StepOutput.not_finite`, of tokens int32 [rows] as `_chosen` marks them."""
    is_bad = marked < 0
    if log_probs is not None:
        # A mask may hide logits that are not finite from the sampler.
        is_bad |= np.isnan(log_probs)
    return np.flatnonzero(is_bad).astype(np.int32) if is_bad.any() else None


def _chosen(
    step: StepInput, logits: Tensor, sampler: Sampler
) -> tuple[Tensor, tuple[VerificationResult, ...] | None]:
    """The target token of each row, int32 [rows], -1 after a row that is not finite; and the
    results of the acceptance rule, if any."""
    if not len(logits):
        return torch.empty(0, dtype=torch.int32, device=logits.device), None
    edited = sampler.edit(logits, step.edits)
    targets = sampler.choose(edited, step.sampling)
    if step.verification is None:
        return targets, None
    is_bad = targets < 0
    if is_bad.any():
        # Such a row has no distribution, and a rule would raise. Its request ends in any case.
        edited = edited.masked_fill(is_bad[:, None], 0.0)
    results = verification_results(edited, step.sampling, step.verification)
    # So that log-probabilities belong to the committed tokens.
    committed = with_verification_results(targets.cpu().numpy(), step.verification, results)
    chosen = to_device(committed, logits.device).to(torch.int32)
    return chosen.masked_fill(is_bad, -1), results


def _asked_for(
    step: StepInput, logits: Tensor, targets: Tensor, sampler: Sampler
) -> dict[str, Tensor]:
    """Log-probabilities and entropies of `logits_rows`, by name, as far as the step wants them."""
    wanted = step.log_probs
    if not wanted.of_targets and not wanted.with_entropies:
        return {}
    parts, distributions = {}, sampler.log_softmax(logits)
    if wanted.of_targets:
        parts["log_probs"] = _of_tokens(distributions, targets.long())
        parts |= _top("top", distributions, wanted.num_top)
    if wanted.with_entropies:
        parts["entropies"] = torch.special.entr(distributions.exp()).sum(dim=-1)
    return parts


def _scored(step: StepInput, logits: Tensor, sampler: Sampler) -> dict[str, Tensor]:
    """Log-probabilities of `scored_tokens`, by the logits of their rows."""
    wanted = step.log_probs
    if not len(wanted.scored_rows):
        return {}
    distributions = sampler.log_softmax(logits)
    scores = _of_tokens(distributions, to_device(wanted.scored_tokens, distributions.device))
    return {"scores": scores, **_top("scored_top", distributions, wanted.num_top)}


def _probed(step: StepInput, logits: Tensor) -> dict[str, Tensor]:
    """The most probable tokens of each row of the probes."""
    if step.probes is NO_PROBES:
        return {}
    return {"probe_ids": logits.topk(step.probes.top_k, dim=-1).indices.to(torch.int32)}


def _of_tokens(distributions: Tensor, tokens: Tensor) -> Tensor:
    """Log-probability of one token a row, float32 [rows]."""
    return distributions.gather(-1, tokens[:, None])[:, 0]


def _top(name: str, distributions: Tensor, count: int) -> dict[str, Tensor]:
    """The most probable tokens of each row and their log-probabilities, if any are wanted."""
    if not count:
        return {}
    best = distributions.topk(count, dim=-1)
    return {f"{name}_ids": best.indices.to(torch.int32), f"{name}_log_probs": best.values}


def _log_probs(step: StepInput, arrays: dict[str, np.ndarray]) -> LogProbOutput:
    if step.log_probs is NO_LOG_PROBS:
        return NO_LOG_PROB_OUTPUT
    return LogProbOutput(
        arrays.get("log_probs"), _top_tokens("top", arrays), arrays.get("entropies"),
        arrays.get("scores"), _top_tokens("scored_top", arrays),
    )  # fmt: skip


def _top_tokens(name: str, arrays: dict[str, np.ndarray]) -> TopTokens | None:
    if f"{name}_ids" not in arrays:
        return None
    return TopTokens(arrays[f"{name}_ids"], arrays[f"{name}_log_probs"])
