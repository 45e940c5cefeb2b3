"""Table 2 in small, on real images: does a net trained without labels have a neuron that knows faces?

    python -m reproductions.cots.table2 --faces lfw32.npz --others cifar10.npz [--device cuda] [--json FILE] [--pictures FOLDER]

`--faces` holds `images` (count, 32, 32), Labeled Faces in the Wild in gray; `--others` is CIFAR-10 with `x_train` and
`x_test`, in color or gray. Half of the faces and the training images of CIFAR-10 are mixed and given without labels;
the other half and CIFAR-10's test images are held out. Every neuron of every layer is then judged by the best accuracy
of one threshold on its response, as the paper does; beside it stand the majority rate, single pixels, the same net
before training, and an estimate that cannot profit from choosing among many neurons: neuron and threshold are taken on
one half of the held-out images and judged on the other.
"""

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks import machine
from reproductions.cots.image_preprocessing import Whitening, contrast_normalise
from reproductions.cots.optimal_stimulus import best_stimulus
from reproductions.cots.pictures import stimuli_picture
from reproductions.cots.selectivity import Selectivity, selectivity
from syncline.nn import Greedy, Stack, StackShape, build_stacks

SHAPES = (
    StackShape(field=8, step=2, block=(2, 2, 8)),
    StackShape(field=10, step=2, block=(2, 2, 8)),
    StackShape(field=10, step=2, block=(2, 2, 8)),
)
PAPER = {
    "random guess": 0.647,
    "second column, presumably random filters": 0.648,
    "1.8 B net": 0.882,
    "11 B net": 0.865,
}
LAYERS = ("filter", "pool", "norm")
BATCH = 500


def gray(images: np.ndarray) -> Tensor:
    """(count, 1, H, W) in 0…1, from gray or color bytes."""
    values = torch.from_numpy(images).float() / 255
    if values.dim() == 4:
        values = values @ torch.tensor([0.299, 0.587, 0.114])
    return values.unsqueeze(1)


def load(faces: Path, others: Path, most: int) -> tuple[Tensor, Tensor, Tensor]:
    """Unlabeled training images, held-out faces, held-out others."""
    portraits = gray(np.load(faces)["images"])
    portraits = portraits[torch.randperm(len(portraits), generator=torch.Generator().manual_seed(0))]
    rest = np.load(others)
    half = len(portraits) // 2
    training = torch.cat([portraits[:half], gray(rest["x_train"][:most])])
    return training, portraits[half:], gray(rest["x_test"])


def prepare(whiten: Whitening, images: Tensor) -> Tensor:
    """Contrast normalised, whitened as the training images are, normalised again."""
    return contrast_normalise(whiten(contrast_normalise(images)))


def responses(network: nn.Sequential, images: Tensor) -> dict[str, Tensor]:
    """(count, neurons) of every layer, on the network's device; pixels are a layer too."""
    device = network[0].filter.weight.device
    found: dict[str, list[Tensor]] = {}
    with torch.no_grad():
        for batch in images.split(BATCH):
            for name, values in layers(network, batch.to(device)):
                found.setdefault(name, []).append(values.flatten(1).float())
    return {name: torch.cat(values) for name, values in found.items()}


def layers(network: nn.Sequential, values: Tensor) -> Iterator[tuple[str, Tensor]]:
    yield "pixels", values
    for number, stack in enumerate(network, 1):
        for name in LAYERS:
            values = stack.get_submodule(name)(values)
            yield f"stack {number} {name}", values


def judge(
    network: nn.Sequential, faces: Tensor, others: Tensor
) -> tuple[dict[str, Selectivity], dict[str, dict[str, float]]]:
    """Per layer: every neuron's accuracy, and of the best one also the estimate free of choosing."""
    positive, negative = responses(network, faces), responses(network, others)
    found, result = {}, {}
    for name in positive:
        mine, theirs = positive[name], negative[name]
        whole = found[name] = selectivity(mine, theirs)
        choice = selectivity(mine[::2], theirs[::2])
        chosen = int(choice.accuracy.argmax())
        threshold = choice.threshold[chosen]
        right = (mine[1::2, chosen] >= threshold).sum() + (theirs[1::2, chosen] < threshold).sum()
        result[name] = {
            "neurons": mine.shape[1],
            "best neuron": int(whole.accuracy.argmax()),
            "accuracy": float(whole.accuracy.max()),
            "chosen on one half, judged on the other": float(right) / (len(mine[1::2]) + len(theirs[1::2])),
        }
    return found, result


