"""Quantized packages against the weights that their codes mean, run in PyTorch; what outliers do to them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch
from gguf import GGMLQuantizationType
from support.gguf_writer import write_gguf
from support.hot import hot_model, save_folder
from support.hot_packages import letter_tokenizer
from support.parity import assert_logits_close
from support.quantized import (
    TEXT,
    Form,
    codes_of,
    configs,
    eager,
    eager_logits,
    initializers,
    oracle,
    quantized_packages,
    source,
    stored_parameters,
    with_parameters,
)
from support.quantized_runs import EXACT, IDS, PREFILL, ROUNDED, assert_computes, graph_logits
from torch import Tensor
from transformers import PreTrainedModel

from onnxlm import io_spec
from onnxlm.export import export
from onnxlm.graphs.weights_file import write_graphs
from onnxlm.models import load
from onnxlm.package import Package
from onnxlm.quality import Quality, QualityMeter
from onnxlm.quantize import QuantizeOptions, quantize, quantizing
from onnxlm.quantize.calibration import Statistics
from onnxlm.quantize.codes import Parameters
from onnxlm.quantize.rewrite import LOWERINGS
from onnxlm.quantize.schemes import find_scheme, scheme_names
from onnxlm.quantize.smoothed import smooth
from onnxlm.quantize.structure import linear_inputs
from onnxlm.workflow import make_package

OPTIONS = QuantizeOptions(calibration_text=TEXT)
PACKAGES = quantized_packages()


@pytest.mark.parametrize("scheme", scheme_names())
@pytest.mark.parametrize("key", PACKAGES)
def test_graphs_compute_with_the_stored_codes(
    key: tuple[str, str, str], scheme: str, tmp_path: Path
) -> None:
    family, variant, lowering = key
    full = source(family, variant, lowering)
    package = quantize(full, tmp_path / "q", scheme=scheme, options=OPTIONS)
    model = eager(family, variant)
    stored = with_parameters(model, stored_parameters(package, model))
    assert_computes(package, stored)


@pytest.mark.parametrize("form", [(8, 32, True), (4, 32, False), (4, 16, True), (8, 128, False)])
@pytest.mark.parametrize("key", PACKAGES)
def test_given_codes_are_taken_over(key: tuple[str, str, str], form: Form, tmp_path: Path) -> None:
    family, variant, lowering = key
    model = eager(family, variant)
    given = codes_of(model, lambda name: form)
    package = quantize(
        source(family, variant, lowering), tmp_path / "q", given=given, options=OPTIONS
    )
    stored = stored_parameters(package, model)
    for name, codes in given.items():
        meant = codes.dequantize()
        np.testing.assert_allclose(stored[name].numpy(), meant, atol=1e-6 * np.abs(meant).max())
    assert_computes(package, with_parameters(model, stored))


def test_given_codes_of_several_widths_are_taken_over(tmp_path: Path) -> None:
    """Files mix widths and sizes of blocks inside what the graphs have merged: q beside v, gate beside up."""
    model = eager("llama", "tiny")
    wide: Form = (8, 16, True)
    forms = {"v_proj": wide, "up_proj": wide, "embed_tokens": wide, "k_proj": (4, 32, True)}
    given = codes_of(model, lambda name: forms.get(name.split(".")[-2], (4, 32, False)))
    package = quantize(source("llama", "tiny"), tmp_path / "q", given=given)
    assert_computes(package, with_parameters(model, given))


def test_layers_that_are_not_given_are_quantized(tmp_path: Path) -> None:
    model = eager("llama", "tiny")
    every = codes_of(model, lambda name: (4, 32, False))
    given = {name: codes for name, codes in every.items() if "layers.0" in name}
    package = quantize(source("llama", "tiny"), tmp_path / "q", given=given, options=OPTIONS)
    found = stored_parameters(package, model)
    for name, codes in given.items():
        np.testing.assert_allclose(found[name].numpy(), codes.dequantize(), atol=1e-6)
    assert_computes(package, with_parameters(model, found))
    # Layers that read what is given, or make it, keep the channels that it was made for.
    norms = ("layers.0.input_layernorm.weight", "layers.0.post_attention_layernorm.weight")
    for name in norms:
        assert torch.equal(found[name], model.get_parameter(name).detach())
    assert not torch.equal(
        found["layers.1.input_layernorm.weight"],
        model.get_parameter("layers.1.input_layernorm.weight").detach(),
    )


@pytest.mark.parametrize(
    ("kind", "precision"),
    [
        (GGMLQuantizationType.Q4_0, "int4"),
        (GGMLQuantizationType.Q4_1, "int4"),
        (GGMLQuantizationType.Q8_0, "int8"),
    ],
)
@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize("variant", ["tiny", "untied, all KV heads, narrow, yarn"])
def test_gguf_blocks_arrive_bit_for_bit(
    variant: str, kind: GGMLQuantizationType, precision: str, lowering: str, tmp_path: Path
) -> None:
    config = configs("llama")[variant] | {
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}
    }
    # As llama.cpp's own files have it, the table is wider than the rest; the fused form takes it as it is.
    table = kind if lowering == "ort" else GGMLQuantizationType.Q8_0
    file = write_gguf(
        tmp_path / "model.gguf",
        hot_model(config),
        lambda name: table if name == "token_embd.weight" else kind,
    )
    package = make_package(file, tmp_path / "q", precision=precision, lowering=lowering)
    model = load(file)
    found = stored_parameters(package, model)
    for name, parameter in model.named_parameters():
        assert torch.equal(found[name], parameter.detach()), name
    assert_computes(package, model)
    # 16 bits for every number of a block, as in the file, but for scales that must be there as they are read.
    widths = {"scale": np.float32 if lowering == "ort" else np.float16, "minimum": np.float16}
    for name, array in initializers(package).items():
        assert array.dtype == widths.get(name.rpartition(".")[2], array.dtype), name


@pytest.mark.parametrize("key", PACKAGES)
def test_smoothing_leaves_the_function(key: tuple[str, str, str], tmp_path: Path) -> None:
    family, variant, lowering = key
    package = source(family, variant, lowering)
    graphs = {name: ir.load(package.graph_path(name)) for name in package.manifest.graphs}
    graph = graphs[io_spec.DECODE].graph
    inputs = linear_inputs(graph)
    seen = {}
    for index, item in enumerate(inputs):
        seen[item.name] = Statistics.empty(item.linears[0].shape[1])
        scales = np.random.default_rng(index).lognormal(0, 3, (1, item.linears[0].shape[1]))
        seen[item.name].add_range(scales.astype(np.float32))
    parameters = Parameters(graph)
    parameters.smoothing = smooth(inputs, parameters, seen, 0.5)
    turned = {linear.name for item in inputs for linear in item.linears if linear.transposed}
    for name in parameters.smoothing.changed:
        values = parameters(name)
        array = np.ascontiguousarray(values.T if name in turned else values)
        for model in graphs.values():
            model.graph.initializers[name].const_value = ir.tensor(array, name=name)
    write_graphs({f"{name}.onnx": model for name, model in graphs.items()}, tmp_path, "data")
    expected = oracle(family, variant)(torch.tensor([IDS])).logits[0].detach()
    assert_logits_close(graph_logits(tmp_path, IDS, PREFILL), expected, EXACT)
    assert any(item.origin is not None for item in inputs)


@pytest.mark.parametrize("variant", list(configs("llama")))
def test_every_input_is_smoothed_but_that_of_a_table_that_is_the_embedding_too(
    variant: str,
) -> None:
    package = source("llama", variant)
    inputs = linear_inputs(ir.load(package.graph_path(io_spec.DECODE)).graph)
    tied = oracle("llama", variant).config.tie_word_embeddings
    assert sum(item.origin is None for item in inputs) == tied


# Operator, and how many of them two layers have: for q, k, v, o, gate and up, but neither for down nor the
# head; in the fused graphs q, k and v are one, gate and up too.
ROW_PRODUCTS = {"ort": ("MatMulIntegerToFloat", 6), "portable": ("MatMulInteger", 12)}


@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize("variant", ["tiny", "odd widths, untied, biases"])
def test_prefill_may_have_weights_of_its_own(variant: str, lowering: str, tmp_path: Path) -> None:
    options = dataclasses.replace(OPTIONS, prefill_rows=True)
    package = quantize(source("llama", variant, lowering), tmp_path / "q", options=options)
    operator, count = ROW_PRODUCTS[lowering]
    for name, expected_count in ((io_spec.PREFILL, count), (io_spec.DECODE, 0)):
        nodes = [node.op_type for node in ir.load(package.graph_path(name)).graph]
        assert nodes.count(operator) == expected_count
    model = eager("llama", variant)
    tensors = initializers(package)
    rows = {}
    for name, place in package.manifest.parameters.items():
        if f"{place.tensor}.row_codes" in tensors:
            whole = (tensors[f"{place.tensor}.row_codes"] * tensors[f"{place.tensor}.row_scale"]).T
            part = whole if place.rows is None else whole[slice(*place.rows)]
            rows[name] = torch.from_numpy(np.ascontiguousarray(part, dtype=np.float32))
    stored = stored_parameters(package, model)
    expected = eager_logits(with_parameters(model, stored | rows), IDS)
    actual = graph_logits(package.path, IDS, len(IDS))
    assert_logits_close(actual, expected, ROUNDED)
    mean = (actual - expected).abs().mean() / expected.abs().mean()
    assert mean < 0.05


def outlier_package(
    edit: Callable[[PreTrainedModel], None], folder: Path, tied: bool
) -> tuple[Package, Tensor]:
    """A hot model after an edit: its fp32 package, and transformers' logits of `TOKENS`."""
    model = hot_model(configs("llama")["tiny"] | {"tie_word_embeddings": tied})
    with torch.no_grad():
        edit(model)
        expected = model(torch.tensor([TOKENS])).logits[0]
    save_folder(model, folder)
    letter_tokenizer().save(str(folder / "tokenizer.json"))
    return export(folder, folder / "fp32"), expected


