"""Hold the language of docstrings, comments and class names: a count per room and rule that may only fall.

    python -m tools.language              compare with the stored counts; exit 1 and name the places if one has risen
    python -m tools.language --lower      store counts that have fallen
    python -m tools.language --list ROOM  print every place of a room (for example engines/local), the worst rule first

The rules are ruff's pydocstyle rules of `RUFF_RULES` and five of our own: how a docstring begins (`opening`), processes treated
as persons (`person`), phrases that only their author understands (`riddle`), names that the vocabulary has retired
(`name`), and class names that stand for two things in `src` (`same class name`). New code meets all of them. Old code is held by
the counts in `language_baseline.json`, which only ever get lower.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import shutil
import subprocess
import sys
import sysconfig
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BASELINE = Path(__file__).with_name("language_baseline.json")
FOLDERS = ("src", "tests", "tools", "benchmarks", "examples", "reproductions")
RUFF_RULES = "D2,D400,D401,D403,D404"
RUFF_EXCEPTIONS = "D203,D213"  # contradict D211 and D212

OPENING = re.compile(
    r"(It|They|Them|Its|Their|This|That|Those|These|Of|To|From|With|Without|In|At|On|By|For|As|Where|When|What|Whether|Who|Whom|"
    r"Whose|Whoever|Somebody|Nobody|Everybody|Everything|Nothing|All|Each|Both|Here|There|Now|Then|So|Else|And|Or|The same)\b"
)
PERSON = re.compile(r"\b(who|whom|whose|whoever|nobody|somebody|everybody|anybody)\b", re.IGNORECASE)
RIDDLE = re.compile(
    r"\b(is said|are said|was said|is told|are told|what is left|as it is|as they are|is there|are there|it has heard|goes on|go on|"
    r"anew|elsewhere|meanwhile|of its own|of one's own|besides|the former|the latter|whatever)\b",
    re.IGNORECASE,
)
RETIRED = {
    *("desk", "lane", "shelf", "bell", "hub", "clerk", "keeper", "crew", "told", "said", "wish"),
    *("workshop", "shop", "parcel", "moment", "way"),
}


@dataclass(frozen=True, slots=True)
class Finding:
    """A place to look at: a rule that the line breaks, and the word or text that shows it."""

    path: Path
    line: int
    rule: str
    text: str

    @property
    def room(self) -> str:
        """Room of the package (`protocols`, `engines/local`), or the folder beside it (`tests`)."""
        top, *rest = self.path.parts
        if top != "src":
            return top
        *folders, file = rest[1:]
        depth = 2 if folders[:1] == ["engines"] else 1
        return "/".join(folders[:depth]) or file


def docstring_rule(docstring: str) -> tuple[str, str] | None:
    """Return the first rule that a docstring breaks and the word that breaks it."""
    first = docstring.strip().splitlines()[0]
    for rule, match in (
        ("opening", OPENING.match(first)),
        ("person", PERSON.search(docstring)),
        ("riddle", RIDDLE.search(docstring)),
    ):
        if match:
            return rule, match.group(0)
    return None


def check_file(path: Path) -> Iterator[Finding]:
    """Yield what our own rules find in one file; `path` is relative to the root."""
    with (ROOT / path).open("rb") as source:
        tokens = list(tokenize.tokenize(source.readline))
    for token in tokens:
        if token.type == tokenize.COMMENT and (person := PERSON.search(token.string)):
            yield Finding(path, token.start[0], "person", person.group(0))
    for node in ast.walk(ast.parse((ROOT / path).read_bytes())):
        if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef | ast.Module):
            continue
        docstring = ast.get_docstring(node)
        if docstring and (broken := docstring_rule(docstring)):
            yield Finding(path, node.body[0].lineno, broken[0], f"[{broken[1]}] {docstring.splitlines()[0]}")
        if not isinstance(node, ast.Module):
            words = set(re.findall(r"[a-z]+", re.sub(r"([A-Z])", r"_\1", node.name).lower()))
            if retired := words & RETIRED:
                yield Finding(path, node.lineno, "name", f"{node.name} has {', '.join(sorted(retired))}")


def same_class_names(paths: Iterable[Path]) -> Iterator[Finding]:
    """Yield every class that shares its name with another class of the package."""
    places: defaultdict[str, list[tuple[Path, int]]] = defaultdict(list)
    for path in paths:
        for node in ast.walk(ast.parse((ROOT / path).read_bytes())):
            if isinstance(node, ast.ClassDef):
                places[node.name].append((path, node.lineno))
    for name, classes in places.items():
        if len(classes) > 1:
            yield from (Finding(path, line, "same class name", name) for path, line in classes)


def ruff_findings() -> Iterator[Finding]:
    """Yield what ruff's pydocstyle rules find, in the same folders."""
    ruff = shutil.which("ruff", path=sysconfig.get_path("scripts")) or "ruff"
    command = [ruff, "check", "--select", RUFF_RULES, "--ignore", RUFF_EXCEPTIONS, "--output-format", "json"]
    done = subprocess.run(
        [*command, "--exit-zero", "--quiet", *FOLDERS], cwd=ROOT, capture_output=True, check=True
    )
    for row in json.loads(done.stdout):
        path = Path(row["filename"]).relative_to(ROOT)
        yield Finding(path, row["location"]["row"], row["code"], row["message"])


