"""A net made of layer records: an ordinary module whose submodules have the layers' names.

    net = Net([
        {"name": "data", "type": "input", "shape": [1, 8, 8]},
        {"name": "label", "type": "label"},
        {"name": "fc", "type": "dense", "units": 10},
        {"name": "loss", "type": "cross_entropy"},
    ])
    net(images)                        # what the loss is of: the output
    sl.train(net, data, optimizer=…)   # trains the sum of its losses
    net.with_losses()(data=images, label=labels)  # that sum, as a function of the inputs by their layers' names

Sizes come from a dry run on zeros, layer by layer. A safetensors file has a net's layers beside the tensors: it loads without
the job that trained it, and no pickle. Not responsible for lines of job files (jobs).
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from syncline.dial import nearest
from syncline.errors import UsageError
from syncline.nn.energy import Contrastive, Parts, is_trained
from syncline.nn.layer_records import Layer, NetError, by_parameter, leading_to, read_layers
from syncline.nn.layers import Input
from syncline.nn.registry import initialise
from syncline.table.checkpoints import write_tensors

TRIED = 2  # examples of a dry run
LAYERS = "layers"  # in a file's metadata
Shape = tuple[int, ...]


class NetRow(NamedTuple):
    """A layer in the net's table."""

    name: str
    type: str
    sources: tuple[str, ...]
    shape: Shape  # of one example
    parameters: int  # of its own: shared ones count once


