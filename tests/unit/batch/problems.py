"""Test problems with their gradients, and what scipy and torch need for them; nothing here needs either."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

TOLERANCE, DECREASE = 1e-6, 1e-14  # both for all: scipy's gtol and ftol

Objective = Callable[[np.ndarray], tuple[float, np.ndarray]]


@dataclass(frozen=True)
class Problem:
    objective: Objective
    start: np.ndarray


def rosenbrock(x: np.ndarray) -> tuple[float, np.ndarray]:
    a, b = x[:-1], x[1:]
    valley = b - a**2
    g = np.zeros_like(x)
    g[:-1] = -400 * a * valley - 2 * (1 - a)
    g[1:] += 200 * valley
    return float(np.sum(100 * valley**2 + (1 - a) ** 2)), g


def beale(z: np.ndarray) -> tuple[float, np.ndarray]:
    x, y = z
    r = np.array([1.5 - x + x * y, 2.25 - x + x * y**2, 2.625 - x + x * y**3])
    by_x = np.array([y - 1, y**2 - 1, y**3 - 1])
    by_y = np.array([x, 2 * x * y, 3 * x * y**2])
    return float(r @ r), np.array([2 * r @ by_x, 2 * r @ by_y])


def himmelblau(z: np.ndarray) -> tuple[float, np.ndarray]:
    x, y = z
    a, b = x**2 + y - 11, x + y**2 - 7
    return float(a**2 + b**2), np.array([4 * x * a + 2 * b, 2 * a + 4 * y * b])


def quadratic(condition: float, n: int) -> Problem:
    """½(x − 1)ᵀA(x − 1), A rotated so that no coordinate is an eigenvector."""
    random = np.random.RandomState(1)
    turn, _ = np.linalg.qr(random.standard_normal((n, n)))
    a = turn @ np.diag(np.logspace(0, -np.log10(condition), n)) @ turn.T

    def objective(x: np.ndarray) -> tuple[float, np.ndarray]:
        g = a @ (x - 1)
        return float(0.5 * (x - 1) @ g), g

    return Problem(objective, np.zeros(n))


def logistic(examples: int = 200, n: int = 20) -> Problem:
    """Logistic regression with a little weight decay; features of unequal scale."""
    random = np.random.RandomState(2)
    data = random.standard_normal((examples, n)) * np.logspace(0, 1, n)
    label = np.where(data @ random.standard_normal(n) + 3 * random.standard_normal(examples) > 0, 1.0, -1.0)

    def objective(w: np.ndarray) -> tuple[float, np.ndarray]:
        margin = label * (data @ w)
        weight = 0.5 * (1 - np.tanh(margin / 2))  # 1 / (1 + exp(margin))
        loss = np.mean(np.logaddexp(0, -margin)) + 5e-3 * w @ w
        return float(loss), -(data.T @ (label * weight)) / examples + 1e-2 * w

    return Problem(objective, np.zeros(n))


def mlp(examples: int = 60, inputs: int = 4, hidden: int = 6) -> Problem:
    """A regression by one hidden tanh layer, with weight decay."""
    random = np.random.RandomState(3)
    data = random.standard_normal((examples, inputs))
    target = np.sin(data[:, 0]) + 0.5 * data[:, 1] * data[:, 2]
    cut = inputs * hidden

    def objective(w: np.ndarray) -> tuple[float, np.ndarray]:
        w1, b1, w2, b2 = w[:cut].reshape(inputs, hidden), w[cut : cut + hidden], w[cut + hidden : -1], w[-1]
        h = np.tanh(data @ w1 + b1)
        error = h @ w2 + b2 - target
        back = np.outer(error, w2) * (1 - h**2) / examples
        parts = [(data.T @ back).ravel(), back.sum(0), h.T @ error / examples, [error.mean()]]
        return float(0.5 * np.mean(error**2) + 5e-3 * w @ w), np.concatenate(parts) + 1e-2 * w

    return Problem(objective, 0.5 * random.standard_normal(cut + 2 * hidden + 1))


PROBLEMS = {
    "Rosenbrock, n = 2": Problem(rosenbrock, np.array([-1.2, 1.0])),
    "Rosenbrock, n = 100": Problem(rosenbrock, np.tile([-1.2, 1.0], 50)),
    "Beale": Problem(beale, np.array([1.0, 1.0])),
    "Himmelblau": Problem(himmelblau, np.array([0.0, 0.0])),
    "quadratic, condition 1e6, n = 50": quadratic(1e6, 50),
    "logistic regression, n = 20": logistic(),
    "MLP, n = 37": mlp(),
}

# the loss at which scipy 1.17.1's L-BFGS-B ends, history 10, and its evaluations: `compare`
REFERENCE = {
    "Rosenbrock, n = 2": (0.0, 45),
    "Rosenbrock, n = 100": (0.0, 632),
    "Beale": (0.0, 16),
    "Himmelblau": (0.0, 16),
    "quadratic, condition 1e6, n = 50": (3.54665185e-08, 1621),
    "logistic regression, n = 20": (0.083337739, 66),
    "MLP, n = 37": (0.0558974438, 162),
}
