"""The curves for TensorBoard, where it is installed: the one place that imports it."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any


def installed() -> bool:
    return importlib.util.find_spec("tensorboard") is not None


class TensorBoardWriter:
    """Event files in the run folder."""

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter  # late: takes a second, and may not be there

        self._writer: Any = SummaryWriter(str(folder / "tensorboard"))

    def feed(self, line: dict[str, Any]) -> None:
        if line["kind"] == "epoch":
            self._add("train/loss", line["loss"], line)
            for name, value in line["metrics"].items():
                self._add(f"test/{name}", value, line)
            self._writer.flush()
        elif line["kind"] == "statistics":
            self._add("staleness/mean", line["staleness"]["mean"], line)
            self._add("examples", line["examples"], line)
            for each in line["learners"]:
                self._add(f"loss of learner/{each['rank']}", each["loss"], line)

    def _add(self, tag: str, value: float | None, line: dict[str, Any]) -> None:
        if value is not None:
            self._writer.add_scalar(tag, value, line["version"], walltime=line.get("time"))

    def close(self) -> None:
        self._writer.close()
