"""GGUF files of mixtures as the families' own table does not write them: older, quantized, at fault."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter, quants
from gguf.constants import Keys
from numpy.typing import NDArray
from support.gguf_writer import write_gguf
from support.hot import hot_model, oracle_logits
from support.parity import assert_logits_close
from support.quantized import stored_parameters
from support.quantized_runs import assert_computes
from support.refusals import refusal
from transformers import PreTrainedModel

from onnxlm.models import load
from onnxlm.models.checkpoint import read
from onnxlm.models.registry import find_architecture
from onnxlm.workflow import make_package

V2, V3, OSS = (
    dict(find_architecture(name).tiny) for name in ("deepseek_v2", "deepseek_v3", "gpt_oss")
)
IDS = [(7 * position + 3) % 90 for position in range(40)]
MXFP4, F32 = GGMLQuantizationType.MXFP4, GGMLQuantizationType.F32
Array = NDArray[np.float32]
# Keys that say an absorbed head's widths, and those of a whole one.
ABSORBED = frozenset(
    key.removeprefix("{arch}.")
    for key in (
        Keys.Attention.HEAD_COUNT_KV,
        Keys.Attention.KEY_LENGTH,
        Keys.Attention.VALUE_LENGTH,
        Keys.Attention.KEY_LENGTH_MLA,
        Keys.Attention.VALUE_LENGTH_MLA,
    )
)


def rewritten(writer: GGUFWriter, form: Callable[[str, Array], Mapping[str, Array]]) -> None:
    """Have the writer put each tensor down in another form."""
    add = writer.add_tensor

    def add_tensor(name: str, array: Array, **rest: Any) -> None:
        for new, changed in form(name, array).items():
            add(new, np.ascontiguousarray(changed), **rest)

    writer.add_tensor = add_tensor


def older(model: PreTrainedModel) -> Callable[[GGUFWriter], None]:
    """The form of files before spring 2025: keys and values of a layer in one matrix, whole heads."""
    config, state = model.config, model.state_dict()

    def form(name: str, array: Array) -> Mapping[str, Array]:
        if name.endswith("attn_k_b.weight"):
            stored = f"model.layers.{name.split('.')[1]}.self_attn.kv_b_proj.weight"
            return {name.replace("k_b", "kv_b"): state[stored].numpy()}
        return {} if name.endswith("attn_v_b.weight") else {name: array}

    def edit(writer: GGUFWriter) -> None:
        width = config.qk_nope_head_dim + config.qk_rope_head_dim
        writer.add_uint32("deepseek2.attention.head_count_kv", config.num_attention_heads)
        writer.add_uint32("deepseek2.attention.key_length", width)
        writer.add_uint32("deepseek2.attention.value_length", config.v_head_dim)
        rewritten(writer, form)

    return edit


@pytest.mark.parametrize("config", [V2, V3], ids=["softmax", "sigmoid"])
def test_older_files_have_keys_and_values_in_one_matrix(
    tmp_path: Path, config: dict[str, Any]
) -> None:
    oracle = hot_model(config)
    path = write_gguf(tmp_path / "a.gguf", oracle, edit=older(oracle), without=ABSORBED)
    assert_logits_close(load(path).logits(IDS), oracle_logits(oracle, IDS))


def test_maps_of_all_heads_in_one_matrix(tmp_path: Path) -> None:
    def flat(name: str, array: Array) -> Mapping[str, Array]:
        joined = name.endswith(("attn_k_b.weight", "attn_v_b.weight"))
        return {name: array.reshape(-1, array.shape[-1]) if joined else array}

    oracle = hot_model(V3)
    path = write_gguf(tmp_path / "a.gguf", oracle, edit=lambda writer: rewritten(writer, flat))
    assert_logits_close(load(path).logits(IDS), oracle_logits(oracle, IDS))


def test_files_that_say_nothing_of_routing_choose_by_softmax(tmp_path: Path) -> None:
    silent = frozenset(
        key.removeprefix("{arch}.")
        for key in (
            Keys.LLM.EXPERT_GATING_FUNC,
            Keys.LLM.EXPERT_GROUP_COUNT,
            Keys.LLM.EXPERT_GROUP_USED_COUNT,
            Keys.LLM.EXPERT_WEIGHTS_NORM,
            Keys.LLM.EXPERT_WEIGHTS_SCALE,
            Keys.LLM.LEADING_DENSE_BLOCK_COUNT,
        )
    )
    oracle = hot_model(V2)
    path = write_gguf(tmp_path / "a.gguf", oracle, without=silent)
    assert_logits_close(load(path).logits(IDS), oracle_logits(oracle, IDS))


def test_a_bias_on_the_choice_means_scores_by_sigmoid(tmp_path: Path) -> None:
    """Files of configs that transformers has written do not say what scores are made by."""
    oracle = hot_model(V3)
    path = write_gguf(tmp_path / "a.gguf", oracle, without=frozenset({"expert_gating_func"}))
    assert_logits_close(load(path).logits(IDS), oracle_logits(oracle, IDS))


def test_files_that_know_of_no_groups(tmp_path: Path) -> None:
    """Those of DeepSeek-V3 before autumn 2025: llama.cpp chooses among all experts then."""
    written = hot_model(V3)
    without = frozenset({"expert_group_count", "expert_group_used_count"})
    model = load(write_gguf(tmp_path / "a.gguf", written, without=without))
    oracle = hot_model({**V3, "n_group": 1, "topk_group": 1})
    assert_logits_close(model.logits(IDS), oracle_logits(oracle, IDS))
    assert not torch.allclose(model.logits(IDS), oracle_logits(written, IDS), atol=0.1)


def test_a_width_of_narrow_queries_without_their_tensors(tmp_path: Path) -> None:
    oracle = hot_model(V2)
    path = write_gguf(
        tmp_path / "a.gguf",
        oracle,
        edit=lambda writer: writer.add_uint32("deepseek2.attention.q_lora_rank", 1536),
    )
    assert_logits_close(load(path).logits(IDS), oracle_logits(oracle, IDS))


@pytest.mark.parametrize(
    ("key", "value", "found"),
    [
        ("expert_gating_func", 3, "expert_gating_func is not supported with this value; found 3"),
        ("attention.key_length", 20, "key_length is not supported with this value; found 20"),
        ("attention.head_count_kv", 4, "head_count_kv is not supported with this value; found 4"),
        ("nextn_predict_layers", 1, "does not read; found deepseek2.nextn_predict_layers=1"),
        ("attention.temperature_scale", 2, "found deepseek2.attention.temperature_scale=2"),
        ("expert_shared_count", 0, "'n_shared_experts'; found 0"),
    ],
)
def test_what_would_change_numbers_is_named(
    tmp_path: Path, key: str, value: int, found: str
) -> None:
    path = write_gguf(
        tmp_path / "a.gguf",
        hot_model(V2),
        edit=lambda writer: writer.add_uint32(f"deepseek2.{key}", value),
        without=frozenset({key}),
    )
    assert found in refusal(path)


def test_a_bias_on_the_choice_of_a_softmax_router_is_named(tmp_path: Path) -> None:
    path = write_gguf(
        tmp_path / "a.gguf",
        hot_model(V2),
        edit=lambda w: w.add_tensor("blk.0.exp_probs_b.bias", np.ones(8, np.float32)),
    )
    assert "no place for; found blk.0.exp_probs_b.bias" in refusal(path)


@pytest.mark.parametrize("kind", ["MXFP4", "Q8_0", "Q4_0"])
def test_experts_in_blocks(tmp_path: Path, kind: str) -> None:
    """gpt-oss as it is published: experts of MXFP4. The oracle has the values that the package reads."""
    oracle, stored = hot_model({**OSS, "intermediate_size": 64}), GGMLQuantizationType[kind]
    path = write_gguf(
        tmp_path / "a.gguf",
        oracle,
        lambda name: stored if name.endswith("_exps.weight") else F32,
    )
    with torch.no_grad():
        for name, parameter in oracle.named_parameters():
            if ".experts." in name and not name.endswith("_bias"):
                rows = np.ascontiguousarray(parameter.numpy().swapaxes(1, 2))
                values = quants.dequantize(quants.quantize(rows, stored), stored)
                parameter.copy_(torch.from_numpy(values.copy()).transpose(1, 2))
    checkpoint = read(path)
    state, theirs = dict(checkpoint.state()), oracle.state_dict()
    for part in ("gate_up", "down"):
        expected = theirs[f"model.layers.1.mlp.experts.{part}_proj"].transpose(1, 2)
        assert torch.equal(state[f"layers.1.mlp.experts.{part}"], expected)
    assert_logits_close(load(checkpoint).logits(IDS), oracle_logits(oracle, IDS))


def experts_of(gate: str, up: str, down: str) -> Callable[[str], GGMLQuantizationType]:
    """Types of a file's tensors: those of its experts, a router in floats, all else as wide as gates."""
    parts = {"ffn_gate_exps": gate, "ffn_up_exps": up, "ffn_down_exps": down}
    usual = "Q8_0" if gate == "MXFP4" else gate

    def kind(name: str) -> GGMLQuantizationType:
        part = name.split(".")[-2]
        return F32 if part == "ffn_gate_inp" else GGMLQuantizationType[parts.get(part, usual)]

    return kind


