"""Heads on random targets, made once for each file."""

from collections.abc import Iterator

import pytest
from support.inputs.head_pairs import KINDS, Pair, pair_of

# One or two of each network; the other kinds run with the whole matrix.
FEW = {"griffin", "eagle3", "p_eagle", "specformer", "medusa", "dflash", "dspark"}


@pytest.fixture(scope="module", autouse=True)
def unrounded() -> Iterator[None]:
    """Drafts are compared with those of torch, whatever another file has loaded."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("draftline.models.heads.cpu_kernels.are_loaded", lambda: False)
        yield


@pytest.fixture(
    scope="module",
    params=[pytest.param(kind, marks=[] if kind in FEW else pytest.mark.full) for kind in KINDS],
)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Every kind of head."""
    return pair_of(request.param, tmp_path_factory.mktemp(request.param))
