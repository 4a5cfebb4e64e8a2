"""`onnxlm quantize`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

from onnxlm.cli.summary import print_package
from onnxlm.cli.terminal import progress_bars
from onnxlm.cli.text_file import read_text

if TYPE_CHECKING:
    from onnxlm.quantize import QuantizeOptions


PrefillRows = Annotated[
    bool,
    typer.Option(
        "--prefill-rows",
        help="Give prefill its own 8-bit weights: faster over long prompts, the weights are held twice.",
    ),
]


@dataclass(frozen=True)
class Quantize:
    """Quantize the weights of a full-precision package into a new package.

    Activations keep their type: quantize an fp32 package to run on processors, an fp16 one for GPUs.
    """

    package: Annotated[
        Path,
        typer.Argument(
            metavar="PACKAGE", help="Folder of an fp32 or fp16 package.", show_default=False
        ),
    ]
    out: Annotated[
        Path, typer.Argument(metavar="OUT", help="Folder of the new package.", show_default=False)
    ]
    scheme: Annotated[
        str, typer.Option(metavar="int8|int4", help="How the weights are stored.")
    ] = "int8"
    calibration: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Text to calibrate on, instead of the bundled one."),
    ] = None
    prefill_rows: PrefillRows = False
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the summary as one JSON object.")
    ] = False

    examples: ClassVar[tuple[str, ...]] = (
        "onnxlm quantize smollm2-fp32 smollm2-int8 --scheme int8",
        "onnxlm quantize my-fp16 my-int4-for-gpu --scheme int4",
        "onnxlm quantize my-fp32 my-int4 --scheme int4 --calibration my-text.txt",
    )

    def run(self) -> None:
        """Quantize, then say what was made."""
        from onnxlm.workflow import quantize_package

        options = quantize_options(self.calibration, self.prefill_rows)
        with progress_bars() as progress:
            package = quantize_package(
                self.package, self.out, scheme=self.scheme, options=options, progress=progress
            )
        print_package(package, self.as_json)


def quantize_options(
    calibration: Path | None, prefill_rows: bool, activations: str | None = None
) -> QuantizeOptions | None:
    """What the options of a command say to a quantizer; None when none was given."""
    if calibration is None and not prefill_rows and activations is None:
        return None
    from onnxlm.quantize import QuantizeOptions

    text = None if calibration is None else read_text(calibration)
    return QuantizeOptions(prefill_rows, text, activations)
