"""Every bad input is one line that names the file or field and what to do, exit code 2, nothing left."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnxruntime
import pytest
from support.commands import Ran, run_process
from support.gguf_writer import write_gguf
from support.hot import hot_model
from support.tiny import CONFIG, CONTEXT, write_source

Cli = Callable[..., Ran]
SHARD = "model-00002-of-00003.safetensors"


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in three weight files; do not change it."""
    return write_source(tmp_path_factory.mktemp("sharded") / "model", shards=3)


@pytest.fixture
def checkpoint(sharded: Path, tmp_path: Path) -> Path:
    """A checkpoint to damage."""
    return Path(shutil.copytree(sharded, tmp_path / "model"))


@pytest.fixture
def package(tiny_package: Path, tmp_path: Path) -> Path:
    """A package to damage."""
    return Path(shutil.copytree(tiny_package, tmp_path / "package"))


def edit_config(folder: Path, **changes: Any) -> Path:
    """Change keys of config.json; None deletes one."""
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8")) | changes
    kept = {key: value for key, value in config.items() if value is not None}
    path.write_text(json.dumps(kept), encoding="utf-8")
    return folder


def refused(ran: Ran, *parts: str) -> None:
    """One line of error that holds all the parts, in their order."""
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith("error: ")
    assert ran.err.endswith("\n")
    assert ran.err.count("\n") == 1
    at = 0
    for part in parts:
        at = ran.err.find(part, at)
        assert at >= 0, f"{part!r} is not in its place in: {ran.err}"


class Export:
    """Exports that must fail, into a folder that must stay as it was."""

    def __init__(self, cli: Cli, folder: Path) -> None:
        self._cli = cli
        self._folder = folder
        folder.mkdir()

    def refused(self, source: Path, *parts: str, precision: str = "fp32") -> None:
        ran = self._cli("export", source, self._folder / "new" / "out", "--precision", precision)
        refused(ran, *parts)
        assert list(self._folder.iterdir()) == []


@pytest.fixture
def export(cli: Cli, tmp_path: Path) -> Export:
    return Export(cli, tmp_path / "destination")


def test_missing_shard(export: Export, checkpoint: Path) -> None:
    (checkpoint / SHARD).unlink()
    export.refused(checkpoint, str(checkpoint), SHARD, "model.layers.", "fetch the missing files")


def test_truncated_shard(export: Export, checkpoint: Path) -> None:
    whole = (checkpoint / SHARD).stat().st_size
    os.truncate(checkpoint / SHARD, 5000)
    export.refused(checkpoint, SHARD, "cut short; found 5000 bytes", f"{whole} bytes", "fetch")


def test_git_lfs_pointer(export: Export, checkpoint: Path) -> None:
    pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 1\n"
    (checkpoint / SHARD).write_text(pointer, encoding="utf-8")
    export.refused(checkpoint, SHARD, "Git-LFS pointer", "git lfs pull")


def test_missing_tensor(export: Export, checkpoint: Path) -> None:
    edit_config(checkpoint, num_hidden_layers=3)
    export.refused(checkpoint, "tensors are missing: model.layers.2.", "correct its config")


def test_extra_tensor(export: Export, checkpoint: Path) -> None:
    edit_config(checkpoint, num_hidden_layers=1)
    export.refused(checkpoint, "no place for", "model.layers.1.", "config does not fit")


def test_wrong_shape(export: Export, checkpoint: Path) -> None:
    edit_config(checkpoint, intermediate_size=100)
    expected = "model.layers.0.mlp.down_proj.weight is [64, 96] and should be [64, 100]"
    export.refused(checkpoint, expected, "correct the config")


def test_a_bad_source_is_refused_before_a_quantized_package_is_begun(
    export: Export, checkpoint: Path
) -> None:
    (checkpoint / SHARD).unlink()
    export.refused(checkpoint, SHARD, precision="int8")


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"model_type": "banana"}, ("model_type", "found 'banana'", "allowed:", "llama")),
        (
            {"rope_parameters": {"rope_type": "banana", "rope_theta": 1e4}},
            ("config.json: rope_type", "found 'banana'", "default, linear, llama3, yarn"),
        ),
        (
            {"intermediate_size": None},
            ("config.json: field 'intermediate_size' is missing", "add"),
        ),
        ({"hidden_size": "64"}, ("config.json: field 'hidden_size'", "found '64'", "int")),
        ({"eos_token_id": "0"}, ("config.json: field 'eos_token_id'", "found '0'", "int")),
    ],
    ids=["architecture", "rope type", "missing field", "mistyped field", "eos id"],
)
def test_config(
    export: Export, checkpoint: Path, changes: dict[str, Any], parts: tuple[str, ...]
) -> None:
    export.refused(edit_config(checkpoint, **changes), *parts)


