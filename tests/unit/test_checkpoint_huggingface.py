"""Every broken Hugging Face folder is one clear line, before any weight is read."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.gguf_writer import write_gguf
from support.hot import hot_model, save_folder
from support.refusals import refusal

from onnxlm.errors import CheckpointError, ConfigError
from onnxlm.models import load
from onnxlm.models.checkpoint import read
from onnxlm.models.registry import find_architecture
from onnxlm.runtime.sampling_params import SamplingParams
from onnxlm.runtime.stopping import eos_token_ids

TINY = dict(find_architecture("llama").tiny)
LAST_SHARD = "model-00003-of-00003.safetensors"
INDEX = "model.safetensors.index.json"
Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture
def single(tmp_path: Path) -> Path:
    return save_folder(hot_model(TINY), tmp_path / "single")


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return save_folder(hot_model(TINY), tmp_path / "sharded", shards=3)


def edit_json(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    raw = json.loads(path.read_text())
    change(raw)
    path.write_text(json.dumps(raw))


def edit_tensors(path: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def shard_of(folder: Path, tensor: str) -> Path:
    return folder / json.loads((folder / INDEX).read_text())["weight_map"][tensor]


def test_reads_what_a_folder_holds(single: Path) -> None:
    checkpoint = read(str(single))
    assert checkpoint.kind == "huggingface"
    assert checkpoint.config.head_dim == TINY["head_dim"]
    assert checkpoint.raw_config["model_type"] == "llama"
    assert checkpoint.generation_config["eos_token_id"] == 2
    assert dict(checkpoint.quantized) == {}
    size = (single / "model.safetensors").stat().st_size
    assert checkpoint.provenance["files"] == {"model.safetensors": size}
    names = [name for name, _ in checkpoint.state()]
    assert names[0] == "embed_tokens.weight"
    assert "lm_head.weight" not in names


@pytest.mark.parametrize("kind", ["huggingface", "gguf"])
def test_a_loaded_model_is_independent_of_its_checkpoint(tmp_path: Path, kind: str) -> None:
    oracle = hot_model(TINY)
    source = (
        write_gguf(tmp_path / "a.gguf", oracle) if kind == "gguf" else save_folder(oracle, tmp_path)
    )
    checkpoint = read(source)
    before = {name: value.clone() for name, value in checkpoint.state()}
    with torch.no_grad():
        for parameter in load(checkpoint).parameters():
            parameter.fill_(7.0)
    assert all(torch.equal(value, before[name]) for name, value in checkpoint.state())


def test_missing_shard_names_the_file_and_its_tensors(sharded: Path) -> None:
    lost = [k for k, v in _weight_map(sharded).items() if v == LAST_SHARD]
    (sharded / LAST_SHARD).unlink()
    message = refusal(sharded)
    assert LAST_SHARD in message
    assert any(name in message for name in lost)
    assert f"no file for {len(lost)} tensors" in message


def _weight_map(folder: Path) -> dict[str, str]:
    return json.loads((folder / INDEX).read_text())["weight_map"]


@pytest.mark.parametrize("cut", [1, 1000])
def test_truncated_shard_names_both_sizes(sharded: Path, cut: int) -> None:
    data = (sharded / LAST_SHARD).read_bytes()
    (sharded / LAST_SHARD).write_bytes(data[:-cut])
    message = refusal(sharded)
    assert re.search(rf"{LAST_SHARD}: .*cut short.*found {len(data) - cut} bytes", message)
    assert f"{len(data)} bytes by its header" in message


@pytest.mark.parametrize("size", [0, 5, 100])
def test_shard_cut_in_its_header(sharded: Path, size: int) -> None:
    (sharded / LAST_SHARD).write_bytes((sharded / LAST_SHARD).read_bytes()[:size])
    assert re.search(rf"{LAST_SHARD}: .*(cut short|damaged)", refusal(sharded))


def test_damaged_header(single: Path) -> None:
    path = single / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[8:20] = b"\xff" * 12
    path.write_bytes(data)
    assert "model.safetensors: the safetensors header is damaged" in refusal(single)


def test_git_lfs_pointer(single: Path) -> None:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0a1b\nsize 269060552\n"
    (single / "model.safetensors").write_text(pointer)
    message = refusal(single)
    assert "model.safetensors: a Git-LFS pointer" in message
    assert "git lfs pull" in message


def test_index_lists_a_tensor_that_its_shard_lacks(sharded: Path) -> None:
    shard = shard_of(sharded, Q_PROJ)
    edit_tensors(shard, lambda tensors: tensors.pop(Q_PROJ))
    assert f"{shard.name}: tensors that {INDEX} places in this file are missing: {Q_PROJ}" in (
        refusal(sharded)
    )


def test_shard_holds_a_tensor_that_the_index_lacks(sharded: Path) -> None:
    shard = shard_of(sharded, Q_PROJ)
    edit_json(sharded / INDEX, lambda raw: raw["weight_map"].pop(Q_PROJ))
    message = refusal(sharded)
    assert message.startswith(shard.name)
    assert f"found {Q_PROJ}" in message


def test_shards_without_their_index(sharded: Path) -> None:
    (sharded / INDEX).unlink()
    assert f"fetch {INDEX} too" in refusal(sharded)


def test_missing_tensors_are_named_as_the_checkpoint_names_them(single: Path) -> None:
    gone = [Q_PROJ, "model.norm.weight"]
    edit_tensors(single / "model.safetensors", lambda tensors: [tensors.pop(n) for n in gone])
    message = refusal(single)
    assert str(single) in message
    assert f"tensors are missing: {', '.join(sorted(gone))}" in message


def test_many_missing_tensors_are_counted(single: Path) -> None:
    edit_tensors(single / "model.safetensors", lambda tensors: tensors.clear())
    assert re.search(r"tensors are missing: .* and 12 more", refusal(single))


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.q_norm.weight",
        "model.layers.0.self_attn.q_proj.bias",  # known, but this config has no biases
        "model.layers.2.mlp.up_proj.weight",  # a layer more than the config says
        "adapter.weight",
    ],
)
def test_unexpected_tensor(single: Path, name: str) -> None:
    edit_tensors(
        single / "model.safetensors", lambda tensors: tensors.update({name: torch.ones(4)})
    )
    assert f"no place for; found {name}" in refusal(single)


def test_tensors_known_to_be_useless_are_skipped(single: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit_tensors(
        single / "model.safetensors", lambda tensors: tensors.update({name: torch.ones(4)})
    )
    assert len(dict(read(single).state())) == 20


def test_wrong_shape_names_both(single: Path) -> None:
    edit_tensors(
        single / "model.safetensors", lambda tensors: tensors.update({Q_PROJ: torch.ones(64, 64)})
    )
    assert f"{Q_PROJ} is [64, 64] and should be [128, 64]" in refusal(single)


def test_integer_weights(single: Path) -> None:
    def quantize(tensors: dict[str, torch.Tensor]) -> None:
        tensors[Q_PROJ] = tensors[Q_PROJ].to(torch.int8)

    edit_tensors(single / "model.safetensors", quantize)
    message = refusal(single)
    assert f"{Q_PROJ} is I8" in message
    assert "allowed: BF16, F16, F32" in message


def test_stored_copy_of_a_tied_head(single: Path) -> None:
    head, table = "lm_head.weight", "model.embed_tokens.weight"
    path = single / "model.safetensors"
    edit_tensors(path, lambda tensors: tensors.update({head: tensors[table].clone()}))
    model = load(single)
    assert model.lm_head.weight is model.embed_tokens.weight
    edit_tensors(path, lambda tensors: tensors[head][3, 4].add_(1e-3))
    message = refusal(single)
    assert f"{head} and {table} differ though tie_word_embeddings is true" in message


def test_untied_head_must_be_there(tmp_path: Path) -> None:
    folder = save_folder(hot_model({**TINY, "tie_word_embeddings": False}), tmp_path)
    edit_tensors(folder / "model.safetensors", lambda tensors: tensors.pop("lm_head.weight"))
    assert "tensors are missing: lm_head.weight" in refusal(folder)


def test_config_that_is_not_utf8(single: Path) -> None:
    (single / "config.json").write_bytes(b'{"model_type": "ll\xe9ma"}')
    assert re.search(r"config\.json: not UTF-8 text; found byte 18", refusal(single))


@pytest.mark.parametrize(("text", "reason"), [("{", "not valid JSON"), ("[]", "not a JSON object")])
def test_config_that_is_no_json_object(single: Path, text: str, reason: str) -> None:
    (single / "config.json").write_text(text)
    assert f"config.json: {reason}" in refusal(single)


@pytest.mark.parametrize(
    "field", ["intermediate_size", "hidden_size", "vocab_size", "num_hidden_layers", "model_type"]
)
def test_config_that_lacks_a_field(single: Path, field: str) -> None:
    edit_json(single / "config.json", lambda raw: raw.pop(field))
    assert f"config.json: field '{field}' is missing" in refusal(single)


def test_config_that_lacks_its_key_value_heads(single: Path) -> None:
    """Llama 1 had as many as query heads and no such field: here the weights say otherwise."""
    edit_json(single / "config.json", lambda raw: raw.pop("num_key_value_heads"))
    assert re.search(r"k_proj\.weight is \[64, 64\] and should be \[128, 64\]", refusal(single))


def test_unknown_architecture_lists_the_known(single: Path) -> None:
    edit_json(single / "config.json", lambda raw: raw.update(model_type="gpt5"))
    assert re.search(
        r"model_type is not supported; found 'gpt5'; allowed: .*llama", refusal(single)
    )


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("value", ["2", [2, "3"], True, 2.0, -2, [2, -5]])
def test_token_id_of_a_wrong_type(single: Path, file: str, value: object) -> None:
    edit_json(single / file, lambda raw: raw.update(eos_token_id=value))
    message = refusal(single)
    assert message.startswith(f"{file}: field 'eos_token_id'")
    assert repr(value) in message


@pytest.mark.parametrize("value", [None, 7, [5, 7]])
def test_token_ids_that_are_right(single: Path, value: object) -> None:
    edit_json(single / "generation_config.json", lambda raw: raw.update(eos_token_id=value))
    assert read(single).generation_config["eos_token_id"] == value


@pytest.mark.parametrize(("value", "read_as"), [(-1, None), ([-1], None), ([5, -1, 7], [5, 7])])
def test_minus_one_is_no_token(single: Path, value: object, read_as: object) -> None:
    """The runtime refuses an id below 0: a package never has one."""
    for file in ("config.json", "generation_config.json"):
        edit_json(single / file, lambda raw: raw.update(eos_token_id=value, pad_token_id=-1))
    checkpoint = read(single)
    for fields in (checkpoint.raw_config, checkpoint.generation_config):
        assert (fields["eos_token_id"], fields["pad_token_id"]) == (read_as, None)
        eos_token_ids({"config.json": fields["eos_token_id"]})


def test_a_top_k_of_minus_one_is_off(single: Path) -> None:
    edit_json(single / "generation_config.json", lambda raw: raw.update(top_k=-1, do_sample=True))
    settings = read(single).generation_config
    assert settings["top_k"] == 0
    assert SamplingParams.from_generation_config(settings).top_k == 0


def test_fields_that_nothing_reads_are_refused(single: Path) -> None:
    edit_json(single / "config.json", lambda raw: raw.update(attn_logit_softcapping=30.0))
    with pytest.raises(ConfigError, match=r"attn_logit_softcapping=30\.0"):
        read(single)


def test_chat_template_inside_the_tokenizer_config(single: Path) -> None:
    templates = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    for value, expected in (("A", b"A"), (templates, b"D")):
        (single / "tokenizer_config.json").write_text(json.dumps({"chat_template": value}))
        assert read(single).tokenizer_files["chat_template.jinja"] == expected
    (single / "chat_template.jinja").write_text("F")
    files = read(single).tokenizer_files
    assert files["chat_template.jinja"] == b"F"
    assert files.keys() == {"tokenizer_config.json", "chat_template.jinja"}


def test_damaged_tokenizer(single: Path) -> None:
    (single / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: not valid JSON"):
        read(single)
