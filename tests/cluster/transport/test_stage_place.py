"""How hidden states travel is chosen by where the stages are."""

from __future__ import annotations

import pytest
from draftline.cluster.transport.stage_worker import StagePlace, check_nccl, fastest_backend
from draftline.core.errors import ConfigError


def places(*gpus: str | None) -> list[StagePlace]:
    return [StagePlace("node", "10.0.0.1", gpu) for gpu in gpus]


@pytest.mark.parametrize(
    ("gpus", "backend"),
    [
        (("a", "b", "c"), "nccl"),
        (("a", "b", "a"), "gloo"),
        (("a", None), "gloo"),
        ((None, None), "gloo"),
        (("a",), "gloo"),
    ],
)
def test_nccl_is_taken_where_every_stage_has_a_gpu_of_its_own(
    gpus: tuple[str | None, ...], backend: str
) -> None:
    assert fastest_backend(places(*gpus)) == backend


@pytest.mark.parametrize(
    ("gpus", "missing"),
    [(("a", "a"), "stage 1 has"), ((None, "b", "b"), "stage 0, 2 has"), ((None,), "stage 0 has")],
)
def test_nccl_where_it_cannot_be_names_the_stages_and_the_way_out(
    gpus: tuple[str | None, ...], missing: str
) -> None:
    with pytest.raises(ConfigError, match=f"stage_transport: .*{missing} none. auto takes"):
        check_nccl(places(*gpus))


def test_nccl_where_it_can_be() -> None:
    check_nccl(places("a", "b"))
    check_nccl(places("a"))
