"""The list of subcommands."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from onnxlm import __version__
from onnxlm.cli.bench import Bench
from onnxlm.cli.chat import Chat
from onnxlm.cli.command import register
from onnxlm.cli.eval import Eval
from onnxlm.cli.export import Export
from onnxlm.cli.generate import Generate
from onnxlm.cli.inspect import Inspect
from onnxlm.cli.profile import Profile
from onnxlm.cli.providers import Providers
from onnxlm.cli.quantize import Quantize
from onnxlm.cli.verify import Verify

COMMANDS = {
    "export": Export,
    "quantize": Quantize,
    "generate": Generate,
    "chat": Chat,
    "verify": Verify,
    "eval": Eval,
    "bench": Bench,
    "profile": Profile,
    "inspect": Inspect,
    "providers": Providers,
}


def build_application() -> typer.Typer:
    """The application with every subcommand."""
    app = typer.Typer(
        add_completion=False,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        # Boxes and colours are for people: what is piped stays plain.
        rich_markup_mode="rich" if sys.stdout.isatty() else None,
    )
    app.callback()(_top)
    for name, command in COMMANDS.items():
        register(app, name, command)
    return app


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"onnxlm {__version__}")
        raise typer.Exit


def _top(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Cast trained Transformers into ONNX packages, quantize them, run and prove them."""
