"""`onnxlm.json`, the one file that says what a package is: a frozen dataclass, versioned and strict."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from onnxlm import strict_json
from onnxlm.errors import PackageError
from onnxlm.io_spec import StateSpec, TensorSpec

MANIFEST_NAME = "onnxlm.json"
WEIGHTS_NAME = "model.onnx_data"
FORMAT_VERSION = 1

TASKS = ("text-generation",)
PRECISIONS = ("fp32", "fp16", "int8", "int4")
LOWERINGS = ("ort", "portable", "plain")
STATE_UPDATES = ("in_place", "append")

# Characters that some supported file system refuses or gives a meaning (drives, streams, wild cards).
_UNPORTABLE = re.compile(r'[\x00-\x1f\x7f\\:*?"<>|]')
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Producer:
    """What wrote the package.

    Attributes:
        name: "onnxlm".
        version: Its version.
        libraries: Versions of the libraries that made the graphs, by name.
    """

    name: str
    version: str
    libraries: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class GraphSpec:
    """One ONNX file.

    Attributes:
        file: Its name inside the package.
        inputs: Graph inputs in order.
        outputs: Graph outputs in order.
        opset_imports: Operator-set version by domain ("" is the standard one).
        fusions: How often each pass fired, by pass name.
    """

    file: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    opset_imports: Mapping[str, int]
    fusions: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class WeightsSpec:
    """The external-data file that all graphs share; a `PackageWriter` fills in the size."""

    file: str = WEIGHTS_NAME
    bytes: int = 0


@dataclass(frozen=True)
class QuantizationSpec:
    """How the weights were quantized.

    Attributes:
        scheme: Name of the scheme.
        summary: Bits per component, block size, smoothing strength and notes, as the scheme tells them.
    """

    scheme: str
    summary: Mapping[str, Any] = field(default_factory=dict)

    @property
    def prefill_weights(self) -> str:
        """Those of prefill: "shared" with decode, or what is their own."""
        return str(self.summary.get("prefill_weights", "shared"))


@dataclass(frozen=True)
class ParameterSpec:
    """Where a parameter of the model lies in the graphs.

    Attributes:
        tensor: Initializer that holds it, alone or merged with others.
        rows: Half-open range of output rows inside a merged initializer; None means all of it.
        transposed: The initializer holds the parameter as [inputs, outputs].
    """

    tensor: str
    rows: tuple[int, int] | None = None
    transposed: bool = False


@dataclass(frozen=True)
class FileSpec:
    """Size and SHA-256 (lower-case hexadecimal) of one file."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """Everything about a package but the numbers in its weights.

    Attributes:
        architecture: The model's `model_type`.
        graphs: "prefill" and "decode".
        states: Tensors that one call hands to the next.
        context_length: Most positions that the model was made for.
        source: Provenance: strings, numbers and lists.
        quality: Figures against the full-precision model (KL, top-1 agreement, perplexity, ...).
        parity: Figures of the parity check at export.
        parameters: Parameter name of the eager model -> place in the graphs.
        files: Every file of the package but the manifest, by relative name; filled in by a `PackageWriter`.
    """

    producer: Producer
    task: str
    architecture: str
    precision: str
    lowering: str
    graphs: Mapping[str, GraphSpec]
    states: tuple[StateSpec, ...]
    weights: WeightsSpec
    vocab_size: int
    context_length: int
    source: Mapping[str, Any] = field(default_factory=dict)
    quantization: QuantizationSpec | None = None
    quality: Mapping[str, float] = field(default_factory=dict)
    parity: Mapping[str, Any] = field(default_factory=dict)
    parameters: Mapping[str, ParameterSpec] = field(default_factory=dict)
    files: Mapping[str, FileSpec] = field(default_factory=dict)
    format_version: int = FORMAT_VERSION

    def to_json(self) -> str:
        """The text of `onnxlm.json`."""
        return strict_json.encode(self)

    @classmethod
    def from_object(cls, value: Mapping[str, Any], source: str) -> Manifest:
        """The manifest in a parsed JSON object.

        Args:
            value: The object.
            source: The file it came from, for messages.

        Raises:
            PackageError: Names the field that is missing, unknown, mistyped or impossible.
        """
        version = value.get("format_version")
        if type(version) is int and version != FORMAT_VERSION:  # before fields we cannot know
            raise PackageError(
                f"{source}: format_version",
                found=version,
                allowed=FORMAT_VERSION,
                fix="use the onnxlm version that wrote the package, or export it again",
            )
        manifest = strict_json.decode(cls, value, source)
        manifest.check(source)
        return manifest

    def check(self, source: str) -> None:
        """Refuse values that fit their type and make no package.

        Args:
            source: The file, for messages.

        Raises:
            PackageError: Names the field.
        """
        _one_of(source, "task", self.task, TASKS)
        _one_of(source, "precision", self.precision, PRECISIONS)
        _one_of(source, "lowering", self.lowering, LOWERINGS)
        _above_zero(source, "vocab_size", self.vocab_size)
        _above_zero(source, "context_length", self.context_length)
        for name, entry in self.files.items():
            check_file_name(source, "files", name)
            if entry.bytes < 0 or not _SHA256.fullmatch(entry.sha256):
                raise PackageError(f"{source}: field 'files.{name}' holds no size and SHA-256")
        if not self.graphs:
            raise PackageError(f"{source}: field 'graphs' is empty")
        for name, graph in self.graphs.items():
            self._check_listed(source, f"graphs.{name}.file", graph.file)
        self._check_listed(source, "weights.file", self.weights.file)
        if self.weights.bytes != self.files[self.weights.file].bytes:
            raise PackageError(
                f"{source}: field 'weights.bytes' disagrees with 'files'",
                found=self.weights.bytes,
                allowed=self.files[self.weights.file].bytes,
            )
        self._check_states(source)
        for name, parameter in self.parameters.items():
            if parameter.rows is not None and not 0 <= parameter.rows[0] < parameter.rows[1]:
                raise PackageError(
                    f"{source}: field 'parameters.{name}.rows' is no range", found=parameter.rows
                )

    def _check_listed(self, source: str, field_name: str, name: str) -> None:
        check_file_name(source, field_name, name)
        if "/" in name:  # external data is looked for beside its graph
            raise PackageError(
                f"{source}: field '{field_name}' names a sub-folder", found=repr(name)
            )
        if name not in self.files:
            raise PackageError(f"{source}: field '{field_name}' is not in 'files'", found=name)

    def _check_states(self, source: str) -> None:
        for index, state in enumerate(self.states):
            _one_of(source, f"states[{index}].update", state.update, STATE_UPDATES)
            for graph_name, graph in self.graphs.items():
                for key, name, side, tensors in (
                    ("past", state.past, "inputs", graph.inputs),
                    ("present", state.present, "outputs", graph.outputs),
                ):
                    if name not in {tensor.name for tensor in tensors}:
                        raise PackageError(
                            f"{source}: field 'states[{index}].{key}' is not among the {side} of "
                            f"graph '{graph_name}'",
                            found=name,
                        )


def read_manifest(path: Path | str) -> Manifest:
    """The manifest of the package in folder `path`; no other file is touched.

    Raises:
        PackageError: There is no package, or its manifest is damaged or of another version.
    """
    file = Path(path) / MANIFEST_NAME
    return Manifest.from_object(strict_json.load_object(file), str(file))


def is_package(path: Path | str) -> bool:
    """Whether `path` is a folder with a manifest, whole or not."""
    return (Path(path) / MANIFEST_NAME).is_file()


def check_file_name(source: str, field_name: str, name: str) -> None:
    """Refuse a file name that could leave the package's folder on any supported system.

    Args:
        source: The file that holds the name, for messages.
        field_name: The field that holds it.
        name: Relative, its parts separated by "/".

    Raises:
        PackageError: The name is absolute, has ".." or characters with a meaning, or is the manifest's own.
    """
    parts = name.split("/")
    if (
        _UNPORTABLE.search(name)
        or any(part in ("", ".", "..") or part[-1] in ". " for part in parts)
        or parts[0].lower() == MANIFEST_NAME
    ):
        raise PackageError(
            f"{source}: field '{field_name}' holds a file name that is not allowed",
            found=repr(name),
            allowed="a plain relative name inside the package's folder",
        )


def _one_of(source: str, field_name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise PackageError(
            f"{source}: field '{field_name}'", found=repr(value), allowed=", ".join(allowed)
        )


def _above_zero(source: str, field_name: str, value: int) -> None:
    if value <= 0:
        raise PackageError(f"{source}: field '{field_name}'", found=value, allowed="above 0")
