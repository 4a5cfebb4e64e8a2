"""Full-precision package -> quantized package."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from tokenizers import Tokenizer

from onnxlm import io_spec
from onnxlm.errors import QuantizationError
from onnxlm.graphs.describe import describe
from onnxlm.graphs.edit import drop_unused, is_op
from onnxlm.graphs.linear import Linear
from onnxlm.graphs.weights_file import write_graphs
from onnxlm.manifest import Manifest, ParameterSpec, QuantizationSpec
from onnxlm.package import Package, PackageWriter, check_destination, open_package
from onnxlm.progress import Progress, silent
from onnxlm.quantize.calibrating import observe
from onnxlm.quantize.calibration import Statistics
from onnxlm.quantize.rewrite import Rewriter, concatenate
from onnxlm.quantize.row import RowQuantized, quantize_rows
from onnxlm.quantize.schemes import Scheme, find_scheme
from onnxlm.quantize.smoothed import smooth
from onnxlm.quantize.structure import LinearInput, WeightRows, is_table, linear_inputs
from onnxlm.quantized_tensor import QuantizedTensor

_WINDOW = 256
_WINDOWS = 4


@dataclasses.dataclass(frozen=True)
class QuantizeOptions:
    """What a user may choose besides the scheme.

    Attributes:
        prefill_rows: Give prefill its own weights, one 8-bit scale per output channel: integer matrix
            products are faster over many tokens; the weights are held twice.
        calibration_text: Text that activations are observed on; the bundled one when None.
    """

    prefill_rows: bool = False
    calibration_text: str | None = None


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
        package: A package in fp32 with the `ort` lowering.
        out: A new folder, an empty one, or a package, which is replaced when the new one is whole.
        scheme: Name of a file in `quantize/schemes/`.
        given: Codes that a checkpoint holds already, by parameter; taken over unchanged.
        options: See `QuantizeOptions`.
        progress: Told of the stages.

    Raises:
        QuantizationError: The scheme is not known or the package is of another kind.
        PackageError: The package is damaged.
        ExportError: `out` cannot be written.
    """
    chosen = find_scheme(scheme)
    source = package if isinstance(package, Package) else open_package(package)
    _check_source(source)
    check_destination(out)
    job = _Job(source, chosen, given or {}, options or QuantizeOptions(), progress)
    job.prepare()
    for name, model in job.graphs.items():
        job.rewrite(name, model)
    with PackageWriter(out) as writer:
        files = {f"{name}.onnx": model for name, model in job.graphs.items()}
        data_name = source.manifest.weights.file
        write_graphs(
            files,
            writer.path,
            data_name,
            lambda done, total: progress("write weights", done, total),
        )
        for name in source.manifest.files:
            if name not in files and name != data_name:
                shutil.copyfile(source.path / name, writer.path / name)
        return writer.finish(job.manifest(scheme))


def _check_source(package: Package) -> None:
    manifest = package.manifest
    if manifest.precision != "fp32" or manifest.lowering != "ort":
        raise QuantizationError(
            f"{package.path}: cannot be quantized",
            found=f"precision {manifest.precision}, lowering {manifest.lowering}",
            allowed="precision fp32, lowering ort",
            fix="export it so first",
        )