TOKENS = np.random.default_rng(1).integers(0, 95, 64).tolist()
UNUSED = 95


def quality(expected: Tensor, package: Package) -> Quality:
    """Of the package's logits behind all tokens but the last."""
    meter = QualityMeter()
    for ours, theirs in ((expected, graph_logits(package.path, TOKENS, len(TOKENS))),):
        meter.add(ours[:-1].numpy(), theirs[:-1].numpy(), np.array(TOKENS[1:]))
    return meter.result()


def table_row(model: PreTrainedModel) -> None:
    """A row of the embedding that no token uses is 200 times as large."""
    model.model.embed_tokens.weight[UNUSED] *= 200


def weight_channel(model: PreTrainedModel) -> None:
    """An output channel of the layers that write to the residual stream is 200 times as large."""
    for layer in model.model.layers:
        layer.mlp.down_proj.weight[7] *= 200


def activation_channel(model: PreTrainedModel) -> None:
    """A channel of every linear's input is 200 times as large, and its readers' columns as much smaller."""
    width = model.config.head_dim
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        _compensate(layer.input_layernorm, [attention.q_proj, attention.k_proj, attention.v_proj])
        _compensate(layer.post_attention_layernorm, [mlp.gate_proj, mlp.up_proj])
        attention.v_proj.weight[5] *= 200
        attention.o_proj.weight[:, [5, width + 5]] /= 200  # the query heads that read it
        mlp.up_proj.weight[9] *= 200
        mlp.down_proj.weight[:, 9] /= 200


