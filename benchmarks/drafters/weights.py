"""Memory and time of a model drafter by how its weights are kept.

    python -m draftline.benchmarks.drafters.weights [--model demo-drafter] [--streams 1]

Texts are the bundled held-out prompts; each draft's time is the median, tokens are compared with
those of the plain weights.
"""

from __future__ import annotations

import argparse
import sys
import time
from statistics import median

import numpy as np
import torch

from ...core.proposals import Commit, DraftRequest, Query
from ...deploy.cli.demo.held_out_prompts import held_out_prompts
from ...drafters.model.drafter import ModelDrafter, load_model_drafter
from ...drafters.model.options import WEIGHTS, ModelOptions
from ...models.text.tokenizer import load_tokenizer

ROUNDS = 24
WARM = 4


def main() -> None:
    """Print a row for each way to keep weights."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo-drafter")
    parser.add_argument("--streams", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(1)
    plain: list[list[int]] = []
    sys.stdout.write(
        "| weights | MB | ms a draft | tokens as of plain weights |\n|---|---|---|---|\n"
    )
    for weights in WEIGHTS:
        options = ModelOptions(device="cpu", weights=weights, compile="off")
        drafter = load_model_drafter(given.model, options=options)
        drafts, milliseconds = drafted(drafter, given.model, given.streams)
        plain = plain or drafts
        pairs = [
            pair
            for one, other in zip(drafts, plain, strict=True)
            for pair in zip(one, other, strict=False)
        ]
        same = sum(one == other for one, other in pairs) / len(pairs)
        megabytes = weight_bytes(drafter) / 1e6
        sys.stdout.write(f"| {weights} | {megabytes:.2f} | {milliseconds:.2f} | {same:.1%} |\n")


def drafted(drafter: ModelDrafter, model: str, num_streams: int) -> tuple[list[list[int]], float]:
    """Drafts behind growing texts, which are the same for all weights, and ms of one message."""
    tokenizer = load_tokenizer(model)
    texts = [tokenizer.encode(prompt.text) for prompt in held_out_prompts(num_streams)]
    lengths = [len(text) // 2 for text in texts]
    for name, (text, length) in enumerate(zip(texts, lengths, strict=True)):
        ids = np.array(text[:length], dtype=np.int32)
        drafter.open(DraftRequest(str(name), ids, length, 0.0, 1))
    drafts, seconds = [], []
    for number in range(ROUNDS):
        start = time.perf_counter()
        queries = [Query(str(name), length, 16) for name, length in enumerate(lengths)]
        proposals = drafter.propose(queries)
        if number >= WARM:
            seconds.append(time.perf_counter() - start)
        drafts += [proposal.tokens.tolist() for proposal in proposals]
        for name, text in enumerate(texts):
            token = np.array([text[lengths[name] % len(text)]], dtype=np.int32)
            drafter.observe([Commit(str(name), lengths[name], token)])
            lengths[name] += 1
    return drafts, 1000 * median(seconds)


def weight_bytes(drafter: ModelDrafter) -> int:
    """Of all parameters of its model, those that are shared once."""
    part = drafter._stage._part  # type: ignore[attr-defined]  # noqa: SLF001 - measured as it is
    modules = [*part.layers, part.embed, part.norm, part.head]
    found: dict[int, int] = {}
    for module in modules:
        tensors = (
            vars(module).values() if not hasattr(module, "parameters") else module.parameters()
        )
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor):
                found[tensor.data_ptr()] = tensor.nbytes
    return sum(found.values())


if __name__ == "__main__":
    main()
