"""`onnxlm verify`: what passes, what fails and how it is said, and what is refused."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.commands import Ran
from support.hot import hot_model, save_folder
from support.hot_packages import change_parameter, edited
from support.tiny import CONFIG, CONTEXT, write_source

from onnxlm.manifest import read_manifest
from onnxlm.package import open_package

Cli = Callable[..., Ran]
CHECKS = ["prefill", "prefill", "decode", "padded", "greedy,"]


@pytest.fixture(scope="module")
def int8(tiny_package: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A quantized package of `tiny_source`."""
    from onnxlm.quantize import quantize

    return quantize(tiny_package, tmp_path_factory.mktemp("int8") / "model").path


@pytest.fixture(scope="module")
def wrong(tiny_package: Path) -> Path:
    """A package with one weight of layer 1 off by 2%."""

    def edit(package: Any, graphs: Any) -> None:
        change_parameter(package, graphs, "layers.1.mlp.down_proj.weight", lambda w: w * 1.02)

    return edited(open_package(tiny_package), edit).path


def test_a_right_package(cli: Cli, tiny_package: Path, tiny_source: Path) -> None:
    """Against the checkpoint that the manifest names; nothing is written."""
    before = read_manifest(tiny_package)
    ran = cli("verify", tiny_package, "--threads", "1")
    assert (ran.code, ran.err) == (0, "")
    head, reference, text, _, header, *rows, _, verdict = ran.out.splitlines()
    assert head == f"{tiny_package}: fp32, lowering ort, on CPU"
    assert reference == f"reference: {tiny_source} (PyTorch, fp32)"
    assert text == "text: bundled evaluation text"
    assert header.split() == ["check", "result", "compared", "largest", "difference", "allowed"]
    assert [row.split()[0] for row in rows] == CHECKS
    assert all("  ok" in row for row in rows)
    assert verdict == "ok"
    assert read_manifest(tiny_package) == before


def test_a_wrong_package(cli: Cli, wrong: Path) -> None:
    ran = cli("verify", wrong, "--threads", "1")
    assert (ran.code, ran.err) == (1, "")
    *_, where, _, verdict = ran.out.splitlines()
    assert "prefill.onnx first differs behind layer 1: relative difference " in where
    assert verdict == "FAILED"
    assert ran.out.count("  FAILED") >= 4


def test_json(cli: Cli, tiny_package: Path, wrong: Path) -> None:
    ran = cli("verify", tiny_package, "--json")
    said = json.loads(ran.out)
    assert (ran.code, ran.err, said["ok"], said["divergence"]) == (0, "", True, None)
    assert [check["ok"] for check in said["checks"]] == [True] * 5
    assert (said["precision"], said["lowering"], said["provider"]) == ("fp32", "ort", "CPU")

    ran = cli("verify", wrong, "--json", "--record")
    said = json.loads(ran.out)
    assert (ran.code, ran.err, said["ok"]) == (1, "", False)
    assert (said["divergence"]["graph"], said["divergence"]["layer"]) == ("prefill", 1)
    assert read_manifest(wrong).parity == {}, "figures of a wrong package are not recorded"


def test_fp16_is_held_to_both(cli: Cli, tiny_source: Path, tmp_path: Path) -> None:
    assert cli("export", tiny_source, tmp_path / "fp16", "--precision", "fp16").code == 0
    ran = cli("verify", tmp_path / "fp16", "--tokens", "100")
    assert (ran.code, ran.err) == (0, "")
    *_, header, prefill, decode, _, verdict = ran.out.splitlines()
    assert ran.out.count("  ok") == 5
    assert header.split()[:4] == ["path", "verdict", "tokens", "KL"]
    assert prefill.split()[:3] == ["prefill", "good", "100"]
    assert decode.split()[:2] == ["decode", "good"]
    assert verdict == "ok"


@pytest.mark.parametrize("by_package", [False, True])
def test_quality(
    cli: Cli, int8: Path, tiny_package: Path, tiny_source: Path, by_package: bool
) -> None:
    source = tiny_package if by_package else tiny_source
    ran = cli("verify", int8, "--reference", source, "--tokens", "200", "--json")
    said = json.loads(ran.out)
    assert (ran.code, ran.err) == (0, "")
    kind = "fp32 package" if by_package else "PyTorch, fp32"
    assert said["reference"] == f"{source} ({kind})"
    prefill, decode = said["quality"]["prefill"], said["quality"]["decode"]
    assert prefill["tokens"] == 200
    assert decode["tokens"] == CONTEXT - CONTEXT // 2
    for figures in (prefill, decode):
        assert 0 < figures["kl"] < 0.1
        assert figures["top1"] > 0.85
        assert figures["verdict"] == "good"


