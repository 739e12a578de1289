"""The control plane is light: nothing heavy is imported before a run is certain."""

from __future__ import annotations

import ast
import json
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import actors
import orchestrator

HEAVY = ("torch", "vllm", "ray", "transformers", "actors")
LEAVES = {"types", "errors", "protocols", "events", "context", "options", "tasks", "files"}


def fresh(code: str) -> dict[str, object]:
    """Run ``code`` in a new interpreter; it leaves a dict in ``result``."""
    out = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport json; print(json.dumps(result))"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    ).stdout
    return dict(json.loads(out.splitlines()[-1]))


def names(package: object, prefix: str) -> list[str]:
    path = package.__path__  # type: ignore[attr-defined]
    return [m.name for m in pkgutil.walk_packages(path, prefix) if "__main__" not in m.name]


def test_no_module_of_the_control_plane_imports_anything_heavy() -> None:
    modules = names(orchestrator, "orchestrator.")
    assert "orchestrator.cli" in modules and "orchestrator.scheduler" in modules
    result = fresh(
        f"""
import importlib, sys
result = {{}}
for name in {["orchestrator", *modules]!r}:
    importlib.import_module(name)
    for heavy in {HEAVY!r}:
        if heavy in sys.modules and heavy not in result:
            result[heavy] = name
"""
    )
    assert result == {}


@pytest.mark.parametrize("flag", ["--help", "--version"])
def test_help_imports_nothing_heavy(flag: str) -> None:
    result = fresh(
        f"""
import sys
from orchestrator.cli import main
code = main([{flag!r}])
result = {{"code": code, "modules": [m for m in sys.modules if "." not in m]}}
"""
    )
    assert result["code"] == 0
    modules = result["modules"]
    assert isinstance(modules, list)
    assert not {*HEAVY, "structlog", "rich", "numpy"} & set(modules)


def test_a_simulation_imports_nothing_heavy() -> None:
    result = fresh(
        """
import sys
from orchestrator.cli import main
code = main(["simulate", "--engines", "2", "--steps", "1", "--max-tokens", "16"])
result = {"code": code, "modules": [m for m in sys.modules if "." not in m]}
"""
    )
    assert result["code"] == 0
    modules = result["modules"]
    assert isinstance(modules, list)
    assert not {*HEAVY, "numpy"} & set(modules)


def test_help_imports_few_modules() -> None:
    """What its half a second depends on, on any machine."""
    result = fresh(
        """
import sys
from orchestrator.cli import main
result = {"code": main(["--help"]), "count": len(sys.modules)}
"""
    )
    assert result["code"] == 0
    assert isinstance(result["count"], int) and result["count"] < 400


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            if node.module == "orchestrator":
                found |= {f"orchestrator.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found - {"orchestrator"}


def test_the_data_plane_imports_only_leaves_of_the_control_plane() -> None:
    folder = Path(actors.__path__[0])
    wrong = {
        f"{path.relative_to(folder)}: {name}"
        for path in folder.rglob("*.py")
        # assembly is what the command line calls: it turns settings into parts.
        if path.name != "assembly.py"
        for name in imports(path)
        if name.startswith("orchestrator.") and name.split(".")[1] not in LEAVES
    }
    assert not wrong


def test_leaves_import_the_standard_library_and_each_other() -> None:
    folder = Path(orchestrator.__path__[0])
    wrong = {
        f"{leaf}: {name}"
        for leaf in LEAVES
        for name in imports(folder / f"{leaf}.py")
        if name.split(".")[0] not in sys.stdlib_module_names
        and not (name.startswith("orchestrator.") and name.split(".")[1] in LEAVES)
    }
    assert not wrong
