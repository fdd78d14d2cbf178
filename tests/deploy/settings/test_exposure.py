"""Nobody is served without a key by mistake, and no key is shown."""

from __future__ import annotations

import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
from draftline.core.errors import ConfigError
from draftline.deploy.cli.main import app
from draftline.deploy.cli.serve.command import curl_line
from draftline.deploy.ray_serve import runtime as ray_runtime
from draftline.deploy.ray_serve.runtime import http_options
from draftline.deploy.settings.settings import (
    ServerConfig,
    build_serve_args,
    check_key_variable,
    is_loopback,
    require_keys,
    without_keys,
)
from draftline.deploy.settings.tenants import key_digest
from typer.testing import CliRunner

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Ray Serve's own, whichever test imports it first
    from draftline.deploy.ray_serve import serve_app

SECRET = "hunter2hunter2"
runner = CliRunner()


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.0.1", "::1", "localhost"])
def test_this_machine_may_be_served_without_keys(host: str) -> None:
    assert is_loopback(host)
    require_keys(ServerConfig(host=host), host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "10.0.0.1", "example.org"])
def test_other_machines_are_not(host: str) -> None:
    assert not is_loopback(host)
    with pytest.raises(ConfigError, match="--allow-unauthenticated") as caught:
        require_keys(ServerConfig(host=host), host)
    assert caught.value.field == "server.host"
    for allowed in (
        {"allow_unauthenticated": True},
        {"api_keys": [SECRET]},
        {"tenants": [{"name": "a", "key_sha256": key_digest(SECRET)}]},
    ):
        require_keys(ServerConfig(host=host, **allowed), host)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("backend", ["local", "ray"])
def test_serve_refuses_to_be_open(backend: str) -> None:
    result = runner.invoke(app, ["serve", "--host", "0.0.0.0", "--backend", backend])
    assert isinstance(result.exception, ConfigError)
    assert "no API key is set" in str(result.exception)


@pytest.mark.parametrize("value", ["", "  "])
def test_an_empty_key_variable_is_an_error(value: str) -> None:
    result = runner.invoke(app, ["serve"], env={"DRAFTLINE_API_KEY": value})
    assert isinstance(result.exception, ConfigError)
    assert str(result.exception).startswith("DRAFTLINE_API_KEY: is set but empty")
    check_key_variable({})
    check_key_variable({"DRAFTLINE_API_KEY": "k"})


def test_an_application_is_refused_by_the_address_of_ray_serves_proxies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(serve_app, "serve_host", lambda: "0.0.0.0")
    monkeypatch.setattr(serve_app, "cluster_has_gpus", lambda: False)
    with pytest.raises(ConfigError, match=r"'0\.0\.0\.0' is reached from other machines"):
        serve_app.build_app({"server": {"host": "127.0.0.1"}})
    assert serve_app.build_app({"server": {"api_keys": [SECRET]}})


def test_without_ray_no_proxy_listens() -> None:
    assert ray_runtime.serve_host() is None


def test_proxies_of_ray_serve_get_the_limits_that_they_know() -> None:
    config = ServerConfig(request_timeout_s=20, port=1)
    assert http_options(config) == {
        "host": "127.0.0.1", "port": 1, "keep_alive_timeout_s": 75, "request_timeout_s": 50.0,
    }  # fmt: skip
    assert "request_timeout_s" not in http_options(ServerConfig(request_timeout_s=None))


def test_keys_of_the_operator_come_from_everywhere_and_stay_digests(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("KEY_OF_MINE", "second")
    (tmp_path / "keys").write_text("third\nfourth\n")
    given = {
        "api_keys": ["first"],
        "api_key_env": "KEY_OF_MINE",
        "api_key_file": str(tmp_path / "keys"),
        "api_key_sha256": key_digest("fifth"),
    }
    args = build_serve_args({"server": given})
    server = args.server
    names = ("first", "fifth", "second", "third", "fourth")
    assert server.api_key_sha256 == tuple(map(key_digest, names))
    assert server.has_keys
    # Ray sends it on; where it arrives there is no such variable.
    monkeypatch.delenv("KEY_OF_MINE")
    sent = pickle.dumps(server)
    assert pickle.loads(sent) == server
    told = [repr(args), str(server.model_dump()), sent.decode("latin-1"), curl_line(args)]
    for name in ("first", "second", "fourth"):
        assert not any(name in text for text in told)


@pytest.mark.parametrize(
    "settings",
    [
        {"api_keys": 5, "api_key_sha256": SECRET},
        {"api_keys": {SECRET: 1}},
        {"api_keys": [SECRET, 5]},
        {"api_keys": [SECRET], "port": "x"},
        {"api_keys": [SECRET], "tenants": SECRET},
        {"api_key_sha256": SECRET},
        {"api_key": SECRET},
        {"api_keys": [SECRET], "cors_allow_origins": "*", "max_connections": 0},
        SECRET,
    ],
)
def test_no_error_shows_a_key(settings: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        build_serve_args({"server": settings})
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "rest", "keys"),
    [
        (["serve", "m", "--api-key", "k", "--port", "1"], ["serve", "m", "--port", "1"], ["k"]),
        (["serve", "--api-key=k", "--api-key", "l"], ["serve"], ["k", "l"]),
        (["serve", "--api-key"], ["serve"], [""]),
        (["serve", "--api-key-file", "f"], ["serve", "--api-key-file", "f"], []),
    ],
)
def test_keys_of_a_command_line(arguments: list[str], rest: list[str], keys: list[str]) -> None:
    assert without_keys(arguments) == (rest, keys)
