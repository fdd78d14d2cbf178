"""Log lines as JSON, one object a line.

draftline logs `key=value` pairs; each becomes a field. Of a traceback only the
error's class and place are logged, because its message may quote a request.
"""

from __future__ import annotations

import json
import logging
import re
import sys
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Literal

from ...core.errors import place_of

LogFormat = Literal["text", "json"]
TEXT_FORMAT = "%(asctime)s %(levelname)s %(name)s %(message)s"
# The request that this task answers; "" where there is none.
request_id: ContextVar[str] = ContextVar("request_id", default="")

_QUOTED = r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\""
# An error's class and place have several words; so they end where the next field begins.
_PLACE = r"(?<==)\w+ at .*?(?=\s\w+=|$)"
_FIELD = re.compile(rf"(?<!\S)(\w+)=({_QUOTED}|{_PLACE}|\S*)")
_NUMBER = re.compile(r"-?\d+(\.\d+)?")


class JsonLines(logging.Formatter):
    """Formats a record as a JSON object: time, level, logger, its pairs, and other text."""

    def format(self, record: logging.LogRecord) -> str:
        """The line, without its end."""
        text = record.getMessage()
        line: dict[str, str | float] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
        }
        for name, value in _FIELD.findall(text):
            line.setdefault(name, _value(name, value))
        if rest := " ".join(_FIELD.sub("", text).split()):
            line["message"] = rest
        if own := request_id.get():
            line.setdefault("request_id", own)
        if record.exc_info and record.exc_info[1] is not None:
            line["exception"] = place_of(record.exc_info[1])
        return json.dumps(line, ensure_ascii=False)


def set_up_logs(level: int, form: LogFormat) -> None:
    """Log to stderr in this format; if logging is set up already, only change the format."""
    # In replicas, Ray Serve makes `sys.stderr` its own logger, which drops all but errors. Of the
    # real one Ray makes the process's log file.
    logging.basicConfig(level=level, format=TEXT_FORMAT, stream=sys.__stderr__)
    use_form(form)


def use_form(form: LogFormat) -> None:
    """Use this format from now on."""
    if form == "json":
        for handler in logging.getLogger().handlers:
            handler.setFormatter(JsonLines())


def _value(name: str, text: str) -> str | float:
    if text[:1] in {"'", '"'} and len(text) > 1:
        return re.sub(r"\\(.)", r"\1", text[1:-1])
    # An identifier of digits is no number.
    if _NUMBER.fullmatch(text) and not name.endswith("id"):
        return float(text) if "." in text else int(text)
    return text
