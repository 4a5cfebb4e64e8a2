"""From a source to a package of any precision: the stages put together."""

from __future__ import annotations

import contextlib
import gc
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from onnxlm import package_swap
from onnxlm.errors import ExportError, InputError
from onnxlm.manifest import PRECISIONS, is_package, read_manifest
from onnxlm.package import Package, check_destination, open_package, record_figures
from onnxlm.progress import Progress, silent

if TYPE_CHECKING:
    from onnxlm.quantize import QuantizeOptions
    from onnxlm.quantized_tensor import QuantizedTensor

_FULL = ("fp32", "fp16")
_BITS = {"int8": 8, "int4": 4}
# Matrices looked at to tell a file's own width: files mix widths, but not from layer to layer.
_SAMPLED = 16
# Enough to tell a collapsed package from a good one; `onnxlm verify --record` measures longer.
_MEASURED_TOKENS = 256


def make_package(
    source: str | Path,
    out: str | Path,
    *,
    precision: str = "fp32",
    lowering: str = "ort",
    requantize: bool = False,
    options: QuantizeOptions | None = None,
    progress: Progress = silent,
) -> Package:
    """Make a package of a checkpoint in the precision asked for.

    A source that is block-quantized in the precision asked for keeps its own codes and scales, without loss.

    Args:
        source: What `onnxlm.models.checkpoint.read` accepts.
        out: A new folder, an empty one, or a package, which is replaced when the new one is whole.
        precision: "fp32", "fp16", "int8" or "int4".
        lowering: "ort" (fused operators of ONNX Runtime), "portable" (standard ONNX only) or "plain" (no
            operator that is newer than opset 21).
        requantize: Quantize anew what the source holds quantized.
        options: What else a quantizer may be told (int8, int4).
        progress: Told of the stages.

    Raises:
        CheckpointError, ConfigError, PackageError: The source is damaged or not supported.
        ExportError, QuantizationError: The request makes no sense or `out` cannot be written.
    """
    if precision not in PRECISIONS:
        raise ExportError("precision", found=repr(precision), allowed=", ".join(PRECISIONS))
    check_destination(out)
    if precision in _FULL:
        if requantize or options is not None:
            raise ExportError(
                "options of a quantizer", found=f"precision {precision}", allowed=", ".join(_BITS)
            )
        from onnxlm.export import export

        return export(source, out, precision=precision, lowering=lowering, progress=progress)
    full = (options and options.activations) or "fp32"
    if full not in _FULL:
        raise ExportError("activations", found=repr(full), allowed=", ".join(_FULL))
    from onnxlm.quantize.quantizing import check_options

    check_options(full, options)
    if _can_be_quantized(source, full, lowering):
        return quantize_package(source, out, scheme=precision, options=options, progress=progress)
    from onnxlm.export import export
    from onnxlm.models.checkpoint import read

    progress("read checkpoint", 0, 0)
    checkpoint = read(source)
    given = None if requantize else _same_width(checkpoint.quantized, precision)
    if given is None and checkpoint.quantized:
        progress("quantize anew what the source holds in other codes", 0, 0)
    with _beside(check_destination(out)) as folder:
        export(checkpoint, folder / full, precision=full, lowering=lowering, progress=progress)
        gc.collect()  # a traced program is full of cycles, and as large as the model
        return quantize_package(
            folder / full,
            out,
            scheme=precision,
            given=given,
            options=options,
            progress=progress,
        )


def quantize_package(
    package: str | Path,
    out: str | Path,
    *,
    scheme: str,
    given: Mapping[str, QuantizedTensor] | None = None,
    options: QuantizeOptions | None = None,
    progress: Progress = silent,
) -> Package:
    """Quantize a full-precision package, then measure what that cost and write it into the manifest.

    See `onnxlm.quantize.quantize`; the figures are those of `onnxlm verify` on a shorter text.
    """
    from onnxlm.quantize import quantize

    check_destination(out)
    made = quantize(
        Path(package),
        Path(out),
        scheme=scheme,
        given=given,
        options=options,
        progress=progress,
    )
    return _with_quality(made, package, progress)


def _with_quality(made: Package, reference: str | Path, progress: Progress) -> Package:
    from onnxlm.verification import VerifyOptions, verify

    options = VerifyOptions(reference=str(reference), tokens=_MEASURED_TOKENS)
    with contextlib.suppress(InputError):  # a model that no text of ours fits
        quality, _ = verify(made.path, options, progress).figures()
        finite = {name: value for name, value in quality.items() if math.isfinite(value)}
        record_figures(made.path, quality=finite)
    return open_package(made.path)


def _can_be_quantized(source: str | Path, precision: str, lowering: str) -> bool:
    """Whether the source is what a quantizer reads, with nothing to export first."""
    if not is_package(source):
        return False
    manifest = read_manifest(source)
    return (manifest.precision, manifest.lowering) == (precision, lowering)


def _same_width(
    quantized: Mapping[str, QuantizedTensor], precision: str
) -> Mapping[str, QuantizedTensor] | None:
    """The source's own codes if most of its matrices have the width asked for."""
    sampled = list(quantized)[:: max(1, len(quantized) // _SAMPLED)]
    widths = Counter(quantized[name].bits for name in sampled)
    usual = widths.most_common(1)
    return quantized if usual and usual[0][0] == _BITS[precision] else None


@contextlib.contextmanager
def _beside(destination: Path) -> Iterator[Path]:
    """A folder for what lies between two stages, on the destination's disk and gone afterwards.

    The lock tells a folder in use from one that a killed process has left, which is deleted.
    """
    parent = destination.parent
    made = [path for path in (parent, *parent.parents) if not path.exists()]
    parent.mkdir(parents=True, exist_ok=True)
    folder = package_swap.sibling(destination, "stages")
    try:
        with package_swap.writer_lock(folder):
            for old in parent.iterdir():
                if old.name.startswith(f".{destination.name}.stages-") and old.is_dir():
                    with contextlib.suppress(ExportError), package_swap.writer_lock(old):
                        package_swap.remove_package(old)
            folder.mkdir()
            yield folder
    finally:
        package_swap.remove_package(folder)
        with contextlib.suppress(OSError):
            for path in made:
                path.rmdir()
