"""Policies of the source tree, held by reading it: import directions, public names, annotations, file sizes.

The files are parsed, never imported (except the root package for its names), so that a broken or
half-written room does not hide what the others do.
"""

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools.code_lines import count_folders

PACKAGE = "syncline"
SOURCE = Path(__file__).resolve().parents[2] / "src" / PACKAGE

# Imports go down only. A room may import rooms of lower ranks, and rooms of its own rank in one direction.
RANKS: tuple[tuple[str, ...], ...] = (
    ("errors", "version", "dial", "cluster", "terminal"),
    ("protocols", "batch", "topologies"),
    ("table", "kernels"),
    ("messages", "ports"),
    ("nn", "models", "data"),
    ("learn", "roles", "parallel", "plan"),
    ("engines",),
    ("sim",),
    ("train", "jobs", "report"),
    ("studies", "testing"),
    ("cli", ""),  # "" is the root package itself: 'from syncline import Sync'
)
RANK_OF = {room: rank for rank, rooms in enumerate(RANKS) for room in rooms}
FREE_ROOMS = {"__init__", "__main__"}  # may import anything; nothing else may import them

PURE_ROOMS = {"dial", "protocols", "batch", "topologies"}
PURE_FILES = {"parallel/windows.py", "plan/solvers.py"}
IMPURE_MODULES = {"torch", "numpy", "time", "os", "socket", "threading"}
ENGINES = {"local", "torchrun", "ray"}
ROLE_ROOMS = {"learn", "roles"}

MOST_PUBLIC_NAMES = 22  # three of them are batch methods
MOST_LINES = 600
MOST_PORT_METHODS = 30  # over all ports
MOST_CODE_LINES = (
    45_200  # without blank lines, comments and docstrings; a commit that raises it gives the reason
)

FILES = sorted(SOURCE.rglob("*.py"))
per_file = pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(SOURCE)))


def room_of(file: Path) -> str:
    """The part of the package a file belongs to: 'dial' for dial.py, 'table' for table/layout.py."""
    return file.relative_to(SOURCE).with_suffix("").parts[0]


def known_rooms() -> set[str]:
    return {room_of(file) for file in FILES} | set(RANK_OF) - {""}


def absolute_base(node: ast.ImportFrom, file: Path) -> list[str]:
    """The dotted module that 'from … import' names, relative dots resolved against the file."""
    named = node.module.split(".") if node.module else []
    if node.level == 0:
        return named
    folder = [PACKAGE, *file.relative_to(SOURCE).parts[:-1]]
    return folder[: len(folder) - (node.level - 1)] + named


