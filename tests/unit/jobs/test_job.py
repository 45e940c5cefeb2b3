"""Jobs: reading, the messages of wrong ones, writing back, building; the record against `train` itself."""

from __future__ import annotations

import dataclasses
import inspect
import pickle
from pathlib import Path

import pytest

import syncline as sl
from syncline.jobs import KEYS, Job, JobError, Named
from tests.unit.jobs.own_job import SMALL

# -- the record ----------------------------------------------------------------------------------------------


def test_the_record_has_what_train_takes() -> None:
    parameters = dict(inspect.signature(sl.train).parameters)
    for name in ("wait", "progress"):  # how to call, not what to run
        del parameters[name]
    assert {key.name for key in KEYS} - {"layers"} == set(parameters)  # a net is a model
    assert {field.name for field in dataclasses.fields(Job)} == {*parameters, "layers", "source"}
    for key in KEYS:
        if key.name == "layers":
            continue
        default = parameters[key.name].default
        if key.name == "engine":
            assert key.default == Named(name=default)
        elif not key.required and key.name not in ("loss", "model"):
            assert key.default == default, key.name
        else:
            assert default in (inspect.Parameter.empty, None), key.name


def test_defaults_of_record_and_reference_are_the_same() -> None:
    defaults = {field.name: field.default for field in dataclasses.fields(Job)}
    for key in KEYS:
        assert defaults[key.name] == (dataclasses.MISSING if key.required else key.default), key.name


def test_a_job_in_python_is_checked_too() -> None:
    model = Named(name="mlp", arguments={"sizes": [64, 10]})
    job = Job(model=model, data="digits", loss="mse", optimizer="sgd", callbacks=["math:sqrt"])  # type: ignore[arg-type]
    assert job.data == Named(name="digits") and job.callbacks == (Named(name="math:sqrt"),)
    with pytest.raises(JobError, match=r"^job: learners: expected a whole number of at least 1, got 0$"):
        dataclasses.replace(job, learners=0)
    with pytest.raises(JobError, match=r"^job: model: mlp: lacks its argument 'sizes'$"):
        dataclasses.replace(job, model=Named(name="mlp"))


def test_reading() -> None:
    job = Job.parse(SMALL)
    assert job == Job(
        learners=2,
        batch_size=8,
        steps=3,
        model=Named(name="mlp", arguments={"sizes": [64, 10]}),
        data=Named(name="digits"),
        loss=Named(name="cross_entropy", arguments={"label_smoothing": 0.1}),
        optimizer=Named(name="sgd", arguments={"lr": 0.1}),
    )
    assert job.sync == "softsync:1" and job.engine == Named(name="local")
    with pytest.raises(dataclasses.FrozenInstanceError):
        job.learners = 3  # type: ignore[misc]


def test_names_alone() -> None:
    job = Job.parse(SMALL, ["data=digits", "optimizer=adam", "loss=cross_entropy"])
    assert job.optimizer == Named(name="adam") and job.loss == Named(name="cross_entropy")


def test_evaluate_without_a_name_changes_data() -> None:
    text = SMALL + '[evaluate]\nsplit = "test"\n'
    assert Job.parse(text).evaluate == Named(name="digits", arguments={"split": "test"})
    changed = Job.parse(SMALL, ["data.split=train", "evaluate.split=test"])
    assert changed.evaluate == Named(name="digits", arguments={"split": "test"})


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["sync=hardsync", "engine=sim", "device=cpu", "threads=1", "seed=7", "clip_norm=0.5"],
        ["sync={splits=2, rate='given'}", "engine={name='sim', compute=2.0}", "device=['cpu', 'cpu']"],
        ["steps=", "epochs=2", "evaluate.split=test", "schedule={name='step', step_size=3}"],
        ["run_dir=runs/x", "resume=runs/y", "warmstart=2", "policy=sample", "topology=servers:3"],
        ["callbacks=['math:sqrt', {name='math:exp'}]", "loss=", "objective=operator:add"],
    ],
)
def test_written_and_read_again_it_is_equal(overrides: list[str]) -> None:
    job = Job.parse(SMALL, overrides)
    assert Job.parse(job.dumps()) == job
    assert Job.parse(job.dumps()).dumps() == job.dumps()
    assert pickle.loads(pickle.dumps(job)) == job


