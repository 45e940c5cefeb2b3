"""A deep autoencoder by unrolling a DBN (784-1000-500-250-30) on MNIST: reconstruction error and a picture, beside a random start.

    python -m reproductions.singa.autoencoder --data FOLDER [--json FILE] [--pictures FOLDER]

Options are those of `reproductions.singa.dbn`. The code of 30 is Gaussian; the unrolled net is trained by back-propagation.
"""

import json
import sys
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import CosineAnnealingLR

import syncline as sl
from benchmarks import machine
from reproductions.singa.dbn import Plan, options, read
from syncline.models import reconstruction
from syncline.nn import DBN

SIZES = (784, 1000, 500, 250, 30)
CODE_RATE = 0.001  # Gaussian hidden units need a small one


def pretrain(plan: Plan) -> DBN:
    torch.manual_seed(plan.seed)
    dbn = DBN(list(plan.sizes), code="gaussian", decay=2e-4)
    for number in range(len(dbn.rbms)):
        rate = CODE_RATE if number == len(dbn.rbms) - 1 else 0.1
        result = sl.train(
            dbn.only(number),
            plan.train,
            gradient="cd:1",
            optimizer=partial(SGD, lr=rate, momentum=0.5),
            epochs=plan.epochs,
            **plan.common(),
        )
        dbn = result.model  # type: ignore[assignment]
        print(f"  RBM {number + 1}: reconstruction error {result.history[-1].loss:.2f}", flush=True)
    return dbn.only(None)


def squares(model: nn.Module, test: Tensor) -> float:
    """Squared error of an image, mean over the test set."""
    with torch.no_grad():
        parts = [(torch.sigmoid(model(x)) - x.flatten(1)).square().sum() for x in test.split(500)]
    return float(sum(parts)) / len(test)


def tune(net: nn.Module, plan: Plan) -> nn.Module:
    result = sl.train(
        net,
        plan.train,
        objective=partial(reconstruction, loss="bce_with_logits"),
        optimizer=partial(Adam, lr=1e-3),
        schedule=partial(CosineAnnealingLR, T_max=plan.tune),
        epochs=plan.tune,
        **plan.common(),
    )
    assert result.model is not None
    return result.model


def run(plan: Plan) -> tuple[dict[str, float], nn.Module]:
    """Test errors by way, and the pre-trained net after fine-tuning."""
    dbn = pretrain(plan)
    test = plan.test.tensors[0]
    unrolled = dbn.autoencoder()
    errors = {"unrolled": squares(unrolled, test)}
    tuned = tune(unrolled, plan)
    errors["unrolled and fine-tuned"] = squares(tuned, test)
    torch.manual_seed(plan.seed)
    errors["random start"] = squares(tune(_random(dbn), plan), test)
    return errors, tuned


def _random(dbn: DBN) -> nn.Module:
    net: Any = dbn.autoencoder()
    for layer in net:
        if isinstance(layer, nn.Linear):
            nn.init.xavier_uniform_(layer.weight)
            nn.init.zeros_(layer.bias)
    return net


def main(arguments: list[str]) -> None:
    given = options().parse_args(arguments)
    train, test = (read(given.data, split, given.examples) for split in ("train", "test"))
    plan = Plan(train=train, test=test, epochs=given.epochs, tune=given.tune, device=given.device)
    errors, tuned = run(replace(plan, sizes=SIZES))
    for way, error in errors.items():
        print(f"{way}: squared error {error:.2f} per image")
    if given.pictures:
        from reproductions.singa.pictures import reconstructions

        given.pictures.mkdir(parents=True, exist_ok=True)
        reconstructions(tuned, test.tensors[0], given.pictures / "singa_reconstructions.png")
    if given.json:
        whole = {"machine": machine.describe(), "squared errors": errors}
        given.json.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
