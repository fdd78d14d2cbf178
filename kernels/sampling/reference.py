"""Sampling in plain torch: what the kernels compute, and the implementation on CPUs.

The noise equals numpy's bit by bit.

torch has no unsigned 64-bit arithmetic on all devices; int64 wraps in the same way, and a logical
shift is an arithmetic shift with the copied sign bits masked off. Change both files together.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ...core import sampling as core
from ...core.request.allowed_tokens import unpack
from ...core.sampling import ATANH_TERMS, GAMMA, LN2, MIX_1, MIX_2, SCREEN_MARGIN, counts_of
from ...core.steps import LogitEdits, Penalties, SamplingRows
from ..cpu.build import are_loaded


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


_GAMMA, _MIX_1, _MIX_2 = _signed(GAMMA), _signed(MIX_1), _signed(MIX_2)


def _xor_shifted(x: Tensor, shift: int) -> Tensor:
    return (x >> shift).bitwise_and_((1 << (64 - shift)) - 1).bitwise_xor_(x)


def _mix64(x: Tensor) -> Tensor:
    x = _xor_shifted(x, 30).mul_(_MIX_1)
    x = _xor_shifted(x, 27).mul_(_MIX_2)
    return _xor_shifted(x, 31)


def _exact_log(x: Tensor) -> Tensor:
    bits = x.view(torch.int64)
    exponent = (bits - 0x3FE6A09E667F3BCD) >> 52
    mantissa = (bits - (exponent << 52)).view(torch.float64)
    s = (mantissa - 1.0) / (mantissa + 1.0)
    square = s * s
    series = torch.full_like(s, ATANH_TERMS[0])
    for term in ATANH_TERMS[1:]:
        # Two roundings, never a fused multiply-add, as in numpy.
        series = series.mul_(square).add_(term)
    return (exponent.to(torch.float64) * LN2).add_(series.mul_(s))


def stream_keys(seeds: Tensor, positions: Tensor) -> Tensor:
    """The int64 bits of `core.sampling.stream_keys`."""
    return _mix64(_mix64(seeds + _GAMMA) ^ _mix64(positions * _GAMMA + _GAMMA))


def uniform(keys: Tensor, token_ids: Tensor) -> Tensor:
    """The float64 uniforms on the open interval (0, 1) that `gumbel` is made of."""
    bits = _mix64(keys + token_ids * _GAMMA)
    bits = (bits >> 12).bitwise_and_((1 << 52) - 1)
    return bits.to(torch.float64).add_(0.5).mul_(2.0**-52)


def gumbel_of(uniforms: Tensor) -> Tensor:
    """Standard Gumbel noise, float32, of the uniforms that `uniform` gives."""
    return (-_exact_log(-_exact_log(uniforms))).to(torch.float32)


def gumbel(seeds: Tensor, positions: Tensor, token_ids: Tensor) -> Tensor:
    """Standard Gumbel noise, float32; int64 tensors that broadcast together.

    Equals `core.sampling.gumbel` bit by bit.
    """
    return gumbel_of(uniform(stream_keys(seeds, positions), token_ids))


def choose_tokens(
    logits: Tensor, sampling: SamplingRows, token_ids: Tensor | None = None
) -> Tensor:
    """The target token of each row, int32 [rows], on the device of `logits` [rows, vocabulary].

    -1 after a row that has NaN, infinity, or minus infinity alone.

    argmax of `processed logits / temperature + gumbel(seed, position, token)`; at temperature 0
    the argmax of the logits. The lowest id wins a tie. Processors act in the order temperature,
    top_k, top_p, min_p, typical_p, each on the distribution that the former leaves. Gives the
    tokens of `core/sampling.py`.

    token_ids  int64 [vocabulary], whose noise the columns have; None: their own numbers. What is
               returned are columns
    """
    chosen = _best(logits)
    if sampling.temperature.any():
        sampled = np.flatnonzero(sampling.temperature)
        rows = torch.from_numpy(sampled).to(logits.device)
        part = logits if len(sampled) == len(logits) else logits[rows]
        part, is_bad = part.float(), chosen[rows] < 0
        if part.device.type != "cpu" or is_bad.any():
            # Filters count what they keep: of NaN nothing.
            part = part.masked_fill(is_bad[:, None], 0.0)
        scaled = process_rows(part, sampling, sampled)
        seeds, positions = (
            torch.from_numpy(values[sampled]).to(logits.device)[:, None]
            for values in (sampling.seed, sampling.position)
        )
        tokens = _noisy_argmax(scaled, seeds, positions, token_ids).to(torch.int32)
        chosen[rows] = tokens.masked_fill(is_bad, -1)
    return chosen


def _best(logits: Tensor) -> Tensor:
    """The best token of each row, int32 [rows]; -1 where its logit is no finite number.

    Both libraries treat NaN as the maximum, so that only the best logit needs a check.
    """
    if logits.device.type == "cpu":
        # numpy's is vectorised: ten times faster than torch's.
        values = logits.float().numpy()
        best = values.argmax(axis=-1)
        is_finite = np.isfinite(values[np.arange(len(values)), best])
        if not is_finite.all():
            best[~is_finite] = -1
        return torch.from_numpy(best.astype(np.int32))
    most, best = logits.max(dim=-1)
    return best.to(torch.int32).masked_fill_(~most.isfinite(), -1)


def process_rows(logits: Tensor, sampling: SamplingRows, rows: np.ndarray) -> Tensor:
    """Logits over the temperature, with -inf for the tokens that cannot be chosen.

    As `core.sampling.process_logits`; `logits` are those of `rows`, all of which have a
    temperature above 0.
    """
    device = logits.device

    def column(values: np.ndarray) -> Tensor:
        return torch.from_numpy(values[rows]).to(device)[:, None]

    scaled = shifted(logits, column(sampling.temperature))
    if sampling.top_k[rows].any() or (sampling.top_p[rows] < 1).any():
        scaled = keep_top(scaled, column(sampling.top_k), column(sampling.top_p))
    if sampling.min_p[rows].any():
        with np.errstate(divide="ignore"):
            floor = np.log(sampling.min_p.astype(np.float64))
        scaled = scaled.masked_fill(scaled < column(floor), -torch.inf)
    if (sampling.typical_p[rows] < 1).any():
        scaled = keep_typical(scaled, column(sampling.typical_p))
    return scaled


def _noisy_argmax(
    scaled: Tensor, seeds: Tensor, positions: Tensor, token_ids: Tensor | None
) -> Tensor:
    if scaled.device.type == "cpu":
        if are_loaded():
            return torch.ops.draftline.noisy_argmax(
                scaled.contiguous(), seeds, positions, token_ids
            )
        # numpy multiplies 64-bit words several times faster than torch.
        parts = (scaled.numpy(), seeds[:, 0].numpy(), positions[:, 0].numpy())
        ids = None if token_ids is None else token_ids.numpy()
        return torch.from_numpy(core.noisy_argmax(*parts, ids))
    return noisy_argmax(scaled, stream_keys(seeds, positions), token_ids)


def shifted(logits: Tensor, temperatures: Tensor) -> Tensor:
    """Logits relative to the best and over the temperature, so that none makes infinities."""
    return (logits - logits.amax(dim=-1, keepdim=True)) / temperatures


def keep_top(scaled: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Logits outside top_k or top_p become -inf. Ties are kept by top_k, and cut by id by top_p.

    `scaled` float [rows, vocabulary], the best of each row 0; `top_k` int32 (0 is off), `top_p`
    float32 (1 is off) [rows, 1]. The vocabulary is not sorted: only a row's candidates can be in
    the set that top_p keeps.
    """
    scaled = _keep_top_k(scaled, top_k)
    rows = (top_p[:, 0] < 1).nonzero()[:, 0]
    if not len(rows):
        return scaled
    kept = scaled.clone()
    kept[rows] = _keep_top_p(scaled[rows], top_p[rows].double())
    return kept


