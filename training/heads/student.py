"""A small model that is distilled to a target (DistillSpec, arXiv 2310.08461).

The student learns the target's distribution after every token of the texts; the divergence of the
two is a mean over the rows that predict a token which the target generated. Logits over a whole
vocabulary are large, so that few rows have them at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...models.layers.model_slice import load_whole_model
from .processes import mean_count, share_of_rows
from .target import TextBatch

Divergence = Literal["forward", "reverse", "both"]
# Logits that are in memory at a time.
MAX_LOGITS = 2**23


@dataclass(frozen=True, slots=True, kw_only=True)
class StudentConfig:
    """What a student begins as.

    folder      model whose weights it begins with
    layers      of that model, which the student consists of; empty: all
    vocab_size  rows of its embedding and output head: the first ones of that model
    """

    folder: str
    layers: tuple[int, ...] = ()
    vocab_size: int

    def layers_of(self, num_layers: int) -> tuple[int, ...]:  # noqa: ARG002 - as heads have it
        """Layers of a target whose outputs it reads: none."""
        return ()


class Student(nn.Module):
    """A causal language model in training, float32."""

    def __init__(self, config: StudentConfig) -> None:
        """Load it. Raises `CheckpointError`."""
        super().__init__()
        self.config = config
        model: Any = load_whole_model(config.folder, layers=config.layers)
        if model.config.vocab_size > config.vocab_size:
            model.resize_token_embeddings(config.vocab_size)
        self.model = model.requires_grad_()

    def forward(self, tokens: Tensor) -> Tensor:
        """Normed last states [texts, length, hidden_size] of tokens int64 [texts, length]."""
        return self.model.base_model(input_ids=tokens, use_cache=False).last_hidden_state

    def logits(self, states: Tensor) -> Tensor:
        """float32 [..., vocab_size] of normed states [..., hidden_size]."""
        return self.model.get_output_embeddings()(states).float()

    @property
    def chunk(self) -> int:
        """Rows whose logits are computed at a time."""
        return max(1, MAX_LOGITS // self.config.vocab_size)


def divergences(log_probs: Tensor, target_log_probs: Tensor, kind: Divergence) -> Tensor:
    """float32 [rows] from two log-distributions [rows, vocabulary], nats.

    forward  KL(target || student)
    reverse  KL(student || target)
    both     the mean of the two
    """
    if kind == "forward":
        return _kl(target_log_probs, log_probs)
    if kind == "reverse":
        return _kl(log_probs, target_log_probs)
    return (_kl(target_log_probs, log_probs) + _kl(log_probs, target_log_probs)) / 2


def _kl(of: Tensor, to: Tensor) -> Tensor:
    return functional.kl_div(to, of, reduction="none", log_target=True).sum(-1)


def train_student(
    student: Student, lm_head: nn.Module, batch: TextBatch, kind: Divergence
) -> float:
    """Add gradients to the student's parameters; returns this process's share of the mean
    divergence, nats a token.

    lm_head  the target's output head, which stays frozen

    Where the target has more rows than the student, its distribution is that over the student's.
    """
    is_answer = batch.answers[:, 1:]
    rows, target_rows = student(batch.tokens)[:, :-1][is_answer], batch.states[:, :-1][is_answer]
    count, total = mean_count(len(rows)), 0.0
    # Separate leaves, so that only a chunk's logits are in memory.
    leaves = [part.requires_grad_() for part in rows.detach().split(student.chunk)]
    for leaf, states in zip(leaves, target_rows.split(student.chunk), strict=True):
        with torch.no_grad():
            target_logits = lm_head(states)[:, : student.config.vocab_size].float()
        found = divergences(
            student.logits(leaf).log_softmax(-1), target_logits.log_softmax(-1), kind
        )
        loss = share_of_rows(found, count)
        loss.backward()
        total += loss.item()
    rows.backward(torch.cat([leaf.grad for leaf in leaves if leaf.grad is not None]))
    return total


@torch.no_grad()
def chain_acceptance(student: Student, batch: TextBatch, depth: int) -> list[tuple[int, int]]:
    """For each depth of a greedy chain: the number of drafts after accepted ones, and how many are
    accepted.

    Texts are assumed to be greedy: a draft is accepted if it is the text's next token. Accepted
    drafts are the text itself, so that the draft after them is the student's best token there, and
    one pass over the text has the chains from all its tokens. A depth counts the chains alone whose
    earlier drafts are all right, unlike the share of best tokens that are right.
    """
    is_answer = batch.answers[:, 1:]
    states = student(batch.tokens)[:, :-1][is_answer]
    best = [student.logits(part).argmax(-1) for part in states.split(student.chunk)]
    # Of the token after each row; a chain of depth d from row t is right at rows t to t + d - 1.
    right = torch.zeros_like(is_answer)
    right[is_answer] = torch.cat(best) == batch.tokens[:, 1:][is_answer]
    follows, counts = is_answer, []
    for _ in range(depth):
        accepted = follows & right
        counts.append((int(follows.sum()), int(accepted.sum())))
        is_answer, right = is_answer[:, 1:], right[:, 1:]
        follows = accepted[:, :-1] & is_answer
    return counts
