"""`draftline tenant`: what it prints, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from draftline.core.errors import ConfigError, StoreError
from draftline.deploy.cli.main import app
from draftline.deploy.settings.tenants import key_digest
from typer.testing import CliRunner, Result

runner = CliRunner()


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "tenants.json"
    monkeypatch.setenv("DRAFTLINE_TENANT_STORE", str(path))
    return path


def run(*arguments: str) -> Result:
    result = runner.invoke(app, ["tenant", *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_a_key_is_shown_once(store: Path) -> None:
    created = run(
        "create", "acme", "--requests-per-minute", "60", "--models", "a", "--models", "b",
        "--no-learn",
    )  # fmt: skip
    key = created.stdout.strip()
    assert key.startswith("dl-")
    assert "cannot be shown again" in created.stderr
    assert key not in store.read_text()
    assert key_digest(key) in store.read_text()
    listed = run("list").stdout
    assert key_digest(key)[:12] in listed
    assert "requests_per_minute=60" in listed
    second = run("rotate", "acme", "--keep-old").stdout.strip()
    (tenant,) = (json.loads(line) for line in run("list", "--json").stdout.splitlines())
    assert tenant == {
        "name": "acme",
        "keys": [key_digest(one)[:12] for one in (key, second)],
        "learn": False,
        "requests_per_minute": 60,
        "models": ["a", "b"],
    }
    assert run("set", "acme", "--unset", "models", "--weight", "2").stdout == (
        "changed acme: models, weight\n"
    )
    revoked = run("revoke", "acme", "--key", key_digest(key)[:8]).stdout
    assert key_digest(key)[:12] in revoked
    assert "revoked tenant acme" in run("revoke", "acme").stdout
    assert run("list", "--json").stdout == ""


def test_a_tenant_that_a_gateway_names_has_no_key(store: Path) -> None:
    assert run("create", "acme", "--no-key").stdout == ""
    assert json.loads(store.read_text())["tenants"] == [{"name": "acme", "key_sha256": []}]


def test_mistakes_name_the_field(store: Path) -> None:
    run("create", "acme")
    refused = run("set", "acme", "--tokens-per-minute", "0")
    assert refused.exit_code == 2
    assert "--tokens-per-minute" in refused.output
    with pytest.raises(ConfigError, match="unset: 'models_' is no setting; known: "):
        run("set", "acme", "--unset", "models-")
    with pytest.raises(ConfigError, match="set: names nothing to change"):
        run("set", "acme")
    with pytest.raises(StoreError, match="letters, digits"):
        run("create", "a/b")
    with pytest.raises(ConfigError, match="known: acme"):
        run("revoke", "carl")
    assert store.exists()
