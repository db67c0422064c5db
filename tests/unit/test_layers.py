"""Imports only go down, and what decides needs neither torch nor MPI."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "hpctrain"

# A module may import from layers below its own, from its own package, and from what is named beside it.
LAYERS = {
    "cli": 6,
    "__main__": 6,
    "train": 5,
    "bench": 5,
    "testing": 5,
    "parallel": 4,
    "checkpoint": 4,
    "model": 3,
    "optim": 3,
    "precision": 3,
    "offload": 3,
    "data": 3,
    "cluster": 2,
    "comm": 2,
    "watch": 2,
    "plan": 1,
    "schedule": 1,
    "errors": 0,
    "config": 0,
}
ALSO = {("comm", "cluster"), ("plan", "schedule"), ("config", "errors"), ("__main__", "cli"), ("bench", "train")}
HEAVY = {"torch", "mpi4py"}
LIGHT = ("hpctrain.plan", "hpctrain.schedule", "hpctrain.config", "hpctrain.errors")

FILES = sorted(path for path in PACKAGE.rglob("*.py") if path.parent != PACKAGE or path.name != "__init__.py")


def name_of(path: Path) -> str:
    """The dotted name of a module's file."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def part_of(module: str) -> str:
    """The package or file right under hpctrain that a module belongs to."""
    return module.split(".")[1]


def imports(nodes: Iterable[ast.AST]) -> list[str]:
    """Every module, or name in a module, that these nodes import."""
    named = []
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            assert not node.level, "imports are absolute"
            named += [f"{node.module}.{one.name}" for one in node.names]
        elif isinstance(node, ast.Import):
            named += [one.name for one in node.names]
    return named


def ours(modules: Iterable[str]) -> set[str]:
    """The parts of hpctrain among these modules."""
    return {part_of(module) for module in modules if module.startswith("hpctrain.")} - {"__version__"}


def allowed(importer: str, imported: str) -> bool:
    """Whether the part ``importer`` may import from the part ``imported``."""
    same = importer == imported
    return same or LAYERS[imported] < LAYERS[importer] or (importer, imported) in ALSO


def test_every_part_has_a_layer() -> None:
    assert {part_of(name_of(path)) for path in FILES} <= set(LAYERS)


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_imports_go_down(path: Path) -> None:
    importer = part_of(name_of(path))
    imported = ours(imports(ast.walk(ast.parse(path.read_text()))))
    assert not [part for part in imported if not allowed(importer, part)]


@pytest.mark.parametrize("path", sorted((PACKAGE / "cli").glob("*.py")), ids=name_of)
def test_the_command_line_imports_what_is_heavy_inside_functions(path: Path) -> None:
    modules = imports(ast.parse(path.read_text()).body)
    assert not [module for module in modules if module.split(".")[0] in HEAVY]
    assert not [part for part in ours(modules) if 1 <= LAYERS[part] <= 5]


def test_what_decides_loads_neither_torch_nor_mpi() -> None:
    deciding = [name for name in map(name_of, FILES) if name.startswith(LIGHT)]
    program = f"""
import importlib, sys
for name in ["hpctrain", *{deciding!r}]:
    importlib.import_module(name)
    found = {HEAVY!r} & set(sys.modules)
    assert not found, f"{{name}} loads {{found}}"
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
