"""From package to package: what is refused, what is kept, and in which form given codes arrive."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch
from support.hot_packages import LETTERS
from support.packages import replace_file
from support.quantized import TEXT, eager, eager_logits, initializers, source
from support.quantized_runs import graph_logits

from onnxlm import io_spec
from onnxlm.errors import ExportError, OnnxlmError, OnnxlmWarning, QuantizationError
from onnxlm.export import export
from onnxlm.manifest import ParameterSpec
from onnxlm.package import Package, PackageWriter, open_package, record_figures
from onnxlm.quantize import QuantizeOptions, calibrating, quantize
from onnxlm.quantize.blocks import round_to_nearest
from onnxlm.quantize.given import merge_given
from onnxlm.quantize.structure import linear_inputs
from onnxlm.quantized_tensor import QuantizedTensor, concatenate

OPTIONS = QuantizeOptions(calibration_text=TEXT)


@pytest.fixture(scope="module")
def int8(tmp_path_factory: pytest.TempPathFactory) -> Package:
    """A quantized package; do not change it."""
    folder = tmp_path_factory.mktemp("int8") / "q"
    return quantize(source("llama", "tiny"), folder, options=OPTIONS)


def copy_of(package: Package, folder: Path) -> Path:
    shutil.copytree(package.path, folder)
    return folder


def refusal(make: Callable[[], object]) -> str:
    """The one line with which something is refused."""
    with pytest.raises(OnnxlmError) as raised:
        make()
    message = str(raised.value)
    assert "\n" not in message
    return message


def test_the_package_says_what_it_is(int8: Package) -> None:
    manifest = open_package(int8.path, verify="always").manifest
    assert manifest.precision == "int8"
    assert manifest.quantization is not None
    assert manifest.quantization.scheme == "int8"
    summary = manifest.quantization.summary
    assert (summary["taken_over"], summary["prefill_weights"]) == (0, "shared")
    before = source("llama", "tiny").manifest
    kept = ("task", "architecture", "lowering", "states", "source", "parameters", "vocab_size")
    for name in kept:
        assert getattr(manifest, name) == getattr(before, name)
    for name, graph in manifest.graphs.items():
        assert graph == before.graphs[name]


def test_side_files_are_copied(int8: Package) -> None:
    before = source("llama", "tiny")
    changed = {"prefill.onnx", "decode.onnx", "model.onnx_data"}
    assert int8.manifest.files.keys() == before.manifest.files.keys()
    for name in before.manifest.files.keys() - changed:
        assert int8.manifest.files[name] == before.manifest.files[name]


def test_figures_of_the_source_are_not_the_packages(tmp_path: Path) -> None:
    folder = copy_of(source("llama", "tiny"), tmp_path / "fp32")
    record_figures(folder, quality={"prefill_kl": 0.0}, parity={"greedy": {"difference": 0.0}})
    manifest = quantize(folder, tmp_path / "q", options=OPTIONS).manifest
    assert (manifest.quality, manifest.parity) == ({}, {})


@pytest.mark.parametrize("variant", ["tiny", "odd widths, untied, biases"])
def test_no_matrix_is_left_and_every_byte_is_used(variant: str, tmp_path: Path) -> None:
    package = quantize(source("llama", variant), tmp_path / "q", options=OPTIONS)
    tensors = initializers(package)
    parameters = {place.tensor for place in package.manifest.parameters.values()}
    assert {tensors[name].ndim for name in parameters & tensors.keys()} == {1}
    used: dict[str, int] = {}
    for graph in package.manifest.graphs.values():
        for value in ir.load(package.path / graph.file).graph.initializers.values():
            if isinstance(value.const_value, ir.ExternalTensor):
                used[value.const_value.name or ""] = value.const_value.nbytes
    # Each tensor begins at a multiple of 64 bytes, those of a megabyte at a page.
    size = package.weights_path.stat().st_size
    assert sum(used.values()) <= size < sum(used.values()) + 64 * len(used)


def test_a_package_may_take_its_sources_place(int8: Package, tmp_path: Path) -> None:
    folder = copy_of(source("llama", "tiny"), tmp_path / "model")
    quantize(folder, folder, options=OPTIONS)
    assert open_package(folder, verify="always").manifest.files == int8.manifest.files


def test_progress_tells_of_every_stage(tmp_path: Path) -> None:
    told: dict[str, list[tuple[int, int]]] = {}

    def progress(stage: str, done: int, total: int) -> None:
        told.setdefault(stage, []).append((done, total))

    quantize(source("llama", "tiny"), tmp_path / "q", options=OPTIONS, progress=progress)
    assert list(told) == ["calibrate", "quantize", "write weights"]
    for steps in told.values():
        assert steps == sorted(steps)
        assert len({total for _, total in steps}) == 1
    assert all(told[stage][-1] == (total, total) for stage in told for _, total in told[stage][:1])


def test_calibration_sees_what_the_layers_read() -> None:
    """Largest magnitudes against hooks on PyTorch's own layers."""
    package, model = (
        source("llama", "biases, one KV head, llama3"),
        eager("llama", "biases, one KV head, llama3"),
    )
    windows = [[5, 17, 80, 2, 33], [60, 1]]
    expected: dict[str, np.ndarray] = {}
    handles = [
        module.register_forward_pre_hook(_note(expected, f"{name}.weight"))
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear)
    ]
    for window in windows:
        eager_logits(model, window)
    for handle in handles:
        handle.remove()
    graph = ir.load(package.graph_path(io_spec.DECODE)).graph
    inputs = {item.name: item for item in linear_inputs(graph)}
    seen: dict[str, np.ndarray] = {}

    def observer(name: str, values: np.ndarray) -> None:
        largest = np.abs(values).max(axis=0)
        seen[name] = np.maximum(seen[name], largest) if name in seen else largest

    calibrating.observe(
        ir.load(package.graph_path(io_spec.PREFILL)),
        package.path,
        list(inputs),
        windows,
        package.manifest.states,
        observer,
        lambda stage, done, total: None,
    )
    places = package.manifest.parameters
    for name, largest in expected.items():
        tensor = places[name].tensor if name in places else places["embed_tokens.weight"].tensor
        (item,) = [i for i in inputs.values() if tensor in {lin.name for lin in i.linears}]
        np.testing.assert_allclose(seen[item.name], largest, rtol=1e-4, atol=1e-4)


