"""Folders of gpt-oss as published, experts in MXFP4, against transformers reading the same folder."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support.hot import hot_model, oracle_logits
from support.hot_packages import letter_tokenizer
from support.parity import assert_logits_close
from support.quantized import stored_parameters, with_parameters
from support.quantized_runs import assert_computes
from support.refusals import refusal
from torch import Tensor
from transformers import AutoModelForCausalLM, Mxfp4Config, PreTrainedModel
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from onnxlm.models import load
from onnxlm.models.checkpoint import read
from onnxlm.models.registry import find_architecture
from onnxlm.workflow import make_package

CONFIG = {**find_architecture("gpt_oss").tiny, "intermediate_size": 96}
METHOD = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
}
IDS = [(7 * position + 3) % 90 for position in range(40)]
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
EXPERTS = "model.layers.1.mlp.experts"
BLOCKS, SCALES = f"{EXPERTS}.down_proj_blocks", f"{EXPERTS}.down_proj_scales"
Tensors = dict[str, Tensor]


def packed(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[E, K, N] as transformers has it -> numbers [E, N, K / 32, 16] and exponents [E, N, K / 32]."""
    blocks = weight.transpose(1, 2).unflatten(2, (-1, 32))
    exponents = torch.floor(torch.log2(blocks.abs().amax(-1))) - 2
    scaled = blocks / 2 ** exponents[..., None]
    numbers = (scaled.abs()[..., None] - E2M1).abs().argmin(-1) + 8 * (scaled < 0)
    # Neighbours whose exponents differ.
    exponents += torch.arange(exponents.numel()).reshape(exponents.shape) % 4 - 2
    return (numbers[..., 0::2] | numbers[..., 1::2] << 4).byte(), (exponents + 127).byte()


def published(folder: Path, change: Callable[[Tensors], object] = lambda tensors: None) -> Path:
    """A hot model in two files; the numbers of a matrix lie in one, their exponents in the other."""
    folder.mkdir(exist_ok=True)
    tensors: Tensors = {}
    for name, value in hot_model(CONFIG).state_dict().items():
        if name.endswith(("gate_up_proj", "down_proj")):
            tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = packed(value)
        else:
            tensors[name] = value.bfloat16()
    change(tensors)
    files = {
        name: f"model-0000{1 + name.endswith('_scales')}-of-00002.safetensors" for name in tensors
    }
    for file in sorted(set(files.values())):
        held = {name: tensors[name].contiguous() for name in tensors if files[name] == file}
        save_file(held, folder / file, {"format": "pt"})
    index = {"metadata": {}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    write_config(folder, METHOD)
    return folder


def write_config(folder: Path, method: dict[str, Any]) -> None:
    config = {"architectures": ["GptOssForCausalLM"], **CONFIG, "quantization_config": method}
    (folder / "config.json").write_text(json.dumps(config))


def oracle(folder: Path) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.float32,
        attn_implementation="eager",
        quantization_config=Mxfp4Config(dequantize=True),
    )
    return model.eval()


def test_a_published_folder(tmp_path: Path) -> None:
    tensors: Tensors = {}
    folder = published(tmp_path, tensors.update)
    checkpoint, theirs = read(folder), oracle(folder)
    state = dict(checkpoint.state())
    for part in ("gate_up", "down"):
        stored = (tensors[f"{EXPERTS}.{part}_proj_{end}"] for end in ("blocks", "scales"))
        # Their matrices are [E, inputs, outputs].
        expected = convert_moe_packed_tensors(*stored, dtype=torch.float32).transpose(1, 2)
        assert torch.equal(state[f"layers.1.mlp.experts.{part}"], expected)
        assert expected.unique().numel() > 30
    assert_logits_close(load(checkpoint).logits(IDS), oracle_logits(theirs, IDS))
    assert "quantization_config" not in checkpoint.raw_config


