"""The examples of the guides to generation and chats, run one after the other on the hot model."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
from support.runtime_models import hot_package

from onnxlm.runtime.sampling_params import SamplingParams
from onnxlm.runtime.stopping import StopReason

DOCS = Path(__file__).parents[2] / "docs"
# Of each guide: its Python blocks, the commands, and a file that the examples leave behind.
GUIDES = {"chat.md": (6, 2, "answers.txt"), "generation.md": (9, 2, "facts.json")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a package of the name that the examples use."""
    path = tmp_path_factory.mktemp("docs")
    shutil.copytree(hot_package().path, path / "smollm2-int8")
    return path


def blocks(guide: str, language: str) -> list[str]:
    text = (DOCS / guide).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def run(command: list[str], folder: Path) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("guide", GUIDES)
def test_python(guide: str, folder: Path) -> None:
    found = blocks(guide, "python")
    assert len(found) == GUIDES[guide][0]
    out = run([sys.executable, "-c", "\n".join(found)], folder).splitlines()
    assert len(out) >= 4
    assert guide != "chat.md" or (folder / "chat.json").is_file()


@pytest.mark.skipif(sys.platform == "win32", reason="needs a POSIX shell")
@pytest.mark.parametrize("guide", GUIDES)
def test_commands(guide: str, folder: Path) -> None:
    found = blocks(guide, "sh")
    _, count, left = GUIDES[guide]
    assert len(found) == count
    for block in found:
        command = re.sub(r"\bonnxlm\b", f"{sys.executable} -m onnxlm", block)
        run(["sh", "-euc", command], folder)
    assert (folder / left).read_text(encoding="utf-8").count("\n") >= 2


def test_the_table_of_fields_is_that_of_the_code() -> None:
    text = (DOCS / "generation.md").read_text(encoding="utf-8")
    told = [
        row.groups() for row in re.finditer(r"^\| `(\w+)` \| (.*?) \| (.*?) \| .+ \|$", text, re.M)
    ]
    assert told == [
        (field.name, spelled(field.default), field.metadata["kind"].allowed)
        for field in dataclasses.fields(SamplingParams)
    ]


def spelled(default: object) -> str:
    """A default as the guide spells it."""
    if default is None or default == ():
        return "none"
    return str(default).lower() if isinstance(default, bool) else str(default)


def test_every_finish_reason_is_told() -> None:
    text = (DOCS / "generation.md").read_text(encoding="utf-8")
    table = text.partition("| `finish_reason` |")[2].partition("\n\n")[0]
    assert re.findall(r"^\| `(\w+)` \|", table, re.M) == list(get_args(StopReason))
