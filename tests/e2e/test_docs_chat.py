"""The examples of docs/chat.md, run one after the other on the hot model."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.runtime_models import hot_package

DOCUMENT = Path(__file__).parents[2] / "docs" / "chat.md"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a package of the name that the examples use."""
    path = tmp_path_factory.mktemp("docs")
    shutil.copytree(hot_package().path, path / "smollm2-int8")
    return path


def blocks(language: str) -> list[str]:
    text = DOCUMENT.read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def run(command: list[str], folder: Path) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_python(folder: Path) -> None:
    found = blocks("python")
    assert len(found) == 6
    out = run([sys.executable, "-c", "\n".join(found)], folder).splitlines()
    assert len(out) >= 4
    assert (folder / "chat.json").is_file()


@pytest.mark.skipif(sys.platform == "win32", reason="needs a POSIX shell")
def test_commands(folder: Path) -> None:
    found = blocks("sh")
    assert len(found) == 2
    for block in found:
        command = re.sub(r"\bonnxlm\b", f"{sys.executable} -m onnxlm", block)
        run(["sh", "-euc", command], folder)
    assert (folder / "answers.txt").read_text(encoding="utf-8").count("\n") >= 2