def test_every_number_and_exponent(tmp_path: Path) -> None:
    """OCP Microscaling Formats v1.0, section 5.3.3: a power of two times a number of E2M1."""
    numbers = torch.arange(16).repeat(2)
    exponents = torch.arange(6 * 64 * 3).reshape(6, 64, 3) % 253  # 6 times the next is no float32

    def change(tensors: Tensors) -> None:
        pairs = (numbers[0::2] | numbers.flip(0)[1::2] << 4).byte()
        tensors[BLOCKS] = pairs.expand(6, 64, 3, 16)
        tensors[SCALES] = exponents.byte()

    value = dict(read(published(tmp_path, change)).state())["layers.1.mlp.experts.down"]
    signed = torch.cat((E2M1, -E2M1)).double()
    even, odd = signed.repeat(2)[0::2], signed.repeat(2).flip(0)[1::2]
    block = torch.stack((even, odd), dim=1).flatten()
    expected = 2.0 ** (exponents[..., None].double() - 127) * block
    assert torch.equal(value.double(), expected.flatten(2))


def put(name: str, value: Tensor) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({name: value})


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda tensors: tensors.pop(SCALES), f"{BLOCKS} is no tensor of MXFP4; found "
         f"[6, 64, 3, 16] beside no {SCALES}"),
        (lambda tensors: tensors.pop(BLOCKS), f"found {SCALES} is U8"),
        (put(SCALES, torch.zeros(6, 64, 2, dtype=torch.uint8)), f"beside {SCALES} [6, 64, 2]"),
        (put(SCALES, torch.zeros(6, 64, 3)), f"{BLOCKS} is no tensor of MXFP4"),
        (put(BLOCKS, torch.zeros(6, 64, 6, 8, dtype=torch.uint8)), "found [6, 64, 6, 8] beside"),
        (put("lm_head.weight", torch.zeros(96, 64, dtype=torch.uint8)), "lm_head.weight is U8"),
        (put("adapter_blocks", torch.zeros(6, 64, dtype=torch.uint8)), "adapter_blocks is no"),
    ],
)  # fmt: skip
def test_bytes_that_are_no_mxfp4_are_named(
    tmp_path: Path, change: Callable[[Tensors], object], found: str
) -> None:
    assert found in refusal(published(tmp_path, change))


def test_a_missing_matrix_and_one_of_another_width_are_named(tmp_path: Path) -> None:
    def without(tensors: Tensors) -> None:
        del tensors[BLOCKS], tensors[SCALES]

    def narrow(tensors: Tensors) -> None:
        tensors[BLOCKS], tensors[SCALES] = tensors[BLOCKS][:, :, :2], tensors[SCALES][:, :, :2]

    message = refusal(published(tmp_path, without))
    assert f"tensors are missing: {EXPERTS}.down_proj or {BLOCKS}" in message
    message = refusal(published(tmp_path, narrow))
    assert f"{BLOCKS} is [6, 64, 64] and should be [6, 64, 96]" in message


@pytest.mark.parametrize(
    ("method", "found"),
    [
        (
            {"quant_method": "gptq", "bits": 4},
            "not supported with this value; found 'gptq'",
        ),
        ({"quant_method": "mxfp4", "group_size": 16}, "found group_size=16"),
    ],
)
def test_other_methods_are_refused(tmp_path: Path, method: dict[str, Any], found: str) -> None:
    folder = published(tmp_path)
    write_config(folder, method)
    message = refusal(folder)
    assert message.startswith("quantization_config: ")
    assert found in message


def test_codes_of_experts_are_taken_over(tmp_path: Path) -> None:
    """int8 holds them without loss; what else the folder has is rounded."""
    folder = published(tmp_path / "published")
    letter_tokenizer().save(str(folder / "tokenizer.json"))
    model = load(folder)
    experts = [
        f"layers.{layer}.mlp.experts.{part}" for layer in (0, 1) for part in ("gate_up", "down")
    ]
    assert set(read(folder).quantized) == set(experts)
    for name, options, taken in (
        ("int8", {}, 4),
        ("int8", {"requantize": True}, 0),
        ("int4", {}, 0),
    ):
        package = make_package(folder, tmp_path / "q", precision=name, **options)
        found = stored_parameters(package, model)
        for expert in experts:
            assert torch.equal(found[expert], model.get_parameter(expert)) == bool(taken)
        summary = package.manifest.quantization.summary
        assert summary["taken_over"] == taken
        assert summary["experts"] == f"{name[3:]} bits in blocks of 32"
        assert_computes(package, with_parameters(model, found))
