"""The sizes of Rudra's CIFAR-10 experiments, for timings."""

CIFAR10_FULL = 89_578  # parameters
EXAMPLES = 50_000
EPOCHS = 140
