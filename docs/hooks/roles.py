"""Docstrings as Markdown: Sphinx roles become links, ``::`` before a literal block a colon."""

from __future__ import annotations

import re
from typing import Any

import griffe

ROLE = re.compile(r":(?:class|func|mod|meth|attr|data):`~?(?P<path>[\w.]+)`")


class Roles(griffe.Extension):
    """Rewrites each docstring when it has been read."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite one docstring."""
        if obj.docstring:
            text = ROLE.sub(_link, obj.docstring.value)
            obj.docstring.value = re.sub(r"(?m)^(.*\S)::$", r"\1:", text)


def _link(match: re.Match[str]) -> str:
    path = match["path"]
    name = path.rpartition(".")[2]
    # optional: no warning where the target has no page
    return f'<autoref identifier="{path}" optional><code>{name}</code></autoref>'
