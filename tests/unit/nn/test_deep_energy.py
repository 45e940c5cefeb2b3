"""DBM and conditional RBM against loops and enumeration; DBNs unrolled; what they refuse."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from syncline.errors import UsageError
from syncline.nn import CRBM, DBM, DBN, windows
from syncline.nn.energy import all_states

DOUBLE = torch.float64


def sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value))


# -- DBM -----------------------------------------------------------------------------------------------------


def deep(*sizes: int) -> DBM:
    torch.manual_seed(3)
    dbm = DBM(list(sizes), std=0.6).to(DOUBLE)
    with torch.no_grad():
        for bias in dbm.biases:
            bias.normal_(0, 0.4)
    return dbm


def test_mean_field_is_what_loops_give() -> None:
    dbm = deep(4, 3, 2)
    v = torch.rand(1, 4, dtype=DOUBLE)
    (w1, w2), (_, b1, b2) = ([t.tolist() for t in each] for each in (dbm.weights, dbm.biases))
    x = v[0].tolist()
    h1 = [sigmoid(b1[j] + sum(2 * w1[j][i] * x[i] for i in range(4))) for j in range(3)]
    h2 = [sigmoid(b2[k] + sum(w2[k][j] * h1[j] for j in range(3))) for k in range(2)]
    for _ in range(dbm.sweeps):
        h1 = [
            sigmoid(b1[j] + sum(w1[j][i] * x[i] for i in range(4)) + sum(w2[k][j] * h2[k] for k in range(2)))
            for j in range(3)
        ]
        h2 = [sigmoid(b2[k] + sum(w2[k][j] * h1[j] for j in range(3))) for k in range(2)]
    found = dbm.mean_field(v)
    assert torch.allclose(found[1][0], torch.tensor(h1, dtype=DOUBLE))
    assert torch.allclose(dbm(v)[0], torch.tensor(h2, dtype=DOUBLE))


def exact_statistics(dbm: DBM) -> list[Tensor]:
    """⟨h_{l+1} h_lᵀ⟩ of the model over all states."""
    states = all_states(sum(dbm.sizes), dbm.biases[0])
    layers = states.split(dbm.sizes, 1)
    minus_energy = sum(layer @ bias for layer, bias in zip(layers, dbm.biases, strict=True))
    for level, weight in enumerate(dbm.weights):
        minus_energy = minus_energy + ((layers[level + 1] @ weight) * layers[level]).sum(1)
    p = torch.softmax(minus_energy, 0)
    return [torch.einsum("s,sa,sb->ab", p, layers[at + 1], layers[at]) for at in range(len(dbm.weights))]


@torch.no_grad()
def test_the_gradients_expectation_is_that_of_all_states() -> None:
    dbm = deep(3, 3, 2)
    dbm.begin_chains(40_000)
    torch.manual_seed(0)
    data = torch.tensor([[1.0, 0.0, 1.0], [0.0, 0.0, 1.0]], dtype=DOUBLE)
    for _ in range(15):
        dbm.zero_grad()
        dbm.contrastive_divergence(data)
    on = dbm.mean_field(data)
    for level, wanted in enumerate(exact_statistics(dbm)):
        mine = on[level + 1].t() @ on[level] / 2
        assert torch.allclose(dbm.weights[level].grad, wanted - mine, atol=0.015)  # type: ignore[arg-type]


def test_a_dbm_learns_what_it_sees() -> None:
    torch.manual_seed(0)
    data = torch.tensor([[1.0, 1.0, 0.0, 0.0], [0.0, 0.0, 1.0, 1.0]]).repeat(20, 1)
    dbm = DBM([4, 4, 2], std=0.1)
    optimizer = torch.optim.SGD(dbm.parameters(), lr=0.2)
    before = dbm.reconstruction_error(data)
    for _ in range(300):
        optimizer.zero_grad()
        dbm.contrastive_divergence(data, 2)
        optimizer.step()
    assert dbm.reconstruction_error(data) < before / 4


# -- CRBM ----------------------------------------------------------------------------------------------------


def conditional(units: str) -> CRBM:
    torch.manual_seed(5)
    crbm = CRBM(2, 3, order=2, units=units, std=0.5).to(DOUBLE)
    with torch.no_grad():
        crbm.hidden_bias.normal_(0, 0.3)
        crbm.visible_bias.normal_(0, 0.3)
    return crbm


def test_conditional_means_are_what_loops_give() -> None:
    crbm = conditional("gaussian")
    series = torch.rand(1, 3, 2, dtype=DOUBLE)
    past, v = [*series[0, 0].tolist(), *series[0, 1].tolist()], series[0, 2].tolist()
    w, a, b = (each.tolist() for each in (crbm.weight, crbm.past_visible, crbm.past_hidden))
    c, d = crbm.hidden_bias.tolist(), crbm.visible_bias.tolist()
    hidden = [
        sigmoid(c[j] + sum(w[j][i] * v[i] for i in range(2)) + sum(b[j][m] * past[m] for m in range(4)))
        for j in range(3)
    ]
    assert torch.allclose(crbm(series)[0], torch.tensor(hidden, dtype=DOUBLE))
    back = [
        d[i] + sum(w[j][i] * hidden[j] for j in range(3)) + sum(a[i][m] * past[m] for m in range(4))
        for i in range(2)
    ]
    found = crbm.visible(crbm(series), series[:, :-1].flatten(1))
    assert torch.allclose(found[0], torch.tensor(back, dtype=DOUBLE))


@torch.no_grad()
def test_its_expected_gradient_is_that_of_all_states() -> None:
    """Binary frames: one Gibbs step, over all states of v' and h, by loops over the past."""
    crbm = conditional("bernoulli")
    frames = torch.tensor([[[1.0, 0.0], [0.0, 0.0], [1.0, 1.0]]], dtype=DOUBLE)
    past, v = crbm.parts(frames)
    h, all_v = all_states(3, crbm.weight), all_states(2, crbm.weight)
    on = crbm.hidden(v, past)
    p_h = (on * h + (1 - on) * (1 - h)).prod(1)
    mean_v = crbm.visible(h, past.expand(8, -1))
    p_v = p_h @ (mean_v[:, None] * all_v + (1 - mean_v[:, None]) * (1 - all_v)).prod(2)
    then = crbm.hidden(all_v, past.expand(4, -1))
    change_v, change_h = p_v @ all_v - v[0], p_v @ then - on[0]
    wanted = {
        "weight": torch.einsum("s,sh,sv->hv", p_v, then, all_v) - on.t() @ v,
        "past_visible": change_v[:, None] * past,
        "past_hidden": change_h[:, None] * past,
        "hidden_bias": change_h,
        "visible_bias": change_v,
    }
    torch.manual_seed(0)
    crbm.contrastive_divergence(frames.expand(100_000, -1, -1))
    for name, value in wanted.items():
        assert torch.allclose(crbm.get_parameter(name).grad, value, atol=0.01), name  # type: ignore[arg-type]


