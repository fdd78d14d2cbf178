"""JSON of a request's body, read so that other threads get on meanwhile."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from json import decoder, scanner
from typing import Any

import numpy as np

from .errors import bad_request

# Bodies with at most so many separators are read by the standard library's C code, which keeps
# the interpreter for itself until it is done: some milliseconds for so many values.
MAX_C_VALUES = 10_000
SEPARATORS = b",:[{"
# Whole pairs are one character after reading.
HALF_PAIR = re.compile("[\ud800-\udfff]")


def read_json(body: bytes, max_values: int) -> dict[str, Any]:
    """The JSON object that the body holds. Raises `ApiError` 400.

    `max_values`: numbers, texts, lists and objects that it may hold together.
    """
    num_separators = sum(body.count(one) for one in SEPARATORS)
    if num_separators >= max_values and (num_values := count_values(body)) > max_values:
        raise bad_request(
            None, f"the body holds {num_values} JSON values; at most {max_values} are allowed"
        )
    reader = _Decoder(parse_constant=_no_constant)
    if num_separators > MAX_C_VALUES:
        reader.use_python()
    try:
        data = reader.decode(body.decode())
    except RecursionError:
        raise bad_request(None, "the body is nested too deeply") from None
    except ValueError as error:
        raise bad_request(None, f"the body is not valid JSON: {error}") from None
    if not isinstance(data, dict):
        raise bad_request(None, "the body must be a JSON object")
    if b"\\ud" in body.lower() and any(HALF_PAIR.search(text) for text in texts_of(data)):
        raise bad_request(None, "the body holds half a surrogate pair")
    return data


def texts_of(value: Any) -> Iterator[str]:
    """Every text in a JSON value, keys included."""
    left = [value]
    while left:
        value = left.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict):
            yield from value
            left += value.values()
        elif isinstance(value, list):
            left += value


def count_values(body: bytes) -> int:
    """Most values that a body can hold, by its separators outside texts; keys count as values."""
    text = body.replace(rb"\\", b"__").replace(rb"\"", b"__")
    letters = np.frombuffer(text, dtype=np.uint8)
    is_text = np.bitwise_xor.accumulate(letters == ord('"'))
    is_separator = np.isin(letters, np.frombuffer(SEPARATORS, dtype=np.uint8))
    return 1 + int(np.count_nonzero(is_separator & ~is_text))


class _Decoder(json.JSONDecoder):
    """The standard library's decoder, whose implementation in Python can be interrupted."""

    def use_python(self) -> None:
        """Read lists and objects by the code in Python."""
        # Type stubs leave them out, as the standard library's documentation does.
        python: Any = decoder
        self.parse_object = python.JSONObject
        self.parse_array = python.JSONArray
        python = scanner
        self.scan_once = python.py_make_scanner(self)


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")