@pytest.mark.parametrize(
    ("types", "precision", "form"),
    [
        (("MXFP4", "MXFP4", "MXFP4"), "int8", "8 bits in blocks of 32"),
        (("Q8_0", "Q8_0", "Q8_0"), "int8", "8 bits in blocks of 32"),
        (("Q4_0", "Q4_0", "Q4_0"), "int4", "4 bits in blocks of 32"),
        # A layer's experts have codes of one width.
        (("Q4_0", "Q8_0", "Q4_0"), "int4", "8 bits in blocks of 32"),
        (("Q4_0", "Q4_0", "Q5_0"), "int4", "8 bits in blocks of 32"),
    ],
)
@pytest.mark.filterwarnings("error::onnxlm.errors.OnnxlmWarning")  # nothing is left to calibrate
@pytest.mark.parametrize("family", ["gpt_oss", "mixtral"])
def test_codes_of_experts_arrive_bit_for_bit(
    tmp_path: Path, family: str, types: tuple[str, str, str], precision: str, form: str
) -> None:
    oracle = hot_model({**find_architecture(family).tiny, "intermediate_size": 96})
    path = write_gguf(tmp_path / "a.gguf", oracle, experts_of(*types))
    package = make_package(path, tmp_path / "q", precision=precision)
    model = load(path)
    found = stored_parameters(package, model)
    for name, parameter in model.named_parameters():
        assert torch.equal(found[name], parameter.detach()), name
    assert package.manifest.quantization.summary["experts"] == form
    assert_computes(package, model)