def test_it_goes_on_with_a_rhythm() -> None:
    torch.manual_seed(0)
    time = torch.arange(400) * 0.4
    series = torch.stack([torch.sin(time), torch.cos(time)], 1) + 0.05 * torch.randn(400, 2)
    crbm = CRBM(2, 8, order=3, std=0.01)
    optimizer = torch.optim.SGD(crbm.parameters(), lr=0.01, momentum=0.9)
    data = windows(series, 3)
    for _ in range(30):
        for batch in data.split(40):
            optimizer.zero_grad()
            crbm.contrastive_divergence(batch)
            optimizer.step()
    made = crbm.generate(series[-3:], 8)
    wanted = torch.stack(
        [torch.sin(0.4 * torch.arange(400, 408)), torch.cos(0.4 * torch.arange(400, 408))], 1
    )
    assert (made - wanted).abs().mean() < 0.35  # the mean would be 0.64 off


# -- DBN -----------------------------------------------------------------------------------------------------


def test_a_dbn_unrolls_to_what_its_machines_do() -> None:
    torch.manual_seed(0)
    dbn = DBN([6, 5, 3], std=0.5)
    x = torch.rand(4, 6)
    code = dbn(x)
    assert torch.allclose(dbn.classifier(2)[:-1](x), code)
    back = dbn.rbms[0].visible(dbn.rbms[1].visible(code))
    assert torch.allclose(torch.sigmoid(dbn.autoencoder()(x)), back, atol=1e-6)
    assert dbn.sample(7, 3).shape == (7, 6)


def test_a_gaussian_code_is_not_squashed() -> None:
    dbn = DBN([6, 5, 3], code="gaussian", std=0.5)
    x = torch.rand(4, 6)
    unrolled = dbn.autoencoder()
    assert torch.allclose(unrolled[:4](x), dbn(x)) and unrolled(x).shape == (4, 6)


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: DBM([4]), "a DBM takes at least two sizes"),
        (lambda: DBM([4, 0]), r"sizes\[1\] must be a whole number of at least 1, got 0"),
        (lambda: DBM([4, 2]).check_way(False), "a DBM needs chains that go on: give gradient='pcd:k'"),
        (lambda: CRBM(2, 3).check_way(True), "give gradient='cd:k'"),
        (lambda: CRBM(2, 3, units="softmax"), "a CRBM has 'gaussian' or 'bernoulli' units"),
        (lambda: CRBM(2, 3)(torch.ones(5, 3, 2)), r"takes windows \(N, 4, 2\), got \(5, 3, 2\)"),
        (lambda: windows(torch.ones(3, 2), 3), "of more than 3 frames is needed"),
    ],
)
def test_what_makes_no_sense_is_said(make: object, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        make()  # type: ignore[operator]
