"""Full-precision package -> quantized package."""

from __future__ import annotations

import dataclasses
import shutil
import warnings
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path

import numpy as np
import onnx_ir as ir
from tokenizers import Tokenizer

from onnxlm import io_spec
from onnxlm.errors import OnnxlmWarning, QuantizationError
from onnxlm.graphs.describe import describe
from onnxlm.graphs.edit import drop_unused
from onnxlm.graphs.weights_file import write_graphs
from onnxlm.manifest import Manifest, QuantizationSpec
from onnxlm.package import Package, PackageWriter, check_destination, open_package
from onnxlm.progress import Progress, silent
from onnxlm.quantize.calibrating import Observer, observe
from onnxlm.quantize.codes import Codes, Parameters, make_codes, smooth_parameters
from onnxlm.quantize.experts import describe_experts, is_routing
from onnxlm.quantize.given import merge_given
from onnxlm.quantize.observed import Observed
from onnxlm.quantize.rewrite import LOWERINGS, Rewriter
from onnxlm.quantize.schemes import Scheme, find_scheme
from onnxlm.quantize.structure import LinearInput, linear_inputs
from onnxlm.quantized_tensor import QuantizedTensor

_SOURCES = ("fp32", "fp16")
_WINDOW = 512
_WINDOWS = 8


@dataclasses.dataclass(frozen=True)
class QuantizeOptions:
    """What a user may choose besides the scheme.

    Attributes:
        prefill_rows: Give prefill its own weights, one 8-bit scale per output channel: integer matrix
            products are faster over many tokens; the weights are held twice.
        calibration_text: Text that activations are observed on; the bundled one when None.
        activations: "fp32" or, for GPUs, "fp16": what the full-precision package is made in; when None, what
            it is in, or fp32 where it is yet to be made.
    """

    prefill_rows: bool = False
    calibration_text: str | None = None
    activations: str | None = None


def quantize(
    package: Path | str | Package,
    out: Path | str,
    *,
    scheme: str = "int8",
    given: Mapping[str, QuantizedTensor] | None = None,
    options: QuantizeOptions | None = None,
    progress: Progress = silent,
) -> Package:
    """Quantize the weights of a full-precision package.

    Args:
        package: A package in fp32, or in fp16, whose activations the quantized one keeps.
        out: A new folder, an empty one, or a package, which is replaced when the new one is whole.
        scheme: Name of a file in `quantize/schemes/`.
        given: Codes that a checkpoint holds already, by parameter; taken over unchanged.
        options: See `QuantizeOptions`.
        progress: Told of the stages.

    Raises:
        QuantizationError: The scheme is not known, the package is of another kind, or codes do not fit it.
        PackageError: The package is damaged.
        ExportError: `out` cannot be written.
    """
    chosen = find_scheme(scheme)
    check_destination(out)
    source = package if isinstance(package, Package) else open_package(package)
    _check_source(source)
    check_options(source.manifest.precision, options)
    graphs = {name: ir.load(source.graph_path(name)) for name in source.manifest.graphs}
    taken = merge_given(given or {}, source.manifest.parameters)
    codes = _codes(source, graphs, chosen, taken, options or QuantizeOptions(), progress)
    _rewrite(graphs, codes, source.manifest)
    with PackageWriter(out) as writer:
        files = {source.manifest.graphs[name].file: model for name, model in graphs.items()}
        data_name = source.manifest.weights.file
        write_graphs(
            files,
            writer.path,
            data_name,
            lambda done, total: progress("write weights", done, total),
        )
        for name in source.manifest.files.keys() - files.keys() - {data_name}:
            copy = writer.path / name
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source.path / name, copy)
        experts = describe_experts(codes.experts, source.manifest.parameters)
        summary = _summary(chosen, codes, source.manifest) | experts
        spec = QuantizationSpec(scheme, summary)
        return writer.finish(_manifest(source.manifest, graphs, chosen.precision, spec))


def check_options(precision: str, options: QuantizeOptions | None) -> None:
    """Refuse options that do not go with a source.

    Args:
        precision: Of the full-precision package.
        options: What a user has chosen.

    Raises:
        QuantizationError: Activations are to be others than its own, or prefill is to have weights of its own
            in a package of 16 bits.
    """
    if options is None:
        return
    if options.activations not in (None, precision):
        raise QuantizationError(
            "activations",
            found=repr(options.activations),
            allowed=f"{precision}, as the package has them; export another for others",
        )
    if options.prefill_rows and precision != "fp32":
        raise QuantizationError(
            "weights of their own for prefill (--prefill-rows)",
            found=f"activations in {precision}",
            allowed="fp32",
        )


def _check_source(package: Package) -> None:
    manifest = package.manifest
    if manifest.precision not in _SOURCES or manifest.lowering not in LOWERINGS:
        raise QuantizationError(
            f"{package.path}: cannot be quantized",
            found=f"precision {manifest.precision}, lowering {manifest.lowering}",
            allowed=f"precision {' or '.join(_SOURCES)}, lowering {' or '.join(LOWERINGS)}",
            fix="export it so first",
        )