@pytest.mark.parametrize("types", [("Q4_1",) * 3, ("Q4_0", "Q4_0", "Q4_1")])
def test_experts_with_offsets_are_rounded_anew(tmp_path: Path, types: tuple[str, str, str]) -> None:
    """Those of gates and ups too: QMoE has codes of one form."""
    path = write_gguf(
        tmp_path / "a.gguf", hot_model({**OSS, "intermediate_size": 96}), experts_of(*types)
    )
    package = make_package(path, tmp_path / "q", precision="int4")
    model = load(path)
    found = stored_parameters(package, model)
    for name, parameter in model.named_parameters():
        if ".experts." not in name or name.endswith("down"):
            same = torch.equal(found[name], parameter.detach())
            assert same != name.endswith("experts.down"), name
    # Table, head, and of each layer two matrices of attention.
    assert package.manifest.quantization.summary["taken_over"] == 2 + 2 * 2


def test_gates_and_ups_of_all_experts_in_one_tensor(tmp_path: Path) -> None:
    gates: dict[str, Array] = {}

    def fused(name: str, array: Array) -> Mapping[str, Array]:
        if name.endswith("ffn_gate_exps.weight"):
            gates[name] = array
            return {}
        if not name.endswith("ffn_up_exps.weight"):
            return {name: array}
        gate = gates[name.replace("up", "gate")]
        return {name.replace("up", "gate_up"): np.concatenate((gate, array), axis=1)}

    oracle = hot_model(find_architecture("qwen3_moe").tiny)
    path = write_gguf(tmp_path / "a.gguf", oracle, edit=lambda writer: rewritten(writer, fused))
    assert_logits_close(load(path).logits(IDS), oracle_logits(oracle, IDS))


def test_a_window_is_required_of_gpt_oss(tmp_path: Path) -> None:
    path = write_gguf(
        tmp_path / "a.gguf", hot_model(OSS), without=frozenset({"attention.sliding_window"})
    )
    assert "gpt-oss.attention.sliding_window" in refusal(path)


def test_a_bias_of_one_expert_too_few_is_named(tmp_path: Path) -> None:
    def short(name: str, array: Array) -> Mapping[str, Array]:
        return {name: array[:-1] if name == "blk.0.ffn_up_exps.bias" else array}

    path = write_gguf(
        tmp_path / "a.gguf", hot_model(OSS), edit=lambda writer: rewritten(writer, short)
    )
    assert "experts in layers.0.mlp.experts.gate_up_bias do not fit together" in refusal(path)
