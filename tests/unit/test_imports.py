"""Imports point one way, and running a package takes neither torch nor onnx nor transformers."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Part -> the parts of onnxlm that its modules may import. "glue" is src/onnxlm without "graphs" (what
# export and quantize share of onnx-ir) and "cli": the command line, and what puts the stages together.
ALLOWED = {
    "glue": {"glue"},
    "graphs": {"glue", "graphs"},
    "models": {"glue", "models"},
    "export": {"glue", "graphs", "models", "export"},
    "quantize": {"glue", "graphs", "quantize"},
    "runtime": {"glue", "runtime"},
    "cli": {"glue", "graphs", "models", "export", "quantize", "runtime", "cli"},
}
TOP = {"onnxlm.__main__", "onnxlm.workflow", "onnxlm.inspection", "onnxlm.config_inspection"}
TOP |= {"onnxlm.verification", "onnxlm.evaluation"}
HEAVY = {"torch", "onnx", "onnx_ir", "onnxscript", "transformers", "optimum", "safetensors", "gguf"}
# Part -> libraries that none of its modules may import, at any depth.
BANNED = {
    "glue": HEAVY | {"onnxruntime"},
    "runtime": HEAVY | {"huggingface_hub"},
    "quantize": {"torch", "transformers", "optimum"},
    "graphs": {"torch", "transformers", "optimum"},
}


def part_of(module: str) -> str:
    """The part that a module of onnxlm belongs to."""
    if module in TOP:
        return "cli"
    names = module.split(".")
    return names[1] if len(names) > 1 and names[1] in ALLOWED else "glue"


def modules() -> Iterator[tuple[str, Path]]:
    """(dotted name, file) of every module."""
    roots = {"onnxlm": ROOT / "src/onnxlm"}
    roots |= {f"onnxlm.{name}": ROOT / name for name in ("models", "export", "quantize", "runtime")}
    for package, folder in roots.items():
        for file in sorted(folder.rglob("*.py")):
            inner = file.relative_to(folder).with_suffix("").parts
            yield ".".join((package, *inner)).removesuffix(".__init__"), file


def imported(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """(absolute module, line) of each import, those inside functions too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            yield base, node.lineno
            if base == "onnxlm":
                yield from ((f"onnxlm.{alias.name}", node.lineno) for alias in node.names)


def faults(name: str, source: str) -> list[str]:
    """What a module of that name imports and may not."""
    part = part_of(name)
    found = []
    tree = ast.parse(source)
    for module, line in imported(tree):
        top = module.partition(".")[0]
        inside = top == "onnxlm" and module != "onnxlm"
        if (inside and part_of(module) not in ALLOWED[part]) or top in BANNED.get(part, ()):
            found.append(f"{name}:{line}: {part} imports {module}")
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            found.append(f"{name}:{node.lineno}: a relative import")
    return found


def test_imports_point_one_way() -> None:
    checked = list(modules())
    assert len(checked) > 30
    assert [
        f for name, file in checked for f in faults(name, file.read_text(encoding="utf-8"))
    ] == []


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("onnxlm.runtime.session", "import torch"),
        ("onnxlm.runtime.session", "def f():\n    from onnx_ir import load"),
        ("onnxlm.runtime.session", "from onnxlm.export import pipeline"),
        ("onnxlm.runtime.session", "from onnxlm import models"),
        ("onnxlm.models.config", "from onnxlm.export import x"),
        ("onnxlm.quantize.blocks", "import torch.nn"),
        ("onnxlm.quantize.blocks", "from onnxlm.models.config import ModelConfig"),
        ("onnxlm.manifest", "import numpy, onnx"),
        ("onnxlm.manifest", "from onnxlm.cli import main"),
        ("onnxlm.models.config", "from . import x"),
    ],
)
def test_the_check_sees_faults(name: str, source: str) -> None:
    assert len(faults(name, source)) == 1


IMPORT_ALL = """
import importlib, pkgutil, sys

BLOCKED = set(sys.argv[1].split(","))

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in BLOCKED:
            raise ModuleNotFoundError(f"{name} is blocked")

sys.meta_path.insert(0, Blocker())
for name in sys.argv[2:]:
    module = importlib.import_module(name)
    for info in pkgutil.walk_packages(getattr(module, "__path__", []), f"{name}."):
        importlib.import_module(info.name)
        print(info.name)
print("done")
"""


def import_all(blocked: set[str], *names: str) -> list[str]:
    """Import modules with all their submodules in a new process that lacks the `blocked` libraries."""
    command = [sys.executable, "-c", IMPORT_ALL, ",".join(sorted(blocked)), *names]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_the_runtime_needs_no_torch() -> None:
    names = import_all(
        HEAVY | {"huggingface_hub"}, "onnxlm.runtime", "onnxlm.cli", "onnxlm.package"
    )
    assert names[-1] == "done"
    assert any(name.startswith("onnxlm.runtime.") for name in names)


def test_quantizing_needs_no_torch() -> None:
    assert (
        import_all({"torch", "transformers", "optimum"}, "onnxlm.quantize", "onnxlm.graphs")[-1]
        == "done"
    )
