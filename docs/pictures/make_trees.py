"""Draws docs/pictures/trees.svg: base, adv and adv* beside one another.

python docs/pictures/make_trees.py
"""

from __future__ import annotations

from pathlib import Path

from syncline.report.svg_plots import COLOURS, FAINT, FONT, INK

UP, DOWN, SERVER, LEARNER = COLOURS[1], COLOURS[0], "#fee2e2", "#dcfce7"
PANEL, HEIGHT = 300, 250


def box(x: float, y: float, words: str, fill: str) -> str:
    return (
        f"<rect x='{x - 28}' y='{y - 13}' width='56' height='26' rx='4' fill='{fill}' stroke='{FAINT}'/>"
        f"<text x='{x}' y='{y + 4}' text-anchor='middle' fill='{INK}' font-size='11'>{words}</text>"
    )


def arrow(a: tuple[float, float], b: tuple[float, float], colour: str, *, dashed: bool = False) -> str:
    style = " stroke-dasharray='4 3'" if dashed else ""
    return (
        f"<line x1='{a[0]}' y1='{a[1]}' x2='{b[0]}' y2='{b[1]}' stroke='{colour}' stroke-width='1.5'{style} "
        f"marker-end='url(#{'up' if colour == UP else 'down'})'/>"
    )


def link(below: tuple[float, float], above: tuple[float, float], *, asked: bool) -> list[str]:
    """A gradient up, a version down."""
    (x, y), (u, v) = below, above
    return [
        arrow((x - 5, y - 14), (u - 5, v + 15), UP),
        arrow((u + 5, v + 14), (x + 5, y - 15), DOWN, dashed=not asked),
    ]


def panel(left: float, title: str, note: str, *, tree: bool, asked: bool) -> list[str]:
    root = (left + PANEL / 2, 60.0)
    learners = [(left + 42 + 72 * index, 200.0) for index in range(4)]
    leaves = [(left + 78, 130.0), (left + 222, 130.0)]
    drawn = [
        f"<text x='{root[0]}' y='22' text-anchor='middle' fill='{INK}' font-weight='600'>{title}</text>",
        f"<text x='{root[0]}' y='{HEIGHT - 10}' text-anchor='middle' fill='{FAINT}' font-size='11'>{note}</text>",
    ]
    for index, learner in enumerate(learners):
        drawn += link(learner, leaves[index // 2] if tree else root, asked=asked)
    if tree:
        drawn += [part for leaf in leaves for part in link(leaf, root, asked=asked)]
        drawn += [box(*leaf, "leaf", SERVER) for leaf in leaves]
    drawn += [box(*root, "shards", SERVER), *(box(*each, "learner", LEARNER) for each in learners)]
    return drawn


def draw() -> str:
    heads = "".join(
        f"<marker id='{name}' viewBox='0 0 8 8' refX='7' refY='4' markerWidth='6' markerHeight='6' orient='auto'>"
        f"<path d='M0 0 L8 4 L0 8 z' fill='{colour}'/></marker>"
        for name, colour in (("up", UP), ("down", DOWN))
    )
    parts = [
        *panel(0, "base: servers", "every gradient to the shards", tree=False, asked=True),
        *panel(PANEL, "adv: tree:2", "sums up; a version is fetched once", tree=True, asked=True),
        *panel(2 * PANEL, "adv*: tree:2,broadcast", "versions flow down unasked", tree=True, asked=False),
    ]
    size = f"width='{3 * PANEL}' height='{HEIGHT}' viewBox='0 0 {3 * PANEL} {HEIGHT}'"
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' {size} {FONT}><defs>{heads}</defs>{''.join(parts)}</svg>\n"
    )


if __name__ == "__main__":
    (Path(__file__).parent / "trees.svg").write_text(draw())
