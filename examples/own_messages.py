"""A network whose nodes say themselves what they send upward; what comes back downward is its mirror (DistBelief's way).

    python examples/own_messages.py [--seats 3] [--steps 40]

A row of nodes, each of which sees its neighbours in the layer below. Every seat has some of them, and their weights; a `Move`
carries what others want to see. The same code in one process gives the same loss.
"""

import argparse
from typing import Any

import torch
from torch import Tensor

import syncline as sl
from syncline.parallel import Box, Group, Move, cut, even, joined

EXAMPLES, NODES, REACH, LAYERS = 16, 30, 2, 3
SEEN = 2 * REACH + 1


def of_these(whole: Tensor, box: Box) -> Tensor:
    low, high = box.spans[-1]
    return whole[..., low:high]


def trained(group: Group, steps: int) -> float:
    """The last loss."""
    torch.manual_seed(0)
    inputs, targets = torch.randn(2, EXAMPLES, NODES)
    weights = torch.randn(LAYERS, SEEN, NODES) / SEEN**0.5
    owned = cut((EXAMPLES, NODES), 1, even(NODES, group.size))
    wanted = [box.replaced(1, (box.spans[1][0] - REACH, box.spans[1][1] + REACH)) for box in owned]
    upward = Move(group, (EXAMPLES, NODES), [[box] for box in owned], [[box] for box in wanted])
    mine = owned[group.rank]
    own = of_these(weights, mine).clone().requires_grad_()
    for _ in range(steps):
        values = of_these(inputs, mine).contiguous()
        for layer in range(LAYERS):
            (seen,) = upward(values)  # beyond the ends: zeros
            values = torch.tanh(torch.einsum("enk,kn->en", seen.unfold(1, SEEN, 1), own[layer]))
        loss = (values - of_these(targets, mine)).square().sum() / targets.numel()
        (gradient,) = torch.autograd.grad(loss, own)  # those of what was seen go back to where it came from
        own.data -= 0.5 * gradient
    return float(group.add(loss.detach()))


def seat(session: Any, steps: int) -> float:
    place = joined()
    assert place is not None
    return trained(place.group, steps)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    result = sl.launch(seat, options.steps, learners=1, group=options.seats)
    print(f"loss in {options.seats} seats {result.returned[0]:.6f}")
    print(f"loss in one process {trained(Group(), options.steps):.6f}")


if __name__ == "__main__":
    main()
