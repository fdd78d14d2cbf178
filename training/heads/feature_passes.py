"""One training step of heads that draft token by token: several passes over the same texts.

Pass 1 reads the target's features. Each later pass reads the previous pass's output instead, one
row later, as a draft of that depth would (HASS, arXiv 2408.15766, section 3.2; GRIFFIN, arXiv
2502.11018, section 3.1). Every pass is backpropagated at once, so that only one graph is in memory.
EAGLE-3's passes are one graph, and have no loss on features (its training-time test, arXiv
2503.01840; SafeAILab/EAGLE, traineagle3).

A pass trains on the rows whose drafted context could have been accepted (GRIFFIN): if an earlier
draft was not among the head's best few tokens, no tree would contain it or any draft after it. Its
attention sees the states of drafting: of the n-th token the last n - 1 features are the head's own.

A head with an output head of its own drafts the most frequent tokens alone (EAGLE-3), so that this
head, which is most of a small drafter's work, is a fraction of the target's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from ...models.heads.feature_head import FeatureHead, HeadOutput
from .distilled_texts import DistilledText
from .processes import mean_count, share_of_rows
from .target import TextBatch, logits_of


@dataclass(frozen=True, slots=True)
class LossWeights:
    """Weights of the three parts, and their forms.

    The defaults are those of GRIFFIN's released code, which made its public weights; its paper has
    0.1 for features and 1 for tokens. EAGLE has no loss on best tokens.

    is_l1       features by their absolute distance, else by smooth L1
    is_one_hot  tokens by the text's own one, else by the target's distribution
    """

    feature: float = 1.0
    token: float = 0.1
    best_tokens: float = 0.5
    num_best: int = 10
    is_l1: bool = False
    is_one_hot: bool = False


def head_loss(
    regress: Tensor, features: Tensor, draft_logits: Tensor, target_logits: Tensor, *,
    tokens: Tensor, mask: Tensor, weights: LossWeights,
) -> Tensor:  # fmt: skip
    """Mean over the rows of `mask` of the weighted parts; losses on tokens are in nats.

    The mean is over the rows of all processes, as in `distribution_loss`
    (`training/heads/processes.py`).

    regress, features            [..., rows, hidden_size] the head's output, and the target's
                                 features
    draft_logits, target_logits  [..., rows, vocabulary]
    tokens                       int64 [..., rows]  of the text
    mask                         bool [..., rows]; 0 where it is empty
    """
    count = mean_count(int(mask.sum()))
    log_probs = draft_logits[mask].float().log_softmax(-1)
    target_probs = target_logits[mask].float().softmax(-1)
    distance = functional.l1_loss if weights.is_l1 else functional.smooth_l1_loss
    distances = distance(regress[mask], features[mask], reduction="none")
    losses = weights.feature * distances.mean(-1)
    if weights.is_one_hot:
        expected_log_probs = log_probs.gather(-1, tokens[mask].unsqueeze(-1)).squeeze(-1)
    else:
        expected_log_probs = (target_probs * log_probs).sum(-1)
    losses = losses - weights.token * expected_log_probs
    if weights.best_tokens:
        best = target_probs.topk(min(weights.num_best, target_probs.shape[-1]), dim=-1)
        chosen = torch.gather(log_probs, -1, best.indices)
        losses = losses - weights.best_tokens * (best.values * chosen).sum(-1)
    return share_of_rows(losses, count)


def distribution_loss(logits: Tensor, target_logits: Tensor) -> Tensor:
    """Mean over rows of the cross-entropy with the target's distribution, nats; 0 without rows.

    logits, target_logits  [rows, vocabulary]
    """
    target_probs = target_logits.float().softmax(-1)
    losses = -(target_probs * logits.float().log_softmax(-1)).sum(-1)
    return share_of_rows(losses, mean_count(len(logits)))


def frequent_tokens(texts: Sequence[DistilledText], vocab_size: int, count: int) -> Tensor:
    """int64 [count]: the most frequent tokens in the answers of texts, by ascending id.

    Lower ids win ties.
    """
    answers = [np.array(text.tokens, dtype=np.int64)[text.answer_mask()] for text in texts]
    counts = np.bincount(np.concatenate(answers), minlength=vocab_size)
    return torch.from_numpy(np.sort(np.argsort(-counts, kind="stable")[:count]))


@torch.no_grad()
def begin_vocabulary(head: FeatureHead, tokens: Tensor, output: Tensor) -> None:
    """Set a head's draft vocabulary, and initialise its output head with the target's rows.

    tokens  int64 [draft vocabulary]
    output  [vocabulary, hidden_size]  the target's
    """
    head.lm_head.weight.copy_(output[tokens.to(output.device)])
    if head.config.has_token_map:
        places = torch.arange(len(tokens))
        head.d2t.copy_(tokens - places)


def vocabulary_of(head: FeatureHead) -> Tensor:
    """int64 [draft vocabulary]: the target's ids of the tokens that a head can draft."""
    count = head.config.draft_vocab_size or head.config.vocab_size
    device = next(head.parameters()).device
    return head.target_tokens(torch.arange(count, device=device))


