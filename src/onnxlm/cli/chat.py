"""`onnxlm chat`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import typer

from onnxlm.cli.generation_options import SamplingOptions, SessionOptions
from onnxlm.cli.terminal import note


@dataclass(frozen=True)
class Chat(SamplingOptions, SessionOptions):
    """Talk with a model. Answers go to standard output as they come, all else to standard error.

    At a terminal, Ctrl-C stops an answer, Ctrl-D or /exit leaves, and /help tells of the other commands. A
    message of several lines begins and ends with three double quotes. From a pipe each line is a turn.
    """

    package: Annotated[
        Path, typer.Argument(metavar="PACKAGE", help="Folder of the package.", show_default=False)
    ]
    system: Annotated[
        str | None, typer.Option(metavar="TEXT", help="The system message.", show_default=False)
    ] = None

    examples: ClassVar[tuple[str, ...]] = (
        "onnxlm chat smollm2-int8",
        'onnxlm chat smollm2-int8 --system "Be brief." --temperature 0.7',
        "onnxlm chat smollm2-int8 < questions.txt > answers.txt",
    )

    def run(self) -> None:
        """Load, then turn by turn."""
        from onnxlm.cli.chat_loop import ChatLoop

        model = self.load(self.package)
        if model.fallback is not None:
            note(f"{model.provider} instead of {self.provider}: {model.fallback}")
        fields = self.sampling_fields()
        model.sampling_params(fields)  # refused before the first message rather than behind it
        ChatLoop(model, model.chat(self.system), fields).run()