class Net(nn.Module):
    """Layers as data. `example` is a batch whose shapes inputs take over where their records name none."""

    def __init__(self, layers: Sequence[Mapping[str, Any]], *, example: Any = None) -> None:
        super().__init__()
        self._layers = read_layers(layers)
        self.records: list[dict[str, Any]] = copy.deepcopy([dict(each) for each in layers])
        self._shapes: dict[str, Shape] = {}
        self._listed = sorted(self._layers, key=lambda each: each.place)  # in the order of the list
        self._inputs = [layer.name for layer in self._listed if layer.type.role == "input"]
        self.losses = [layer for layer in self._listed if layer.type.role == "loss"]
        for layer in self._listed:
            self.add_module(layer.name, None)
        dry: dict[str, Tensor] = {}
        with torch.no_grad():
            for layer in self._layers:
                self._modules[layer.name] = module = self._make(layer, dry, example)
                self._initialise(layer, module)
        self._share_all()
        for layer in self._layers:
            if layer.freeze:
                self._modules[layer.name].requires_grad_(False)  # type: ignore[union-attr]
        roles = {layer.name: layer.type.role for layer in self._layers}
        ends = [name for loss in self.losses for name in loss.sources[:1] if roles[name] == "layer"]
        ends += [layer.name for layer in self._listed if layer.output]
        ends += [] if self.losses else [self._listed[-1].name]
        self.outputs = list(dict.fromkeys(ends))
        needed = leading_to(self.outputs, self._layers)
        self._ways = [layer for layer in self._layers if layer.name in needed]
        self._sums_losses = False

    # -- running -----------------------------------------------------------------------------------------

    def forward(self, /, *inputs: Any, **named: Any) -> Any:
        """Return the output, or several by name. Inputs come in their order, by their layers' names, or as one batch.

        Targets are not needed, except by a net that `with_losses` made: it returns the sum of the losses.
        """
        layers = self._layers if self._sums_losses else self._ways
        whole = len(inputs) == 1 and isinstance(inputs[0], list | tuple | Mapping)
        given = self._named(named) if named else self._parts_of(inputs[0] if whole else inputs, layers)
        values = self._run(layers, given)
        if self._sums_losses:
            return self._total(values)
        found = {name: values[name] for name in self.outputs}
        return found if len(found) > 1 else next(iter(found.values()))

    def with_losses(self) -> Net:
        """Return a net that shares these layers and returns the sum of the losses from `forward`."""
        if not self.losses:
            raise UsageError("this net has no loss layers; give it a loss= or objective=")
        found = copy.copy(self)
        found._sums_losses = True
        return found

    def inputs_of(self, batch: Any) -> dict[str, Any]:
        """Return the parts of a batch that the input layers take, by the layers' names."""
        return self._parts_of(batch, self._layers)

    def _named(self, given: dict[str, Any]) -> dict[str, Any]:
        wanted = {layer.name for layer in self._layers if layer.type.role == "input"}
        if strange := sorted(given.keys() - wanted):
            there = ", ".join(sorted(wanted))
            raise UsageError(
                f"the net has no input {strange[0]!r}{nearest(strange[0], wanted)}; it has {there}"
            )
        return given

    def _total(self, values: Mapping[str, Tensor]) -> Tensor:
        return torch.stack([values[layer.name].reshape(()) for layer in self.losses]).sum()

    def objective(self, batch: Any) -> Tensor:
        """The sum of the losses on a batch (input, target, …)."""
        return self.parts(batch)[0]

    def parts(self, batch: Any) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """The sum of the losses; output and target of the first that has a target."""
        if not self.losses:
            raise UsageError("this net has no loss layers; give it a loss= or objective=")
        values = self._run(self._layers, self.inputs_of(batch))
        total = self._total(values)
        for layer in self.losses:
            if len(layer.sources) == 2:
                return total, values[layer.sources[0]], values[layer.sources[1]]
        return total, None, None

    def reaching(self, *inputs: Any) -> Iterator[tuple[nn.Module, list[Tensor]]]:
        """Every layer on the way to the outputs, with what it takes."""
        given = self._parts_of(inputs, self._ways)
        values = self._run(self._ways, given)
        for layer in self._ways:
            if layer.name not in given:
                yield self._modules[layer.name], [values[name] for name in layer.sources]  # type: ignore[misc]

    def _run(self, layers: Sequence[Layer], inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        values: dict[str, Tensor] = {}
        for layer in layers:
            if layer.type.role == "input" and layer.name not in inputs:
                raise UsageError(f"the net needs its input {layer.name!r} too, got {', '.join(inputs)}")
            given = [inputs[layer.name]] if layer.name in inputs else [values[name] for name in layer.sources]
            values[layer.name] = self._modules[layer.name](*given)  # type: ignore[misc]
        return values

    def _parts_of(self, batch: Any, layers: Sequence[Layer]) -> dict[str, Any]:
        """The batch's parts by input layer."""
        inputs = [layer for layer in layers if layer.type.role == "input"]
        return {layer.name: self._part(batch, layer, len(inputs)) for layer in inputs}

    def _part(self, batch: Any, layer: Layer, inputs: int) -> Any:
        module = self._modules[layer.name]
        field = self._inputs.index(layer.name) if module.field is None else module.field  # type: ignore[union-attr]
        if isinstance(batch, Mapping):
            field = layer.name if module.field is None else field  # type: ignore[union-attr]
            if field in batch:
                return batch[field]
        elif isinstance(batch, list | tuple):
            if isinstance(field, int) and -len(batch) <= field < len(batch):
                return batch[field]
        elif inputs == 1:
            return batch
        several = isinstance(batch, list | tuple)
        got = f"of {len(batch)} parts" if several else f"of type {type(batch).__name__}"
        raise UsageError(f"layer {layer.name!r} takes part {field!r} of the batch, which is one {got}")

    # -- what it is --------------------------------------------------------------------------------------

    def table(self) -> list[NetRow]:
        """All layers in their order."""
        seen: set[int] = set()
        rows = []
        for layer in self._listed:
            own = [p for p in self._modules[layer.name].parameters() if id(p) not in seen]  # type: ignore[union-attr]
            seen.update(map(id, own))
            count = sum(parameter.numel() for parameter in own)
            rows.append(NetRow(layer.name, layer.type.name, layer.sources, self._shapes[layer.name], count))
        return rows

    def __repr__(self) -> str:
        lines = [("layer", "type", "sources", "shape", "parameters")]
        for name, kind, sources, shape, count in self.table():
            lines.append((name, kind, ", ".join(sources), str(shape), f"{count:,}"))
        lines.append(("", "", "", "", f"{sum(parameter.numel() for parameter in self.parameters()):,}"))
        wide = [max(map(len, column)) for column in zip(*lines, strict=True)]
        form = "  ".join(f"{{:{side}{size}}}" for side, size in zip("<<<<>", wide, strict=True))
        return "\n".join(form.format(*line) for line in lines)

    def groups(self) -> list[tuple[float, float, list[str]]]:
        """(rate multiplier, decay multiplier, names of parameters); each parameter is in one, its first layer's."""
        found: dict[tuple[float, float], list[str]] = {}
        layers = {layer.name: layer for layer in self._listed}
        for name, _ in self.named_parameters():
            path, _, own = name.partition(".")
            key = by_parameter(layers[path].rate, own), by_parameter(layers[path].decay, own)
            found.setdefault(key, []).append(name)
        return [(*key, names) for key, names in found.items()]

    # -- making ------------------------------------------------------------------------------------------

    def _fail(self, layer: Layer, key: str | None, words: str) -> NetError:
        return NetError([(layer.place, key, words)], [record["name"] for record in self.records])

    def _make(self, layer: Layer, dry: dict[str, Tensor], example: Any) -> nn.Module:
        given = [dry[name] for name in layer.sources]
        shapes = [tuple(tensor.shape[1:]) for tensor in given]
        first: list[Any] = {"shape": shapes[:1], "shapes": [shapes], "": []}[layer.type.wants]  # type: ignore[assignment]
        came = ", ".join(f"{name!r} gives {s}" for name, s in zip(layer.sources, shapes, strict=True))
        try:
            module = layer.type.make(*first, **copy.deepcopy(layer.arguments))
        except Exception as error:  # the layer's own code runs here
            raise self._fail(layer, None, f"{_words(error)}; {came}" if came else _words(error)) from error
        if not isinstance(module, nn.Module):
            words = f"{layer.type.name} gave {type(module).__name__}, expected an nn.Module"
            raise self._fail(layer, "type", words)
        if isinstance(module, Input):
            out = self._zeros(layer, module, example)
        else:
            out = self._dry_run(layer, module, given, came)
        dry[layer.name], self._shapes[layer.name] = out, tuple(out.shape[1:])
        return module

    def _zeros(self, layer: Layer, module: Input, example: Any) -> Tensor:
        if module.shape is None:
            if example is None:
                words = "shape: missing; give it, as [1, 28, 28], or an example of the data"
                raise self._fail(layer, None, words)
            self._modules[layer.name] = module
            try:
                part = self._part(example, layer, 1)
            except UsageError as error:
                raise self._fail(layer, "field", str(error)) from error
            if not isinstance(part, Tensor) or not part.dim():
                words = f"the batch's part is a {type(part).__name__}, expected a tensor"
                raise self._fail(layer, "field", words)
            module.shape, module.dtype = tuple(part.shape[1:]), module.dtype or part.dtype
            self.records[layer.place]["shape"] = list(module.shape)
            if module.dtype == torch.int64:
                self.records[layer.place].setdefault("dtype", "int64")
        return torch.zeros(TRIED, *module.shape, dtype=module.dtype)

    def _dry_run(self, layer: Layer, module: nn.Module, given: list[Tensor], came: str) -> Tensor:
        trained = module.training
        try:
            with torch.random.fork_rng(devices=[]):
                out = module.eval()(*given)
        except Exception as error:
            raise self._fail(layer, None, f"{layer.type.name} failed: {_words(error)}; {came}") from error
        module.train(trained)
        if not isinstance(out, Tensor):
            words = f"{layer.type.name} gave a {type(out).__name__}, expected one tensor; {came}"
            raise self._fail(layer, "type", words)
        if layer.type.role == "loss":
            if out.numel() != 1:
                words = f"a loss must be one number, got shape {tuple(out.shape)}; {came}"
                raise self._fail(layer, "type", words)
            return out.reshape(1)
        if out.dim() < 1 or len(out) != TRIED:
            words = f"gave shape {tuple(out.shape)} for a batch of {TRIED}, the batch must stay first; {came}"
            raise self._fail(layer, "type", f"{layer.type.name} {words}")
        return out

    def _initialise(self, layer: Layer, module: nn.Module) -> None:
        named = dict(module.named_parameters())
        for key in ("rate", "decay", "init", "share"):
            given = getattr(layer, key)
            for name in given if isinstance(given, Mapping) and "name" not in given else ():
                if name not in named:
                    there = f"{nearest(name, named)}; there are: {', '.join(named) or 'none'}"
                    raise self._fail(layer, key, f"{key}: {layer.type.name} has no parameter {name!r}{there}")
        if layer.init is None:
            return
        single = not isinstance(layer.init, Mapping) or "name" in layer.init
        chosen = {name: layer.init for name, p in named.items() if p.dim() > 1} if single else layer.init
        for name, given in chosen.items():
            try:
                initialise(named[name], given)
            except Exception as error:  # xavier of a vector
                words = f"init: {given} of {name!r} {tuple(named[name].shape)} failed: {_words(error)}"
                raise self._fail(layer, "init", words) from error

    def _share_all(self) -> None:
        sharing = [layer for layer in self._layers if layer.share is not None]
        for _ in range(len(sharing) + 1):  # one may share with one that shares
            changed = [layer for layer in sharing if self._share(layer)]
            if not changed:
                return
        raise self._fail(changed[0], "share", "share: a cycle: each takes another's, none has its own")

    def _share(self, layer: Layer) -> bool:
        """Whether that changed anything."""
        changed = False
        named = dict(self.named_parameters(remove_duplicate=False))
        own = [name for name, _ in self._modules[layer.name].named_parameters()]  # type: ignore[union-attr]
        if isinstance(layer.share, str):
            wanted = {name: f"{layer.share}.{name}" for name in own}
            if layer.share not in self._modules or layer.share == layer.name or not own:
                words = f"{layer.share!r} is no other layer with parameters"
                words += nearest(layer.share, self._modules)
                raise self._fail(layer, "share", f"share: {words}")
        else:
            wanted = dict(layer.share)
        for name, source in wanted.items():
            mine = f"{layer.name}.{name}"
            if source not in named:
                words = f"there is no parameter {source!r}{nearest(source, named)}"
                raise self._fail(layer, "share", f"share: {words}")
            if named[source].shape != named[mine].shape:
                shapes = f"{tuple(named[mine].shape)}, {source!r} has {tuple(named[source].shape)}"
                raise self._fail(layer, "share", f"share: {mine!r} has shape {shapes}")
            changed = changed or named[source] is not named[mine]
            *path, last = mine.split(".")
            setattr(self.get_submodule(".".join(path)), last, named[source])
        return changed


def _words(error: BaseException) -> str:
    words = " ".join(str(error).split())
    return words if isinstance(error, UsageError) else f"{type(error).__name__}: {words}"


def by_layer(model: nn.Module, *, make: Any) -> torch.optim.Optimizer:
    """Make an optimizer with the rate and decay multipliers of a net's layers: `partial(by_layer, make=partial(SGD, lr=0.1))`.

    The model may be a net that is cut over seats: its `skeleton` is the whole net, with parameters of the same names.
    """
    net = getattr(model, "skeleton", model)
    if not isinstance(net, Net):
        raise UsageError(f"by_layer is for a Net, whose layers have multipliers, got {type(net).__name__}")
    groups = net.groups()
    if all((rate, decay) == (1.0, 1.0) for rate, decay, _ in groups):
        made: torch.optim.Optimizer = make(model.parameters())
        return made
    named = dict(model.named_parameters())
    made = make([{"params": [named[name] for name in names]} for _, _, names in groups])
    for group, (rate, decay, _) in zip(made.param_groups, groups, strict=True):
        if decay != 1.0 and "weight_decay" not in group:
            raise UsageError(f"a layer has decay = {decay}, but {type(made).__name__} has no weight_decay")
        group["lr"] *= rate
        group["weight_decay"] = group.get("weight_decay", 0.0) * decay
    return made


# -- files ---------------------------------------------------------------------------------------------------


def layer_notes(model: nn.Module | None) -> dict[str, str]:
    """What a file says about a model beside its tensors: a net's layers."""
    return {LAYERS: json.dumps(model.records)} if isinstance(model, Net) else {}


def save_net(net: Net, path: str | Path) -> None:
    """All tensors by name, tied ones by all their names."""
    if not isinstance(net, Net):
        raise UsageError(f"save_net is for a Net, got {type(net).__name__}; use safetensors.torch.save_model")
    write_tensors(Path(path), net.state_dict(), layer_notes(net))


def load_net(path: str | Path) -> Net:
    """The net of a file, made anew and filled. Its layers name types that are built in or registered here: nothing is imported for it."""
    try:
        with safe_open(path, "pt") as file:
            notes = file.metadata() or {}
        if LAYERS not in notes:
            raise UsageError(f"{path} holds no layers: it was not saved by save_net or a run of a net")
        records: Any = json.loads(notes[LAYERS])
        tensors = load_file(path)
    except (OSError, SafetensorError, ValueError) as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(f"{path} cannot be read as a net: {' '.join(str(error).split())}") from error
    try:
        net = Net(records)
        net.load_state_dict(tensors)
    except (UsageError, RuntimeError) as error:
        raise UsageError(f"{path}: {' '.join(str(error).split())}") from error
    return net


# -- contrastive divergence ----------------------------------------------------------------------------------


class NetParts(Parts):
    """The energy models among a net's layers."""

    def __init__(self, net: Net) -> None:
        self._net = net

    def members(self) -> list[Contrastive]:
        return [each for each in self._net.children() if isinstance(each, Contrastive) and is_trained(each)]

    def reached(self, data: Tensor) -> Iterator[tuple[Contrastive, Tensor]]:
        for module, inputs in self._net.reaching(data):
            if isinstance(module, Contrastive) and is_trained(module):
                yield module, inputs[0]

    def check_way(self, persistent: bool) -> None:
        if not self.members():
            words = "the net has no rbm layer that is trained: contrastive divergence has nothing to do"
            raise UsageError(words)
        super().check_way(persistent)


def parts_of(model: nn.Module) -> Contrastive:
    """A model as what contrastive divergence trains."""
    return NetParts(model) if isinstance(model, Net) else model  # type: ignore[return-value]
