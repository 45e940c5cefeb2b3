"""What Rudra's paper reports of CIFAR-10 (Tables 2 and 3), and which dial each row stands for.

(σ, μ, λ): σ = 0 is hardsync, σ = 1 is 1-softsync, σ = λ is λ-softsync. All rows: 140 epochs, momentum 0.9, α₀ = 0.001,
divided by ten after epochs 120 and 130.
"""

from __future__ import annotations

from dataclasses import dataclass

REFERENCE_BATCH = 128  # B, of the baseline


@dataclass(frozen=True, slots=True)
class Row:
    """One configuration, its test error in percent and its training time in seconds."""

    sigma: int
    mu: int
    learners: int
    error: float
    seconds: int | None
    group: int  # μλ, as the table groups its rows

    @property
    def sync(self) -> str:
        """The dial; rates are the paper's: α₀/n, and α₀·√(λμ/B) under hardsync."""
        if self.sigma == 0:
            return "hardsync" if self.learners == 1 else f"hardsync:reference_batch={REFERENCE_BATCH}"
        return f"softsync:{1 if self.sigma == 1 else self.learners}"

    @property
    def name(self) -> str:
        return f"{self.sigma},{self.mu},{self.learners}"


BASELINE = Row(0, 128, 1, 17.9, 22392, 128)
ROWS = (
    BASELINE,
    Row(1, 4, 30, 18.09, 1573, 128),
    Row(30, 4, 30, 18.41, 2073, 128),
    Row(18, 8, 18, 18.92, 2488, 128),
    Row(10, 16, 10, 18.79, 3396, 128),
    Row(4, 32, 4, 18.82, 7776, 128),
    Row(2, 64, 2, 17.96, 13449, 128),
    Row(1, 8, 30, 20.04, 1478, 256),
    Row(30, 8, 30, 19.65, 1509, 256),
    Row(18, 16, 18, 20.33, 2938, 256),
    Row(10, 32, 10, 20.82, 3518, 256),
    Row(4, 64, 4, 20.70, 6631, 256),
    Row(2, 128, 2, 19.52, 11797, 256),
    Row(1, 128, 2, 19.59, 11924, 256),
    Row(1, 16, 30, 23.25, 1469, 512),
    Row(30, 16, 30, 22.14, 1502, 512),
    Row(18, 32, 18, 23.63, 2255, 512),
    Row(10, 64, 10, 24.08, 2683, 512),
    Row(4, 128, 4, 23.01, 7089, 512),
    Row(1, 32, 30, 27.16, 1299, 1024),
    Row(30, 32, 30, 27.27, 1420, 1024),
    Row(18, 64, 18, 28.31, 1713, 1024),
    Row(1, 128, 10, 29.83, 2551, 1024),
    Row(10, 128, 10, 29.90, 2626, 1024),
    Row(0, 8, 30, 18.56, 1995, 256),  # Table 3
    Row(0, 4, 30, 18.15, 2235, 128),
)


def first_rows() -> tuple[Row, ...]:
    """The baseline and the first row of each group."""
    firsts = {row.group: row for row in reversed(ROWS) if row is not BASELINE and row.sigma}
    return (BASELINE, *(firsts[group] for group in sorted(firsts)))


def find(names: str) -> tuple[Row, ...]:
    """The rows that a text names: `all`, `first`, `baseline`, or (σ, μ, λ) such as `1,4,30;30,4,30`."""
    if names in ("all", "first", "baseline"):
        return {"all": ROWS, "first": first_rows(), "baseline": (BASELINE,)}[names]
    known = {row.name: row for row in ROWS}
    wanted = [name.replace(" ", "").strip("()") for name in names.split(";")]
    unknown = [name for name in wanted if name not in known]
    if unknown:
        raise SystemExit(f"no row {unknown[0]!r} in Table 2 or 3; rows: {'; '.join(known)}")
    return tuple(known[name] for name in wanted)
