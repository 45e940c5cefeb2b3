"""The log: decisions of the leading shard, as every shard replays them, in order (M3).

Tuples by name, since they are on every step's path. Tell them apart by their class: different ones may be equal as tuples.
"""

from __future__ import annotations

from typing import NamedTuple


class Take(NamedTuple):
    """A gradient goes into the next update."""

    table: int
    learner: int
    number: int
    options: int  # counts the changes of the group options that go with it
    full: bool  # every parameter has a gradient
    examples: int
    rank: int
    iteration: int
    alone: bool  # the next update is made of this one
    weight: float  # multiplies it in the mean


class Fold(NamedTuple):
    """The next update, with the group options of one of its gradients."""

    table: int
    learner: int
    number: int
    iteration: int
    version: int
    factor: float  # of the learning rate


class Release(NamedTuple):
    """The learner of this ticket goes on with this version."""

    table: int
    learner: int
    number: int
    version: int
    keep: bool  # a checkpoint follows: its next gradient brings its random states
    deliver: bool  # it was overtaken by newer versions while it read: this one is sent to it


class Free(NamedTuple):
    """The gradient of this ticket is in no update: its draft is free."""

    table: int
    learner: int
    number: int


class PutValues(NamedTuple):
    """The parameters in a learner's draft become global with the next update."""

    table: int
    learner: int
    number: int
    rank: int
    version: int


class GiveState(NamedTuple):
    """A learner wants the optimizer's state."""

    table: int
    learner: int
    number: int


class LoadState(NamedTuple):
    """The optimizer state that a learner has sent holds from here on."""

    table: int
    learner: int
    number: int
    version: int


class Snapshot(NamedTuple):
    """An epoch is done: its weights are wanted."""

    table: int
    epoch: int


class Finish(NamedTuple):
    """Nothing more comes: the last weights are wanted."""

    table: int
    version: int


class Change(NamedTuple):
    """Another dial."""

    table: int
    dial: int


class Cut(NamedTuple):
    """A checkpoint of the table as it is now."""

    table: int
    checkpoint: int


class Leave(NamedTuple):
    """Nothing of this learner is needed any more."""

    learner: int


OfTable = Take | Fold | Release | Free | PutValues | GiveState | LoadState | Snapshot | Finish | Change | Cut
Entry = OfTable | Leave
