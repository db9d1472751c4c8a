"""The floors of the house: a room imports only rooms on lower floors."""

import ast
import pathlib

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent / "rstar_jax"
FLOORS = {
    "types": 0, "config": 0, "overrides": 0,
    "model": 1, "algorithms": 1, "text": 1, "rewards": 1, "tools": 1,
    "rollout": 2, "training": 2, "data": 2, "distributed": 2, "storage": 2,
    "recipes": 3, "planning": 3,
}  # fmt: skip
PURE_ROOMS = ("model", "algorithms")
IMPURE_MODULES = {"asyncio", "os", "transformers", "subprocess", "threading"}


def _imports(path: pathlib.Path) -> list[str]:
    names = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute here"
            names.append(node.module or "")
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


def _room(path: pathlib.Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def violations(path: pathlib.Path, room: str) -> list[str]:
    found = []
    for name in _imports(path):
        parts = name.split(".")
        if parts[0] in ("launch", "experiments", "tests"):
            found.append(f"{room} imports {name}")
        if parts[0] == "rstar_jax" and len(parts) > 1:
            other = parts[1]
            if other not in FLOORS:
                found.append(f"{room} imports the unknown room {other}")
            elif other != room and FLOORS[other] >= FLOORS[room] and FLOORS[room] > 0:
                found.append(f"{room} (floor {FLOORS[room]}) imports {other} (floor {FLOORS[other]})")
            elif FLOORS[room] == 0 and FLOORS[other] > 0:
                found.append(f"{room} (floor 0) imports {other} (floor {FLOORS[other]})")
        if room in PURE_ROOMS and parts[0] in IMPURE_MODULES:
            found.append(f"{room} imports {parts[0]}; device rooms are pure")
    return found


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_down(path):
    room = _room(path)
    if room == "__init__":
        assert not [n for n in _imports(path) if n.startswith("rstar_jax.")]
        return
    assert room in FLOORS, f"{room} is not a room of the house"
    assert violations(path, room) == []


def test_an_arrow_that_runs_up_is_found(tmp_path):
    bad = tmp_path / "bad.py"
    bad.write_text("import os\nfrom rstar_jax.recipes import rl\nfrom rstar_jax.text import chat\n")
    assert len(violations(bad, "model")) >= 3
