"""Layers as data, read: the order of their graph, what stands for what is not written, and every refusal by its place."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.errors import UsageError
from syncline.nn import NetError
from syncline.nn.layer_records import by_parameter, leading_to, read_layers
from tests.unit.nn.layer_lists import classifier, data


def dense(name: str, **changes: Any) -> dict[str, Any]:
    return {"name": name, "type": "dense", "units": 3, **changes}


def problems(records: Any) -> list[tuple[int, str | None, str]]:
    with pytest.raises(NetError) as error:
        read_layers(records)
    return error.value.problems


@given(st.integers(2, 8), st.randoms(use_true_random=False))
def test_every_layer_comes_after_its_sources(size: int, chance: random.Random) -> None:
    records: list[dict[str, Any]] = [data(3)]
    for number in range(size):
        sources = chance.sample([each["name"] for each in records], chance.randint(1, len(records)))
        records.append({"name": f"n{number}", "type": "sum", "sources": sources, "output": True})
    shuffled = chance.sample(records, len(records))
    found = read_layers(shuffled)
    assert sorted(layer.place for layer in found) == list(range(len(records)))
    seen: set[str] = set()
    for layer in found:
        assert seen.issuperset(layer.sources) and shuffled[layer.place]["name"] == layer.name
        seen.add(layer.name)


def test_a_layer_takes_the_one_above_and_a_loss_the_only_label() -> None:
    sources = {layer.name: layer.sources for layer in read_layers(classifier())}
    assert sources == {
        "data": (),
        "label": (),
        "fc1": ("data",),
        "act": ("fc1",),
        "fc2": ("act",),
        "loss": ("fc2", "label"),
    }


def test_what_is_not_said_has_its_value_and_arguments_are_the_types_own() -> None:
    first, second = read_layers([data(3), dense("fc", rate=2.0, freeze=True, bias=False)])[0:2]
    assert (first.rate, first.decay, first.output, first.freeze, first.init, first.share) == (
        1.0,
        1.0,
        False,
        False,
        None,
        None,
    )
    assert second.arguments == {"units": 3, "bias": False} and second.rate == 2.0 and second.freeze


LABEL = {"name": "label", "type": "label"}
LOSS = {"name": "loss", "type": "cross_entropy"}
CASES: dict[str, tuple[list[Any], tuple[int, str | None, str]]] = {
    "no table": ([data(3), "fc"], (1, None, "layer 2: expected a table with name and type, got 'fc'")),
    "no name": ([data(3), {"type": "dense"}], (1, "name", "layer 2: name: expected letters, digits, _ and -, missing")),
    "bad name": ([data(3), dense("1st")], (1, "name", "layer '1st': name: expected letters, digits, _ and -, got '1st'")),
    "taken twice": ([data(3), dense("data")], (1, "name", "layer 'data': name: layer 1 is called so already")),
    "a word": ([data(3), dense("forward")], (1, "name", "layer 'forward': name: 'forward' is a word of nn.Module or Net; choose another")),
    "no type": ([data(3), {"name": "fc"}], (1, "type", "layer 'fc': type: missing")),
    "a missing value": ([data(3), {"name": "fc", "type": "dense"}], (1, None, "layer 'fc': dense lacks its argument 'units'")),
    "a wrong value": ([data(3), dense("fc", units=0)], (1, "units", "layer 'fc': units: expected a whole number of at least 1, got 0")),
    "a flag": ([data(3), dense("fc", freeze=1)], (1, "freeze", "layer 'fc': freeze: expected true or false, got 1")),
    "a rate": ([data(3), dense("fc", rate={"bias": -1})], (1, "rate", "layer 'fc': rate: expected a finite number of at least 0, got -1")),
    "a source's name": ([data(3), dense("fc", sources="dta")], (1, "sources", "layer 'fc': sources: there is no layer 'dta', did you mean 'data'?; there are: data, fc")),
    "sources of another kind": ([data(3), dense("fc", sources=[1])], (1, "sources", "layer 'fc': sources: expected a layer or a list of layers, got [1]")),
    "an input's": ([data(3), {**data(2), "name": "b", "sources": "data"}], (1, "sources", "layer 'b': sources: input takes the batch and has none")),
    "a loss": ([data(3), LABEL, LOSS, dense("fc", sources="loss")], (3, "sources", "layer 'fc': sources: 'loss' is a loss, which nothing can take")),
    "too many": ([data(3), dense("a"), dense("b", sources=["data", "a"])], (2, "sources", "layer 'b': sources: dense takes one, got data, a")),
    "a loss of one": ([data(3), LOSS], (1, "sources", "layer 'loss': sources: a loss is of an output and its target, got data")),
    "nothing above": ([dense("fc")], (0, "sources", "layer 'fc': sources: there is no layer above to take; begin with an input")),
    "a cycle": ([data(3), dense("a", sources="b"), dense("b", sources="a")], (1, "sources", "layer 'a': sources: a cycle: 'a' takes 'b' takes 'a'")),
    "unused": ([data(3), dense("a"), dense("b", sources="data")], (1, "name", "layer 'a': name: unused: it leads to no loss or output; take it away, connect it, or write output = true")),
    "a loss as output": ([data(3), LABEL, {**LOSS, "output": True}], (2, "output", "layer 'loss': output: cross_entropy cannot be an output of the net")),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_what_makes_no_net_is_said_with_its_place_and_key(case: str) -> None:
    records, (place, key, words) = CASES[case]
    found = problems(records)[0]
    assert found == (place, key, words)


def test_all_problems_of_one_kind_are_found_together() -> None:
    found = problems([data(3), dense("a", units=0), dense("b", units=-1, freeze=2)])
    assert [(place, key) for place, key, _ in found] == [(1, "units"), (2, "units"), (2, "freeze")]


@pytest.mark.parametrize("records", [None, [], "layers", {}])
def test_a_list_of_layers_is_wanted(records: Any) -> None:
    with pytest.raises(UsageError, match="layers must be a list of at least one layer"):
        read_layers(records)


def test_what_leads_to_an_end_and_multipliers_of_single_parameters() -> None:
    layers = read_layers([data(3), dense("a", output=True), dense("b", sources="data"), dense("c")])
    assert leading_to(["a"], layers) == {"a", "data"} and leading_to(["c"], layers) == {"c", "b", "data"}
    assert by_parameter(2, "bias") == 2.0 and by_parameter({"bias": 0}, "weight") == 1.0
    assert by_parameter({"bias": 0}, "bias") == 0.0