def _codes(
    source: Package,
    graphs: Mapping[str, ir.Model],
    scheme: Scheme,
    given: Mapping[str, QuantizedTensor],
    options: QuantizeOptions,
    progress: Progress,
) -> Codes:
    """Observe, smooth, and turn every weight into codes."""
    # In prefill the head reads chosen rows of what it reads in decode; all else has one name in both.
    graph = graphs[io_spec.DECODE].graph
    inputs = linear_inputs(graph)
    parameters = Parameters(graph)
    observed = _observed(source, graphs, scheme, inputs, given, options, progress)
    if scheme.smoothing is not None:
        smooth_parameters(parameters, inputs, given, observed.ranges, scheme.smoothing)
    return make_codes(graph, scheme, parameters, given, observed, options.prefill_rows, progress)


def _observed(
    source: Package,
    graphs: Mapping[str, ir.Model],
    scheme: Scheme,
    inputs: Sequence[LinearInput],
    given: Mapping[str, QuantizedTensor],
    options: QuantizeOptions,
    progress: Progress,
) -> Observed:
    """What the scheme wants to know of the linears' inputs; nothing where all codes are given."""
    wanted = scheme.hessian or scheme.smoothing is not None
    names = {linear.name for item in inputs for linear in item.linears} - given.keys()
    if not wanted or all(is_routing(name) for name in names):
        return Observed(lambda names, observer: None, {}, moments=False)
    windows = _windows(source, options.calibration_text)

    def run(names: Sequence[str], observer: Observer) -> None:
        observe(
            graphs[io_spec.PREFILL],
            source.path,
            names,
            windows,
            source.manifest.states,
            observer,
            progress,
        )

    widths = {item.name: item.linears[0].shape[1] for item in inputs}
    return Observed(run, widths, moments=scheme.hessian)


def _windows(source: Package, text: str | None) -> list[list[int]]:
    """Token ids of the calibration text, in rows as long as the model takes."""
    length = min(_WINDOW, source.manifest.context_length)
    ids = _random_ids(source, text) if not source.has("tokenizer.json") else _text_ids(source, text)
    return [ids[i : i + length] for i in range(0, len(ids), length)]


def _random_ids(source: Package, text: str | None) -> list[int]:
    """What a model runs whose tokens nobody has spelled."""
    if text is not None:
        raise QuantizationError(
            f"{source.path}: has no tokenizer to read the calibration text with",
            fix="export from a checkpoint with a tokenizer.json beside its weights",
        )
    warnings.warn(
        f"{source.path}: has no tokenizer.json, so random token ids are what it is calibrated on",
        OnnxlmWarning,
        stacklevel=2,
    )
    drawn = np.random.default_rng(0).integers(0, source.manifest.vocab_size, _WINDOW * _WINDOWS)
    return [int(token_id) for token_id in drawn]


def _text_ids(source: Package, text: str | None) -> list[int]:
    if text is None:
        text = resources.files("onnxlm.data").joinpath("calibration.txt").read_text("utf-8")
    file = source.file_path("tokenizer.json")
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library has no class of its own for it
        raise QuantizationError(f"{file}: cannot be read", found=error) from error
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids[: _WINDOW * _WINDOWS]
    if not ids or max(ids) >= source.manifest.vocab_size:
        raise QuantizationError(
            "calibration text has no tokens, or some that the model does not have",
            found=f"{len(ids)} tokens" + (f", the largest id {max(ids)}" if ids else ""),
            allowed=f"ids below {source.manifest.vocab_size}",
            fix="give another text",
        )
    return ids


def _rewrite(graphs: Mapping[str, ir.Model], codes: Codes, source: Manifest) -> None:
    """Put the quantized operators and the smoothed vectors into every graph."""
    half = source.precision == "fp16"
    rewriter = Rewriter(codes.tensors, source.lowering, codes.experts, half)
    floats = np.float16 if half else np.float32
    vectors = {
        name: ir.tensor(values.astype(floats), name=name) for name, values in codes.vectors.items()
    }
    for name, model in graphs.items():
        rewriter.rewrite(model.graph, codes.rows if name == io_spec.PREFILL else None)
        for vector, tensor in vectors.items():
            model.graph.initializers[vector].const_value = tensor
        drop_unused(model)


def _summary(scheme: Scheme, codes: Codes, source: Manifest) -> dict[str, object]:
    return {
        **scheme.summary,
        "activations": source.precision,
        "smoothing": scheme.smoothing,
        "taken_over": len(codes.taken_over),
        "prefill_weights": "own, one scale per row" if codes.rows else "shared",
    }


def _manifest(
    old: Manifest, graphs: Mapping[str, ir.Model], precision: str, spec: QuantizationSpec
) -> Manifest:
    """The source's manifest with what has changed."""
    return dataclasses.replace(
        old,
        precision=precision,
        graphs={
            name: describe(old.graphs[name].file, model, old.graphs[name].fusions)
            for name, model in graphs.items()
        },
        quantization=spec,
        quality={},
        parity={},
    )
