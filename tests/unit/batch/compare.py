"""Prints the table of docs/measured/batch_methods.md; needs scipy: `python -m tests.unit.batch.compare`."""

import numpy as np
import torch

from syncline.batch.methods import LBFGS, ConjugateGradient
from tests.unit.batch.plain import drive
from tests.unit.batch.problems import DECREASE, PROBLEMS, TOLERANCE, Problem


def by_scipy(problem: Problem) -> tuple[float, int]:
    from scipy.optimize import minimize

    options = {"maxcor": 10, "gtol": TOLERANCE, "ftol": DECREASE, "maxfun": 100_000, "maxiter": 100_000}
    found = minimize(problem.objective, problem.start, jac=True, method="L-BFGS-B", options=options)
    return float(found.fun), found.nfev


def by_torch(problem: Problem) -> tuple[float, int]:
    x, calls = torch.tensor(problem.start, requires_grad=True), 0
    optimizer = torch.optim.LBFGS(
        [x],
        max_iter=100_000,
        max_eval=100_000,
        tolerance_grad=TOLERANCE,
        tolerance_change=DECREASE,
        history_size=10,
        line_search_fn="strong_wolfe",
    )

    def closure() -> torch.Tensor:
        nonlocal calls
        calls += 1
        loss, g = problem.objective(x.detach().numpy())
        x.grad = torch.from_numpy(np.array(g))
        return torch.tensor(loss)

    optimizer.step(closure)
    return problem.objective(x.detach().numpy())[0], calls


def main() -> None:
    import scipy

    print(f"scipy {scipy.__version__}, torch {torch.__version__}")
    print("| problem | minimum | scipy | torch | LBFGS | by armijo | ConjugateGradient |")
    for name, problem in PROBLEMS.items():
        lowest, scipy_calls = by_scipy(problem)
        reached, torch_calls = by_torch(problem)
        ours = [
            drive(method, problem.objective, problem.start, most=100_000).end
            for method in (
                LBFGS(decrease=DECREASE),
                LBFGS(decrease=DECREASE, line_search="armijo"),
                ConjugateGradient(decrease=DECREASE),
            )
        ]
        counts = " | ".join(str(end.evaluations) for end in ours if end)
        print(f"| {name} | {lowest:.9g} | {scipy_calls} | {torch_calls} | {counts} |")
        print("  ", reached, *(end.loss for end in ours if end))


if __name__ == "__main__":
    main()
