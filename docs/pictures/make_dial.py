"""Draws dial.svg: four settings of the dial, three learners of unequal speed, by a small simulation.

usage: python docs/pictures/make_dial.py
"""

from __future__ import annotations

from pathlib import Path

SPEEDS = (10.0, 13.0, 19.0)  # time of one step of each learner
END = 76.0  # of the drawn time
PLOT, GAP, LEFT, TOP, ROW = 222, 24, 26, 96, 30
COLOURS = ("#2563eb", "#059669", "#d97706")
SETTINGS = (
    ("hardsync", "one gradient from each", "everybody waits", "σ = 0"),
    ("softsync:1", "the first λ gradients", "nobody waits", "σ ≈ 1"),
    ("ssp:1", "every gradient", "at most 1 step ahead of the last", "σ bounded"),
    ("async", "every gradient", "nobody waits", "σ ≈ λ−1"),
)
Step = tuple[int, float, float]  # learner, start, end


def lockstep() -> tuple[list[Step], list[float]]:
    """All start together, an update when the slowest is done."""
    steps: list[Step] = []
    updates: list[float] = []
    now = 0.0
    while now < END:
        steps += [(learner, now, now + speed) for learner, speed in enumerate(SPEEDS)]
        now += max(SPEEDS)
        updates.append(now)
    return steps, updates


def free(quorum: int) -> tuple[list[Step], list[float]]:
    """Nobody waits; an update with every so many gradients."""
    steps = [
        (learner, speed * number, speed * (number + 1))
        for learner, speed in enumerate(SPEEDS)
        for number in range(int(END / speed) + 1)
    ]
    done = sorted(end for _, _, end in steps)
    return steps, done[quorum - 1 :: quorum]


def bounded(slack: int) -> tuple[list[Step], list[float]]:
    """Every gradient is an update; a learner so many steps ahead of the slowest waits for it."""
    ends: list[list[float]] = [[] for _ in SPEEDS]
    steps: list[Step] = []
    while min(times[-1] if times else 0.0 for times in ends) < END:
        learner = min(range(len(SPEEDS)), key=lambda each: (len(ends[each]), each))
        number = len(ends[learner])
        before = ends[learner][-1] if ends[learner] else 0.0
        behind = number - slack  # what the slowest must have done
        start = max(before, max(times[behind - 1] for times in ends)) if behind > 0 else before
        ends[learner].append(start + SPEEDS[learner])
        steps.append((learner, start, ends[learner][-1]))
    return steps, sorted(end for _, _, end in steps)


def panel(number: int, x: float) -> str:
    name, takes, waits, sigma = SETTINGS[number]
    steps, updates = (lockstep(), free(len(SPEEDS)), bounded(1), free(1))[number]
    scale = PLOT / END
    parts = [f"<text x='{x}' y='{TOP - 14}' class='name'>{name}</text>"]
    parts.append(f"<text x='{x + PLOT}' y='{TOP - 14}' text-anchor='end'>{sigma}</text>")
    for learner in range(len(SPEEDS)):
        y = TOP + ROW * learner
        parts.append(f"<rect x='{x}' y='{y}' width='{PLOT}' height='{ROW - 8}' class='idle'/>")
    for learner, start, end in steps:
        if start < END:
            wide = (min(end, END) - start) * scale - 1.5
            y = TOP + ROW * learner
            place = f"x='{x + start * scale:.1f}' y='{y}' width='{wide:.1f}' height='{ROW - 8}'"
            parts.append(f"<rect {place} rx='2' fill='{COLOURS[learner]}'/>")
    bottom = TOP + ROW * len(SPEEDS)
    for moment in (each for each in updates if each < END):
        place = x + moment * scale
        parts.append(
            f"<line x1='{place:.1f}' x2='{place:.1f}' y1='{TOP - 5}' y2='{bottom + 3}' class='update'/>"
        )
        parts.append(f"<circle cx='{place:.1f}' cy='{bottom + 7}' r='3.5' fill='#1f2937'/>")
    parts.append(f"<text x='{x}' y='{bottom + 32}'>update: {takes}</text>")
    parts.append(f"<text x='{x}' y='{bottom + 50}'>{waits}</text>")
    return "".join(parts)


def picture() -> str:
    wide = 2 * LEFT + len(SETTINGS) * PLOT + (len(SETTINGS) - 1) * GAP
    high = TOP + ROW * len(SPEEDS) + 88
    style = (
        "text{font:13px system-ui,sans-serif;fill:#374151}.name{font-weight:700;font-size:15px;fill:#111827}"
        ".idle{fill:#f3f4f6}.update{stroke:#1f2937;stroke-width:1.5}.small{fill:#6b7280;font-size:12px}"
    )
    dial = (
        "<defs><linearGradient id='g'><stop stop-color='#1e3a8a'/><stop offset='1' stop-color='#f59e0b'/></linearGradient></defs>"
        f"<rect x='{LEFT}' y='34' width='{wide - 2 * LEFT}' height='8' rx='4' fill='url(#g)'/>"
        f"<text x='{LEFT}' y='24' class='name'>lockstep</text>"
        f"<text x='{wide - LEFT}' y='24' class='name' text-anchor='end'>free</text>"
    )
    panels = []
    for number in range(len(SETTINGS)):
        x = LEFT + number * (PLOT + GAP)
        dial += f"<circle cx='{x + 7}' cy='38' r='7' fill='white' stroke='#111827' stroke-width='2'/>"
        panels.append(panel(number, x))
    words = (
        f"<text x='{LEFT}' y='{high - 8}' class='small'>Three learners of unequal speed; a bar is one step, grey is waiting, "
        "a line with a dot is an update. σ, the staleness, is how many updates a gradient missed.</text>"
    )
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {wide} {high}' width='{wide}' height='{high}'>"
        f"<style>{style}</style><rect width='{wide}' height='{high}' fill='white'/>{dial}{''.join(panels)}{words}</svg>\n"
    )


if __name__ == "__main__":
    Path(__file__).with_name("dial.svg").write_text(picture(), encoding="utf-8")
