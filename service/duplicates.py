"""Finds a key that comes twice in an object of a JSON body; the decoder would silently keep the last value.

A document has two quotes for each of its strings, keys included. A body with more quotes has a key that was dropped, or
quotes inside a string: only then is it searched.
"""

import re
from typing import Any

import orjson

from service.errors import BadRequestError

# Of valid JSON. It never backtracks (`*+`), so it keeps no positions to return to, which for a string of escapes would
# take some fifty times the body's size.
TOKEN = re.compile(rb'\{|\}|"([^"\\]*+(?:(?:\\.)++[^"\\]*+)*+)"(\s*+:)?')
MAX_STRINGS = 10_000  # that are looked through, within some milliseconds; no body that is taken has so many
FEW = 64  # values of a list, and levels, in which strings are counted; no body that is taken has strings beyond


def duplicate(body: bytes | bytearray, document: Any) -> str | None:
    """Return the first key that comes twice in one object of `body`, which is `document`; None where there is none.

    Raises:
        BadRequestError: the body would have to be looked through, and that would take long.
    """
    if type(document) is not dict:
        return None
    quotes = body.count(b'"')
    if quotes == 2 * strings(document):
        return None
    most = max(quotes // 2, body.count(b"{"))
    if most > MAX_STRINGS:
        raise BadRequestError(
            f"expected a body of at most {MAX_STRINGS} strings, keys included, and as many objects, got {most}; "
            "numbers are written without quotes"
        )
    objects: list[set[str]] = []
    for token in TOKEN.finditer(body):
        text, is_key = token[1], token[2]
        if text is None:
            if token[0] == b"{":
                objects.append(set())
            else:
                objects.pop()
        elif is_key:
            name: str = orjson.loads(b'"%b"' % text)
            if name in objects[-1]:
                return name
            objects[-1].add(name)
    return None


def strings(document: dict[str, Any], depth: int = FEW) -> int:
    """Count the strings of a document, keys included, as far as a body that is taken has any."""
    count = len(document)
    for value in document.values():
        kind = type(value)
        if kind is str:
            count += 1
        elif kind is dict:
            count += strings(value, depth - 1) if depth else 0
        elif kind is list and value:
            kind = type(value[0])
            if kind is dict:
                count += sum(strings(each, depth - 1) for each in value[:FEW] if type(each) is dict) if depth else 0
            elif kind is str:
                count += sum(type(each) is str for each in value[:FEW])
    return count
