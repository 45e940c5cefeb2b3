"""Plans: which layers of a model are cut by examples, features or image, at the least cost (S3, S4)."""

from syncline.plan.costs import best_group, data_parallel, grouped, measure, model_parallel
from syncline.plan.search import Plan, plan, shapes_of, step_seconds

__all__ = [
    "Plan",
    "best_group",
    "data_parallel",
    "grouped",
    "measure",
    "model_parallel",
    "plan",
    "shapes_of",
    "step_seconds",
]