def _note(found: dict[str, np.ndarray], name: str) -> Callable[..., None]:
    def hook(module: torch.nn.Module, arguments: tuple[torch.Tensor, ...]) -> None:
        largest = arguments[0].detach().abs().amax(dim=(0, 1)).numpy()
        found[name] = np.maximum(found[name], largest) if name in found else largest

    return hook


def test_the_bundled_text_is_read_by_default(tmp_path: Path) -> None:
    default = quantize(source("llama", "tiny"), tmp_path / "a")
    other = quantize(source("llama", "tiny"), tmp_path / "b", options=OPTIONS)
    weights = [package.manifest.files["model.onnx_data"].sha256 for package in (default, other)]
    assert weights[0] != weights[1]


def test_an_unknown_scheme_is_refused(tmp_path: Path) -> None:
    message = refusal(lambda: quantize(source("llama", "tiny"), tmp_path / "q", scheme="int3"))
    assert message == "scheme is not known; found 'int3'; allowed: int4, int8"


def test_a_package_of_another_lowering_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "plain"
    export(source("llama", "tiny").path, folder, lowering="plain")
    message = refusal(lambda: quantize(folder, tmp_path / "q"))
    assert message == (
        f"{folder}: cannot be quantized; found precision fp32, lowering plain; "
        "allowed: precision fp32 or fp16, lowering ort or portable; export it so first"
    )


