"""A subcommand is a frozen dataclass: fields are its options, the docstring its help, `run` its work."""

from __future__ import annotations

import inspect
from typing import Any, ClassVar, Protocol

import typer


class Command(Protocol):
    """What a subcommand's class offers.

    Attributes:
        examples: Command lines for `--help`.
    """

    examples: ClassVar[tuple[str, ...]]

    def run(self) -> None:
        """Do the work; what fails for a user's reason raises an `OnnxlmError`."""


def register(app: typer.Typer, name: str, command: type[Command]) -> None:
    """Add a subcommand to the application."""

    def call(**options: Any) -> None:
        command(**options).run()

    # Typer reads a function's signature.
    signature = inspect.signature(command, eval_str=True)
    call.__signature__ = signature.replace(return_annotation=None)  # type: ignore[attr-defined]
    app.command(name, help=command.__doc__, epilog=_epilog(command.examples))(call)


def _epilog(examples: tuple[str, ...]) -> str:
    # Paragraphs, because lines of one paragraph are joined.
    return "\n\n".join(("Example:" if len(examples) == 1 else "Examples:", *examples))
