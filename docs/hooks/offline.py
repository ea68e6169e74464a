"""No page may load anything from the network: the site is read where there is none."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError

AWAY = r"=[\"']?(?:https?:)?//[^>]*>"
LOADS = re.compile(
    rf"<(?:script|img|iframe|source)\b[^>]*\ssrc{AWAY}"
    rf"|<link\b(?=[^>]*\srel=[\"']?(?:stylesheet|preload|preconnect|icon))[^>]*\shref{AWAY}"
)


def on_post_build(config: Any) -> None:
    """Stop if a page has a script, style, font or image from elsewhere."""
    for page in sorted(Path(config.site_dir).rglob("*.html")):
        text = page.read_text()
        if found := LOADS.search(text):
            raise PluginError(f"{page.name} loads something from the network: {found[0]}")
