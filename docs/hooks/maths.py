"""Maths at build time: TeX becomes MathML, which browsers draw without a script.

`pymdownx.arithmatex` marks ``$...$`` and ``$$...$$``; GitHub draws the same text.
"""

from __future__ import annotations

import html
import logging
import re
from typing import Any

from latex2mathml.converter import convert

LOG = logging.getLogger("mkdocs.hooks.maths")
MARKED = re.compile(
    r'<(?P<tag>span|div) class="arithmatex">\\[(\[](?P<tex>.*?)\\[)\]]</(?P=tag)>', re.S
)


def on_page_content(content: str, page: Any, **_: Any) -> str:
    """Replace each formula; a formula that cannot be converted is a warning, so an error when strict."""

    def mathml(match: re.Match[str]) -> str:
        tex = html.unescape(match["tex"])
        display = "block" if match["tag"] == "div" else "inline"
        try:
            made = convert(tex, display=display)
        except Exception as error:
            LOG.warning("%s: cannot convert the formula %r: %s", page.file.src_uri, tex, error)
            return match[0]
        if unknown := re.findall(r"\\[A-Za-z]+|<mi>&</mi>", made):  # & outside a known environment
            LOG.warning("%s: unknown TeX %s in %r", page.file.src_uri, unknown, tex)
        return made

    return MARKED.sub(mathml, content)
