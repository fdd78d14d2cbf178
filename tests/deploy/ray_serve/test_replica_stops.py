"""A replica that Ray Serve stops gives its requests some time, and then they end with an error."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from support.servers.ray_cluster import living_actors, no_actors_left

# Far more than a replica that stops has time for.
MAX_TOKENS = 16_000
BODY = {"prompt": "abc", "max_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True}
KEY = "hunter2hunter2"
REASON = "please retry (the replica of this request died)"


@pytest.fixture
def long_checkpoint(checkpoint: Path, tmp_path: Path) -> Path:
    """The tiny model, with room for long answers."""
    folder = tmp_path / "long"
    shutil.copytree(checkpoint, folder)
    file = folder / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"max_position_embeddings": 2 * MAX_TOKENS}))
    return folder


def num_running(client: httpx.Client) -> float:
    text = client.get("/metrics").raise_for_status().text
    return sum(map(float, re.findall(r"^vllm:num_requests_running{.*} (\S+)$", text, re.MULTILINE)))


def shown_by_ray_serve() -> str:
    """What the dashboard and `serve status` show, and what the controller keeps of deployments."""
    import ray
    from ray.serve.context import _get_global_client

    client = _get_global_client()
    assert client is not None
    controller = client._controller
    details = ray.get(controller.get_serve_instance_details.remote())
    kept = ray.get(controller.list_deployments_internal.remote())
    texts = [
        info.replica_config.serialized_init_args.decode("latin-1") for info, *_ in kept.values()
    ]
    assert len(texts) == 2
    return str(details) + "".join(texts)


@pytest.mark.cluster
@pytest.mark.full
@pytest.mark.timeout(300)
# Ray Serve's modules warn when they are imported, so they are imported in here.
@pytest.mark.filterwarnings("ignore")
def test_requests_of_a_stopped_replica_end_with_503(
    long_checkpoint: Path, ray_serve_url: str
) -> None:
    from draftline.deploy.ray_serve.runtime import serve_host
    from draftline.deploy.ray_serve.serve_app import build_app
    from ray import serve

    # By it an application knows whom it would serve without keys.
    assert serve_host() == "127.0.0.1"
    settings = {
        "model": str(long_checkpoint),
        "kv_cache_tokens": 4 * MAX_TOKENS,
        "deployment": {"graceful_shutdown_timeout_s": 0.5},
        "server": {"api_keys": [KEY]},
    }
    serve.run(build_app(settings), name="draftline")
    assert KEY not in shown_by_ray_serve()
    options = {"headers": {"Authorization": f"Bearer {KEY}"}, "timeout": 60}
    with ThreadPoolExecutor() as pool, httpx.Client(base_url=ray_serve_url, **options) as client:
        whole = pool.submit(client.post, "/v1/completions", json=BODY)
        with client.stream("POST", "/v1/completions", json=BODY | {"stream": True}) as stream:
            events = (line.removeprefix("data: ") for line in stream.iter_lines() if line)
            assert "error" not in json.loads(next(events))
            while num_running(client) < 2:
                pass
            assert living_actors("StageWorker")
            deleting = pool.submit(serve.delete, "draftline")
            *_, last, done = events
        assert done == "[DONE]"
        error = json.loads(last)["error"]
        assert (error["code"], error["type"]) == (503, "ServiceUnavailableError")
        assert REASON in error["message"]
        answer = whole.result(60)
        assert (answer.status_code, answer.json()["error"]) == (503, error)
        assert int(answer.headers["retry-after"]) >= 1
        deleting.result(60)
    # Killed as it was, the replica could not close its stages itself.
    assert asyncio.run(no_actors_left("StageWorker"))


@pytest.mark.filterwarnings("ignore")
def test_what_ray_serve_does_not_end_keeps_no_server_from_its_own_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from draftline.deploy.ray_serve import runtime
    from ray import serve

    def delete(_name: str) -> None:
        raise TimeoutError("Some of these applications were not deleted after 60s")

    monkeypatch.setattr(serve, "delete", delete)
    runtime._delete("draftline")
    assert "event=delete_failed application=draftline reason='Some of these" in caplog.text
