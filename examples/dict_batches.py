"""Batches that are dicts, and a model that computes its own loss, as Hugging Face's do: `objective=`.

The task: has a sentence more tokens from the first half of the vocabulary than from the second?
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

import syncline as sl

WORDS, LENGTH = 32, 12


@dataclass
class Output:
    """What such models give back."""

    loss: Tensor
    logits: Tensor


class Classifier(nn.Module):
    """One layer of attention over embeddings; called with the batch's entries as keyword arguments."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        self.layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True)
        self.head = nn.Linear(width, 2)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Output:
        hidden = self.layer(self.words(input_ids), src_key_padding_mask=attention_mask == 0)
        weights = attention_mask.unsqueeze(2) / attention_mask.sum(1)[:, None, None]
        logits = self.head((hidden * weights).sum(1))
        return Output(F.cross_entropy(logits, labels), logits)


class Sentences(Dataset[dict[str, Tensor]]):
    """Sentences of different lengths, padded."""

    def __init__(self, count: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.ids = torch.randint(WORDS, (count, LENGTH), generator=generator)
        lengths = torch.randint(LENGTH // 2, LENGTH + 1, (count,), generator=generator)
        self.mask = (torch.arange(LENGTH) < lengths[:, None]).long()
        first = ((self.ids < WORDS // 2) & (self.mask == 1)).sum(1)
        self.labels = (2 * first > lengths).long()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {
            "input_ids": self.ids[index],
            "attention_mask": self.mask[index],
            "labels": self.labels[index],
        }


def objective(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(**batch).loss


def evaluate(model: nn.Module, data: Sentences) -> dict[str, float]:
    with torch.no_grad():
        output = model(input_ids=data.ids, attention_mask=data.mask, labels=data.labels)
    return {
        "accuracy": (output.logits.argmax(1) == data.labels).float().mean().item(),
        "loss": output.loss.item(),
    }


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--sentences", type=int, default=4000)
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--learners", type=int, default=2)
given = parser.parse_args()
result = sl.train(
    Classifier,
    Sentences(given.sentences, seed=0),
    objective=objective,
    optimizer=partial(torch.optim.AdamW, lr=3e-3),
    evaluate=partial(evaluate, data=Sentences(1000, seed=1)),
    sync="softsync:1",
    learners=given.learners,
    epochs=given.epochs,
    threads=1,
)
for record in result.history:
    print(f"epoch {record.epoch + 1}: loss {record.loss:.3f}, test accuracy {record['accuracy']:.3f}")
