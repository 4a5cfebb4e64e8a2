"""`onnxlm export` and `onnxlm quantize`: packages, what is said of them, and what is left on the disk."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter
from support.commands import Ran
from support.gguf_writer import write_gguf
from support.hot import hot_model
from support.tiny import CONFIG, train_tokenizer

from onnxlm.models.checkpoint import read
from onnxlm.package import open_package
from onnxlm.runtime import load

Cli = Callable[..., Ran]
MODEL_FILES = {
    "prefill.onnx",
    "decode.onnx",
    "model.onnx_data",
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
}


def test_export_says_what_it_made(tiny_export: Ran, tiny_package: Path) -> None:
    assert (tiny_export.code, tiny_export.err) == (0, "")
    first, *rest = tiny_export.out.splitlines()
    assert first.startswith(f"{tiny_package}: llama, fp32, lowering ort, ")
    listed = {line.split()[0] for line in rest if line.endswith("B")}
    assert listed == MODEL_FILES == {path.name for path in tiny_package.iterdir()} - {"onnxlm.json"}
    fusions = [line for line in rest if "fusions: " in line]
    layers = CONFIG["num_hidden_layers"]
    assert [line.split()[0] for line in fusions] == ["prefill", "decode"]
    assert all(f"packed_qkv {layers}, merged_gate_up {layers}" in line for line in fusions)


def test_export_leaves_nothing_beside_the_package(
    cli: Cli, tiny_source: Path, tmp_path: Path
) -> None:
    ran = cli("export", tiny_source, tmp_path / "out", "--precision", "int8")
    assert (ran.code, ran.err) == (0, "")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    open_package(tmp_path / "out", verify="always")


def test_a_failed_quantization_leaves_nothing(cli: Cli, tiny_source: Path, tmp_path: Path) -> None:
    """With a damaged tokenizer the calibration text cannot be read: this shows after the export."""
    source = Path(shutil.copytree(tiny_source, tmp_path / "source"))
    (source / "tokenizer.json").write_text("{}", encoding="utf-8")
    (tmp_path / "destination").mkdir()
    out = tmp_path / "destination" / "new" / "out"
    ran = cli("export", source, out, "--precision", "int8")
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.count("\n") == 1
    assert "tokenizer" in ran.err
    assert list((tmp_path / "destination").iterdir()) == []


def test_what_a_killed_export_left_is_cleaned_up(
    cli: Cli, tiny_source: Path, tmp_path: Path
) -> None:
    left = tmp_path / ".out.stages-1-abcdef"
    (left / "fp32").mkdir(parents=True)
    (left / "fp32" / "model.onnx_data").write_bytes(b"x" * 100)
    stranger = tmp_path / ".other.stages-1-abcdef"
    stranger.mkdir()
    assert cli("export", tiny_source, tmp_path / "out", "--precision", "int8").code == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == [stranger.name, "out"]


def facts(ran: Ran) -> dict[str, Any]:
    assert (ran.code, ran.err) == (0, "")
    return dict(json.loads(ran.out))


@pytest.mark.parametrize(
    ("options", "precision", "lowering"),
    [
        (("--precision", "fp16"), "fp16", "ort"),
        (("--lowering", "portable"), "fp32", "portable"),
        (("--precision", "int8"), "int8", "ort"),
        (("--precision", "int4"), "int4", "ort"),
    ],
)
def test_export_json(
    cli: Cli,
    tiny_source: Path,
    tmp_path: Path,
    options: tuple[str, ...],
    precision: str,
    lowering: str,
) -> None:
    out = tmp_path / "out"
    said = facts(cli("export", tiny_source, out, *options, "--json"))
    assert said["path"] == str(out)
    assert (said["precision"], said["lowering"]) == (precision, lowering)
    assert said["files"] == {
        path.name: path.stat().st_size for path in out.iterdir() if path.name != "onnxlm.json"
    }
    assert set(said["fusions"]) == {"prefill", "decode"}
    assert (said["quantization"] is None) == (precision in ("fp16", "fp32"))
    ids = [5, 80, 200, 7]
    assert np.isfinite(load(out).logits(ids)).all()


def test_quantizing_is_exporting_quantized(
    cli: Cli, tiny_source: Path, tiny_package: Path, tmp_path: Path
) -> None:
    """The package of two commands, of one command, and of a package as the source are the same model."""
    one = facts(cli("export", tiny_source, tmp_path / "one", "--precision", "int8", "--json"))
    two = facts(cli("quantize", tiny_package, tmp_path / "two", "--scheme", "int8", "--json"))
    three = facts(cli("export", tiny_package, tmp_path / "three", "--precision", "int8", "--json"))
    for said in (one, two, three):
        said.pop("path")
    assert one == two == three
    logits = [load(tmp_path / name).logits([5, 80, 200, 7]) for name in ("one", "two", "three")]
    assert np.array_equal(logits[0], logits[1])
    assert np.array_equal(logits[0], logits[2])


def test_quantize_has_a_default_scheme(cli: Cli, tiny_package: Path, tmp_path: Path) -> None:
    assert facts(cli("quantize", tiny_package, tmp_path / "out", "--json"))["precision"] == "int8"


def test_calibration_text_matters(cli: Cli, tiny_package: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("A B C D E F G H 0 1 2 3 4 5 6 7 8 9 " * 20, encoding="utf-8")
    for name, options in (("plain", ()), ("own", ("--calibration", text))):
        assert cli("quantize", tiny_package, tmp_path / name, *options).code == 0
    ours, bundled = (load(tmp_path / name).logits([5, 80, 200]) for name in ("own", "plain"))
    assert not np.array_equal(ours, bundled)


@pytest.fixture(scope="module")
def quantized_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    return write_gguf(
        path, hot_model(CONFIG), lambda name: GGMLQuantizationType.Q4_1, write_tokenizer
    )


def write_tokenizer(writer: GGUFWriter) -> None:
    """The tiny model's tokenizer as llama.cpp keeps one."""
    tokenizer = train_tokenizer()
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(sorted(tokenizer.get_vocab(), key=tokenizer.token_to_id))
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_eos_token_id(0)


def test_a_quantized_source_keeps_its_codes(cli: Cli, quantized_gguf: Path, tmp_path: Path) -> None:
    """int4 of a 4-bit file is the file's own function; `--requantize`, or another width, is not."""
    ran = cli("export", quantized_gguf, tmp_path / "kept", "--precision", "int4", "--json")
    matrices = [t for t in read(quantized_gguf).tensors.values() if t.quantized is not None]
    assert 0 < facts(ran)["quantization"]["taken_over"] < len(matrices)  # merged ones count as one
    for name, options in (("anew", ("int4", "--requantize")), ("wide", ("int8",))):
        ran = cli("export", quantized_gguf, tmp_path / name, "--json", "--precision", *options)
        assert facts(ran)["quantization"]["taken_over"] == 0
