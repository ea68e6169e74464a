"""Shell patterns on the names of a model's entries, such as ``"head.*"``."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from fnmatch import fnmatchcase


def split(patterns: str | Sequence[str], what: str) -> tuple[str, ...]:
    """Return the single patterns of a text with commas, or of a sequence of such texts.

    Raises ValueError, with `what` the argument's name, for a pattern that is empty or no text.
    """
    texts = [patterns] if isinstance(patterns, str) else patterns
    if isinstance(texts, Sequence) and all(isinstance(t, str) for t in texts):
        names = [p.strip() for text in texts for p in text.split(",")]
        if all(names):
            return tuple(names)
    raise ValueError(f"{what} must be a string of names separated by commas, not {patterns!r}")


def matching(patterns: Sequence[str], names: Collection[str]) -> set[str]:
    """Return the names that any of the patterns matches; ValueError for a pattern that matches none."""
    matches: set[str] = set()
    for pattern in patterns:
        matched = {n for n in names if fnmatchcase(n, pattern)}
        if not matched:
            raise ValueError(
                f"the pattern '{pattern}' matches none of the model's arrays {sorted(names)}"
            )
        matches |= matched
    return matches
