"""The rows of the suite of SPECTRA that go from the papers' drafters to ours."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from draftline.deploy.cli.bench.suite_rows import BETWEEN, Stores, drafters_of, rows_of
from draftline.drafters.ngram.anpd import AnpdOptions
from draftline.drafters.ngram.lookahead import PAPER as LOOKAHEAD
from draftline.drafters.ngram.lookahead import LookaheadOptions
from draftline.drafters.retrieval.drafter import PAPER as REST
from draftline.drafters.retrieval.drafter import RetrievalOptions
from draftline.drafters.spectra.options import PAPER as SPECTRA
from draftline.drafters.spectra.options import SpectraOptions


@pytest.mark.parametrize(
    ("kind", "options", "paper", "more"),
    [
        ("spectra", SpectraOptions, SPECTRA, {}),
        ("anpd", AnpdOptions, {}, {"num_tokens": 16}),
        ("lookahead", LookaheadOptions, LOOKAHEAD, {}),
        ("retrieval", RetrievalOptions, REST, {}),
    ],
)
def test_the_rows_between_go_from_the_paper_s_drafter_to_ours(
    kind: str, options: type, paper: dict[str, Any], more: dict[str, Any]
) -> None:
    drafters = [one for one in drafters_of(BETWEEN, Stores("a", "b")) if one.kind == kind]
    changes = [{**one.options} for one in drafters]
    assert {change.pop("profile") for change in changes} == {"paper"}
    stores = [change.pop("store", None) for change in changes]
    assert changes[0] == {}
    assert options(**paper | changes[-1]) == options(**more)
    # One option a row, or the store, or how trees take nodes.
    steps = [len(b.items() - a.items()) for a, b in itertools.pairwise(changes)]
    assert set(steps) <= {0, 1}
    others = steps.count(0)
    assert others == {"spectra": 1, "retrieval": 1}.get(kind, 0)
    assert stores == (["b"] * (len(drafters) - 1) + ["a"] if kind == "retrieval" else stores)


def test_the_rows_between_end_with_both_halves_in_order_and_by_value() -> None:
    known = {one.source for one in drafters_of(BETWEEN, Stores("a", "b"))}
    rows = list(rows_of(BETWEEN))
    assert {name for row in rows for name in row.drafters or ()} == known
    *singles, ordered, by_value = rows
    assert all(len(row.drafters or ()) == 1 for row in singles)
    assert singles[0].is_ordered
    assert not singles[-1].is_ordered
    assert ordered.drafters == by_value.drafters
    assert (ordered.is_ordered, by_value.is_ordered) == (True, False)


def test_rows_without_a_store_are_left_out() -> None:
    kinds = {one.kind for one in drafters_of(BETWEEN, Stores(None, None))}
    assert kinds == {"spectra", "anpd", "lookahead"}
