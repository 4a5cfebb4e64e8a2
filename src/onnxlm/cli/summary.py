"""What a command says of the package that it has made."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from onnxlm.cli.terminal import note, print_json, size
from onnxlm.package import Package


def print_package(package: Package, as_json: bool) -> None:
    """Print the facts of a new package: files with sizes, fusions, quality where it was measured."""
    facts = package_facts(package)
    if as_json:
        print_json(facts)
        return
    manifest = package.manifest
    total = sum(spec.bytes for spec in manifest.files.values())
    print(
        f"{package.path}: {manifest.architecture}, {manifest.precision}, "
        f"lowering {manifest.lowering}, {size(total)}"
    )
    for name, spec in sorted(manifest.files.items(), key=lambda item: -item[1].bytes):
        print(f"  {name:<24} {size(spec.bytes):>10}")
    for name, graph in manifest.graphs.items():
        print(f"  {name} fusions: {pairs(graph.fusions)}")
    if manifest.quality:
        print(f"  quality: {pairs(manifest.quality)}")
        if collapsed(manifest.quality):
            note(
                "warning: this package says something else than the model it was made from; "
                "use a wider precision"
            )


def collapsed(quality: Mapping[str, float]) -> bool:
    """Whether recorded figures, through prefill or through decode, are those of a useless package.

    A manifest holds finite numbers only: a KL that is missing beside other figures was none.
    """
    return any(_path_collapsed(quality, path) for path in ("prefill", "decode"))


def _path_collapsed(quality: Mapping[str, float], path: str) -> bool:
    from onnxlm.quality import COLLAPSED_KL, COLLAPSED_TOP1

    measured = any(name.startswith(f"{path}_") for name in quality)
    kl = quality.get(f"{path}_kl", math.inf if measured else 0.0)
    return kl > COLLAPSED_KL or quality.get(f"{path}_top1", 1.0) < COLLAPSED_TOP1


def package_facts(package: Package) -> dict[str, Any]:
    """The same as JSON values."""
    manifest = package.manifest
    quantization = manifest.quantization
    return {
        "path": str(package.path),
        "architecture": manifest.architecture,
        "precision": manifest.precision,
        "lowering": manifest.lowering,
        "files": {name: spec.bytes for name, spec in manifest.files.items()},
        "fusions": {name: dict(graph.fusions) for name, graph in manifest.graphs.items()},
        "quantization": None
        if quantization is None
        else {"scheme": quantization.scheme, **quantization.summary},
        "quality": dict(manifest.quality),
        "parity": dict(manifest.parity),
    }


def pairs(values: Any) -> str:
    """A mapping as "name 30, other 0.0031"."""
    return ", ".join(
        f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}"
        for key, value in values.items()
    )
