"""Heads on random targets, made once for each file."""

import pytest
from support.inputs.head_pairs import KINDS, Pair, pair_of

# One of each network; the other kinds differ in how a token is found, not in what is kept of a
# request.
NETWORKS = ("eagle3", "p_eagle", "specformer", "medusa", "dspark")


@pytest.fixture(scope="module", params=KINDS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Every kind of head."""
    return pair_of(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module", params=NETWORKS)
def network(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A head of each network."""
    return pair_of(request.param, tmp_path_factory.mktemp(request.param))
