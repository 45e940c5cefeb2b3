"""Greedy training, stack by stack from the bottom, with momentum; it can be saved and resumed (C3).

A saved run is a folder: `greedy.safetensors` with weights, momentum, norms and gains, `greedy.json` with the position and
the settings. A resumed run goes on with the batches, rates and rounding bits that the interrupted one would have had; on
a CPU with the same bits. Not responsible for what images go in: those of the paper are made in reproductions/cots.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from syncline.errors import UsageError
from syncline.kernels.block_local import batch_last
from syncline.nn.autoencoder import FusedStack
from syncline.nn.block_local import Stack

TENSORS, POSITION = "greedy.safetensors", "greedy.json"


@dataclass(frozen=True, slots=True)
class GreedyRecord:
    """One epoch of one stack, both counted from 0; the values are means over its batches."""

    stack: int
    epoch: int
    loss: float
    reconstruction: float
    penalty: float


class Greedy:
    """Trains the stacks of a network (`build_stacks`), one after the other, `epochs` epochs each.

    for record in Greedy(network, epochs=3).run(images): print(record)

    Images are (count, C, H, W), on any device; every epoch has its own order, from the seed, and leaves out the last
    images that do not fill a batch. The network's weights change in place.
    """

    def __init__(
        self,
        network: nn.Sequential,
        *,
        epochs: int,
        batch_size: int = 96,
        rate: float = 0.01,
        decay: float = 0.9,
        sparsity: float = 0.1,
        seed: int = 0,
    ) -> None:
        if epochs < 1 or batch_size < 1:
            raise UsageError(f"epochs and batch_size must be at least 1, got {epochs} and {batch_size}")
        self.batch_size, self.epochs = batch_size, epochs
        self.rate, self.decay, self.sparsity, self.seed = rate, decay, sparsity, seed
        self.stacks: list[Stack] = []
        for module in network:
            if not isinstance(module, Stack):
                raise UsageError(
                    f"Greedy trains a sequence of Stack, found {type(module).__name__}: use build_stacks"
                )
            self.stacks.append(module)
        self.position = (0, 0)  # stack and epoch that come next
        self.records: list[GreedyRecord] = []
        self._below: list[FusedStack] = []
        self._current: FusedStack | None = None

    def run(self, images: Tensor) -> Iterator[GreedyRecord]:
        """Train from the position on; a record after every epoch. Stop iterating to stop, `save` between records."""
        if len(images) < self.batch_size:
            raise UsageError(
                f"{len(images)} images do not fill one batch of {self.batch_size}: use a smaller batch_size"
            )
        while self.position[0] < len(self.stacks):
            index, epoch = self.position
            current = self._fused(index, images)
            totals, count = torch.zeros(3, device=current.weight.device), 0
            for batch in self._batches(index, epoch, images):
                step = current.update(self._seen(batch), rate=self.rate, decay=self.decay)
                totals += torch.stack([value.float() for value in step])
                count += 1
            loss, reconstruction, penalty = (totals / count).tolist()
            self.records.append(GreedyRecord(index, epoch, loss, reconstruction, penalty))
            last = epoch + 1 == self.epochs
            self.position = (index + 1, 0) if last else (index, epoch + 1)
            if last:
                self._below, self._current = [*self._below, _frozen(current)], None
            yield self.records[-1]

    def _fused(self, index: int, images: Tensor) -> FusedStack:
        while len(self._below) < index:
            self._below.append(_frozen(self._make(len(self._below))))
        if self._current is None:
            self._current = self._make(index)
            self._current.fit_gain(self._seen(next(self._batches(index, 0, images))))
        return self._current

    def _make(self, index: int) -> FusedStack:
        return FusedStack(self.stacks[index], sparsity=self.sparsity, seed=self.seed + 1_000_003 * index)

    def _batches(self, index: int, epoch: int, images: Tensor) -> Iterator[Tensor]:
        """Batches of one epoch, (C, H, W, N), on the network's device."""
        generator = torch.Generator().manual_seed((self.seed * 1009 + index) * 1009 + epoch)
        order, size = torch.randperm(len(images), generator=generator), self.batch_size
        weight = self.stacks[index].filter.weight
        for start in range(0, len(order) - size + 1, size):
            chosen = images[order[start : start + size].to(images.device)]
            yield batch_last(chosen.to(weight.device, torch.float32))

    def _seen(self, images: Tensor) -> Tensor:
        """What the current stack sees of a batch."""
        for stack in self._below:
            images = stack.output(images)
        return images

    def save(self, folder: Path | str) -> None:
        """Write the run, whole: a crash in between leaves the former one."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {f"weight.{i}": stack.filter.weight.detach().cpu() for i, stack in enumerate(self.stacks)}
        position = {
            **self._fixed(),
            "position": list(self.position),
            "steps": 0 if self._current is None else self._current.steps,
            "records": [asdict(record) for record in self.records],
        }
        if self._current is not None:
            for name in ("momentum", "scale", "gain"):
                tensors[name] = getattr(self._current, name).detach().cpu()
        save_file(tensors, folder / (TENSORS + ".new"), {"position": json.dumps(position)})
        os.replace(folder / (TENSORS + ".new"), folder / TENSORS)
        new = folder / (POSITION + ".new")
        new.write_text(json.dumps(position, indent=1) + "\n", encoding="utf-8")
        os.replace(new, folder / POSITION)

    def load(self, folder: Path | str) -> None:
        """Go on where `save` was called, with the same network and settings."""
        folder = Path(folder)
        if not (folder / TENSORS).exists():
            raise UsageError(f"no {TENSORS} in {folder}: nothing was saved there")
        with safe_open(folder / TENSORS, "pt") as file:  # beside the tensors: the two can never disagree
            position = json.loads(file.metadata()["position"])
        for name, value in self._fixed().items():
            if position[name] != value:
                raise UsageError(
                    f"{folder} was saved with other {name}: {position[name]}, this run has {value}"
                )
        tensors = load_file(folder / TENSORS)
        for i, stack in enumerate(self.stacks):
            stack.filter.weight.data.copy_(tensors[f"weight.{i}"])
        index, epoch = position["position"]
        self.position = (index, epoch)
        self.records = [GreedyRecord(**record) for record in position["records"]]
        self._below, self._current = [], None
        if "momentum" in tensors:
            self._current = self._make(index)
            device = self._current.weight.device
            self._current.momentum.copy_(tensors["momentum"])
            self._current.scale = tensors["scale"].to(device)
            self._current.gain = tensors["gain"].to(device)
            self._current.steps = position["steps"]

    def _fixed(self) -> dict[str, Any]:
        """What must not change between saving and resuming."""
        settings = ("batch_size", "epochs", "rate", "decay", "sparsity", "seed")
        return {
            "settings": {name: getattr(self, name) for name in settings},
            "shapes": [f"{s.filter.geometry} {s.filter.weight.dtype} {s.shape}" for s in self.stacks],
        }


def _frozen(stack: FusedStack) -> FusedStack:
    """A trained stack needs its momentum no more; its norms are taken as a resumed run will take them."""
    stack.momentum = torch.empty(0)
    stack.refresh()
    return stack
