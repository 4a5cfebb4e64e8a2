"""The wheel holds what the tree holds: an undeclared package would work here and be missing there."""

from __future__ import annotations

import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("models", "export", "quantize", "runtime")


def settings() -> dict[str, Any]:
    loaded = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    return dict(loaded["tool"]["setuptools"])


def source_roots() -> dict[str, Path]:
    """Package -> its folder, as the layout of the repository says."""
    return {"onnxlm": ROOT / "src/onnxlm"} | {f"onnxlm.{name}": ROOT / name for name in FOLDERS}


def source_files() -> dict[str, Path]:
    """Path inside the wheel -> file, for everything that belongs in it."""
    return {
        f"{package.replace('.', '/')}/{file.relative_to(folder).as_posix()}": file
        for package, folder in source_roots().items()
        for file in sorted(folder.rglob("*"))
        if file.is_file() and "__pycache__" not in file.parts and file.suffix != ".pyc"
    }


def test_every_package_is_declared() -> None:
    in_tree = {
        name.rpartition("/")[0].replace("/", ".") for name in source_files() if name.endswith(".py")
    }
    assert sorted(settings()["packages"]) == sorted(in_tree)


def test_every_folder_of_modules_is_a_package() -> None:
    folders = {file.parent for name, file in source_files().items() if name.endswith(".py")}
    assert [f for f in sorted(folders) if not (f / "__init__.py").is_file()] == []


def test_folders_are_mapped() -> None:
    expected = {
        name: folder.relative_to(ROOT).as_posix() for name, folder in source_roots().items()
    }
    assert settings()["package-dir"] == expected


def test_no_folder_shadows_the_package() -> None:
    assert not (ROOT / "onnxlm").exists()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built without a network and without touching the tree."""
    place = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    command += [
        "--config-settings=--build-option=--quiet",
        f"--wheel-dir={place}",
        str(copy(place)),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (built,) = place.glob("*.whl")
    return built


def copy(place: Path) -> Path:
    """What a build reads, copied: setuptools leaves its build folder beside pyproject.toml."""
    tree = place / "tree"
    files = [
        *source_files().values(),
        *(ROOT / n for n in ("pyproject.toml", "README.md", "LICENSE")),
    ]
    for file in files:
        target = tree / file.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(file.read_bytes())
    return tree


def test_the_wheel_holds_every_module_and_data_file(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        inside = {name for name in archive.namelist() if ".dist-info/" not in name}
        assert inside == set(source_files())
        for name, file in source_files().items():
            assert archive.read(name) == file.read_bytes()


def test_the_wheel_tells_its_command_and_needs(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (info,) = {name.partition("/")[0] for name in archive.namelist() if ".dist-info/" in name}
        commands = archive.read(f"{info}/entry_points.txt").decode()
        needs = archive.read(f"{info}/METADATA").decode().splitlines()
        assert any(name.endswith("LICENSE") for name in archive.namelist())
    assert "onnxlm = onnxlm.cli:main" in commands
    base = {
        line.removeprefix("Requires-Dist: ").partition(">")[0]
        for line in needs
        if line.startswith("Requires-Dist: ") and "extra ==" not in line
    }
    assert base == {"onnxruntime", "numpy", "tokenizers", "jinja2", "typer", "rich"}
