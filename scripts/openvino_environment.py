"""Make an environment with ONNX Runtime's OpenVINO build, which cannot be beside the ordinary one.

    python scripts/openvino_environment.py .cache/openvino

Once; a later call with the same requirements does nothing. The project itself is not installed there: the
tests put it on the path.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

# What the runtime needs, with the build in the place of onnxruntime; see [project.dependencies].
REQUIREMENTS = (
    "onnxruntime-openvino==1.24.1",
    "numpy>=2.0",
    "tokenizers>=0.22",
    "jinja2>=3.1",
    "typer>=0.20",
    "rich>=13",
)


def python_of(folder: Path) -> Path:
    """The interpreter of an environment."""
    return folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def make(folder: Path) -> None:
    """Make the environment, whole or not at all."""
    ready = folder / ".ready"
    wanted = "\n".join(REQUIREMENTS)
    if ready.is_file() and ready.read_text(encoding="utf-8") == wanted:
        return
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder, with_pip=True)
    command = [str(python_of(folder)), "-m", "pip", "install", "--quiet", *REQUIREMENTS]
    if subprocess.run(command, check=False).returncode != 0:
        shutil.rmtree(folder, ignore_errors=True)
        raise SystemExit(
            f"openvino_environment: pip cannot install {REQUIREMENTS[0]} here (see above); tests of OpenVINO "
            "are skipped"
        )
    ready.write_text(wanted, encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    make(Path(sys.argv[1]))
