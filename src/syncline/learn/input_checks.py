"""What users give as data and functions; or one line that says what to give instead."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from syncline.errors import UsageError


def as_data(name: str, data: Any) -> Any:
    """A data set; a tuple of tensors is a `TensorDataset`."""
    if isinstance(data, tuple) and data and all(isinstance(part, Tensor) for part in data):
        return _joined(name, data)
    check_data(name, data)
    return data


def check_data(name: str, data: Any) -> None:
    """A torch Dataset, or anything with a length and items."""
    if isinstance(data, Dataset) or _is_sequence(data):
        if not isinstance(data, IterableDataset):
            _check_length(name, data)
    else:
        raise UsageError(f"{name} must be a torch Dataset, got {_what(data)}")


def check_function(name: str, given: Any) -> None:
    """Where a function may be given."""
    if isinstance(given, type) and issubclass(given, nn.Module):
        raise UsageError(f"{name} is the class {given.__name__}: give an instance, {given.__name__}()")
    if given is not None and not callable(given):
        raise UsageError(f"{name} must be a function, got {given!r}")


def _is_sequence(data: Any) -> bool:
    words = isinstance(data, (type, str, bytes, dict, tuple))
    return not words and hasattr(data, "__getitem__") and hasattr(data, "__len__")


def _what(data: Any) -> str:
    if isinstance(data, DataLoader):
        return "DataLoader; give its .dataset, and batch_size= and collate= beside it: every learner gets batches of its own"
    if isinstance(data, type):
        return f"the class {data.__name__}; give an instance of it"
    if isinstance(data, tuple):
        kinds = ", ".join(type(part).__name__ for part in data)
        return f"a tuple of ({kinds}); give tensors, or TensorDataset(torch.as_tensor(x), torch.as_tensor(y))"
    return f"{type(data).__name__}; wrap tensors in TensorDataset"


def _joined(name: str, parts: tuple[Tensor, ...]) -> TensorDataset:
    lengths = [len(part) if part.dim() else 0 for part in parts]
    if len(set(lengths)) > 1:
        raise UsageError(
            f"{name}: the tensors have {', '.join(map(str, lengths))} examples; they must be the same"
        )
    return TensorDataset(*parts)


def _check_length(name: str, data: Any) -> None:
    try:
        len(data)
    except (TypeError, NotImplementedError) as error:
        raise UsageError(
            f"{name}: {type(data).__name__} has no length; give it a __len__, or make it an IterableDataset"
        ) from error
