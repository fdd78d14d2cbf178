"""A pytest plugin: of the cases of a parametrized test, the first that would run, and no other."""

from __future__ import annotations

import pytest


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What `-m` and `-k` leave out has left already."""
    first: dict[str, pytest.Item] = {}
    for item in items:
        first.setdefault(item.nodeid.partition("[")[0], item)
    rest = set(items) - set(first.values())
    config.hook.pytest_deselected(items=list(rest))
    items[:] = first.values()
