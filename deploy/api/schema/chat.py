"""The fields of a request that decide how a chat becomes a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import Field

from ....models.text.chat_template import ChatOptions
from ..errors import bad_request
from .request_models import StrictModel
from .tools import Tool, ToolFields

MAX_DOCUMENTS = 128
MAX_TEMPLATE_VARIABLES = 64


class TemplateFields(StrictModel):
    """vLLM's fields for chat templates.

    add_generation_prompt   open the assistant's answer; by default, unless the last message is to
                            be continued
    continue_final_message  leave the last message open: the answer continues it
    chat_template_kwargs    further variables of the template, such as `enable_thinking`
    documents               texts to answer from, for templates that know them
    chat_template           a template of the client's own, where the server allows it
    """

    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: (
        Annotated[dict[str, Any], Field(max_length=MAX_TEMPLATE_VARIABLES)] | None
    ) = None
    documents: Annotated[list[dict[str, Any]], Field(max_length=MAX_DOCUMENTS)] | None = None
    chat_template: str | None = None

    def chat_options(self, tools: Sequence[Tool], *, trust_template: bool) -> ChatOptions:
        """How to render the chat. Raises `ApiError` 400 naming the field.

        trust_template  whether a client may bring its own template
        """
        if self.continue_final_message and self.add_generation_prompt:
            raise bad_request(
                "continue_final_message", "does not go with add_generation_prompt: true"
            )
        if self.chat_template is not None and not trust_template:
            raise bad_request(
                "chat_template",
                "this server uses its model's own template; its operator can allow others with "
                "--trust-request-chat-template",
            )
        opens = not self.continue_final_message and self.add_generation_prompt is not False
        return ChatOptions(
            tools=[tool.for_template() for tool in tools] or None,
            documents=self.documents,
            open_answer=opens,
            continue_final=self.continue_final_message,
            variables=self.chat_template_kwargs or {},
            template=self.chat_template,
        )


class ChatFields(TemplateFields, ToolFields):
    """The fields of all requests that hold a chat, but for its messages."""
