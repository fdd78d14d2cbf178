"""Draws a training run's loss as a PNG."""

from __future__ import annotations

import csv
from pathlib import Path


def draw_loss_curve(loss_csv: Path, png: Path, title: str) -> None:
    """Training and held-out loss over tokens seen, from the rows that `train` appends."""
    # Matplotlib is a development dependency: training needs it, serving does not.
    from matplotlib.figure import Figure

    with loss_csv.open(newline="") as file:
        rows = [
            (float(tokens), float(loss), float(held)) for _, tokens, loss, held in csv.reader(file)
        ]
    tokens, loss, held = zip(*rows, strict=True)
    millions = [count / 1e6 for count in tokens]
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(millions, loss, label="training batch", linewidth=1)
    axes.plot(millions, held, label="held-out files", linewidth=2)
    axes.set(title=title, xlabel="tokens seen (millions)", ylabel="loss (nats a token)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(png, dpi=120)
