"""Text from files and from user code, before it reaches a terminal, a page or a picture.

Names of metrics, models, learners' errors and paths may hold markup and escape sequences. Everything that is printed goes through `visible`:
through a `Terminal`, or through `print(visible(text))`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

# Control characters, marks that turn the direction of writing, line and paragraph separators, lone surrogates, and what XML refuses.
HIDDEN = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]"
)


def visible(text: str, *, lines: bool = False) -> str:
    r"""Return the text with each hidden character written out, as `\x1b`; `lines` keeps line ends."""

    def written(found: re.Match[str]) -> str:
        return "\n" if lines and found[0] == "\n" else found[0].encode("unicode_escape").decode()

    return HIDDEN.sub(written, text)


class Terminal(Console):
    """A console without markup, emoji codes or anything in a text that a terminal would obey."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        """Escape a text before its width is measured."""
        return super().render_str(visible(text, lines=True), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Escape what was not made from a plain text."""
        for segment in super().render(renderable, options):
            if segment.control is not None:
                yield segment
            else:
                yield Segment(visible(segment.text, lines=True), segment.style)
