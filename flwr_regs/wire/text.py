"""Text and JSON from another machine: shortened, with its control characters escaped, or refused."""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import islice
from typing import Any

LONGEST = 500
"""Characters of one text in an error, a log line or the history."""
LONGEST_NAME = 100
"""Characters of one name: an array's, a metric's."""
MOST_NAMES = 10
"""Names that one error lists."""
LONGEST_JSON = 2**22
"""Characters of a JSON text."""


def shown(text: Any, limit: int = LONGEST) -> str:
    r"""Return a text for logs, errors and reports: at most `limit` characters, all of them printable.

    Control characters, ANSI codes, line ends, invisible and reordering characters and lone surrogates are
    escaped. A longer text keeps its beginning and its end. No long text is copied.

    >>> shown("\x1b[31mred\n")
    '\\x1b[31mred\\n'
    """
    text = text if isinstance(text, str) else str(text)
    if len(text) > limit:
        tail = limit // 4
        text = f"{_escaped(text[: limit - tail - 3], limit - tail - 3)} … {_escaped(text[-tail:], tail)}"
    return _escaped(text, limit)


def one_line(text: str) -> str:
    """Return a text of several lines as one, as :func:`shown` shows it."""
    if len(text) > 4 * LONGEST:
        text = f"{text[: 3 * LONGEST]} … {text[-LONGEST:]}"
    return shown(" ".join(text.split()))


def quoted(value: Any, limit: int = 200) -> str:
    """Return the `repr` of a value that may be of any kind and size; at most `limit` characters."""
    if isinstance(value, str | bytes | bytearray | list | tuple) and len(value) > limit:
        value = value[:limit]
    if isinstance(value, list | tuple):
        value = [v[:limit] if isinstance(v, str | bytes) else v for v in value]
    try:
        text = repr(value)
    except Exception:  # too deep, or an integer of too many digits
        text = f"a {type(value).__name__}"
    text = text if len(text) <= limit else f"{text[: limit - 1]}…"
    return _escaped(text, limit)


def named(names: Iterable[Any]) -> str:
    """Return a list of names for an error, without those beyond `MOST_NAMES`."""
    names = list(names)
    texts = [name[:LONGEST_NAME] if isinstance(name, str) else str(name) for name in names]
    first = ", ".join(repr(shown(n, LONGEST_NAME)) for n in sorted(texts)[:MOST_NAMES])
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return f"[{first}]{more}"


def read_json(value: Any) -> Any:
    """Return what a JSON text holds; raise ValueError for a text that is too long, or none."""
    if not isinstance(value, str):
        raise ValueError(f"expected JSON text, not {quoted(value, 40)}")
    if len(value) > LONGEST_JSON:
        raise ValueError(f"JSON text of {len(value)} characters, expected at most {LONGEST_JSON}")
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"expected JSON text, not {quoted(value, 40)}") from error


def _escaped(text: str, limit: int) -> str:
    if text.isprintable():
        return text
    escapes = (c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return "".join(islice("".join(escapes), limit))
