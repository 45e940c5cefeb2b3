"""A queue that hands out the applications of one step in any order (A8): `with opt.applications() as queue:` in place of `opt.step()`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from torch import nn

from syncline.errors import UsageError


class Application:
    """Some parameters whose averages come together."""

    def __init__(
        self,
        names: Sequence[str],
        parameters: Sequence[nn.Parameter],
        ready: Callable[[], bool],
        run: Callable[[], None],
    ) -> None:
        self.names, self.parameters = tuple(names), tuple(parameters)
        self._ready, self._run = ready, run
        self.applied = False

    def ready(self) -> bool:
        """Their averages are there: `apply` does not wait."""
        return self._ready()

    def apply(self) -> None:
        """Wait for the averages and run the optimizer on these parameters, once."""
        if not self.applied:
            self.applied = True
            self._run()


class Applications:
    """One step's applications; those that nobody asked for are applied when the block ends."""

    def __init__(self, parts: Sequence[Application]) -> None:
        self._left = list(parts)

    def __len__(self) -> int:
        """How many nobody has been given yet."""
        return len(self._left)

    def __iter__(self) -> Iterator[Application]:
        """As their averages arrive; where none has, from the last layer on."""
        while self._left:
            yield self._give(next((part for part in self._left if part.ready()), self._left[0]))

    def take(self, name: str) -> Application:
        """The one that holds this parameter."""
        for part in self._left:
            if name in part.names:
                return self._give(part)
        raise UsageError(
            f"no application with '{name}' is left; there are {[part.names for part in self._left]}"
        )

    def _give(self, part: Application) -> Application:
        self._left.remove(part)
        return part