def test_gguf_with_another_magic(export: Export, tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"nonsense" * 100)
    export.refused(tmp_path / "model.gguf", "model.gguf: not a GGUF file", "b'GGUF'", "fetch")


def test_gguf_cut_short(export: Export, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", hot_model(CONFIG))
    os.truncate(path, path.stat().st_size - 1000)
    export.refused(path, "model.gguf", "fetch the file again")


def test_no_such_source(export: Export, tmp_path: Path) -> None:
    export.refused(tmp_path / "absent", "absent: no such file or folder", "GGUF file", "Hub id")


def test_precision_that_is_not_known(export: Export, checkpoint: Path) -> None:
    export.refused(checkpoint, "precision; found 'int3'", "fp32", "int8", precision="int3")


@pytest.mark.parametrize("options", [("--requantize",), ("--activations", "fp16")])
def test_options_of_a_quantizer_without_one(
    cli: Cli, checkpoint: Path, tmp_path: Path, options: tuple[str, ...]
) -> None:
    ran = cli("export", checkpoint, tmp_path / "out", *options)
    refused(ran, "options of a quantizer; found precision fp32; allowed: int8, int4")


def test_activations_that_do_not_go(cli: Cli, checkpoint: Path, tmp_path: Path) -> None:
    command = ("export", checkpoint, tmp_path / "out", "--precision", "int8", "--activations")
    refused(cli(*command, "int8"), "activations; found 'int8'; allowed: fp32, fp16")
    ran = cli(*command, "fp16", "--prefill-rows")
    refused(ran, "(--prefill-rows); found activations in fp16; allowed: fp32")


def test_non_empty_destination(cli: Cli, checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "full"
    out.mkdir()
    (out / "letter.txt").write_text("dear", encoding="utf-8")
    for precision in ("fp32", "int8"):
        ran = cli("export", checkpoint, out, "--precision", precision)
        refused(ran, f"{out}: is a non-empty folder that is no package; found letter.txt")
        assert [path.name for path in out.iterdir()] == ["letter.txt"]


def test_unwritable_destination(cli: Cli, checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    ran = cli("export", checkpoint, tmp_path / "file" / "out")
    refused(ran, f"{tmp_path / 'file' / 'out'}: cannot be made", "is a file")


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="root may write anywhere")
def test_folder_without_permission(cli: Cli, checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "locked").mkdir(mode=0o500)
    refused(cli("export", checkpoint, tmp_path / "locked" / "out"), str(tmp_path / "locked"))


def test_package_cut_short(cli: Cli, package: Path) -> None:
    data = package / "model.onnx_data"
    size = data.stat().st_size
    os.truncate(data, size - 1)
    ran = cli("generate", package, "hi")
    refused(ran, str(data), f"found {size - 1} bytes; allowed: {size} bytes", "export")


def test_package_changed_with_its_size_kept(cli: Cli, package: Path) -> None:
    data = package / "model.onnx_data"
    content = bytearray(data.read_bytes())
    content[-5:] = bytes(5) if any(content[-5:]) else b"12345"
    data.write_bytes(content)
    refused(cli("generate", package, "hi"), str(data), "SHA-256", "export the package again")


def test_weights_outside_the_package(cli: Cli, package: Path) -> None:
    """A writer who hashes what he wrote is still not let out of the folder."""
    graph = package / "decode.onnx"
    content = graph.read_bytes().replace(b"model.onnx_data", b"../x/onnx_data_")
    graph.write_bytes(content)
    manifest = json.loads((package / "onnxlm.json").read_text(encoding="utf-8"))
    digest = hashlib.sha256(content).hexdigest()
    manifest["files"]["decode.onnx"] = {"bytes": len(content), "sha256": digest}
    (package / "onnxlm.json").write_text(json.dumps(manifest), encoding="utf-8")
    ran = cli("generate", package, "hi")
    refused(ran, str(graph), "location; found '../x/onnx_data_'; allowed: model.onnx_data")


@pytest.mark.parametrize("command", [("generate", "hi"), ("inspect",), ("verify",)])
def test_no_package(cli: Cli, tmp_path: Path, command: tuple[str, ...]) -> None:
    refused(cli(command[0], tmp_path / "absent", *command[1:]), f"{tmp_path / 'absent'}: ")


def test_prompt_longer_than_the_context(cli: Cli, tiny_package: Path) -> None:
    ran = cli("generate", tiny_package, "x" * (CONTEXT + 1))
    refused(ran, f"longer than the context; found {CONTEXT + 1} tokens; allowed: up to {CONTEXT}")


@pytest.mark.parametrize("prompt", ["", "-"])
def test_empty_prompt(tiny_package: Path, prompt: str) -> None:
    ran = run_process("generate", tiny_package, prompt, stdin=b"")
    refused(ran, "the prompt is empty", "give at least one token")


def test_prompt_that_is_no_text(tiny_package: Path) -> None:
    ran = run_process("generate", tiny_package, "-", stdin=b"caf\xe9")
    refused(ran, "the prompt on standard input is not UTF-8; found byte 3")


def test_token_outside_the_vocabulary(cli: Cli, package: Path) -> None:
    """A tokenizer with more tokens than the model has rows."""
    path = package / "tokenizer.json"
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    tokenizer["added_tokens"].append(
        {**tokenizer["added_tokens"][0], "id": CONFIG["vocab_size"], "content": "<new>"}
    )
    path.write_text(json.dumps(tokenizer), encoding="utf-8")
    manifest = json.loads((package / "onnxlm.json").read_text(encoding="utf-8"))
    content = path.read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    manifest["files"]["tokenizer.json"] = {"bytes": len(content), "sha256": digest}
    (package / "onnxlm.json").write_text(json.dumps(manifest), encoding="utf-8")
    refused(cli("generate", package, "a<new>b"), str(CONFIG["vocab_size"]))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--temperature", "-1"), "generation field 'temperature'; found -1.0; allowed: "),
        (("--top-k", "-1"), "generation field 'top_k'; found -1; allowed: "),
        (("--top-p", "1.5"), "generation field 'top_p'; found 1.5; allowed: "),
        (("--seed", "-1"), "generation field 'seed'; found -1; allowed: "),
        (("--max-new-tokens", "-1"), "generation field 'max_new_tokens'; found -1; allowed: "),
        (("--provider", "banana"), "execution provider is not known; found 'banana'; allowed: "),
        (("--device-id", "-1"), "device_id; found -1; allowed: 0 or more"),
        (
            ("--device-id", "1"),
            "execution provider 'cpu' has no device id; allowed: providers that ",
        ),
        (("--gpu-mem-limit", "lots"), "gpu_mem_limit; found 'lots'; allowed: a number of bytes "),
        (("--gpu-mem-limit", "1GB"), "execution provider 'cpu' has no memory limit; allowed: "),
        (("--graph-capture",), "execution provider 'cpu' has no graph capture; allowed: "),
    ],
)
def test_generation_field(
    cli: Cli, tiny_package: Path, arguments: tuple[str, ...], message: str
) -> None:
    refused(cli("generate", tiny_package, "hi", *arguments), f"error: {message}")


