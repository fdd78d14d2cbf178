"""Structured output: the form that an answer must have, followed beside the engine's loop."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

from ..arrays import ROOT, Bool, UInt32
from ..errors import RequestError
from ..tree.tree import TokenTree

Kind = Literal["json_object", "json", "regex", "choice", "grammar"]


@dataclass(frozen=True, slots=True, eq=False)
class TreeForm:
    """What a form allows after a root and after the nodes of a tree.

    accepted  bool [nodes]  whether a node and all above it fit the form, and may go on. Masks may
              allow only one of several spellings of a text: a node that is accepted here and
              forbidden there is a wasted row. An end is not accepted; it comes as the bonus token
    masks     uint32 [1 + nodes, words]  the tokens allowed after the root and after each node;
              rows of nodes that are not accepted mean nothing
    """

    accepted: Bool
    masks: UInt32


class Constraint(Protocol):
    """A form that an answer must have; one object a request, which follows its answer.

    Masks may take long, so they are computed elsewhere. At most one `follow` is under way.
    """

    @property
    def first(self) -> UInt32:
        """uint32 [words]: the tokens that may begin the answer."""
        ...

    def follow(self, tree: TokenTree) -> Future[TreeForm]:
        """What is allowed after the committed tokens and after the nodes of `tree`.

        The future raises `RequestError` where the form cannot be followed within its limits.
        """
        ...

    def advance(self, token_ids: Sequence[int]) -> None:
        """Tokens were committed; they are allowed. Does not wait."""
        ...

    def close(self) -> None:
        """Free what follows the answer, for the request has ended. May be called twice."""
        ...


def rows_in(tree: TokenTree, whole: TokenTree) -> list[int]:
    """Where the root and the nodes of `tree` stand among those of `whole`, which it was cut from.

    Rows: 0 is the root, node i is i + 1.
    """
    edges = zip(whole.parents.tolist(), whole.tokens.tolist(), strict=True)
    row_of = {(parent + 1, token): node + 1 for node, (parent, token) in enumerate(edges)}
    rows = [ROOT + 1]
    for parent, token in zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True):
        rows.append(row_of[rows[parent + 1], token])
    return rows


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutput:
    """What an answer must match, whole.

    kind   json_object: any JSON object; json: a JSON schema; regex; choice: one of some texts;
           grammar: a context-free grammar in Lark's syntax
    value  the schema as JSON, the expression, the texts as a JSON list, or the grammar
    field  the name of the request's field that asked for it, for errors

    Raises `RequestError`; whether the value can be used is checked with the model's tokenizer.
    """

    kind: Kind
    value: str = ""
    field: str = "structured_outputs"

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            known = ", ".join(get_args(Kind))
            raise RequestError("structured_outputs", f"{self.kind!r} is unknown; known: {known}")
        if self.kind != "json_object" and not self.value:
            raise RequestError("structured_outputs", f"{self.kind} must not be empty")