def _keep_top_k(scaled: Tensor, top_k: Tensor) -> Tensor:
    is_cut = (top_k > 0) & (top_k < scaled.shape[-1])
    if not is_cut.any():
        return scaled
    sizes = torch.where(is_cut, top_k, 1).long()
    best = scaled.topk(int(sizes.max()), dim=-1).values
    least = best.gather(-1, sizes - 1).masked_fill(~is_cut, -torch.inf)
    return scaled.masked_fill(scaled < least, -torch.inf)


def _keep_top_p(scaled: Tensor, share: Tensor) -> Tensor:
    """For rows with a top_p below 1, float64 [rows, 1]."""
    num_rows, vocab_size = scaled.shape
    weights = torch.exp(scaled.double())
    total = weights.sum(dim=-1, keepdim=True)
    # All others together have at most half of the mass that top_p cuts, as a margin for rounding.
    row, token = (weights * (2 * vocab_size) >= (1 - share) * total).nonzero(as_tuple=True)
    counts = torch.bincount(row, minlength=num_rows)
    place = torch.arange(len(row), device=row.device) - (counts.cumsum(0) - counts)[row]
    candidates = scaled.new_full((num_rows, int(counts.max())), -torch.inf)
    candidates[row, place] = scaled[row, token]
    # Equal values in the order of ids (a stable sort).
    order = candidates.argsort(dim=-1, descending=True, stable=True)
    ranked = torch.exp(candidates.gather(-1, order).double())
    outside = ranked.cumsum(dim=-1) - ranked >= share * total
    outside[:, 0] = False
    dropped = torch.empty_like(outside).scatter_(-1, order, outside)
    kept = torch.full_like(scaled, -torch.inf)
    kept[row, token] = candidates.masked_fill(dropped, -torch.inf)[row, place]
    return kept


