"""docs/howto/layers.md against the code."""

from __future__ import annotations

import re
from pathlib import Path

from syncline.jobs import Job
from syncline.learn.gradient_ways import REGULARISERS
from syncline.models import MODELS
from syncline.nn.registry import INITIALISERS, TYPES

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "howto" / "layers.md").read_text(encoding="utf-8")


def test_the_first_example_is_a_net_that_prints_as_the_page_says() -> None:
    (text,) = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    (table,) = re.findall(r"```\n(layer .*?)```", PAGE, re.DOTALL)
    assert str(Job.parse(text).build()["model"]).split() == table.split()


def test_all_names_are_on_the_page() -> None:
    built_in = [name for name, each in TYPES.items() if each.built_in]
    models = [name for name in MODELS if name not in ("cifar10_full", "googlenet")]
    missing = [name for name in [*built_in, *INITIALISERS, *REGULARISERS, *models] if f"`{name}`" not in PAGE]
    assert not missing