def test_figures_are_recorded_on_request(
    cli: Cli, int8: Path, tiny_package: Path, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(int8, tmp_path / "copy"))
    ran = cli("verify", copy, "--reference", tiny_package, "--tokens", "64", "--record")
    assert (ran.code, ran.err) == (0, f"recorded in {copy}\n")
    recorded = open_package(copy, verify="always").manifest.quality
    assert recorded["prefill_tokens"] == 64
    (row,) = [line for line in ran.out.splitlines() if line.startswith("prefill")]
    assert row.split()[3] == f"{recorded['prefill_kl']:.4f}"
    assert "quality" in cli("inspect", copy).out


def test_a_text_of_ones_own(cli: Cli, int8: Path, tiny_package: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("The capital of Japan is Tokyo. " * 3, encoding="utf-8")
    ran = cli("verify", int8, "--reference", tiny_package, "--text", text, "--json")
    said = json.loads(ran.out)
    assert said["text"] == "given text"
    assert said["quality"]["prefill"]["tokens"] < 93


def test_a_collapsed_package_fails(cli: Cli, int8: Path, tmp_path: Path) -> None:
    """The reference is another model of the same shape: as good as noise."""
    other = save_folder(hot_model(CONFIG, seed=9), tmp_path)
    ran = cli("verify", int8, "--reference", other, "--tokens", "100")
    assert ran.code == 1
    assert "collapsed" in ran.out
    assert ran.out.endswith("\nFAILED\n")


def refused(ran: Ran, *parts: str) -> None:
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith("error: ")
    assert ran.err.count("\n") == 1
    assert [part for part in parts if part not in ran.err] == []


def test_refusals(
    cli: Cli, int8: Path, tiny_package: Path, tiny_source: Path, tmp_path: Path
) -> None:
    refused(cli("verify", tmp_path / "no"), "is no package")
    refused(
        cli("verify", int8, "--reference", int8), f"{int8}: is no reference", "found int8", "fp32"
    )
    refused(cli("verify", tiny_package, "--reference", tmp_path / "gone"), "gone")
    refused(cli("verify", tiny_package, "--provider", "banana"), "'banana'", "cpu")
    refused(cli("verify", tiny_package, "--text", tmp_path / "gone.txt"), "gone.txt")
    short = tmp_path / "short.txt"
    short.write_text("a", encoding="utf-8")
    refused(cli("verify", tiny_package, "--text", short), "too few tokens", "13 or more")
    refused(cli("verify", int8, "--reference", tiny_package, "--text", short), "too short")
    other = save_folder(hot_model({**CONFIG, "vocab_size": 100}), tmp_path / "other")
    refused(
        cli("verify", tiny_package, "--reference", other),
        "is another model",
        "found a vocabulary of 100",
        "--reference",
    )


def test_the_source_has_moved(cli: Cli, tmp_path: Path) -> None:
    source = write_source(tmp_path / "source")
    assert cli("export", source, tmp_path / "package").code == 0
    source.rename(tmp_path / "elsewhere")
    refused(
        cli("verify", tmp_path / "package"),
        "the model it was made from is not there",
        f"found {source}",
        "name it with --reference",
    )
    ran = cli("verify", tmp_path / "package", "--reference", tmp_path / "elsewhere")
    assert ran.code == 0


WITHOUT_TORCH = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"torch", "onnx", "onnx_ir", "transformers", "optimum"}:
            raise ModuleNotFoundError(f"{name} is blocked")

sys.meta_path.insert(0, Blocker())
from onnxlm.cli import main
main(sys.argv[1:])
"""


def test_quality_against_a_package_takes_no_torch(int8: Path, tiny_package: Path) -> None:
    command = ["verify", int8, "--reference", tiny_package, "--tokens", "40", "--json"]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, *map(str, command)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert np.isfinite(json.loads(done.stdout)["quality"]["prefill"]["kl"])