def imported_modules(file: Path, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and dotted name of every import in the file, inside functions and type-checking blocks too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = absolute_base(node, file)
            yield from ((node.lineno, ".".join([*base, alias.name])) for alias in node.names)


def imported_rooms(file: Path, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and room of every import from within the package; '' where only the root package is named."""
    rooms = known_rooms()
    for line, name in imported_modules(file, tree):
        top, *rest = name.split(".")
        if top == PACKAGE:
            yield line, rest[0] if rest and rest[0] in rooms else ""


def parse(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"), filename=str(file))


def test_every_room_has_a_rank() -> None:
    unranked = {room_of(file) for file in FILES} - set(RANK_OF) - FREE_ROOMS
    assert not unranked, f"give {sorted(unranked)} a place in RANKS"


@per_file
def test_imports_go_down_only(file: Path) -> None:
    own = room_of(file)
    if own in FREE_ROOMS:
        return
    upward = [
        f"line {line}: {own} imports {room or PACKAGE}"
        for line, room in imported_rooms(file, parse(file))
        if room != own and (room not in RANK_OF or RANK_OF[room] > RANK_OF.get(own, -1))
    ]
    assert not upward, "\n".join(upward)


def test_rooms_of_one_rank_import_each_other_in_one_direction_only() -> None:
    edges = {
        (room_of(file), room)
        for file in FILES
        for _, room in imported_rooms(file, parse(file))
        if room and RANK_OF.get(room) == RANK_OF.get(room_of(file), -1) and room != room_of(file)
    }
    both_ways = sorted((a, b) for a, b in edges if a < b and (b, a) in edges)
    assert not both_ways


@per_file
def test_decisions_are_pure(file: Path) -> None:
    if room_of(file) not in PURE_ROOMS and str(file.relative_to(SOURCE)) not in PURE_FILES:
        return
    impure = [
        f"line {line}: imports {name}"
        for line, name in imported_modules(file, parse(file))
        if name.split(".")[0] in IMPURE_MODULES
    ]
    assert not impure, "\n".join(impure)


@per_file
def test_no_role_imports_an_engine(file: Path) -> None:
    if room_of(file) not in ROLE_ROOMS:
        return
    lines = [line for line, room in imported_rooms(file, parse(file)) if room in ("engines", "sim")]
    assert not lines, f"imports engines in lines {lines}; ask the port instead"


@per_file
def test_engines_import_no_other_engine(file: Path) -> None:
    """But for Ray's: an agent's node runs the processes of the local engine."""
    own = file.relative_to(SOURCE).parts
    if own[0] not in ("engines", "sim") or (own[0] == "engines" and len(own) < 3):
        return
    allowed = set() if own[0] == "sim" else {own[1], "local"} if own[1] == "ray" else {own[1]}
    others = [
        f"line {line}: imports {name}"
        for line, name in imported_modules(file, parse(file))
        if name.startswith("syncline.engines.") and name.split(".")[2] in ENGINES - allowed
    ]
    assert not others, "\n".join(others)


def test_public_names_are_few_and_exist() -> None:
    package = importlib.import_module(PACKAGE)
    names = package.__all__
    assert len(names) <= MOST_PUBLIC_NAMES, f"{len(names)} public names: {names}"
    assert len(set(names)) == len(names)
    missing = [name for name in names if not hasattr(package, name)]
    assert not missing


def functions(tree: ast.Module) -> Iterator[tuple[ast.FunctionDef | ast.AsyncFunctionDef, bool]]:
    """Every function with whether it is a method whose first argument is bound."""
    for parent in ast.walk(tree):
        for node in ast.iter_child_nodes(parent):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                static = any(isinstance(d, ast.Name) and d.id == "staticmethod" for d in node.decorator_list)
                yield node, isinstance(parent, ast.ClassDef) and not static


def missing_annotations(node: ast.FunctionDef | ast.AsyncFunctionDef, bound: bool) -> list[str]:
    arguments = node.args
    positional = [*arguments.posonlyargs, *arguments.args]
    if bound:
        positional = positional[1:]
    stars = [star for star in (arguments.vararg, arguments.kwarg) if star is not None]
    missing = [a.arg for a in [*positional, *arguments.kwonlyargs, *stars] if a.annotation is None]
    return missing if node.returns is not None else [*missing, "return"]


@per_file
def test_every_function_is_annotated(file: Path) -> None:
    gaps = [
        f"line {node.lineno}: {node.name} lacks {', '.join(missing)}"
        for node, bound in functions(parse(file))
        if (missing := missing_annotations(node, bound))
    ]
    assert not gaps, "\n".join(gaps)


@per_file
def test_files_stay_short(file: Path) -> None:
    lines = len(file.read_text(encoding="utf-8").splitlines())
    assert lines <= MOST_LINES, f"{lines} lines: split it along its responsibilities"


def test_the_source_does_not_grow_unnoticed() -> None:
    lines = count_folders([SOURCE]).total()
    assert lines <= MOST_CODE_LINES, f"{lines:,} lines of code in src"


def abstract_methods(tree: ast.Module) -> list[str]:
    return [
        f"{parent.name}.{node.name}"
        for parent in ast.walk(tree)
        if isinstance(parent, ast.ClassDef)
        for node in parent.body
        if isinstance(node, ast.FunctionDef)
        and any(isinstance(each, ast.Name) and each.id == "abstractmethod" for each in node.decorator_list)
    ]


def test_the_seam_stays_small() -> None:
    ports = SOURCE / "ports.py", SOURCE / "table" / "store.py"
    methods = [name for file in ports for name in abstract_methods(parse(file))]
    assert len(methods) <= MOST_PORT_METHODS, f"{len(methods)} methods: {methods}"
