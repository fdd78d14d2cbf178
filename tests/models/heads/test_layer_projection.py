"""What single layers add to a head's first matrix, against the matrix over all of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from draftline.models.heads.feature_head import FeatureHead
from draftline.models.heads.layer_projection import load_layer_projections, sum_size
from draftline.models.heads.load_head import build_head, load_head
from draftline.training.heads.export import export_head
from support.inputs import tiny_heads
from support.tools.tiny_models import save_tiny_model

ROWS = 5


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model("llama", tmp_path_factory.mktemp("target"))


def saved(kind: str, target: Path, folder: Path, **own: object) -> Path:
    """A random head of a kind, whose norms are not at their neutral values."""
    torch.manual_seed(5)
    config = replace(tiny_heads.EVERY_CONFIG[kind](target), **own)
    head = build_head(config)
    for name, parameter in head.named_parameters():
        if "norm" in name:
            parameter.data += torch.rand_like(parameter)
    fields = {"norm_before_fc": True} if own.get("norm_features") == "all" else {}
    export_head(head, folder, fields, {})
    return folder


@pytest.mark.parametrize(
    ("kind", "own"),
    [
        ("eagle3", {}),
        ("eagle3", {"norm_features": "each"}),
        ("p_eagle", {}),
        ("spec_former", {"feature_layers": (2, -1, 0, 3)}),
        ("dflash", {}),
        ("dspark", {}),
    ],
)
def test_shares_of_layers_add_up_to_the_projection(
    kind: str, own: dict[str, object], target: Path, tmp_path: Path
) -> None:
    folder = saved(kind, target, tmp_path, **own)
    head = load_head(folder)
    assert sum_size(folder) == head.config.hidden_size
    layers = head.config.layers_of(4)
    states = torch.randn(ROWS, len(layers), head.config.feature_size)
    found: dict[int, torch.Tensor] = {}
    # As stages have them: a layer here, the others there.
    for wanted in ((), layers[:1], layers[1:]):
        shares = load_layer_projections(folder, layers, wanted, torch.float32, torch.device("cpu"))
        assert shares.keys() == set(wanted)
        found |= {layer: shares[layer](states[:, layers.index(layer)]) for layer in wanted}
    assert not isinstance(head, FeatureHead) or head.config.fusion == "pair"
    projected = head.project(states.flatten(1))  # pyright: ignore[reportCallIssue]
    torch.testing.assert_close(sum(found.values()), projected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("kind", "own"),
    [
        # One norm goes over all states; one state; no matrix.
        ("eagle3", {"norm_features": "all"}),
        ("griffin", {}),
        ("medusa", {}),
    ],
)
def test_other_heads_read_states(
    kind: str, own: dict[str, object], target: Path, tmp_path: Path
) -> None:
    assert sum_size(saved(kind, target, tmp_path, **own)) == 0