def test_a_quantized_package_is_refused(int8: Package, tmp_path: Path) -> None:
    message = refusal(lambda: quantize(int8, tmp_path / "q"))
    assert message.startswith(f"{int8.path}: cannot be quantized; found precision int8")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", "found 0 tokens"),
        ("\u00e9\u00df", "found 0 tokens"),
    ],  # letters that the tokenizer drops
)
def test_a_text_without_tokens_is_refused(text: str, found: str, tmp_path: Path) -> None:
    options = QuantizeOptions(calibration_text=text)
    message = refusal(lambda: quantize(source("llama", "tiny"), tmp_path / "q", options=options))
    assert message.startswith("calibration text has no tokens")
    assert found in message


def with_tokenizer(folder: Path, content: bytes | None) -> Path:
    """A package with another tokenizer.json, or without one."""
    package = source("llama", "tiny")
    if content is not None:
        replace_file(copy_of(package, folder), "tokenizer.json", content)
        return folder
    with PackageWriter(folder) as writer:
        for name in package.manifest.files.keys() - {"tokenizer.json"}:
            shutil.copyfile(package.path / name, writer.path / name)
        writer.finish(package.manifest)
    return folder


def test_a_text_with_ids_that_the_model_lacks_is_refused(tmp_path: Path) -> None:
    tokenizer = (source("llama", "tiny").path / "tokenizer.json").read_text(encoding="utf-8")
    assert f'"{LETTERS[-1]}": 95' in tokenizer
    folder = with_tokenizer(tmp_path / "p", tokenizer.replace('": 95', '": 96').encode())
    options = QuantizeOptions(calibration_text=f"a{LETTERS[-1]}")
    message = refusal(lambda: quantize(folder, tmp_path / "q", options=options))
    assert "the largest id 96; allowed: ids below 96" in message


@pytest.mark.parametrize(
    ("content", "calibration", "text"),
    [
        (None, "a text", "has no tokenizer to read the calibration text with"),
        (b"{}", None, "tokenizer.json: cannot be read"),
    ],
)
def test_a_calibration_text_needs_a_tokenizer(
    content: bytes | None, calibration: str | None, text: str, tmp_path: Path
) -> None:
    folder = with_tokenizer(tmp_path / "p", content)
    options = QuantizeOptions(calibration_text=calibration)
    message = refusal(lambda: quantize(folder, tmp_path / "q", options=options))
    assert text in message
    assert str(folder) in message


def test_without_a_tokenizer_random_ids_calibrate(int8: Package, tmp_path: Path) -> None:
    folder = with_tokenizer(tmp_path / "p", None)
    with pytest.warns(OnnxlmWarning, match=r"has no tokenizer\.json, so random token ids"):
        package = quantize(folder, tmp_path / "q")
    ids = list(range(3, 35))
    want = eager_logits(eager("llama", "tiny"), ids)
    off, off_by_text = (
        float((graph_logits(made.path, ids, len(ids) - 4) - want).abs().max())
        for made in (package, int8)
    )
    assert 0 < off < 2 * off_by_text


def every_code(bits: int = 8) -> dict[str, QuantizedTensor]:
    """Codes for every matrix of the tiny model."""
    model = eager("llama", "tiny")
    return {
        name: round_to_nearest(parameter.detach().numpy(), bits, 32)
        for name, parameter in model.named_parameters()
        if parameter.dim() == 2
    }


def test_given_codes_need_no_tokenizer(tmp_path: Path) -> None:
    folder = with_tokenizer(tmp_path / "p", None)
    package = quantize(folder, tmp_path / "q", given=every_code())
    assert package.manifest.quantization is not None
    # The embedding, and four matrices a layer after merging.
    assert package.manifest.quantization.summary["taken_over"] == 1 + 2 * 4


def test_given_codes_of_unknown_parameters_are_refused(tmp_path: Path) -> None:
    given = every_code() | {
        f"layers.{i}.extra.weight": every_code()["embed_tokens.weight"] for i in range(5)
    }
    message = refusal(lambda: quantize(source("llama", "tiny"), tmp_path / "q", given=given))
    assert message == (
        "given codes are for parameters that the package does not have; found layers.0.extra.weight, "
        "layers.1.extra.weight, layers.2.extra.weight and 2 more"
    )


