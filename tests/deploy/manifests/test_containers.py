"""`deploy/docker/` and `deploy/systemd/`: confined, watched, and without a secret in them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import draftline
import pytest
import yaml
from draftline.cluster.config import DrafterConfig
from draftline.deploy.settings.settings import build_serve_args, read_settings

ROOT = Path(draftline.__file__).parent
DEPLOY = ROOT / "deploy"
DOCKER = DEPLOY / "docker"
UNIT = DEPLOY / "systemd" / "draftline.service"
DOCKERFILES = sorted(DOCKER.glob("Dockerfile.*"))
SECRET = re.compile(r"(?i)(password|secret|token|api_?key)\w*\s*[:=]\s*['\"]?[\w+-]{16,}")


@pytest.fixture
def compose() -> dict[str, Any]:
    return yaml.safe_load((DOCKER / "compose.yaml").read_text("utf-8"))


def secret_files(folder: Path) -> set[str]:
    """What the script makes in a copy of the folder."""
    shutil.copy(DOCKER / "make-secrets.sh", folder)
    subprocess.run(["sh", folder / "make-secrets.sh"], check=True, capture_output=True)
    return {path.name for path in (folder / "secrets").iterdir()}


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.suffix)
def test_images_run_as_a_user_and_are_watched(path: Path) -> None:
    lines = path.read_text("utf-8").splitlines()
    assert "USER 1000:1000" in lines
    assert any(line.startswith("HEALTHCHECK ") for line in lines)
    assert 'CMD ["draftline", "serve", "--host", "0.0.0.0"]' in lines
    # An entry point would stand before the commands of `ray up` and of KubeRay.
    assert not any(line.startswith("ENTRYPOINT") for line in lines)
    assert f"draftline:{draftline.__version__}{path.suffix.replace('.', '-')}" in lines[0]


def test_an_image_of_cpus_takes_the_torch_that_is_tested() -> None:
    [setup] = re.findall(r'CPU_TORCH="(.+)"', (ROOT / "scripts" / "setup.sh").read_text("utf-8"))
    assert f" {setup} " in (DOCKER / "Dockerfile.cpu").read_text("utf-8")


def test_what_is_copied_into_images_is_there() -> None:
    lines = (ROOT / ".dockerignore").read_text("utf-8").splitlines()
    kept = [line[1:] for line in lines if line.startswith("!")]
    assert "*" in lines
    assert all((ROOT / name).exists() for name in kept)
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert packages - set(kept) == {"benchmarks"}


def parsed(compose: dict[str, Any]) -> Any:
    """As an implementation of the Compose specification reads it; raises `ValueError`."""
    module = pytest.importorskip("compose_spec", reason="no compose-spec")
    # What `<<` merges is no part of the specification, but of YAML.
    found = module.PyCompose.from_yaml(yaml.safe_dump(compose))
    found.validate()
    return found


def test_compose_is_as_its_specification_says(compose: dict[str, Any]) -> None:
    assert set(parsed(compose).service_names()) == set(compose["services"])


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("read_only", 5),
        ("stop_grace_period", "soon"),
        ("healthchek", {"disable": True}),
        ("networks", ["nowhere"]),
        ("secrets", ["no_such_secret"]),
    ],
)
def test_a_mistake_in_compose_would_be_seen(compose: dict[str, Any], key: str, value: Any) -> None:
    compose["services"]["redis"][key] = value
    with pytest.raises(ValueError, match=r"redis|nowhere|no_such_secret"):
        parsed(compose)


def test_services_are_confined_and_watched(compose: dict[str, Any]) -> None:
    for name, service in compose["services"].items():
        assert service["read_only"], name
        assert service["cap_drop"] == ["ALL"], name
        assert service["user"].split(":")[0] not in ("0", "root"), name
        assert "image" in service, name
        # draftline's is in its image.
        assert "healthcheck" in service or name == "draftline", name
        for port in service.get("ports", []):
            assert port.startswith("127.0.0.1:"), name


def test_every_secret_is_a_file_that_the_script_makes(
    compose: dict[str, Any], tmp_path: Path
) -> None:
    named = {Path(secret["file"]).name for secret in compose["secrets"].values()}
    assert named == secret_files(tmp_path)
    before = (tmp_path / "secrets" / "operator_key").read_text()
    assert secret_files(tmp_path) == named
    assert (tmp_path / "secrets" / "operator_key").read_text() == before
    asked = {one for service in compose["services"].values() for one in service.get("secrets", [])}
    assert asked == set(compose["secrets"])


def test_no_file_holds_a_secret() -> None:
    kinds = ("yaml", "sh", "service", "cpu", "cuda")
    files = [path for kind in kinds for path in DEPLOY.rglob(f"*.{kind}")]
    assert len(files) > 15
    for path in files:
        assert not SECRET.search(path.read_text("utf-8")), path


def test_draftline_takes_the_settings_of_compose(tmp_path: Path) -> None:
    settings = read_settings(DOCKER / "config" / "serve.yaml")
    assert settings["server"]["api_key_file"] == "/run/secrets/operator_key"
    secret_files(tmp_path)
    settings["server"]["api_key_file"] = str(tmp_path / "secrets" / "operator_key")
    args = build_serve_args(settings)
    assert len(args.server.api_key_sha256) == 1
    grace = yaml.safe_load((DOCKER / "compose.yaml").read_text("utf-8"))
    assert int(grace["services"]["draftline"]["stop_grace_period"][:-1]) > (
        args.server.drain_timeout_s
    )


def test_drafter_servers_of_compose_are_those_that_the_settings_ask(
    compose: dict[str, Any],
) -> None:
    settings = read_settings(DOCKER / "config" / "serve.yaml")
    asked = {one["address"]: one for one in settings["drafters"] if "address" in one}
    assert set(asked) == {"drafter:7100", "lookup:7000"}
    for address, drafter in asked.items():
        service, _, port = address.partition(":")
        command = compose["services"][service]["command"]
        assert command[:3] == ["python", "-m", "draftline.actors.drafter_server"]
        options = dict(one.split("=", 1) for one in command[3:])
        own = DrafterConfig(**json.loads(options.pop("--config")))
        assert (own.kind, own.options.get("learn")) == (drafter["kind"], drafter.get("learn"))
        assert options == {
            "--target": settings["model"],
            "--host": "0.0.0.0",
            "--port": port,
            "--token-file": drafter["token_file"],
        }


def test_config_files_of_compose_are_there(compose: dict[str, Any]) -> None:
    for config in compose["configs"].values():
        assert isinstance(yaml.safe_load((DOCKER / config["file"]).read_text("utf-8")), dict)
    scrape = yaml.safe_load((DOCKER / "config" / "prometheus.yaml").read_text("utf-8"))
    [job] = scrape["scrape_configs"]
    assert job["static_configs"] == [{"targets": ["draftline:8000"]}]
    assert job["authorization"]["credentials_file"] == "/run/secrets/operator_key"
    volumes = [one.split(":") for one in compose["services"]["prometheus"]["volumes"]]
    [alerts] = [f"{target}/alerts.yaml" for source, target, *_ in volumes if source[0] == "."]
    assert scrape["rule_files"] == [alerts]


def test_folders_of_compose_are_there(compose: dict[str, Any]) -> None:
    mounted = {
        volume.split(":")[0]
        for service in compose["services"].values()
        for volume in service.get("volumes", [])
    }
    folders = {one for one in mounted if one.startswith(".")}
    # Models of the user's own.
    assert folders == {"./models", "../assets/observability"}
    assert {path.name for path in (DOCKER / "../assets/observability").resolve().iterdir()} >= {
        "alerts.yaml",
        "grafana-dashboard.json",
    }
    assert mounted - folders == set(compose["volumes"])


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd here")
def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    text = UNIT.read_text("utf-8")
    # The program is not installed here.
    path = tmp_path / UNIT.name
    path.write_text(text.replace("/opt/draftline/bin/draftline", "/bin/true"))
    found = subprocess.run(
        ["systemd-analyze", "verify", str(path)], capture_output=True, text=True, check=False
    )
    assert (found.returncode, found.stderr) == (0, "")
