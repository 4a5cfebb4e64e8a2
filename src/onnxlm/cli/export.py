"""`onnxlm export`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import typer

from onnxlm.cli.quantize import PrefillRows, quantize_options
from onnxlm.cli.summary import print_package
from onnxlm.cli.terminal import note, progress_bars
from onnxlm.package import Package

_TOKENIZER = "tokenizer.json"
# What other libraries read a vocabulary from.
_OTHER_TOKENIZERS = ("tokenizer.model", "spiece.model", "vocab.json", "merges.txt", "vocab.txt")


@dataclass(frozen=True)
class Export:
    """Cast a trained model into an ONNX package.

    SOURCE is a Hugging Face folder, a GGUF file, a Hub id (org/name), a full-precision package, or a function
    in a Python file that builds a model of onnxlm's blocks (file.py:function). OUT is a new folder, an empty
    one, or a package, which is replaced when the new one is whole.
    """

    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE", help="Folder, GGUF file, Hub id or package.", show_default=False
        ),
    ]
    out: Annotated[
        Path, typer.Argument(metavar="OUT", help="Folder of the package.", show_default=False)
    ]
    precision: Annotated[
        str, typer.Option(metavar="fp32|fp16|int8|int4", help="Precision of the weights.")
    ] = "fp32"
    lowering: Annotated[
        str,
        typer.Option(
            metavar="ort|portable|plain",
            help="ort: fused operators of ONNX Runtime; portable: standard ONNX operators only; plain: only "
            "those of opset 21, for engines that lack newer ones.",
        ),
    ] = "ort"
    activations: Annotated[
        str | None,
        typer.Option(
            metavar="fp32|fp16",
            help="Type of what layers pass on, in int8 and int4 packages: fp16 for GPUs, else fp32.",
        ),
    ] = None
    weights: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Weights (safetensors) of a model from a Python file."),
    ] = None
    requantize: Annotated[
        bool,
        typer.Option(
            "--requantize",
            help="Quantize anew a source that is quantized, instead of keeping its codes without loss.",
        ),
    ] = False
    calibration: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Text to calibrate on, instead of the bundled one (int8, int4)."
        ),
    ] = None
    prefill_rows: PrefillRows = False
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the summary as one JSON object.")
    ] = False

    examples: ClassVar[tuple[str, ...]] = (
        "onnxlm export SmolLM2-135M-Instruct.Q4_1.gguf smollm2-int8 --precision int8",
        "onnxlm export ./my-llama my-llama-onnx --lowering portable",
        "onnxlm export ./my-llama my-llama-gpu --precision int4 --activations fp16",
        "onnxlm export my_model.py:build my-model-onnx --weights my_model.safetensors",
    )

    def run(self) -> None:
        """Export, then say what was made."""
        from onnxlm.models.checkpoint import spelled
        from onnxlm.workflow import make_package

        options = quantize_options(self.calibration, self.prefill_rows, self.activations)
        with progress_bars() as progress:
            package = make_package(
                spelled(self.source, self.weights),
                self.out,
                precision=self.precision,
                lowering=self.lowering,
                requantize=self.requantize,
                options=options,
                progress=progress,
            )
        print_package(package, self.as_json)
        _note_tokenizer(self.source, package)


def _note_tokenizer(source: str, package: Package) -> None:
    """Say that a package takes and gives token ids only, while the source is still at hand."""
    if package.has(_TOKENIZER):
        return
    kinds = [name for name in _OTHER_TOKENIZERS if (Path(source) / name).is_file()]
    found = f", found {' and '.join(kinds)}" if kinds else ""
    note(
        f"note: {source} has no {_TOKENIZER}{found}; the package takes and gives token ids only; for text, "
        f"make {_TOKENIZER} (transformers: AutoTokenizer.from_pretrained, save_pretrained) and export again"
    )
