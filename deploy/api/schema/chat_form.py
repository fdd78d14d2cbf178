"""A body of another API's form that stands for a chat."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import field_validator

from ..errors import ApiError, bad_request
from .protocol import ChatRequest, GenerationRequest, SpeculativeOptions


class ChatForm(GenerationRequest):
    """The sampling fields beyond its API's are those of chats.

    names  of a chat's fields in this body
    """

    names: ClassVar[Mapping[str, str]] = {}

    @field_validator("speculative")
    @classmethod
    def _check_explain(cls, value: SpeculativeOptions) -> SpeculativeOptions:
        if value.explain:
            raise ValueError("explain: see /v1/chat/completions")
        return value

    @abstractmethod
    def chat_fields(self) -> dict[str, Any]:
        """Messages, tools, and what else is spelled otherwise in a chat."""
        ...

    def chat(self) -> ChatRequest:
        """The chat that this body stands for. Raises `ApiError` 400 naming the field."""
        shared = self.model_fields_set & GenerationRequest.model_fields.keys()
        body = {name: getattr(self, name) for name in shared - set(self.refused)}
        try:
            return ChatRequest.build(body | self.chat_fields())
        except ApiError as error:
            raise self.named_here(error) from error

    def named_here(self, error: ApiError) -> ApiError:
        """An error of a chat, with the names that its fields have in this body."""
        name = error.param or ""
        field = self.names.get(name.split(".")[0], name.replace(".function", ""))
        if field == name:
            return error
        return bad_request(field, error.message.removeprefix(f"{name}: "))