@pytest.mark.skipif(
    "CUDAExecutionProvider" in onnxruntime.get_available_providers(), reason="CUDA is here"
)
def test_cuda_where_there_is_none(cli: Cli, tiny_package: Path) -> None:
    ran = cli("generate", tiny_package, "hi", "--provider", "cuda")
    refused(ran, "'cuda' cannot be used", "has no CUDAExecutionProvider", "onnxruntime-gpu")
    allowed = cli("generate", tiny_package, "hi", "--provider", "cuda", "--allow-fallback")
    assert allowed.code == 0
    fallback, speed = allowed.err.splitlines()
    assert fallback.startswith("cpu instead of cuda: the installed onnxruntime ")
    assert speed.startswith("cpu: TTFT ")


@pytest.mark.parametrize("lengths", ["0", "1,x", "", "1,-2", "1.5"])
def test_lengths_that_are_none(cli: Cli, tiny_package: Path, lengths: str) -> None:
    ran = cli("inspect", tiny_package, "--kv-lengths", lengths)
    refused(ran, f"--kv-lengths; found {lengths!r}; allowed: whole numbers from 1")


def test_calibration_file(cli: Cli, tiny_package: Path, tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    for content, said in ((None, "cannot be read"), (b"\xff", "not UTF-8"), (b" \n", "is empty")):
        if content is not None:
            file.write_bytes(content)
        ran = cli("quantize", tiny_package, tmp_path / "out", "--calibration", file)
        refused(ran, f"{file}: {said}")
    assert not (tmp_path / "out").exists()