def train(network: nn.Sequential, images: Tensor, epochs: int, rate: float) -> list[dict[str, Any]]:
    start, records = time.perf_counter(), []
    images = images.to(network[0].filter.weight.device)
    for record in Greedy(network, epochs=epochs, rate=rate).run(images):
        records.append(asdict(record) | {"seconds": round(time.perf_counter() - start, 1)})
        print(f"stack {record.stack + 1} epoch {record.epoch + 1}: loss {record.loss:.1f}", flush=True)
    return records


def draw(
    network: nn.Sequential,
    found: dict[str, Selectivity],
    whiten: Whitening,
    file: Path,
    count: int,
    steps: int,
) -> None:
    """Fig. 7: best stimuli of the neurons that tell faces best, `count` of the last layer and of the best one."""
    device, shown = network[0].filter.weight.device, []
    best_layer = max(list(found)[1:], key=lambda name: float(found[name].accuracy.max()))  # but the pixels
    for layer in dict.fromkeys((best_layer, list(found)[-1])):
        for neuron in found[layer].accuracy.argsort(descending=True)[:count].tolist():
            best = best_stimulus(
                lambda x, layer=layer, at=neuron: dict(layers(network, x))[layer].flatten(1)[:, at],
                (1, 32, 32),
                steps=steps,
                device=device,
            )
            name = f"{layer} {neuron}\n{100 * float(found[layer].accuracy[neuron]):.1f} %"
            image = best.image.cpu()
            shown.append((name, image[0], whiten.undo(image.unsqueeze(0))[0, 0]))
    stimuli_picture(shown, file)


def make(device: str) -> nn.Sequential:
    torch.manual_seed(0)
    return build_stacks(1, 32, SHAPES, device=device)


def parameters(network: nn.Sequential) -> int:
    return sum(stack.filter.geometry.parameters for stack in network if isinstance(stack, Stack))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--faces", type=Path, required=True)
    parser.add_argument("--others", type=Path, required=True)
    parser.add_argument("--most", type=int, default=50_000, help="images of CIFAR-10 to train on")
    parser.add_argument("--epochs", type=int, default=10, help="of every stack")
    parser.add_argument("--rate", type=float, default=0.001)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--pictures", type=Path)
    parser.add_argument("--neurons", type=int, default=3, help="of a layer in the picture")
    parser.add_argument("--steps", type=int, default=300, help="of the search for a best stimulus")
    parser.add_argument("--commit")
    chosen = parser.parse_args()
    raw = load(chosen.faces, chosen.others, chosen.most)
    whiten = Whitening.fit(contrast_normalise(raw[0]), epsilon=0.05)
    training, faces, others = (prepare(whiten, images) for images in raw)
    network = make(chosen.device)
    _, untrained = judge(network, faces, others)
    records = train(network, training, chosen.epochs, chosen.rate)
    found, trained = judge(network, faces, others)
    result = {
        "machine": machine.describe() | ({"commit": chosen.commit} if chosen.commit else {}),
        "weights": parameters(network),
        "training images": len(training),
        "held-out faces": len(faces),
        "held-out others": len(others),
        "epochs": chosen.epochs,
        "rate": chosen.rate,
        "majority": max(len(faces), len(others)) / (len(faces) + len(others)),
        "untrained": untrained,
        "trained": trained,
        "paper": PAPER,
        "records": records,
    }
    show(result)
    if chosen.json:
        chosen.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if chosen.pictures:
        file = chosen.pictures / "cots_stimuli.png"
        draw(network, found, whiten, file, chosen.neurons, chosen.steps)


def show(result: dict[str, Any]) -> None:
    half = "chosen on one half, judged on the other"
    print(f"majority rate {result['majority']:.3f}, {result['weights']:,} weights")
    print(
        "| layer | neurons | untrained | trained | untrained, unbiased | trained, unbiased |\n|---|---|---|---|---|---|"
    )
    for name, after in result["trained"].items():
        before = result["untrained"][name]
        cells = (before["accuracy"], after["accuracy"], before[half], after[half])
        print(
            f"| {name} | {after['neurons']} | " + " | ".join(f"{100 * cell:.1f} %" for cell in cells) + " |"
        )


if __name__ == "__main__":
    main()
