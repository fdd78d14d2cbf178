"""What transformers says behind a prompt, to compare answers with."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from draftline.core.steps import SamplingRows
from draftline.kernels.sampling.reference import choose_tokens


@torch.inference_mode()
def generated(peer: Any, prompt: list[int], num_tokens: int) -> list[int]:
    """So many tokens, greedily, by transformers' own cache."""
    answer = peer.generate(
        torch.tensor([prompt]), max_new_tokens=num_tokens, do_sample=False, eos_token_id=None
    )
    return answer[0, len(prompt) :].tolist()


@torch.inference_mode()
def drawn(
    peer: Any, prompt: list[int], answer: list[int], temperature: float, seed: int
) -> list[int]:
    """What is drawn behind each token before the answer's, given the answer."""
    logits = peer(input_ids=torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
    positions = np.arange(len(prompt), len(prompt) + len(answer))
    temperatures = np.full(len(answer), temperature, dtype=np.float32)
    rows = SamplingRows.unfiltered(temperatures, np.full_like(positions, seed), positions)
    return choose_tokens(logits.float(), rows).tolist()
