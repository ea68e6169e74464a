"""Pages that come from elsewhere: CONTRIBUTING.md, CHANGELOG.md, and one page per method."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[2]
COPIES = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
"""A file of the repository -> its page."""


def on_config(config: Any) -> Any:
    """Add the pages of docs/methods/ to the navigation, in the order of the registry."""
    sys.path.insert(0, str(ROOT))  # for the package's plain data: names, registry
    registry = importlib.import_module("flwr_regs.methods.registry")
    order = [name.lower() for name in registry.METHODS]
    folder = Path(config.docs_dir) / "methods"
    found = sorted(
        folder.glob("*.md"),
        key=lambda p: (order.index(p.stem) if p.stem in order else len(order), p.stem),
    )
    (methods,) = (entry["Methods"] for entry in config.nav if "Methods" in entry)
    methods.extend(f"methods/{path.name}" for path in found)
    return config


def on_files(files: Any, config: Any) -> Any:
    """Make a page of each copied file."""
    for source, page in COPIES.items():
        text = (ROOT / source).read_text()
        text = re.sub(r"\]\(docs/", "](", text)  # links are relative to the page now
        text = re.sub(r"\]\(README\.md", "](index.md", text)
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point links at the copies."""
    up = "../" * page.file.src_uri.count("/")
    for source, copy in COPIES.items():
        markdown = markdown.replace(f"]({up}../{source}", f"]({up}{copy}")
    return markdown
