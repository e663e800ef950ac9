"""Which room may import what: read from the source, so that a lazy import counts too."""

import ast
import sys
from pathlib import Path

import pytest

import zplan

ROOT = Path(__file__).parent.parent
ROOMS = ("planner", "runtime", "cuda_ops")
FILES = [p for room in (*ROOMS, "zplan") for p in sorted((ROOT / room).glob("*.py"))]


def imports(path, *, top_only=False):
    """Names of imported modules; `from a import b` gives `a` and `a.b`."""
    tree = ast.parse(path.read_text())
    found = set()
    for node in tree.body if top_only else ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def foreign(names):
    """Top-level packages that are neither ours nor the standard library's."""
    return {n.split(".")[0] for n in names} - set(sys.stdlib_module_names) - {"zplan"}


@pytest.mark.parametrize("path", FILES, ids=lambda p: f"{p.parent.name}/{p.name}")
def test_rooms_keep_their_direction(path):
    names = imports(path)
    room = path.parent.name
    assert not {n.split(".")[0] for n in names} & set(ROOMS), "rooms are imported as zplan.<room>"
    if room == "planner":
        assert foreign(names) <= {"tabulate"} and not any(
            n.startswith(("zplan.runtime", "zplan.cuda_ops")) for n in names
        )
    if room == "cuda_ops":
        assert not any(n.startswith(("zplan.planner", "zplan.runtime")) for n in names)


def test_the_command_line_imports_no_runtime_and_little_else():
    names = imports(ROOT / "zplan" / "cli.py", top_only=True)
    assert foreign(names) == {"click"}
    assert not any(n.startswith(("zplan.runtime", "zplan.planner")) for n in names)


def test_names_that_need_torch_say_so(monkeypatch):
    for name in [m for m in sys.modules if m.startswith(("zplan.runtime.engine", "zplan.runtime.initialize"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(zplan.ZplanError, match="`zplan.initialize` needs torch"):
        _ = zplan.initialize


def test_every_room_was_found():
    assert {p.parent.name for p in FILES} == {*ROOMS, "zplan"} and len(FILES) > 30