class _Job:
    """One quantization from opened package to rewritten graphs."""

    def __init__(
        self,
        source: Package,
        scheme: Scheme,
        given: Mapping[str, QuantizedTensor],
        options: QuantizeOptions,
        progress: Progress,
    ) -> None:
        self._source = source
        self._scheme = scheme
        self._options = options
        self._progress = progress
        self.graphs = {name: ir.load(source.graph_path(name)) for name in source.manifest.graphs}
        self._prefill = self.graphs[io_spec.PREFILL].graph
        self._inputs = linear_inputs(self._prefill)
        self._given = _merge_given(given, source.manifest.parameters)
        self._changed: dict[str, NDArray[np.float32]] = {}
        self._tensors: dict[str, QuantizedTensor] = {}
        self._rows: dict[str, RowQuantized] = {}

    def prepare(self) -> None:
        """Observe, smooth, and turn every weight into codes."""
        seen = self._observe()
        if self._scheme.smoothing is not None:
            free = [item for item in self._inputs if not self._touches_given(item)]
            self._changed = smooth(free, self._weight, seen, self._scheme.smoothing)
        work = [(item, linear) for item in self._inputs for linear in item.linears]
        for done, (item, linear) in enumerate(work):
            self._progress("quantize", done, len(work))
            self._tensors[linear.name] = self._codes(linear, seen.get(item.name))
            if self._options.prefill_rows and _has_rows(item, linear):
                self._rows[linear.name] = quantize_rows(self._row_source(linear))
        self._progress("quantize", len(work), len(work))

    def rewrite(self, name: str, model: ir.Model) -> None:
        """Put the quantized operators into one graph."""
        graph = model.graph
        for changed, array in self._changed.items():
            value = graph.initializers[changed]
            value.const_value = ir.tensor(array, name=changed)
        rewriter = Rewriter(graph)
        inputs = linear_inputs(graph)
        tables = {lin.weight for item in inputs for lin in item.linears if is_table(lin)}
        for node in list(graph):
            if is_op(node, "Gather") and node.inputs[0] in tables:
                source = node.inputs[0]
                assert source is not None and source.name is not None
                rewriter.table(node, self._tensors[source.name])
        for item in inputs:
            for linear in item.linears:
                if name == io_spec.PREFILL and linear.name in self._rows:
                    rewriter.rows(linear, self._rows[linear.name])
                else:
                    rewriter.blocks(linear, self._tensors[linear.name])
        drop_unused(model)

    def manifest(self, scheme: str) -> Manifest:
        """The source's manifest with what has changed."""
        old = self._source.manifest
        summary = dict(self._scheme.summary)
        summary["smoothing"] = self._scheme.smoothing
        summary["taken_over"] = len(self._given)
        summary["prefill_weights"] = "own, one scale per row" if self._rows else "shared"
        return dataclasses.replace(
            old,
            precision=self._scheme.precision,
            graphs={
                name: describe(old.graphs[name].file, model, old.graphs[name].fusions)
                for name, model in self.graphs.items()
            },
            quantization=QuantizationSpec(scheme, summary),
            quality={},
            parity={},
        )

    def _observe(self) -> dict[str, Statistics]:
        """Statistics of every linear input, by its name; empty when the scheme needs none."""
        needed = self._scheme.hessian or self._scheme.smoothing is not None
        if not needed or all(lin.name in self._given for i in self._inputs for lin in i.linears):
            return {}
        seen: dict[str, Statistics] = {}
        for item in self._inputs:
            width = item.linears[0].shape[1]
            seen[item.name] = Statistics.empty(width, hessian=self._scheme.hessian)
        observe(
            self.graphs[io_spec.PREFILL],
            self._source.path,
            self._inputs,
            self._windows(),
            self._source.manifest.states,
            lambda name, values: seen[name].add(values),
            self._progress,
        )
        return seen

    def _windows(self) -> list[list[int]]:
        text = self._options.calibration_text
        if text is None:
            text = resources.files("onnxlm.data").joinpath("calibration.txt").read_text("utf-8")
        if not self._source.has("tokenizer.json"):
            raise QuantizationError(
                f"{self._source.path}: has no tokenizer to read the calibration text with",
                fix="export from a checkpoint that has a tokenizer.json",
            )
        tokenizer = Tokenizer.from_file(str(self._source.file_path("tokenizer.json")))
        ids = tokenizer.encode(text, add_special_tokens=False).ids[: _WINDOW * _WINDOWS]
        length = min(_WINDOW, self._source.manifest.context_length)
        return [ids[i : i + length] for i in range(0, len(ids), length)]

    def _codes(self, linear: Linear, seen: Statistics | None) -> QuantizedTensor:
        if linear.name in self._given:
            return self._given[linear.name]
        head = is_table(linear) or linear.y.is_graph_output()
        make = self._scheme.quantize_head if head else self._scheme.quantize_weight
        return make(self._weight(linear.name), seen)

    def _row_source(self, linear: Linear) -> NDArray[np.float32]:
        if linear.name in self._given:
            return self._given[linear.name].dequantize()
        return self._weight(linear.name)

    def _weight(self, name: str) -> NDArray[np.float32]:
        if name in self._changed:
            return self._changed[name]
        tensor = self._prefill.initializers[name].const_value
        assert tensor is not None
        return np.asarray(tensor.numpy(), dtype=np.float32)

    def _touches_given(self, item: LinearInput) -> bool:
        made = item.origin.name if item.origin is not None else ""
        return made in self._given or any(lin.name in self._given for lin in item.linears)


def _has_rows(item: LinearInput, linear: Linear) -> bool:
    """Whether a linear of prefill gets one scale per row.

    Not the head, which runs for one token a row; and not what reads act(gate) * up, whose channels
    differ so much that one scale for all costs more than the rest together.
    """
    gated = isinstance(item.origin, WeightRows) and item.origin.heads is None
    return not (gated or is_table(linear) or linear.y.is_graph_output())


def _merge_given(
    given: Mapping[str, QuantizedTensor], places: Mapping[str, ParameterSpec]
) -> dict[str, QuantizedTensor]:
    """Codes by graph initializer, from codes by parameter, where all of an initializer is given."""
    parts: dict[str, list[tuple[int, str]]] = {}
    for parameter, place in places.items():
        start = place.rows[0] if place.rows is not None else 0
        parts.setdefault(place.tensor, []).append((start, parameter))
    merged: dict[str, QuantizedTensor] = {}
    for tensor, members in parts.items():
        ordered: Sequence[str] = [parameter for _, parameter in sorted(members)]
        if all(parameter in given for parameter in ordered):
            whole = concatenate([given[parameter] for parameter in ordered])
            if whole is not None:
                merged[tensor] = whole
    return merged
