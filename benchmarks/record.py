"""What the benchmarks of generation share: a clock's rounds, and a file for the figures and the machine."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from onnxlm.runtime.foreign_load import ForeignLoad
from onnxlm.runtime.machine import describe_machine


def parser(description: str) -> argparse.ArgumentParser:
    """A parser that shows a module's docstring as it is, with the options that every benchmark here has."""
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--threads", type=int, default=0, help="threads; 0 is all cores")
    made.add_argument("--json", type=Path, metavar="FILE", help="file for figures and machine")
    return made


class Record:
    """The figures of one run of a benchmark.

    Args:
        args: Its options; paths are left out of the file, they are the user's own.
        schema: Name of the file's form.
    """

    def __init__(self, args: argparse.Namespace, schema: str) -> None:
        self._args = args
        self._schema = schema
        self._load = ForeignLoad()
        self._rows: list[dict[str, Any]] = []

    def add(self, **row: Any) -> None:
        """Take a row, and print it."""
        self._rows.append(row)
        print("  ".join(f"{name} {_shown(value)}" for name, value in row.items()), flush=True)

    def finish(self, aims: Mapping[str, tuple[float, str, float]]) -> None:
        """Print what was to be reached and what was, and write the file.

        Args:
            aims: What was measured, how it is compared ("<=" or ">=") and with what, by name.
        """
        told: list[dict[str, Any]] = []
        for name, (value, sign, aim) in aims.items():
            held = value <= aim if sign == "<=" else value >= aim
            told.append({"aim": name, "value": value, "wanted": f"{sign} {aim:g}", "held": held})
            print(f"{name}: {value:.4g}, wanted {sign} {aim:g}: {'held' if held else 'MISSED'}")
        cores = self._load.cores()
        print(f"cores that others used meanwhile: {'unknown' if cores is None else f'{cores:.2f}'}")
        if self._args.json is None:
            return
        options = {
            name: value
            for name, value in vars(self._args).items()
            if isinstance(value, int | float) or _is_numbers(value)
        }
        result = {
            "schema": self._schema,
            "machine": dataclasses.asdict(describe_machine()),
            "foreign_load": cores,
            "options": options,
            "aims": told,
            "rows": self._rows,
        }
        self._args.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _is_numbers(value: Any) -> bool:
    return isinstance(value, Sequence) and all(isinstance(item, int) for item in value)
