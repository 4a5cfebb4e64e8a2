"""The `onnxlm` command: one module a subcommand, each a dataclass whose fields are its options."""

from __future__ import annotations

from collections.abc import Sequence

from onnxlm.cli.faults import one_line_errors, quiet_libraries

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run `onnxlm` and exit: 0 done, 1 a check failed or a bug, 2 bad input, 130 interrupted.

    Args:
        arguments: What follows the command's name; those of the process when None.
    """
    quiet_libraries()
    with one_line_errors():
        from onnxlm.cli.application import build_application

        build_application()(args=None if arguments is None else list(arguments), prog_name="onnxlm")