# -- messages ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "overrides, message",
    [
        (["learners=0"], "--set learners=0: learners: expected a whole number of at least 1, got 0"),
        (["learnrs=4"], "--set learnrs=4: learnrs: unknown key, did you mean 'learners'?"),
        (["lr=0.1"], "--set lr=0.1: lr: unknown key, did you mean 'optimizer.lr'?"),
        (["momentum=0.9"], "--set momentum=0.9: momentum: unknown key, did you mean 'optimizer.momentum'?"),
        (["optimizer=sgd", "lr=1"], "--set lr=1: lr: unknown key, did you mean 'optimizer.lr'?"),
        (
            ["evaluate.split=test", "split=train"],
            "--set split=train: split: unknown key, did you mean 'data.split' or 'evaluate.split'?",
        ),
        (["name=1"], "--set name=1: name: unknown key, did you mean 'model.name' or 'data.name' or"),
        (["pi=3", "loss=math:pi"], "--set pi=3: pi: unknown key"),
        (
            ["model=", "layers=[{name='fc', units=3}]", "units=5"],
            "--set units=5: units: unknown key, did you mean 'layers.fc.units'?",
        ),
        (
            ["model.name=mpl"],
            "--set model.name=mpl: model: no model is called 'mpl', did you mean 'mlp'?; "
            "there are: mlp, cifar10_full, alexnet, googlenet, speech, locally_connected, recurrent, autoencoder, rbm, dbn, dbm, crbm, or 'package.module:callable'",
        ),
        (
            ["optimizer.lrr=1"],
            "--set optimizer.lrr=1: optimizer.lrr: sgd: unknown argument, did you mean 'lr'?",
        ),
    ],
)
def test_overrides_are_named(overrides: list[str], message: str) -> None:
    with pytest.raises(JobError) as caught:
        Job.parse(SMALL, overrides)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    "before, after, message",
    [
        ("learners = 2", "learners = -2", "job:1: learners: expected a whole number of at least 1, got -2"),
        ("learners = 2", "learners = true", "job:1: learners: expected a whole number of at least 1, got True"),
        ("learners = 2", "lr = 0.2", "job:1: lr: unknown key, did you mean 'optimizer.lr'?"),
        ("learners = 2", "lerners = 2", "job:1: lerners: unknown key, did you mean 'learners'?"),
        ("[model]", "[modell]", "job:5: modell: unknown key, did you mean 'model'?"),
        ("steps = 3", "steps = 3\nepochs = 2", "job:3: steps: give either epochs or steps, got epochs = 2 and steps = 3"),
        ("steps = 3", 'sync = "softsync:4"', "job:3: sync: softsync:4 needs n <= learners, got n = 4 with 2 learners"),
        ("steps = 3", 'sync = "hardsink"', "job:3: sync: no preset is called 'hardsink', did you mean 'hardsync'?"),
        ("steps = 3", "sync = {split = 2}", "job:3: sync.split: unknown field, did you mean 'splits'?"),
        ("steps = 3", "sync = {one_from_each = 'no'}", "job:3: sync.one_from_each: expected true or false, got 'no'"),
        ("steps = 3", 'topology = "ring"', "job:3: topology: unknown topology 'ring'"),
        ("steps = 3", 'topology = "servers:²"', "job:3: topology: "),
        ("steps = 3", 'policy = "sampel"', "job:3: policy: expected one of ledger, partition, sample, got 'sampel', did you mean 'sample'?"),
        ("steps = 3", 'device = "abacus"', "job:3: device: 'abacus' is no device that torch knows"),
        ("steps = 3", 'engine = "cloud"', "job:3: engine: no engine is called 'cloud'"),
        ("steps = 3", "clip_norm = nan", "job:3: clip_norm: expected a finite number > 0, got nan"),
        ("steps = 3", "clip_norm = 2020-01-01", "job:3: clip_norm: expected a finite number > 0, got datetime.date(2020, 1, 1)"),
        ("[optimizer]", "[[layer]]\nkind = 'x'\n[optimizer]", "job:16: layer: unknown key, did you mean 'layers'?"),
        ("sizes =", "size =", "job:7: model.size: mlp: unknown argument, did you mean 'sizes'?; there are: sizes, activation, bias"),
        ("lr = 0.1", "learning_rate = 0.1", "job:18: optimizer.learning_rate: sgd: unknown argument"),
        ('"cross_entropy"', '"cross_entropie"', "job:13: loss: no loss is called 'cross_entropie', did you mean 'cross_entropy'?"),
        ('name = "digits"', "split = 'test'", "job:9: data: expected a name, or a table with a name and its arguments, got {'split': 'test'} (the table lacks its name)"),
        ('name = "digits"', "name = 3", "(the table's name is no text)"),
        ('name = "digits"', 'name = "torch.digits"', "job:10: data: 'torch.digits' is no data set; write 'package.module:callable' with a colon"),
        ('name = "digits"', 'name = "no_such_module:x"', "job:10: data: no module 'no_such_module'; it is looked for on Python's path"),
        ('name = "digits"', 'name = "math:sqr"', "job:10: data: 'math:sqr': math has no 'sqr', did you mean 'sqrt'?"),
        ('name = "digits"', 'name = "math:pi"', "job:10: data: 'math:pi' is a float, not a callable"),
        ('name = "digits"', 'name = "a b:c"', "job:10: data: 'a b:c' is no 'package.module:callable'"),
        ("learners = 2", "learners 2", "job:1: not TOML: Expected '=' after a key"),
        ("learners = 2", "learners = 2\nlearners = 3", "job:2: not TOML: Cannot overwrite a value"),
        ("sizes = [64, 10]", "sizes = " + "[" * 5000, "job:7: keys or values are nested more than 64 deep"),
    ],
)  # fmt: skip
def test_messages(before: str, after: str, message: str) -> None:
    assert before in SMALL
    with pytest.raises(JobError) as caught:
        Job.parse(SMALL.replace(before, after, 1))
    assert message in str(caught.value), str(caught.value)
    assert len(caught.value.problems) == 1 and "\n" not in str(caught.value)


