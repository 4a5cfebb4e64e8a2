"""OpenVINO, the second provider that really runs: in an environment of its own, against the CPU's tokens.

`scripts/openvino_environment.py` makes the environment. The oracle is transformers where the model is tiny,
and the CPU provider, itself held against PyTorch, for the real one.
"""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.commands import Ran
from support.runtime_models import at_once, hot_package

from onnxlm.export import export
from onnxlm.package import open_package
from onnxlm.runtime import load

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts/openvino_environment.py"
FOLDER = ROOT / ".cache/openvino"
PROMPT = "The capital of France is"

pytestmark = pytest.mark.openvino


@pytest.fixture(scope="module")
def python() -> Path:
    """The interpreter of the environment."""
    path: Path = runpy.run_path(str(SCRIPT))["python_of"](FOLDER)
    if not (FOLDER / ".ready").is_file():
        pytest.skip(f"there is no environment with OpenVINO: python {SCRIPT.name} .cache/openvino")
    return path


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package in the shape in which it is imported, for an environment that it is not installed in."""
    script = runpy.run_path(str(ROOT / "scripts/link_tree.py"))
    names = script["main"].__globals__
    names["TREE"] = tmp_path_factory.mktemp("tree")
    script["main"]()
    tree: Path = names["TREE"]
    return tree


def run(python: Path, tree: Path, *arguments: str | Path) -> Ran:
    environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [str(python), "-m", "onnxlm", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    return Ran(done.returncode, done.stdout, done.stderr)


def tokens(python: Path, tree: Path, package: Path, prompt: str, count: int) -> list[int]:
    ran = run(
        python, tree, "generate", package, prompt, "--provider", "openvino", "--json",
        "--temperature", "0", "--max-new-tokens", str(count),
    )  # fmt: skip
    assert ran.code == 0, ran.err
    facts = json.loads(ran.out)
    assert (facts["provider"], facts["fallback"]) == ("openvino", None)
    found: list[int] = facts["token_ids"]
    return found


def test_the_tokens_of_transformers(python: Path, tree: Path) -> None:
    package = hot_package("plain")
    model = load(package.path)
    ids = model.encode("Abc")
    expected: list[int] = []
    while len(expected) < 24:
        expected.append(int(torch.argmax(at_once([*ids, *expected])[-1])))
        if expected[-1] in model.eos_token_ids:
            break
    assert tokens(python, tree, package.path, "Abc", 24) == expected


def test_every_node_is_on_openvino(python: Path, tree: Path) -> None:
    package = hot_package("plain").path
    ran = run(python, tree, "providers", "--package", package, "--provider", "openvino", "--json")
    assert ran.code == 0, ran.err
    for graph in json.loads(ran.out).values():
        assert set(graph["nodes"]) == {"OpenVINOExecutionProvider"}
        assert graph["nodes"]["OpenVINOExecutionProvider"]["MatMul"] > 10
        assert graph["copies"] == {}


@pytest.mark.parametrize("lowering", ["ort", "portable"])
def test_packages_it_cannot_run_are_refused_in_a_line(
    python: Path, tree: Path, lowering: str
) -> None:
    """With the others it fails inside, after pages of its own text."""
    ran = run(python, tree, "generate", hot_package(lowering).path, "Abc", "--provider", "openvino")
    assert (ran.code, ran.out) == (2, "")
    assert ran.err == (
        "error: execution provider 'openvino' does not run packages of this lowering; "
        f"found {lowering}; allowed: plain; export the model with --lowering plain\n"
    )


@pytest.mark.real_model
def test_the_real_model(python: Path, tree: Path, smollm2: Path, tmp_path: Path) -> None:
    package = tmp_path / "model"
    export(smollm2, package, lowering="plain")
    assert open_package(package).manifest.precision == "fp32"
    ours = load(package, packed=False).generate(PROMPT, max_new_tokens=24, temperature=0)
    assert tokens(python, tree, package, PROMPT, 24) == ours.token_ids


def test_the_script_makes_nothing_without_an_index(tmp_path: Path) -> None:
    environment = os.environ | {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path)}
    folder = tmp_path / "environment"
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(folder)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(
        "openvino_environment: pip cannot install onnxruntime-openvino==1.24.1 here"
    )
    assert not folder.exists()