def _compensate(norm: torch.nn.Module, readers: Sequence[torch.nn.Module]) -> None:
    norm.weight[7] *= 200
    for reader in readers:
        reader.weight[:, 7] /= 200


@pytest.mark.parametrize(
    ("edit", "tied"), [(table_row, False), (weight_channel, True), (activation_channel, True)]
)
@pytest.mark.parametrize("prefill_rows", [False, True])
def test_outliers_leave_int8_good(
    edit: Callable[[PreTrainedModel], None], tied: bool, prefill_rows: bool, tmp_path: Path
) -> None:
    package, expected = outlier_package(edit, tmp_path, tied)
    options = dataclasses.replace(OPTIONS, prefill_rows=prefill_rows)
    found = quality(expected, quantize(package, tmp_path / "q", options=options))
    assert found.verdict == "good"
    assert found.kl < 0.05
    assert found.top1 > 0.85


def test_without_smoothing_an_activation_outlier_is_called_a_collapse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = dataclasses.replace(find_scheme("int8"), smoothing=None)
    monkeypatch.setattr(quantizing, "find_scheme", lambda name: plain)
    package, expected = outlier_package(activation_channel, tmp_path, True)
    found = quality(expected, quantize(package, tmp_path / "q", options=OPTIONS))
    assert found.verdict == "collapsed"
