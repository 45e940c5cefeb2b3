"""Count lines of code: lines that are neither blank, nor a comment, nor part of a docstring.

    python -m tools.code_lines [PATH ...]      lines of code per folder and in all (default: src)

A line that holds code and a comment counts. A string literal that is a whole statement counts as a docstring.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections import Counter
from pathlib import Path

NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


def code_lines(text: str) -> int:
    """Return the number of lines of code in a Python source text."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def count_folders(roots: list[Path]) -> Counter[str]:
    """Return the lines of code of every folder that holds Python files below `roots`."""
    counts: Counter[str] = Counter()
    for path in sorted(path for root in roots for path in root.rglob("*.py")):
        counts[str(path.parent)] += code_lines(path.read_text(encoding="utf-8"))
    return counts


if __name__ == "__main__":
    folders = count_folders([Path(argument) for argument in sys.argv[1:] or ["src"]])
    for folder, lines in folders.items():
        print(f"{lines:7,}  {folder}")
    print(f"{folders.total():7,}  in all")