def drafted_logits(head: FeatureHead, lm_head: nn.Module, states: Tensor) -> Tensor:
    """[..., draft vocabulary]: the target's logits of the tokens that a head can draft."""
    if not head.config.has_token_map:
        return lm_head(states)
    return logits_of(lm_head, states, vocabulary_of(head))


def draft_logits(head: FeatureHead, lm_head: nn.Module, predict: Tensor) -> Tensor:
    """[..., draft vocabulary]: by the head's own output head, or by the target's."""
    return head.lm_head(predict) if head.config.draft_vocab_size else lm_head(predict)


def best_tokens(head: FeatureHead, logits: Tensor) -> Tensor:
    """int64 [...]: the target's id of the most probable token."""
    return head.target_tokens(logits.argmax(-1))


MaskForm = Literal["paper", "code"]


def is_aligned(logits: Tensor, tokens: Tensor, count: int) -> Tensor:
    """bool [..., rows]: whether the target token is among the `count` best of a row.

    logits  [..., rows, vocabulary]
    tokens  int64 [..., rows] the target tokens
    """
    best = logits.topk(count, dim=-1).indices
    return (best == tokens.unsqueeze(-1)).any(-1)


def pass_mask(aligned: Sequence[Tensor], answers: Tensor, form: MaskForm = "paper") -> Tensor:
    """bool [..., rows]: the rows of the next pass.

    aligned  of each pass before it, `is_aligned` [..., rows]
    answers  bool [..., rows] rows whose tokens are trained on

    Row t of pass n reads the output of pass n - 1 at row t - 1, which read that of pass n - 2 at
    row t - 2, and so on. With `form: code` all are one row later, as in GRIFFIN's released code,
    which checks the previous pass at the row itself. Rows without such a past are excluded.
    """
    mask = answers.clone()
    late = 0 if form == "paper" else 1
    for back, earlier in enumerate(reversed(aligned), start=1):
        distance = back - late
        mask &= shifted(earlier, distance)
    return mask


def shifted(rows: Tensor, distance: int) -> Tensor:
    """The values `distance` rows before each, False where there is none: bool [..., rows]."""
    moved = rows.roll(distance, -1)
    moved[..., :distance] = False
    return moved


