"""`train` and `launch`. `train`'s learners run `learn.train_and_evaluate`, a loop that any user could have written."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Required, TypedDict, Unpack, overload

import torch
from torch import nn
from torch.utils.data import Dataset

from syncline.batch.commands import BatchMethod
from syncline.dial import Course
from syncline.engines.checkpoint_options import AUTO, REFUSE
from syncline.engines.run import Callback, Engine, Task
from syncline.errors import NotYetError
from syncline.learn.gradient_ways import Backprop, Loss, Objective, regularised, way_of
from syncline.learn.server_session import check_whole
from syncline.learn.train_and_evaluate import (
    Training,
    evaluation_of,
    read_stop,
    run_training,
    with_norm,
)
from syncline.protocols.lifecycle import PATIENCE
from syncline.roles.run_plan import RunPlan
from syncline.sim.engine import Sim
from syncline.train import checks
from syncline.train.batch import batch_spec, wants_batch
from syncline.train.groups import (
    Grouped,
    check_group,
    cut_over,
    simulated,
    under_torchrun,
    updates_locally,
)
from syncline.train.run import Result, Run
from syncline.train.spec import (
    DEFAULT_LEARNERS,
    Dial,
    devices_of,
    engine_of,
    learners_of,
    place_of,
    run_spec,
    topology_of,
)

ModelOrFactory = nn.Module | Callable[[], nn.Module]
Examples = Dataset[Any] | tuple[torch.Tensor, ...]


@overload
def launch(
    function: Callable[..., Any],
    *arguments: Any,
    learners: int = DEFAULT_LEARNERS,
    sync: Dial = "hardsync",
    topology: str = "servers",
    engine: str | Engine = "local",
    device: str | Sequence[str] | None = None,
    table_device: str | None = None,
    seed: int = 0,
    threads: int | None = None,
    clip_norm: float | None = None,
    batch_size: int | None = None,
    warmstart: int = 0,
    run_dir: str | Path | None = None,
    resume: str | Path | None = None,
    if_exists: str = REFUSE,
    checkpoint_every: int | str | None = AUTO,
    keep_checkpoints: int = 2,
    clocks: bool = False,
    on_error: str = "raise",
    replace: bool = False,
    patience: float | None = PATIENCE,
    kill_hung: bool = False,
    wait: Literal[True] = True,
    progress: bool = True,
    group: int = 1,
    plan: Any = None,
    **keywords: Any,
) -> Result: ...
@overload
def launch(function: Callable[..., Any], *arguments: Any, wait: Literal[False], **keywords: Any) -> Run: ...
@overload
def launch(function: Callable[..., Any], *arguments: Any, wait: bool, **keywords: Any) -> Result | Run: ...
def launch(
    function: Callable[..., Any],
    *arguments: Any,
    learners: int = DEFAULT_LEARNERS,
    sync: Dial = "hardsync",
    topology: str = "servers",
    engine: str | Engine = "local",
    device: str | Sequence[str] | None = None,
    table_device: str | None = None,
    seed: int = 0,
    threads: int | None = None,
    clip_norm: float | None = None,
    batch_size: int | None = None,
    warmstart: int = 0,
    run_dir: str | Path | None = None,
    resume: str | Path | None = None,
    if_exists: str = REFUSE,
    checkpoint_every: int | str | None = AUTO,
    keep_checkpoints: int = 2,
    clocks: bool = False,
    on_error: str = "raise",
    replace: bool = False,
    patience: float | None = PATIENCE,
    kill_hung: bool = False,
    wait: bool = True,
    progress: bool = True,
    group: int = 1,
    plan: Any = None,
    **keywords: Any,
) -> Result | Run:
    """Run `function(session, *arguments, **keywords)` in every learner; a `Result`, or a `Run` with wait=False.

    `batch_size` is needed only by dials whose rate depends on it. Everything else a learner needs is passed
    through: models, data and functions defined in a script or notebook travel, tensors are shared. For faults and
    checkpoints see `train`. With `group` processes for each learner the function runs in every seat (`session.seat`), on
    `sl.partition(model, plan, example)`. A function that is resumed starts from its beginning, `loader.epoch` says where its data stands.
    """
    given = dict(locals())
    checks.check_import("sl.launch")
    runner = engine_of(engine)
    check_group(group, plan, runner, topology)
    sync, topology = under_torchrun(runner, group, sync, topology)
    learners = learners_of(runner, learners, topology, wait, group)
    if group > 1 and isinstance(runner, Sim):
        raise NotYetError(
            f"group={group} in launch: the simulator has no seats, a group is one learner there; use train, or engine='local'"
        )
    checks.check_call(function, arguments, keywords, given.keys() - {"arguments", "keywords"})
    checks.check_seed(seed)
    check_whole("learners", learners)
    if batch_size is not None:
        check_whole("batch_size", batch_size)
    course = Course.of(sync)
    description = RunPlan(
        course=course,
        learners=learners,
        topology=topology_of(topology, learners, course),
        seed=seed,
        warm=warmstart,
        batch_size=batch_size,
        joint_batch=batch_size * learners if batch_size else None,
        clip_norm=clip_norm,
    )
    task = Task(function, arguments, keywords)
    spec = run_spec(runner, task, description, given, group=group, cut=plan)
    run = Run(runner, spec, None, progress=progress)
    return run.wait() if wait else run


class TrainOptions(TypedDict, total=False):
    """Every option of `train` but `wait`, for type checkers; the signature of `train` has the defaults."""

    loss: Loss | None
    objective: Objective | None
    optimizer: Required[Callable[..., torch.optim.Optimizer] | BatchMethod]
    schedule: Callable[[Any], Any] | None
    sync: Dial
    topology: str
    engine: str | Engine
    learners: int
    batch_size: int
    global_batch_size: int | None
    epochs: int | None
    steps: int | None
    evaluate: Dataset[Any] | tuple[torch.Tensor, ...] | Callable[[nn.Module], dict[str, float]] | None
    clip_norm: float | None
    warmstart: int
    device: str | Sequence[str] | None
    table_device: str | None
    data_device: str | None
    seed: int
    policy: str
    collate: Callable[[list[Any]], Any] | None
    threads: int | None
    run_dir: str | Path | None
    resume: str | Path | None
    if_exists: str
    checkpoint_every: int | str | None
    keep_checkpoints: int
    clocks: bool
    on_error: str
    replace: bool
    patience: float | None
    kill_hung: bool
    callbacks: Callback | Sequence[Callback]
    gradient: str | Callable[[nn.Module, Any], torch.Tensor]
    regulariser: Callable[[nn.Module], torch.Tensor] | None
    stop: Mapping[str, Any] | None
    progress: bool
    group: int
    plan: Any
    local_update: bool
    check: bool


@overload
def train(
    model: ModelOrFactory, data: Examples, *, wait: Literal[True] = True, **options: Unpack[TrainOptions]
) -> Result: ...
@overload
def train(
    model: ModelOrFactory, data: Examples, *, wait: Literal[False], **options: Unpack[TrainOptions]
) -> Run: ...
@overload
def train(
    model: ModelOrFactory, data: Examples, *, wait: bool, **options: Unpack[TrainOptions]
) -> Result | Run: ...
@checks.only_known
def train(
    model: ModelOrFactory,
    data: Examples,
    *,
    loss: Loss | None = None,
    objective: Objective | None = None,
    optimizer: Callable[..., torch.optim.Optimizer] | BatchMethod,
    schedule: Callable[[Any], Any] | None = None,
    sync: Dial = "softsync:1",
    topology: str = "servers",
    engine: str | Engine = "local",
    learners: int = DEFAULT_LEARNERS,
    batch_size: int = 32,
    global_batch_size: int | None = None,
    epochs: int | None = None,
    steps: int | None = None,
    evaluate: Dataset[Any] | tuple[torch.Tensor, ...] | Callable[[nn.Module], dict[str, float]] | None = None,
    clip_norm: float | None = None,
    warmstart: int = 0,
    device: str | Sequence[str] | None = None,
    table_device: str | None = None,
    data_device: str | None = None,
    seed: int = 0,
    policy: str = "ledger",
    collate: Callable[[list[Any]], Any] | None = None,
    threads: int | None = None,
    run_dir: str | Path | None = None,
    resume: str | Path | None = None,
    if_exists: str = REFUSE,
    checkpoint_every: int | str | None = AUTO,
    keep_checkpoints: int = 2,
    clocks: bool = False,
    on_error: str = "raise",
    replace: bool = False,
    patience: float | None = PATIENCE,
    kill_hung: bool = False,
    callbacks: Callback | Sequence[Callback] = (),
    gradient: str | Callable[[nn.Module, Any], torch.Tensor] = "backprop",
    regulariser: Callable[[nn.Module], torch.Tensor] | None = None,
    stop: Mapping[str, Any] | None = None,
    wait: bool = True,
    progress: bool = True,
    group: int = 1,
    plan: Any = None,
    local_update: bool = True,
    check: bool = False,
) -> Result | Run:
    """Train `model` on `data` with several learners; a `Result`, or a `Run` with wait=False.

    A callable `model` makes it, with this seed, in every learner; `data` is a Dataset, or a tuple of tensors.
    Give `loss(output, target)` for (input, target) batches, or `objective(model, batch)` for any other. The run ends after
    `epochs`, or after `steps` updates. `global_batch_size`, of all learners together, takes the place of `batch_size`. `evaluate` is a data set like `data`, or a function of the model; it
    runs beside the learners at each epoch's end, on one version. A callback gets each epoch's record and ends the run by returning True.

    `gradient` is the way to one: back-propagation, `"cd:k"` or `"pcd:k"` (contrastive divergence of energy models), or a
    function (model, batch) -> loss that fills `.grad`; only the first has a `loss` or `objective`, a net's own losses apart.
    `regulariser`, a function of the model, is added to every gradient. `stop` ends the run before its end: at a `loss`, after a
    `plateau` of so many epochs without a better one, or at a `gradient_norm` of the data.

    Tables lie with their learners, where those are on GPUs, unless `table_device="cpu"`; with `data_device="cuda"` each
    learner keeps all data, a TensorDataset's or a tuple's tensors, on its GPU (docs/howto/gpus.md).

    The first `warmstart` updates are one learner's alone. Checkpoints go to `run_dir` every `checkpoint_every` updates (a
    number) or seconds (a text such as "30s"; "auto" is a minute, "end" or None the last one alone) and at the end; `resume` goes
    on from one. Where `run_dir` holds a run already, `if_exists="resume"` continues it, "replace" deletes it, "new" writes to the next
    free name, `run_dir-2`. With `clocks` the vector clock of every update is kept there too. A learner that dies is left out, with `replace`
    another takes its place; an exception ends the run, or only its learner with `on_error="continue"`; a learner not heard of for
    `patience` seconds is named, and ended with `kill_hung`.

    `group` processes, seats, hold one model together and are one learner, with one batch; `plan` says how its layers are cut over
    them: "auto" (the cheapest, see `sl.plan`), "data", a Plan, or by hand, {"fc*": "model"}. What is cut over the seats of one group
    is updated by them, unless `local_update=False` (docs/howto/parallel.md). With `check` the first batch is compared with the whole model.

    With `sync="sandblaster"` the optimizer is a batch method such as `sl.LBFGS()`: `steps` counts iterations, `batch_size` is a portion of
    the batch, which is all data or, with `global_batch_size` or `schedule` (iteration -> examples), a sample. See docs/howto/batch_methods.md.

    While the run is waited for its progress is shown on stderr: a live panel on a terminal or in a notebook, plain lines elsewhere;
    `progress=False`, or SYNCLINE_PROGRESS=off in the environment, switches it off.

    Ctrl-C and SIGTERM end the run well, with a last checkpoint, and are then raised: KeyboardInterrupt and SystemExit(143), whose
    `.result` is what was trained. A second Ctrl-C does not wait.
    """
    given = dict(locals())
    checks.check_import("sl.train")
    runner = engine_of(engine)
    if wants_batch(sync, optimizer):
        batch, whole = batch_spec(runner, **given)
        run = Run(runner, batch, whole, progress=progress)
        return run.wait() if wait else run
    check_group(group, plan, runner, topology)
    sync, topology = under_torchrun(runner, group, sync, topology, local_update=local_update)
    learners = learners_of(runner, learners, topology, wait, group)
    each, joint = checks.batches_of(batch_size, global_batch_size, learners, sync, topology)
    checks.check_loop(loss, objective, epochs, steps, policy, collate)
    data, evaluate = checks.check_data(data, each), checks.check_evaluate(evaluate)
    checks.check_data_device(data_device, device, data, collate)
    whole, sent = checks.built(model, seed)
    way = way_of(gradient, whole, loss, objective)
    trained, rule = regularised(way, regulariser), read_stop(stop, data)
    made = checks.check_optimizer(whole, optimizer, sync)
    checks.check_schedule(schedule, made)
    if steps is None and epochs is None:
        epochs = 1
    aim = trained.objective if isinstance(trained, Backprop) else None
    grouped = Grouped(way.to_cut(whole) if group > 1 else whole, way, data, collate, each, learners)
    training = Training(
        model=sent,
        data=data,
        objective=aim,
        gradient=None if aim is not None else trained,
        optimizer=optimizer,  # type: ignore[arg-type]
        schedule=schedule,
        batch_size=each,
        global_batch_size=joint,
        epochs=epochs,
        policy=policy,
        collate=collate,
        on_device=data_device is not None,
        check=check,
    )
    evaluation = with_norm(evaluation_of(sent, evaluate, way, each, collate), rule, training)
    course, cut, local = Course.of(sync), None, False
    if isinstance(runner, Sim):
        runner = simulated(runner, group, plan, grouped)
        group = 1  # to the run
    elif group > 1:
        place = place_of(runner)
        seats = (
            ()
            if runner.deals_devices
            else devices_of(device, learners * group if place is None else place.local)
        )
        local = (
            place is None
            and local_update
            and updates_locally(
                course, made, grouped, plain=clip_norm is None and not warmstart and evaluation is None
            )
        )
        cut = cut_over(group, plan, grouped, devices=seats, local=local or place is not None, place=place)
    description = RunPlan(
        course=course,
        learners=learners,
        topology=topology_of(topology, learners, course),
        seed=seed,
        warm=warmstart,
        batch_size=each,
        joint_batch=joint or each * learners,
        limit=steps,
        epochs=epochs,
        clip_norm=clip_norm,
        local=local,
    )
    spec = run_spec(
        runner,
        Task(run_training, (training,)),
        description,
        given,
        group=group,
        cut=cut,
        model=whole,
        evaluate=evaluation,
        callbacks=(*checks.check_callbacks(callbacks), *([rule] if rule is not None else [])),
    )
    run = Run(runner, spec, whole, made, progress=progress)
    return run.wait() if wait else run
