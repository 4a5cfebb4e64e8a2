"""Make build/typecheck/onnxlm, where type checkers see the package in the shape in which it is imported.

    python scripts/link_tree.py

Packages are mapped to top-level folders (pyproject.toml, [tool.setuptools.package-dir]); checkers do not
follow that mapping, but they follow links.
"""

from __future__ import annotations

import os
import shutil
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TREE = ROOT / "build" / "typecheck"


def link(target: Path, path: Path) -> None:
    """Link `path` to `target`; copy where the system allows no links."""
    try:
        path.symlink_to(os.path.relpath(target, path.parent), target_is_directory=target.is_dir())
    except OSError:
        (shutil.copytree if target.is_dir() else shutil.copy2)(target, path)


def main() -> None:
    """Build the tree anew from the mapping in pyproject.toml."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    mapping: dict[str, str] = settings["tool"]["setuptools"]["package-dir"]
    shutil.rmtree(TREE, ignore_errors=True)
    package = TREE / "onnxlm"
    package.mkdir(parents=True)
    for item in sorted((ROOT / mapping["onnxlm"]).iterdir()):
        if item.name != "__pycache__":
            link(item, package / item.name)
    for name, folder in mapping.items():
        if name != "onnxlm":
            link(ROOT / folder, package / name.removeprefix("onnxlm."))


if __name__ == "__main__":
    main()