class ContextReplacement:
    """Attention of pass n, over n - 1 streams of states besides that of the queries.

    Stream 0 has the target's features, stream j the head's own from pass j, each shifted to the row
    that reads it. Row r attends stream 0 up to row r - (n - 1), stream j at row r - (n - 1 - j),
    and its own. Missing rows are masked by minus infinity before the softmax; a factor of 0 would
    leave them a share.

    Implements `Attend` for a head of one layer.
    """

    def __init__(self, streams: Sequence[tuple[Tensor, Tensor]]) -> None:
        """`streams`: keys and values [..., rows, kv_heads, head_dim] of each stream except the
        queries'."""
        self._streams = streams

    def __call__(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """[..., rows, heads, head_dim] of queries of that shape."""
        assert layer == 0, "context is replaced in heads of one layer"
        queries = queries * queries.shape[-1] ** -0.5
        streams = [*self._streams, (keys, values)]
        num_heads = queries.shape[-2]
        repeated = [
            tuple(part.repeat_interleave(num_heads // part.shape[-2], -2) for part in stream)
            for stream in streams
        ]
        (first_keys, first_values), later = repeated[0], repeated[1:]
        scores = [_scores_before(queries, first_keys, len(later))]
        for index, (own_keys, _) in enumerate(later):
            scores.append(_scores_at(queries, own_keys, len(later) - 1 - index))
        shares = torch.cat(scores, dim=-1).softmax(-1)
        rows = queries.shape[-3]
        attended = torch.einsum("...hrc,...chd->...rhd", shares[..., :rows], first_values)
        for index, (_, own_values) in enumerate(later):
            share = shares[..., rows + index].transpose(-1, -2).unsqueeze(-1)
            attended = attended + share * own_values.roll(len(later) - 1 - index, -3)
        return attended


def _scores_before(queries: Tensor, keys: Tensor, distance: int) -> Tensor:
    """[..., heads, rows, rows]: of each row with those that are `distance` or more before it."""
    rows = queries.shape[-3]
    scores = torch.einsum("...rhd,...chd->...hrc", queries, keys)
    is_hidden = torch.ones(rows, rows, dtype=torch.bool, device=queries.device).triu(1 - distance)
    return scores.masked_fill(is_hidden, -torch.inf)


def _scores_at(queries: Tensor, keys: Tensor, distance: int) -> Tensor:
    """[..., heads, rows, 1]: of each row with the one that is `distance` before it."""
    rows = queries.shape[-3]
    scores = (queries * keys.roll(distance, -3)).sum(-1).transpose(-1, -2).unsqueeze(-1)
    is_missing = torch.arange(rows, device=queries.device) < distance
    return scores.masked_fill(is_missing[:, None], -torch.inf)


@dataclass(frozen=True, slots=True, kw_only=True)
class PassPlan:
    """How a step trains.

    num_passes   drafts of up to this depth are trained on
    is_staged    the run has as many equal parts, and each part adds one pass (GRIFFIN); else all
                 passes from the start (HASS)
    num_aligned  best tokens among which an earlier draft must be for a row to count; 0: all rows
                 count (HASS)
    best_from    share of the run from which the loss on best tokens counts
    """

    num_passes: int = 3
    is_staged: bool = False
    num_aligned: int = 3
    mask_form: MaskForm = "paper"
    weights: LossWeights = field(default_factory=LossWeights)
    best_from: float = 0.0

    def passes_at(self, done: float) -> int:
        """Number of passes of a step at the fraction `done` (0 to 1) of the run."""
        if not self.is_staged:
            return self.num_passes
        return min(int(done * self.num_passes) + 1, self.num_passes)

    def weights_at(self, done: float) -> LossWeights:
        """Weights at the fraction `done` of the run."""
        return self.weights if done >= self.best_from else replace(self.weights, best_tokens=0.0)


class PassReport(NamedTuple):
    """One pass: its loss, the share of answer rows that it trained on, and the share of these whose
    best draft was the target's own token.
    """

    loss: float
    trained: float
    accuracy: float


class TrainingRows(NamedTuple):
    """Inputs and labels of rows, [texts, rows, ...]. Row t pairs the target's feature of token t
    with token t + 1, and learns the state t + 1, whose logits predict token t + 2.

    embeddings  of the input tokens
    features    input features; for EAGLE-3 several, side by side
    states      labels, the normed last ones
    tokens      int64, labels; `answers`: whether the target generated them
    """

    embeddings: Tensor
    features: Tensor
    states: Tensor
    places: Tensor
    tokens: Tensor
    answers: Tensor


def train_passes(
    head: FeatureHead, embed: nn.Module, lm_head: nn.Module, batch: TextBatch, plan: PassPlan,
    *, done: float = 1.0,
) -> list[PassReport]:  # fmt: skip
    """Add the gradients of every pass to the head's parameters.

    embed    token ids to embeddings, the target's own
    lm_head  features to logits, the target's own
    done     completed fraction of the run, 0 to 1

    A row counts if the head can draft the text's token, and its losses on tokens are over those
    that it can draft.
    """
    rows = text_rows(embed, batch)
    tokens, is_known = _drafted_tokens(head, rows)
    num_passes, weights = plan.passes_at(done), plan.weights_at(done)
    # Of these alone logits are computed, which are most of a step's work.
    needed = _with_rows_before(rows.answers, num_passes - 1)
    states, tokens = rows.states[needed], tokens[needed]
    with torch.no_grad():
        target_logits = drafted_logits(head, lm_head, states)
    aligned: list[Tensor] = []
    reports = []
    for output in drafting_passes(head, rows, num_passes):
        logits = draft_logits(head, lm_head, output.predict[needed])
        mask = pass_mask(aligned, rows.answers & is_known, plan.mask_form)
        trained = mask[needed]
        loss = head_loss(
            output.regress[needed], states, logits, target_logits, tokens=tokens, mask=trained,
            weights=weights,
        )  # fmt: skip
        loss.backward()
        is_right = logits.argmax(-1) == target_logits.argmax(-1)
        reports.append(
            PassReport(loss.item(), _share(mask, rows.answers), _share(is_right, trained))
        )
        if plan.num_aligned:
            fits = torch.zeros_like(needed)
            fits[needed] = is_aligned(logits, tokens, plan.num_aligned)
            aligned.append(fits & is_known)
    return reports


def _with_rows_before(rows: Tensor, count: int) -> Tensor:
    """bool [texts, rows]: those of `rows`, and `count` rows before each."""
    found = rows.clone()
    for distance in range(1, count + 1):
        found[:, :-distance] |= rows[:, distance:]
    return found


def _drafted_tokens(head: FeatureHead, rows: TrainingRows) -> tuple[Tensor, Tensor]:
    """Labels of rows as places among the tokens that a head can draft, and whether they have one;
    both [texts, rows].
    """
    if not head.config.has_token_map:
        return rows.tokens, torch.ones_like(rows.answers)
    vocabulary = vocabulary_of(head)
    places = torch.searchsorted(vocabulary, rows.tokens.contiguous())
    places = places.clamp(max=len(vocabulary) - 1)
    return places, vocabulary[places] == rows.tokens


@torch.no_grad()
def depth_acceptance(
    head: FeatureHead, embed: nn.Module, lm_head: nn.Module, batch: TextBatch, depth: int
) -> list[tuple[int, int]]:
    """For each depth of a greedy chain: the number of drafts after accepted ones, and how many are
    accepted.

    Texts are assumed to be greedy: a draft is accepted if it is the text's next token.
    """
    rows = text_rows(embed, batch)
    accepted: list[Tensor] = []
    counts = []
    for output in drafting_passes(head, rows, depth):
        best = best_tokens(head, draft_logits(head, lm_head, output.predict))
        is_right = best == rows.tokens
        follows = pass_mask(accepted, rows.answers)
        counts.append((int(follows.sum()), int((is_right & follows).sum())))
        accepted.append(is_right)
    return counts


def text_rows(embed: nn.Module, batch: TextBatch) -> TrainingRows:
    """The rows of a batch; the last two tokens of a text have no label."""
    features = batch.features[:, :-2]
    with torch.no_grad():
        embeddings = embed(batch.tokens[:, 1:-1])
    places = torch.arange(features.shape[1], device=features.device).expand(features.shape[:2])
    return TrainingRows(
        embeddings, features, batch.states[:, 1:-1], places, batch.tokens[:, 2:],
        batch.answers[:, 2:],
    )  # fmt: skip


def drafting_passes(
    head: FeatureHead, rows: TrainingRows, count: int, *, is_constant: bool = True
) -> Iterator[HeadOutput]:
    """The head's output in each pass.

    is_constant  later passes see the output as a constant, so that each pass can be backpropagated
                 before the next one
    """
    known = head.project(rows.features)
    streams = [known]
    for _ in range(count):
        # The projections of earlier streams are trained in every pass.
        context = ContextReplacement(
            [head.keys_values(rows.embeddings, stream, rows.places) for stream in streams[:-1]]
        )
        output = head(rows.embeddings, streams[-1], rows.places, context)
        yield output
        before = output.regress.detach() if is_constant else output.regress
        # Shifted by one row: each row reads the output of the previous row; the first has none.
        streams.append(torch.cat([known[:, :1], before[:, :-1]], dim=1))


def _share(rows: Tensor, of: Tensor) -> float:
    return int((rows & of).sum()) / max(int(of.sum()), 1)


# Ratio of a pass's loss weight to that of the previous pass.
PASS_DECAY = 0.8


def train_as_tested(
    head: FeatureHead, embed: nn.Module, lm_head: nn.Module, batch: TextBatch, num_passes: int
) -> list[PassReport]:
    """Add the gradients of `num_passes` passes to the head's parameters.

    embed, lm_head  the target's, which stay frozen

    A row counts if the head can draft the text's token. The loss is the cross-entropy with the
    target's distribution over the tokens that the head can draft, sum 1. Only one pass's logits
    are in memory.
    """
    rows = text_rows(embed, batch)
    is_known = rows.answers & torch.isin(rows.tokens, vocabulary_of(head))
    with torch.no_grad():
        target_logits = drafted_logits(head, lm_head, rows.states[is_known])
    best = target_logits.argmax(-1)
    places = is_known.flatten().cumsum(0).view_as(rows.tokens) - 1
    every_row = torch.ones_like(rows.answers)
    predicted, gradients, reports = [], [], []
    for index, output in enumerate(drafting_passes(head, rows, num_passes, is_constant=False)):
        leaf = output.predict.detach().requires_grad_()
        # The first rows have no earlier drafts to continue.
        mask = pass_mask([every_row] * index, is_known)
        logits = draft_logits(head, lm_head, leaf[mask])
        loss = distribution_loss(logits, target_logits[places[mask]])
        (PASS_DECAY**index * loss).backward()
        predicted.append(output.predict)
        gradients.append(leaf.grad)
        is_right = logits.argmax(-1) == best[places[mask]]
        trained = int(mask.sum()) / max(int(rows.answers.sum()), 1)
        accuracy = int(is_right.sum()) / max(len(is_right), 1)
        reports.append(PassReport(loss.item(), trained, accuracy))
    torch.autograd.backward(predicted, gradients)
    return reports
