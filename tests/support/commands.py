"""The `onnxlm` command, run as a user runs it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Ran:
    """What a command left behind."""

    code: int
    out: str
    err: str


def run_process(
    *arguments: str | Path, stdin: bytes = b"", environment: Mapping[str, str] | None = None
) -> Ran:
    """Run `onnxlm` in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "onnxlm", *map(str, arguments)],
        input=stdin,
        capture_output=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})},
    )
    return Ran(done.returncode, done.stdout.decode(), done.stderr.decode())