def all_findings() -> list[Finding]:
    """Return what all rules find in all folders."""
    paths = sorted(path.relative_to(ROOT) for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
    ours = [finding for path in paths for finding in check_file(path)]
    classes = same_class_names(path for path in paths if path.parts[0] == "src")
    return [*ours, *classes, *ruff_findings()]


def count(findings: Iterable[Finding]) -> dict[str, dict[str, int]]:
    """Return the number of findings per room and rule, sorted."""
    counts = Counter((finding.room, finding.rule) for finding in findings)
    table: dict[str, dict[str, int]] = {}
    for (room, rule), number in sorted(counts.items()):
        table.setdefault(room, {})[rule] = number
    return table


def risen(
    now: dict[str, dict[str, int]], stored: dict[str, dict[str, int]]
) -> list[tuple[str, str, int, int]]:
    """Return room, rule, the stored count and the present one wherever the present count is higher."""
    return [
        (room, rule, stored.get(room, {}).get(rule, 0), number)
        for room, rules in now.items()
        for rule, number in rules.items()
        if number > stored.get(room, {}).get(rule, 0)
    ]


def changed_lines() -> set[tuple[Path, int]]:
    """Return the lines that differ from the last commit, or that the last commit changed if nothing differs."""
    for revision in ("HEAD", "HEAD~1"):
        done = subprocess.run(
            ["git", "diff", "-U0", revision, "--", "*.py"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        lines: set[tuple[Path, int]] = set()
        path = Path()
        for line in done.stdout.splitlines():
            if line.startswith("+++ "):
                path = Path(line[6:])
            elif match := re.match(r"@@ -\S+ \+(\d+)(?:,(\d+))? @@", line):
                start, length = int(match[1]), int(match[2] or 1)
                lines.update((path, number) for number in range(start, start + length))
        if lines:
            return lines
    return set()


def report(findings: Iterable[Finding]) -> None:
    for finding in findings:
        print(f"  {finding.path}:{finding.line}  {finding.rule}: {finding.text}", file=sys.stderr)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lower", action="store_true", help="store counts that have fallen")
    parser.add_argument("--list", metavar="ROOM", help="print every place of a room")
    options = parser.parse_args()
    findings = all_findings()
    if options.list:
        in_room = [finding for finding in findings if finding.room == options.list]
        often = Counter(finding.rule for finding in in_room)
        report(sorted(in_room, key=lambda finding: (-often[finding.rule], finding.path, finding.line)))
        return 0
    now, stored = count(findings), json.loads(BASELINE.read_text(encoding="utf-8"))
    higher = risen(now, stored)
    if higher:
        recent = changed_lines()
        for room, rule, before, after in higher:
            print(
                f"{room}: {rule} has risen from {before} to {after}; reword what you added:", file=sys.stderr
            )
            here = [each for each in findings if (each.room, each.rule) == (room, rule)]
            report([each for each in here if (each.path, each.line) in recent] or here[:20])
        return 1
    if options.lower:
        BASELINE.write_text(json.dumps(now, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