def test_all_problems_at_once() -> None:
    text = SMALL.replace("learners = 2", "learners = 0").replace("steps", "stps").replace("[data]", "[dada]")
    with pytest.raises(JobError) as caught:
        Job.parse(text, ["seed=x"], name="a.toml")
    assert caught.value.problems == (
        "a.toml:1: learners: expected a whole number of at least 1, got 0",
        "a.toml:3: stps: unknown key, did you mean 'steps'?",
        "a.toml:9: dada: unknown key, did you mean 'data'?",
        "--set seed=x: seed: expected a whole number of at least 0, got 'x'",
    )
    assert str(caught.value).splitlines() == list(caught.value.problems)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    assert isinstance(caught.value, sl.UsageError)


def test_what_is_missing() -> None:
    with pytest.raises(JobError) as caught:
        Job.parse("")
    assert [problem.split(";")[0] for problem in caught.value.problems] == [
        "job: model: missing",
        "job: data: missing",
        "job: optimizer: missing",
    ]
    with pytest.raises(JobError, match=r"^--set loss=: loss: missing; give a loss"):
        Job.parse(SMALL, ["loss="])
    with pytest.raises(JobError, match=r"objective: give either loss or objective, not both"):
        Job.parse(SMALL, ["objective=operator:add"])


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    missing, binary = tmp_path / "none.toml", tmp_path / "binary.toml"
    binary.write_bytes(b'a = 1\nb = "\xff"\n')
    large = tmp_path / "large.toml"
    large.write_bytes(b"#" * (1 << 20) + b"\n")
    for file, words in (
        (missing, "none.toml: cannot be read: No such file or directory"),
        (tmp_path, "cannot be read: Is a directory"),
        (binary, "binary.toml:2: not UTF-8, byte 0xff"),
        (large, "large.toml: more than 1,048,576 bytes"),
        (Path("a\0b"), "cannot be read: embedded null byte"),
    ):
        with pytest.raises(JobError, match=words) as caught:
            Job.load(file)
        assert "\n" not in str(caught.value)