@pytest.mark.parametrize("name", ["embed_tokens.weight", "layers.1.mlp.down_proj.weight"])
def test_given_codes_of_another_shape_are_refused(name: str, tmp_path: Path) -> None:
    given = every_code()
    given[name] = given[name].rows(np.arange(given[name].shape[0] - 1))
    message = refusal(lambda: quantize(source("llama", "tiny"), tmp_path / "q", given=given))
    assert message.startswith(f"shape of the codes given for {name}; found")


def test_a_full_folder_is_refused_before_any_work(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine", encoding="utf-8")
    with pytest.raises(ExportError, match="notes"):
        quantize(tmp_path / "no package at all", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_a_refused_request_leaves_nothing_behind(tmp_path: Path) -> None:
    options = QuantizeOptions(calibration_text="")
    with pytest.raises(QuantizationError):
        quantize(source("llama", "tiny"), tmp_path / "new" / "q", options=options)
    assert list(tmp_path.iterdir()) == []


def blocks(
    rows: int, bits: int, size: int = 32, offset: bool = False, columns: int = 64
) -> QuantizedTensor:
    rng = np.random.default_rng((rows, bits, size))
    shape = rows, -(-columns // size)
    codes = rng.integers(0, 1 << bits, (rows, columns), dtype=np.uint8)
    scale, extra = (rng.standard_normal(shape).astype(np.float32) for _ in range(2))
    return QuantizedTensor(bits, size, codes, scale, extra if offset else None)


@pytest.mark.parametrize(
    "parts",
    [
        [blocks(3, 4), blocks(5, 4)],
        [blocks(3, 4), blocks(5, 8)],
        [blocks(3, 8, offset=True), blocks(5, 4)],
        [blocks(3, 4, offset=True), blocks(5, 8), blocks(1, 4)],
        [blocks(2, 4, size=128, columns=100), blocks(1, 8, size=128, columns=100)],
        [blocks(2, 4, size=32, columns=100), blocks(1, 8, size=16, columns=100)],
        [blocks(3, 4, offset=True), blocks(5, 4, size=16, offset=True), blocks(1, 8, size=64)],
    ],
)
def test_rows_of_several_tensors_keep_their_values(parts: list[QuantizedTensor]) -> None:
    whole = concatenate(parts)
    assert whole is not None
    assert whole.bits == max(part.bits for part in parts)
    expected = np.concatenate([part.dequantize() for part in parts])
    np.testing.assert_array_equal(whole.dequantize(), expected)


def test_blocks_that_do_not_divide_are_not_put_together() -> None:
    assert concatenate([blocks(3, 4), blocks(3, 4, size=24)]) is None


PLACES: Mapping[str, ParameterSpec] = {
    "v": ParameterSpec("qkv", (8, 10)),
    "q": ParameterSpec("qkv", (0, 4)),
    "k": ParameterSpec("qkv", (4, 8)),
    "o": ParameterSpec("o"),
}


def test_merged_rows_come_in_the_graphs_order() -> None:
    given = {"v": blocks(2, 4), "q": blocks(4, 4), "k": blocks(4, 8)}
    merged = merge_given(given, PLACES)
    assert merged.keys() == {"qkv"}
    expected = np.concatenate([given[name].dequantize() for name in "qkv"])
    np.testing.assert_array_equal(merged["qkv"].dequantize(), expected)


@pytest.mark.parametrize(
    "given",
    [
        {"q": blocks(4, 4), "v": blocks(2, 4)},
        {"q": blocks(4, 4), "k": blocks(4, 4, size=24), "v": blocks(2, 4)},
    ],
)
def test_rows_that_do_not_make_a_whole_are_not_taken(given: dict[str, QuantizedTensor]) -> None:
    assert merge_given({**given, "o": blocks(4, 4)}, PLACES).keys() == {"o"}
