"""The drafter's own chat template: its prompt of a chat, in place of the target's prompt as text.

Only prompts differ: what is answered so far follows the template's generation prompt, in tokens
made of the committed ids, and drafts are encoded behind these as ever.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ....core.errors import ConfigError, RequestError
from ....core.proposals import DraftRequest
from ....models.load.model_info import ModelInfo
from ....models.text.chat_template import ChatOptions, ChatTemplate
from ....models.text.tokenizer import load_tokenizer
from .names import CHAT_AUTO, CHAT_OWN, CHAT_TARGET

logger = logging.getLogger(__name__)

# Turns from which on a template is given a bounded time, which makes it slower.
MANY_TURNS = 32
RENDER_TIMEOUT_S = 1.0
TRIAL = ({"role": "user", "content": "Hello"},)


class OwnPrompt(NamedTuple):
    """A prompt in the drafter's own words.

    tokens      the drafter's ids
    num_target  how many of the request's first target ids they stand for
    """

    tokens: Sequence[int]
    num_target: int


NO_PROMPT = OwnPrompt((), 0)


class OwnChat:
    """Makes a drafter's prompts of chats, by its tokenizer and a template.

    size      ids that its model has
    template  in place of the tokenizer's own; None: that one
    name      of the drafter's folder, in the log
    """

    def __init__(
        self, tokenizer: Any, size: int, template: str | None = None, name: str = "drafter"
    ) -> None:
        self._tokenizer = tokenizer
        self._template = ChatTemplate(tokenizer)
        self._options = ChatOptions(template=template)
        self._size = size
        self._name = name
        self._told = False

    def prompt(self, request: DraftRequest) -> OwnPrompt:
        """The prompt of a request's chat; an empty one of no ids where there is no chat, or none
        for this template.

        What a template refuses costs drafts at most, so the first time is logged, without a word
        of the chat, and the target's prompt is read as text.
        """
        if not request.chat:
            return NO_PROMPT
        try:
            tokens = self.tokens([turn._asdict() for turn in request.chat])
        except RequestError:
            if not self._told:
                self._told = True
                logger.warning("drafter=%s event=chat_template_refused", self._name)
            return NO_PROMPT
        return OwnPrompt(tokens, request.prompt_len)

    def tokens(self, messages: Sequence[dict[str, Any]]) -> list[int]:
        """The drafter's ids of a chat whose answer is opened.

        Raises `RequestError` where the template refuses it, or writes what the model cannot read.
        """
        timeout_s = RENDER_TIMEOUT_S if len(messages) > MANY_TURNS else None
        text = self._template.render(messages, self._options, timeout_s=timeout_s)
        ids = self._tokenizer.encode(text, add_special_tokens=False, verbose=False)
        if not ids or max(ids) >= self._size:
            raise RequestError("messages", "the template writes nothing, or tokens without a row")
        return ids


def own_prompt(chat: OwnChat | None, request: DraftRequest) -> OwnPrompt:
    """As `OwnChat.prompt`; without a template of its own a drafter reads all as text."""
    return NO_PROMPT if chat is None else chat.prompt(request)


def read_own_chat(option: str, draft: ModelInfo) -> OwnChat | None:
    """What the option `chat_template` says of a drafter of another tokenizer; None: it reads the
    target's text.

    Raises `ConfigError` (`chat_template`), `CheckpointError`.
    """
    if option == CHAT_TARGET:
        return None
    template = None if option in (CHAT_AUTO, CHAT_OWN) else _file_text(option)
    name = draft.path.name
    chat = OwnChat(load_tokenizer(draft.path), draft.vocab_size, template, name)
    try:
        chat.tokens(TRIAL)
    except RequestError as error:
        if option != CHAT_AUTO:
            raise ConfigError("chat_template", f"of {name}: {error.message}") from error
        logger.info("drafter=%s chat_template=%s", name, CHAT_TARGET)
        return None
    return chat


def _file_text(path: str) -> str:
    try:
        return Path(path).expanduser().read_text("utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(
            "chat_template", f"must be auto, target, own or a file with a template: {error}"
        ) from error