def test_a_mark_at_the_beginning_is_no_problem(own: Path) -> None:
    own.write_bytes(b"\xef\xbb\xbf" + SMALL.encode())
    assert Job.load(own) == Job.parse(SMALL)


def test_problems_name_the_file(own: Path) -> None:
    own.write_text(SMALL.replace("learners = 2", "learners = 0"))
    with pytest.raises(JobError, match=f"^{own}:1: learners: "):
        Job.load(own)


def test_overrides_that_are_none() -> None:
    with pytest.raises(JobError, match=r"^--set: 'learners' is no key=value"):
        Job.parse(SMALL, ["learners"])
    with pytest.raises(JobError, match=r"^--set: learners is no table; set it as a whole$"):
        Job.parse(SMALL, ["learners.x=3"])


# -- files of a megabyte: what takes more than linear time in any of them runs into the test's time-out ------------------


@pytest.mark.parametrize(
    "text, message",
    [
        pytest.param("speeds = [\n" + (",".join(["1"] * 4000) + ",\n") * 120 + "]", ":1: speeds: unknown", id="list"),
        pytest.param("a" + ".a" * 3000 + " = 1", ":1: keys or values are nested", id="dots"),
        pytest.param("a" + ".a" * 450_000 + " = 1", ":1: keys or values are nested", id="more dots"),
        pytest.param("[a" + ".a" * 450_000 + "]", ":1: keys or values are nested", id="dots of a header"),
        pytest.param("a = {a" + ".a" * 450_000 + " = 1}", ":1: keys or values are nested", id="dots in a value"),
        pytest.param("a = " + "[" * 900_000, ":1: keys or values are nested", id="brackets"),
        pytest.param("a = " + '"' * 900_000, ":1: not TOML", id="quotes"),
        pytest.param("".join(f"key{n} = 1\n" for n in range(60_000)), ":1: key0: unknown key", id="keys"),
        pytest.param("b" * 900_000 + " = 1", ":1: bbbb", id="a long key"),
        pytest.param("callbacks = [" + '"no_module_:y",' * 60_000 + "]", ":1: callbacks: no module", id="callbacks"),
        pytest.param("".join(f"{'a.' * 50}k{n} = 1\n" for n in range(7500)), ":1: a: unknown", id="deep keys"),
        pytest.param("".join(f"[{'a.' * 50}k{n}]\n" for n in range(7500)), ":1: a: unknown", id="deep headers"),
    ],
)  # fmt: skip
def test_a_large_file_is_refused_with_its_line(text: str, message: str) -> None:
    with pytest.raises(JobError) as caught:
        Job.parse(text + "\n" + SMALL)
    assert str(caught.value).startswith("job" + message)
    assert len(str(caught.value)) < 60_000


@pytest.mark.parametrize("kind", ["dense", "no_such_type"])
def test_twenty_thousand_layers(kind: str) -> None:
    layers = "".join(f"[[layers]]\nname = 'l{n}'\ntype = '{kind}'\n" for n in range(20_000))
    with pytest.raises(JobError, match="layer 'l0'"):
        Job.parse(f"data = 'digits'\noptimizer = 'adam'\nloss = 'mse'\n{layers}")
