"""Every kind of head, made once for each file."""

import pytest
from support.inputs.head_pairs import KINDS, Pair, pair_of


@pytest.fixture(scope="module", params=KINDS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return pair_of(request.param, tmp_path_factory.mktemp(request.param))
