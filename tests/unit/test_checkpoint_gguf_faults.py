"""Every broken GGUF file is one clear line that names what was found."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter
from support.gguf_writer import write_gguf
from support.hot import hot_model
from support.refusals import refusal

from onnxlm.errors import CheckpointError, ConfigError
from onnxlm.models.checkpoint import read
from onnxlm.models.registry import find_architecture

TINY = dict(find_architecture("llama").tiny)


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "tiny.gguf", hot_model(TINY))


@pytest.mark.parametrize(
    "key",
    ["attention.head_count", "embedding_length", "block_count", "feed_forward_length"],
)
def test_missing_metadata_is_named_in_full(tmp_path: Path, key: str) -> None:
    path = write_gguf(tmp_path / "a.gguf", hot_model(TINY), without=frozenset({key}))
    with pytest.raises(ConfigError, match=rf"metadata key llama\.{key} is missing"):
        read(path)


@pytest.mark.parametrize(
    ("key", "value"),
    [("expert_shared_count", 1), ("attention.sliding_window", 4), ("logit_scale", 2)],
)
def test_metadata_that_changes_numbers_is_refused(tmp_path: Path, key: str, value: int) -> None:
    path = write_gguf(
        tmp_path / "a.gguf",
        hot_model(TINY),
        edit=lambda writer: writer.add_uint32(f"llama.{key}", value),
    )
    assert f"found llama.{key}={value}" in refusal(path)


def test_unknown_rope_type_is_named(tmp_path: Path) -> None:
    def edit(writer: GGUFWriter) -> None:
        writer.add_string("llama.rope.scaling.type", "banana")
        writer.add_float32("llama.rope.scaling.factor", 4.0)

    message = refusal(write_gguf(tmp_path / "a.gguf", hot_model(TINY), edit=edit))
    assert "rope_type is not supported; found 'banana'; allowed: default, linear" in message


@pytest.mark.parametrize("key", ["rope.dimension_count", "attention.value_length"])
def test_other_head_widths_are_refused(tmp_path: Path, key: str) -> None:
    path = write_gguf(
        tmp_path / "a.gguf",
        hot_model(TINY),
        edit=lambda writer: writer.add_uint32(f"llama.{key}", 16),
        without=frozenset({key}),
    )
    assert f"llama.{key} is not supported with this value; found 16; allowed: 32" in refusal(path)


@pytest.mark.parametrize("name", ["rope_factors.weight", "blk.0.ffn_gate_exps.weight", "extra"])
def test_unknown_tensor_is_named(tmp_path: Path, name: str) -> None:
    path = write_gguf(
        tmp_path / "a.gguf",
        hot_model(TINY),
        edit=lambda writer: writer.add_tensor(name, np.ones(8, np.float32)),
    )
    assert f"does not know; found {name}" in refusal(path)


def test_wrong_shape_names_both(tmp_path: Path) -> None:
    path = write_gguf(
        tmp_path / "a.gguf",
        hot_model(TINY),
        edit=lambda writer: writer.add_uint32("llama.feed_forward_length", 64),
        without=frozenset({"feed_forward_length"}),
    )
    assert "blk.0.ffn_down.weight is [64, 96] and should be [64, 64]" in refusal(path)


def test_missing_tensor_is_named(tmp_path: Path) -> None:
    path = write_gguf(
        tmp_path / "a.gguf",
        hot_model(TINY),
        edit=lambda writer: writer.add_uint32("llama.block_count", 3),
        without=frozenset({"block_count"}),
    )
    assert "tensors are missing: blk.2.attn_k.weight" in refusal(path)


def test_rows_that_do_not_divide_into_heads(tmp_path: Path) -> None:
    path = write_gguf(
        tmp_path / "a.gguf",
        hot_model(TINY),
        edit=lambda writer: writer.add_uint32("llama.attention.head_count", 6),
        without=frozenset({"attention.head_count"}),
    )
    assert "rows of blk.0.attn_q.weight do not divide into its heads" in refusal(path)


def test_other_architecture(tmp_path: Path, tiny: Path) -> None:
    path = tmp_path / "b.gguf"
    path.write_bytes(
        tiny.read_bytes().replace(b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0mamba", 2)
    )
    message = refusal(path)
    assert "found 'mamba'; allowed: " in message
    assert "llama" in message


def test_cut_in_the_tensor_area(tiny: Path) -> None:
    data = tiny.read_bytes()
    for cut in (1, 33, 20000):
        tiny.write_bytes(data[:-cut])
        message = refusal(tiny)
        assert "cut short" in message
        assert f"{len(data) - cut} bytes" in message


@pytest.mark.parametrize("size", [0, 3, 10, 23, 24, 100, 500, 900, 1500])
def test_cut_in_the_header(tiny: Path, size: int) -> None:
    tiny.write_bytes(tiny.read_bytes()[:size])
    message = refusal(tiny)
    assert "cut short" in message or "not a GGUF file" in message


def test_wrong_magic(tiny: Path) -> None:
    tiny.write_bytes(b"GGML" + tiny.read_bytes()[4:])
    assert "not a GGUF file; found magic b'GGML'; allowed: b'GGUF'" in refusal(tiny)


def test_git_lfs_pointer(tiny: Path) -> None:
    tiny.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 98362432\n")
    assert "found a Git-LFS pointer; allowed" in refusal(tiny)


@pytest.mark.parametrize(
    ("version", "found"),
    [(b"\x01\0\0\0", "found 1"), (b"\x63\0\0\0", "found 99"), (b"\0\0\0\x03", "big-endian")],
)
def test_versions(tiny: Path, version: bytes, found: str) -> None:
    data = tiny.read_bytes()
    tiny.write_bytes(data[:4] + version + data[8:])
    message = refusal(tiny)
    assert found in message
    assert "little-endian versions 2, 3" in message


def test_counts_that_the_file_cannot_hold(tiny: Path) -> None:
    data = tiny.read_bytes()
    tiny.write_bytes(data[:16] + (2**40).to_bytes(8, "little") + data[24:])
    assert "damaged or cut short" in refusal(tiny)


def test_array_length_that_the_file_cannot_hold(tmp_path: Path) -> None:
    path = write_gguf(
        tmp_path / "a.gguf",
        hot_model(TINY),
        edit=lambda writer: writer.add_array("numbers", [7, 8, 9]),
    )
    data = path.read_bytes()
    at = data.index(b"numbers") + len(b"numbers") + 4 + 4  # behind the types of value and item
    assert data[at : at + 8] == (3).to_bytes(8, "little")
    path.write_bytes(data[:at] + (2**60).to_bytes(8, "little") + data[at + 8 :])
    assert "damaged or cut short" in refusal(path)


@pytest.mark.parametrize("kind", [GGMLQuantizationType.I32, GGMLQuantizationType.Q8_K])
def test_tensor_type_that_cannot_be_read(tmp_path: Path, kind: GGMLQuantizationType) -> None:
    def edit(writer: GGUFWriter) -> None:
        if kind == GGMLQuantizationType.I32:
            writer.add_tensor("output.weight", np.ones((96, 64), np.int32))
        else:
            writer.add_tensor("output.weight", np.ones((96, 292), np.uint8), raw_dtype=kind)

    expected = rf"output\.weight.*cannot be read; found {kind.name}; allowed: F32, F16, BF16"
    with pytest.raises(CheckpointError, match=expected):
        read(write_gguf(tmp_path / "a.gguf", hot_model(TINY), edit=edit))
