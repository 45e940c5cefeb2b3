"""A deep belief network on digits: RBMs one after another by contrastive divergence, then back-propagation (DBN-DNN)."""

import argparse
from functools import partial

import torch.nn.functional as F
from torch.optim import SGD, Adam

import syncline as sl
from syncline.data import digits
from syncline.nn import DBN

SIZES = [64, 100, 50]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=15, help="of each RBM, and of the fine-tuning")
    parser.add_argument("--learners", type=int, default=2)
    given = parser.parse_args()
    train, test = digits("train"), digits("test")
    common = {
        "learners": given.learners,
        "epochs": given.epochs,
        "batch_size": 16,
        "threads": 1,
        "evaluate": test,
    }

    dbn = DBN(SIZES, sparsity=0.1)
    for number in range(len(dbn.rbms)):
        dbn.only(number)  # the others pass on
        result = sl.train(dbn, train, gradient="cd:1", optimizer=partial(SGD, lr=0.1, momentum=0.5), **common)
        dbn = result.model
        print(f"RBM {number + 1}: reconstruction error {result.history[-1].metrics['loss']:.2f}")

    net = dbn.only(None).classifier(10)
    result = sl.train(net, train, loss=F.cross_entropy, optimizer=partial(Adam, lr=0.01), **common)
    print(f"fine-tuned: test accuracy {result.history[-1].metrics['accuracy']:.3f}")


if __name__ == "__main__":
    main()
