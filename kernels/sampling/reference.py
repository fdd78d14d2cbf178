"""The sampling kernels in plain torch; the noise equals numpy's bit by bit.

torch has no unsigned 64-bit arithmetic on all devices; int64 wraps in the same way, and a logical
shift is an arithmetic shift with the copied sign bits masked off. Change both files together.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ...core.request.allowed_tokens import unpack
from ...core.sampling import ATANH_TERMS, GAMMA, LN2, MIX_1, MIX_2, SCREEN_MARGIN, counts_of
from ...core.steps import LogitEdits, Penalties
from .tables import SamplingScratch, SamplingTables


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
    logits: Tensor, tables: SamplingTables, scratch: SamplingScratch, out: Tensor
) -> None:
    """Store each row's token in `out`, int32 [rows]: that of `core.sampling.choose_tokens`;
    -1 where the best logit is no finite number.

    `logits` [rows, vocabulary] of any float type count as float32. `scratch` is not used.
    """
    del scratch
    rows = slice(tables.launch_rows)
    logits = logits[rows]
    most, out[rows] = logits.max(dim=-1)
    is_sampled = tables.temperatures[rows] > 0
    is_finite = most.isfinite()
    if not tables.samples:
        out[rows].masked_fill_(~is_finite, -1)
        return

    def column(values: Tensor) -> Tensor:
        return values[rows][is_sampled][:, None]

    known = logits[is_sampled].float().masked_fill(~is_finite[is_sampled][:, None], 0.0)
    scaled = shifted(known, column(tables.temperatures))
    if tables.filters:
        scaled = keep_top(scaled, column(tables.top_k), column(tables.top_p))
    scaled = scaled.masked_fill(scaled < column(tables.floors), -torch.inf)
    out[rows][is_sampled] = noisy_argmax(scaled, column(tables.keys)).to(torch.int32)
    out[rows].masked_fill_(~is_finite, -1)


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


def noisy_argmax(scaled: Tensor, keys: Tensor) -> Tensor:
    """The token of each row whose value plus noise is largest; see `core.sampling`.

    `keys` int64 [rows, 1] are those of `core.sampling.stream_keys`.
    """
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
