"""What the sizing model says, against what is known and what must hold."""

from __future__ import annotations

import itertools

import pytest
from draftline.measure.simulate.cost_profile import Device, Network, read_cost_profile
from draftline.measure.simulate.devices import DEVICE_TYPES, DeviceType, device_type
from draftline.measure.simulate.sizing import (
    HEAD,
    Link,
    best_gain,
    fewest_stages,
    kv_room,
    plain_rate,
    pool_servers,
    profile_of,
    round_s,
    tokens_a_round,
)
from draftline.measure.simulate.sizing_table import COLUMNS, LINK, TARGETS, sizing_rows

SMALL, _, LARGE = TARGETS
# What `nvidia-smi` calls them.
NAMES = {
    "NVIDIA H100 80GB HBM3": "H100",
    "NVIDIA H100 PCIe": "H100 PCIe",
    "NVIDIA H200": "H200",
    "NVIDIA A100-SXM4-40GB": "A100-SXM4-40GB",
    "NVIDIA A100-SXM4-80GB": "A100",
    "NVIDIA A100 80GB PCIe": "A100 80GB PCIe",
    "NVIDIA L40S": "L40S",
    "NVIDIA L4": "L4",
    "Tesla T4": "T4",
}


def gpu(name: str) -> DeviceType:
    kind = device_type(name)
    assert kind is not None
    return kind


@pytest.mark.parametrize(("name", "kind"), NAMES.items())
def test_gpus_are_known_by_the_drivers_names(name: str, kind: str) -> None:
    assert gpu(name).name == kind


def test_other_gpus_are_not_guessed() -> None:
    assert device_type("NVIDIA GeForce GTX 970") is None


def test_8b_on_an_h100_takes_what_is_published() -> None:
    profile = profile_of(SMALL, gpu("NVIDIA H100 80GB HBM3").device, 1, LINK)
    # 158.3 tokens/s, which the bundled profile is fitted to, too.
    assert plain_rate(profile, 1, 128) == pytest.approx(158.3, rel=0.02)
    bundled = read_cost_profile("8b-h100")
    assert bundled.stage_s(1, 128) == pytest.approx(profile.stage_s(1, 128), rel=0.02)


def test_more_requests_more_tokens_and_longer_rounds() -> None:
    profile = profile_of(LARGE, gpu("NVIDIA H200").device, 2, LINK)
    counts = (1, 2, 8, 32, 128)
    rates = [plain_rate(profile, count, 2048) for count in counts]
    rounds = [round_s(profile, count, 0, 2048) for count in counts]
    assert all(a < b for a, b in itertools.pairwise(rates))
    assert all(a <= b for a, b in itertools.pairwise(rounds))
    # Two requests fill two stages, and neither takes longer for it.
    assert rounds[0] == rounds[1]


def test_expected_tokens_of_a_chain() -> None:
    assert tokens_a_round(0, 0.7) == 1
    assert tokens_a_round(2, 0.5) == 1.75
    assert tokens_a_round(3, 1.0) == 4


def test_speculation_pays_less_under_load_and_never_costs() -> None:
    profile = profile_of(SMALL, gpu("NVIDIA A100-SXM4-80GB").device, 1, LINK)
    factors = [best_gain(profile, count, 2048, 0.7).factor for count in (1, 32, 128, 512)]
    assert all(a >= b for a, b in itertools.pairwise(factors))
    assert factors[0] > 2.9
    none = best_gain(profile, 1, 2048, 0.0)
    assert (none.nodes, none.factor) == (0, 1.0)
    # A head takes its own time.
    assert 1 < best_gain(profile, 1, 2048, 0.7, HEAD).factor < factors[0]


def test_a_slow_link_makes_steps_longer() -> None:
    device = gpu("NVIDIA H200").device
    near = profile_of(LARGE, device, 2, Link(20e-6, 50e9))
    far = profile_of(LARGE, device, 2, Link(5e-3, 50e9))
    assert round_s(far, 1, 0, 128) - round_s(near, 1, 0, 128) == pytest.approx(10e-3, rel=0.05)
    # Rows that wait with others cost nothing more.
    assert best_gain(far, 1, 128, 0.7).factor >= best_gain(near, 1, 128, 0.7).factor


def test_room_and_stages() -> None:
    memory = gpu("NVIDIA H100 80GB HBM3").memory
    assert kv_room(LARGE, 1, memory) == 0
    assert kv_room(LARGE, 4, memory) > 2 * kv_room(LARGE, 2, memory) > 0
    assert fewest_stages(LARGE, memory, 16384, (1, 2, 4)) == 2
    assert fewest_stages(LARGE, memory, 10**9, (1, 2, 4)) is None


def test_servers_of_a_pool() -> None:
    device = Device(
        bandwidth=1e12, bandwidth_share=1, operations=1e14, operations_share=1, attention_share=1
    )
    # 2 ms a level: five take 10 ms.
    drafter = Network(bytes=2e9, operations=2e9)
    assert pool_servers(32, drafter, device, 5, every_s=20e-3) == 1
    assert pool_servers(32, drafter, device, 5, every_s=10e-3) is None
    # 0.1 ms to read and 0.2 ms a row: of 200 rows 12 servers have 17 each, in 3.5 ms.
    slow = Network(bytes=1e8, operations=2e10)
    assert pool_servers(200, slow, device, 1, every_s=5.1e-3) == 12


def test_the_table_has_a_row_for_what_fits() -> None:
    rows = list(sizing_rows())
    assert all(len(row) == len(COLUMNS) for row in rows)
    assert len({row[:2] for row in rows}) == len(rows) > 10
    assert {row[1] for row in rows} <= {kind.name for kind in DEVICE_TYPES}
