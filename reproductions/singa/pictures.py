"""Pictures of the SINGA reproduction: filters of an RBM, reconstructions of an autoencoder, a series and how it is gone on with."""

from pathlib import Path

import matplotlib
import torch
from torch import Tensor, nn

matplotlib.use("Agg")
import matplotlib.pyplot as plt

COLUMNS = 20


def filters(weight: Tensor, file: Path, count: int = 200) -> None:
    """Incoming weights of the first hidden units (H, 784), each on its own scale."""
    chosen = weight[:count].unflatten(1, (28, 28))
    rows = -(-len(chosen) // COLUMNS)
    sheet = torch.zeros(rows * 29 - 1, COLUMNS * 29 - 1)
    for number, image in enumerate(chosen):
        y, x = 29 * (number // COLUMNS), 29 * (number % COLUMNS)
        sheet[y : y + 28, x : x + 28] = image / image.abs().max().clamp(min=1e-9)
    plt.imsave(file, sheet.numpy(), cmap="gray", vmin=-1, vmax=1)


@torch.no_grad()
def reconstructions(net: nn.Module, images: Tensor, file: Path, count: int = COLUMNS) -> None:
    """Images (N, 1, 28, 28) above, what comes back below."""
    shown = images[:count]
    back = torch.sigmoid(net.cpu().eval()(shown)).unflatten(1, (28, 28))
    sheet = torch.ones(57, len(shown) * 29 - 1)
    for number, (image, made) in enumerate(zip(shown[:, 0], back, strict=True)):
        sheet[:28, 29 * number : 29 * number + 28] = 1 - image
        sheet[29:, 29 * number : 29 * number + 28] = 1 - made
    plt.imsave(file, sheet.numpy(), cmap="gray", vmin=0, vmax=1)


def motion(series: Tensor, made: Tensor, order: int, file: Path, joints: int = 4) -> None:
    """A real series (T, joints) and what the model makes after its first frames."""
    figure, axes = plt.subplots(joints, 1, figsize=(8, 1.2 * joints), sharex=True)
    for joint, axis in enumerate(axes):
        axis.plot(series[:, joint], linewidth=1, label="real")
        axis.plot(range(order, order + len(made)), made[:, joint], linewidth=1, label="made")
        axis.set_ylabel(f"joint {joint + 1}", fontsize=7)
    axes[0].legend(fontsize=7, loc="upper right", ncols=2)
    axes[-1].set_xlabel("frame")
    figure.tight_layout()
    figure.savefig(file, dpi=110)
    plt.close(figure)
