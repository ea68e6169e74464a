"""``python -m benchmarks.size``: code lines and files of each folder, of the package and of its tests.

``... report`` writes the package's table, rooms within their folders, into docs/architecture.md.

A code line holds code: blank lines, comments and docstrings do not count. A folder's row counts what lies
below it too, so that a room's lines are in its folder's; `share` is of the whole tree.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TREES = ("flwr_regs", "tests")
PAGE = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- size -->\n", "<!-- end -->"
NO_CODE = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
    *(tokenize.ENDMARKER, tokenize.ENCODING),
}


def code_lines(source: str) -> int:
    """Return how many lines of a Python file hold code, docstrings and comments left out."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        match node:  # also one below an attribute that it explains
            case ast.Expr(value=ast.Constant(value=str())):
                lines.difference_update(range(node.lineno, (node.end_lineno or 0) + 1))
    return len(lines)


def table(tree: str, root: Path = ROOT, depth: int = 9) -> str:
    """Return the Markdown table of one tree: folder, files directly in it, code lines, share.

    Folders more than `depth` below the tree's root are left out; their lines count in those above.
    """
    lines: Counter[Path] = Counter()
    files: Counter[Path] = Counter()
    for path in sorted((root / tree).rglob("*.py")):
        folder = path.parent.relative_to(root)
        files[folder] += 1
        for above in (folder, *folder.parents):
            lines[above] += code_lines(path.read_text(encoding="utf-8"))
    total = lines[Path(tree)]
    rows = ["| folder | files | code lines | share |", "|---|---|---|---|"]
    for folder in sorted(files):
        if len(folder.parts) > depth + 1:
            continue
        share = f"{lines[folder] / total:.0%}"
        rows.append(f"| `{folder.as_posix()}/` | {files[folder]} | {lines[folder]:,} | {share} |")
    return "\n".join(rows)


if __name__ == "__main__":
    if sys.argv[1:] == ["report"]:
        before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
        _, _, after = rest.partition(END)
        tables = "\n\n".join(table(tree, depth=1) for tree in TREES)
        PAGE.write_text(f"{before}{BEGIN}{tables}\n{END}{after}", encoding="utf-8")
    else:
        print("\n\n".join(table(tree) for tree in TREES))
