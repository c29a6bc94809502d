"""Who imports whom: rooms stand on floors, imports point down, and no files import each other in a circle.

`python -m tests.test_imports` prints the table. Imports inside functions count too; those for type checkers alone do not.
"""

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
FLOORS = {
    "cli": 10,
    "dlm": 9,  # the public names, each fetched from its room on first use
    "serving": 8,
    "bench": 8,
    "evaluation": 7,
    "latent": 6,
    "prepare": 6,
    "replay": 6,
    "lineage": 6,
    "rerun": 6,
    "training": 6,
    "inference": 5,
    "models": 4,
    "data": 3,
    "kernels": 3,
    "config": 2,
    "diffusion": 2,
    "sudoku": 2,
    "trace": 2,
    "atomic": 1,
    "errors": 1,
    "fields": 1,
    "reading": 1,
}
"""Room -> floor: a folder or a file of dlm/, and cli/. A room may import its own floor (in no circle) and those below."""


class Import(NamedTuple):
    """One import statement between two of our modules."""

    source: str
    target: str
    line: int
    lazy: bool
    """Inside a function: run when it is called."""


def modules(root: Path = ROOT) -> dict[str, Path]:
    """Every module of the package by its name; cli/ is installed as dlm.cli."""
    found = {}
    for folder, name in (("dlm", "dlm"), ("cli", "dlm.cli")):
        for file in sorted((root / folder).rglob("*.py")):
            parts = file.relative_to(root / folder).with_suffix("").parts
            found[".".join([name, *parts]).removesuffix(".__init__")] = file
    return found


def imports(name: str, file: Path, known: Mapping[str, Path]) -> Iterator[Import]:
    """What one module imports of `known`."""
    package = name if file.name == "__init__.py" else name.rpartition(".")[0]
    for node, lazy in _statements(ast.parse(file.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        else:
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, base] if base else above)
            targets = [f"{base}.{alias.name}" if f"{base}.{alias.name}" in known else base for alias in node.names]
        for target in dict.fromkeys(targets):
            if target in known and target != name:
                yield Import(name, target, node.lineno, lazy)


def _statements(node: ast.AST, lazy: bool = False) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool]]:
    """Import statements, and whether each stands in a function; without those under `if TYPE_CHECKING`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child, lazy
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            yield from _statements(ast.Module(child.orelse, []), lazy)
        else:
            yield from _statements(child, lazy or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef))


def graph(root: Path = ROOT) -> list[Import]:
    """All imports between our own modules."""
    known = modules(root)
    return [found for name, file in known.items() for found in imports(name, file, known)]


def room(module: str) -> str:
    """The room of a module: the first name behind `dlm`."""
    return module.split(".")[1] if "." in module else module


def upwards(found: Iterable[Import], floors: Mapping[str, int] = FLOORS) -> list[Import]:
    """Imports of a higher floor."""
    return [each for each in found if floors[room(each.target)] > floors[room(each.source)]]


def circles(pairs: Iterable[tuple[str, str]]) -> list[list[str]]:
    """Groups that reach each other: of each, everything that can be reached from it and reaches it."""
    below: dict[str, set[str]] = defaultdict(set)
    for source, target in pairs:
        below[source].add(target)
    reached = {name: _reached(name, below) for name in below}
    groups = {frozenset(other for other in reached[name] if name in reached.get(other, ())) for name in below}
    return sorted(sorted(group) for group in groups if group)


def _reached(start: str, below: Mapping[str, set[str]]) -> set[str]:
    seen: set[str] = set()
    waiting = [start]
    while waiting:
        fresh = below.get(waiting.pop(), set()) - seen
        seen |= fresh
        waiting += fresh
    return seen


def _told(found: Iterable[Import]) -> list[str]:
    return [f"{each.source}:{each.line} imports {each.target}{' (lazily)' * each.lazy}" for each in found]


def test_every_room_has_a_floor():
    assert {room(name) for name in modules()} == {name for name in FLOORS if name not in PLANNED}


PLANNED: tuple[str, ...] = ()
"""Rooms that are not built yet."""


def test_nothing_is_imported_upwards():
    assert _told(upwards(graph())) == []


def test_no_files_import_each_other_in_a_circle():
    assert circles((each.source, each.target) for each in graph()) == []


def test_no_rooms_import_each_other_in_a_circle():
    between = {(room(each.source), room(each.target)) for each in graph()}
    assert circles(pair for pair in between if pair[0] != pair[1]) == []


def test_what_counts_as_an_import(tmp_path):
    files = {"dlm/__init__.py": "", "dlm/a/__init__.py": ""}
    files |= {"dlm/a/one.py": "from dlm.b import two\nfrom . import other\nimport os\n"}
    files |= {"dlm/a/other.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from dlm.a.one import x\n"}
    files |= {"dlm/b/__init__.py": "", "dlm/b/two.py": "def f():\n    from ..a.one import x\n"}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "cli").mkdir()
    found = graph(tmp_path)
    assert set(found) == {
        Import("dlm.a.one", "dlm.b.two", 1, False),
        Import("dlm.a.one", "dlm.a.other", 2, False),
        Import("dlm.b.two", "dlm.a.one", 2, True),
    }
    assert circles((each.source, each.target) for each in found) == [["dlm.a.one", "dlm.b.two"]]
    assert [each.source for each in upwards(found, {"a": 2, "b": 1})] == ["dlm.b.two"]


def table() -> str:
    """The floors, the rooms on each with their files and lines, and the rooms each imports."""
    files = modules()
    lines = {name: len(file.read_text("utf-8").splitlines()) for name, file in files.items()}
    found = graph()
    rows = ["| floor | room | files | lines | imports |", "| --- | --- | --- | --- | --- |"]
    for name in sorted({room(module) for module in files}, key=lambda name: (-FLOORS[name], name)):
        own = [module for module in files if room(module) == name]
        below = sorted({room(each.target) for each in found if room(each.source) == name} - {name})
        size = f"{sum(lines[module] for module in own):,}"
        rows.append(f"| {FLOORS[name]} | {name} | {len(own)} | {size} | {', '.join(below) or '–'} |")
    rows += [f"upwards: {line}" for line in _told(upwards(found))]
    rows += [f"circle: {' ↔ '.join(group)}" for group in circles((each.source, each.target) for each in found)]
    return "\n".join(rows)


if __name__ == "__main__":
    print(table())
