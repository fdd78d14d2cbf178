"""`deploy/70b.yaml` comes up from one command: the short form of `test_whole_deployment.py`."""

from __future__ import annotations

from pathlib import Path

import pytest
from draftline.models.load.public_models import fetch
from support.servers.processes import coordinator_pids, pool_server_pids, stage_pids
from support.servers.whole_deployment import deployment, until

RAY = Path("/tmp/ray")
GRAFANA = "session_latest/metrics/grafana"


@pytest.mark.cluster
@pytest.mark.redis
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("model", "num_tokens"),
    [("demo", 120), pytest.param("smollm2", 32, marks=[pytest.mark.public, pytest.mark.full])],
)
def test_all_parts_come_up_draft_and_stop(tmp_path: Path, model: str, num_tokens: int) -> None:
    if model == "smollm2":
        fetch(model)
    with deployment(
        tmp_path, num_documents=4, num_tokens=num_tokens, num_lookups=1, model=model
    ) as running:
        assert len(stage_pids()) == 2
        assert len(coordinator_pids()) == 1
        assert len(pool_server_pids("drafters")) == 1
        assert len(pool_server_pids("retrieval")) == 1
        plain = [running.text(index, drafts=False) for index in range(2)]
        proposals: dict[str, float] = {}

        def all_have_drafted() -> bool:
            assert running.texts(2) == plain
            proposals.update(running.values("draftline:drafter_proposals_total"))
            return {name for name, count in proposals.items() if count} == running.drafters

        until(all_have_drafted, "some never draft", 120)
        # What `deploy/clusters/observe.sh` gives to Prometheus and Grafana.
        for file in ("prom_metrics_service_discovery.json", f"{GRAFANA}/grafana.ini"):
            assert (RAY / file).is_file()
        assert (RAY / GRAFANA / "dashboards").is_dir()
    until(lambda: not (stage_pids() or coordinator_pids()), "it does not stop", 60)
