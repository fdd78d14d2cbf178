"""What a coordinator tells a drafter, and what it proposes: every field of them once."""

from __future__ import annotations

import numpy as np

from ...cluster.links.link import DrafterMessage
from ...core.draft_distributions import DraftDistributions
from ...core.logits_params import LogitsParams
from ...core.proposals import (
    Commit,
    DraftRequest,
    FeatureRows,
    Probe,
    Proposal,
    Query,
    TopNextTokens,
)

TOKENS = np.arange(5, 29, dtype=np.int32)
PARENTS = np.array([-1, 0, 1, 0], dtype=np.int32)
SHAPED = LogitsParams(
    top_k=20,
    top_p=0.9,
    min_p=0.05,
    repetition_penalty=1.1,
    logit_bias={3: 1.5, 70: -2.0},
    allowed_token_ids=(5, 6, 7),
    banned_token_ids=(9,),
)
OPENED = DraftRequest("one", TOKENS, 20, 0.7, 2**40, "tenant", SHAPED, (2, 3), "salt")
COMMIT = Commit(
    "one", 24, np.array([4, 5], dtype=np.int32), np.ones((2, 3), dtype=np.int32),
    TopNextTokens(np.array([4, 5], dtype=np.int32), np.ones((2, 4), dtype=np.int32)),
)  # fmt: skip
FEATURES = [FeatureRows("one", 24, np.ones((2, 8), dtype=np.float32))]
ANSWERED = DrafterMessage(
    9, (), (), (), [Query("one", 26, 8), Query("two", 5, 0, (1, 2), 0.01)], 0.0
)
STEPS = (
    DrafterMessage(
        1, ("gone",), (OPENED, DraftRequest("two", TOKENS[:3], 3, 0.0, 1)), [COMMIT],
        [Query("one", 24, 8), Query("two", 3, 4)], 0.0, [COMMIT], FEATURES,
    ),
    ANSWERED,
)  # fmt: skip
LOG_PROBS = np.array([-0.1, -0.5, -1.0, -2.0], dtype=np.float32)
PROPOSALS = [
    Proposal(
        "x", TOKENS[:4], PARENTS, LOG_PROBS,
        Probe(
            TOKENS[:2], np.array([1, 2], dtype=np.int32), np.eye(2, dtype=np.bool_),
            np.array([1], dtype=np.int32), 4,
        ),
        2,
        DraftDistributions(np.ones((4, 2), dtype=np.int32), np.full((4, 2), 0.5, np.float32)),
    ),
    Proposal("x", TOKENS[:0], TOKENS[:0], LOG_PROBS[:0]),
]  # fmt: skip