def keep_typical(scaled: Tensor, typical_p: Tensor) -> Tensor:
    """Logits with -inf outside the typical set, as `core/sampling.py` keeps it.

    Rows with a typical_p of 1 stay as they are.
    """
    weights = torch.exp(scaled.double())
    total = weights.sum(dim=-1, keepdim=True)
    surprise = torch.log(total) - scaled
    terms = weights * surprise.masked_fill(weights == 0, 0.0)
    entropy = terms.sum(dim=-1, keepdim=True) / total
    order = (surprise - entropy).abs().argsort(dim=-1, stable=True)
    ranked = weights.gather(-1, order)
    outside = ranked.cumsum(dim=-1) - ranked >= typical_p.double() * total
    outside[:, 0] = False
    dropped = torch.zeros_like(outside).scatter_(-1, order, outside) & (typical_p < 1)
    kept = scaled.masked_fill(dropped, -torch.inf)
    return kept - kept.amax(dim=-1, keepdim=True)


def noisy_argmax(scaled: Tensor, keys: Tensor, token_ids: Tensor | None = None) -> Tensor:
    """The column of each row whose value plus noise is largest; see `core.sampling`.

    `keys` int64 [rows, 1] are those of `core.sampling.stream_keys`.
    """
    if token_ids is None:
        token_ids = torch.arange(scaled.shape[-1], device=scaled.device)
    uniforms = uniform(keys, token_ids)
    screen = scaled - torch.log(-torch.log(uniforms))
    best = screen.amax(dim=-1, keepdim=True)
    row, token = torch.nonzero(screen >= best - 2 * SCREEN_MARGIN, as_tuple=True)
    scores = torch.full_like(scaled, -torch.inf)
    scores[row, token] = scaled[row, token] + gumbel_of(uniforms[row, token])
    return scores.argmax(dim=-1)


def edit_logits(logits: Tensor, edits: Sequence[LogitEdits]) -> Tensor:
    """float32 [rows, vocabulary] with the edits made; without edits, `logits` itself."""
    if not edits:
        return logits
    edited = logits.clone()
    for edit in edits:
        rows = edited[edit.first_row : edit.first_row + edit.num_rows]
        if len(edit.bias_tokens):
            rows[:, _on(rows, edit.bias_tokens).long()] += _on(rows, edit.bias)
        if edit.penalties is not None:
            tokens = _on(rows, edit.penalties.tokens).long()
            rows[:, tokens] = _penalised(rows[:, tokens], edit.penalties)
        if edit.mask is not None:
            rows.masked_fill_(~_on(rows, unpack(edit.mask, rows.shape[1])), -torch.inf)
    return edited


def _on(like: Tensor, array: np.ndarray) -> Tensor:
    return torch.from_numpy(array).to(like.device)


def _penalised(logits: Tensor, penalties: Penalties) -> Tensor:
    counts = _on(logits, counts_of(penalties, len(logits)))
    # Python numbers would be float64 scalars: the same rounding as numpy's needs float32.
    repetition, frequency, presence = (
        logits.new_tensor(value)
        for value in (penalties.repetition, penalties.frequency, penalties.presence)
    )
    weaker = torch.where(logits > 0, logits / repetition, logits * repetition)
    changed = torch.where((counts > 0) | _on(logits, penalties.in_prompt), weaker, logits)
    changed = changed - counts.float() * frequency
    return changed - (counts > 0).float() * presence


class TorchSampler:
    """Plain torch: the reference, and the implementation on CPUs."""

    def edit(self, logits: Tensor, edits: Sequence[LogitEdits]) -> Tensor:
        """float32 logits [rows, vocabulary] with the edits made; without edits, `logits` itself."""
        return edit_logits(logits, edits) if edits else logits

    def choose(self, logits: Tensor, sampling: SamplingRows) -> Tensor:
        """The target token of each row, int32 [rows] on the device."""
        return choose_tokens(logits, sampling)

    def log_softmax(self, logits: Tensor) -> Tensor:
        """float32 log-probabilities [rows, vocabulary]."""
        return torch.log_softmax(logits, dim=-1)
