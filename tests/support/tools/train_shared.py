"""A network of every way to train, in as many processes as torchrun started.

    torchrun --nproc-per-node 2 train_shared.py TARGET FOLDER

Each kind's folder gets its run's files, and of the first process the trained weights.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import torch
from accelerate import PartialState
from draftline.models.load.model_info import read_model_info
from draftline.training.heads.trainer import train_head
from support.inputs.tiny_heads import EVERY_NETWORK, PLAN, uneven_texts

WEIGHTS = "weights.pt"
# Of two processes one has two texts of a step, the other one.
SHARED_PLAN = replace(PLAN, texts_per_step=3)


def train_every_network(target: Path, folder: Path) -> None:
    """Train one network of each kind for a few steps."""
    texts = uneven_texts(read_model_info(target).vocab_size)
    for kind, config in EVERY_NETWORK.items():
        network = train_head(config(target), target, texts, SHARED_PLAN, folder / kind)
        if PartialState().is_main_process:
            torch.save(network.state_dict(), folder / kind / WEIGHTS)


if __name__ == "__main__":
    torch.set_num_threads(1)
    train_every_network(Path(sys.argv[1]), Path(sys.argv[2]))
    PartialState().destroy_process_group()
