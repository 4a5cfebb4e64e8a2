"""Get what the comparison needs: an environment for each peer, and its files made from one GGUF file.

llama.cpp is compiled on this machine (llama-cpp-python from its source), which takes some minutes, a C++
compiler and cmake. Nothing is made twice. Run it with the interpreter that has onnxlm[export].

    python benchmarks/setup_peers.py model.gguf --folder .peers
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import venv
from pathlib import Path

from hf_folder import write_folder

HERE = Path(__file__).parent
REQUIREMENTS = {
    "llama": ("llama-cpp-python",),
    "genai": (
        "onnxruntime-genai==0.18.*",
        "torch==2.13.0",
        "transformers",
        "onnx",
        "onnx-ir",
    ),
}
KINDS = ("q8_0", "q4_0", "q4_k_m")


def run(*command: str | Path) -> None:
    """Run a command, showing it; a failure ends the script."""
    words = [str(word) for word in command]
    print("+", shlex.join(words), file=sys.stderr)
    done = subprocess.run(words, check=False)
    if done.returncode != 0:
        raise SystemExit(f"failed with code {done.returncode}: {shlex.join(words)}")


def environment(folder: Path, peer: str) -> Path:
    """The interpreter of a peer's environment, which is made unless it was finished before."""
    home = folder / peer
    python = home / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    ready = home / ".ready"
    if not ready.is_file():
        venv.create(home, with_pip=True, clear=True)
        run(python, "-m", "pip", "install", "--quiet", *REQUIREMENTS[peer])
        ready.touch()
    return python


def build_genai(python: Path, source: Path, folder: Path) -> Path:
    """The int4 model of onnxruntime-genai's builder with its defaults for the CPU."""
    model, checkpoint = folder / "genai_int4", folder / "hf"
    if not (model / "genai_config.json").is_file():
        if not (checkpoint / "config.json").is_file():
            write_folder(str(source), checkpoint)
        cache = folder / "builder-cache"
        builder = ("-m", "onnxruntime_genai.models.builder", "-p", "int4", "-e", "cpu")
        run(python, *builder, "-i", checkpoint, "-o", model, "-c", cache)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path, help="GGUF file")
    parser.add_argument("--folder", type=Path, default=Path(".peers"), help="where all of it goes")
    parser.add_argument("--files", type=Path, help="where the models go, instead of --folder")
    options = parser.parse_args()
    files = options.files or options.folder
    files.mkdir(parents=True, exist_ok=True)
    llama, genai = (environment(options.folder, peer) for peer in REQUIREMENTS)
    run(llama, HERE / "requantize.py", options.source, files, *KINDS)
    model = build_genai(genai, options.source, files)
    words = [
        *("python", "benchmarks/peers.py", "--source", options.source),
        *("--package", "int8=PACKAGE", "--llama", f"source={options.source}"),
        *(word for kind in KINDS for word in ("--llama", f"{kind}={files / kind}.gguf")),
        *("--genai", f"genai_int4={model}"),
        *("--python", f"llama={llama}", "--python", f"genai={genai}", "--against", "int8=q8_0"),
    ]
    print(shlex.join(map(str, words)))


if __name__ == "__main__":
    main()
