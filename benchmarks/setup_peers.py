"""Get what the comparison needs: an environment for each peer, and its files made from one GGUF file.

llama.cpp is compiled on this machine (llama-cpp-python from its source), which takes some minutes, a C++
compiler and cmake. Nothing is made twice. A peer that cannot be installed, or refuses the model, is left out,
and the command line that is printed says so. Run it with the interpreter that has onnxlm[export].

    python benchmarks/setup_peers.py model.gguf --folder .peers
    python benchmarks/setup_peers.py model.gguf --folder .peers --peer openvino --peer optimum
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import venv
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from hf_folder import write_folder

HERE = Path(__file__).parent
TORCH = "torch==2.13.0"
GGUF_KINDS = ("q8_0", "q4_0", "q4_k_m")


class SetupError(Exception):
    """A command failed; says which."""


@dataclass(frozen=True)
class Home:
    """Where a peer's things are.

    Attributes:
        python: Interpreter of its environment.
        source: GGUF file that all models are made from.
        files: Folder for the models.
    """

    python: Path
    source: Path
    files: Path

    def program(self, name: str) -> Path:
        """A program that the peer's packages brought."""
        return self.python.with_name(name)

    def hf(self) -> Path:
        """The source as a Hugging Face folder, for tools that need one."""
        folder = self.files / "hf"
        if not (folder / "config.json").is_file():
            write_folder(str(self.source), folder)
        return folder


Models = Iterator[tuple[str, Path]]


@dataclass(frozen=True)
class Peer:
    """One peer.

    Attributes:
        packages: For pip.
        models: Makes its contestants' files; yields names and paths.
        without: Packages that come along, are not needed, and can be in the way.
    """

    packages: tuple[str, ...]
    models: Callable[[Home], Models]
    without: tuple[str, ...] = ()


def run(*command: str | Path) -> None:
    """Run a command, showing it.

    Raises:
        SetupError: It failed.
    """
    words = [str(word) for word in command]
    print("+", shlex.join(words), file=sys.stderr)
    done = subprocess.run(words, check=False)
    if done.returncode != 0:
        raise SetupError(f"failed with code {done.returncode}: {shlex.join(words)}")


def llama(home: Home) -> Models:
    """The file itself, and what llama.cpp makes of it."""
    yield "source", home.source
    run(home.python, HERE / "requantize.py", home.source, home.files, *GGUF_KINDS)
    for kind in GGUF_KINDS:
        yield kind, home.files / f"{kind}.gguf"


def genai(home: Home) -> Models:
    """onnxruntime-genai's builder with its defaults for the CPU."""
    for precision in ("int4", "fp32"):
        model = home.files / f"genai_{precision}"
        if not (model / "genai_config.json").is_file():
            builder = ("-m", "onnxruntime_genai.models.builder", "-p", precision, "-e", "cpu")
            cache = home.files / "builder-cache"
            run(home.python, *builder, "-i", home.hf(), "-o", model, "-c", cache)
        yield model.name, model


def optimum(home: Home) -> Models:
    """optimum-onnx's export, and its dynamic quantization for a CPU with VNNI."""
    plain, quantized = home.files / "optimum_fp32", home.files / "optimum_int8"
    tool = home.program("optimum-cli")
    if not (plain / "model.onnx").is_file():
        task = ("--task", "text-generation-with-past")
        run(tool, "export", "onnx", "--model", home.hf(), *task, plain)
    yield plain.name, plain
    if not quantized.is_dir():
        run(
            tool, "onnxruntime", "quantize", "--onnx_model", plain, "--avx512_vnni", "-o", quantized
        )
    yield quantized.name, quantized


def openvino(home: Home) -> Models:
    """optimum-intel's export with its defaults, but for the groups of int4: 128 does not divide 576."""
    groups: dict[str, tuple[str, ...]] = {"int8": (), "int4": ("--group-size", "64")}
    for bits, group in groups.items():
        model = home.files / f"openvino_{bits}"
        if not (model / "openvino_model.bin").is_file():
            words = ("--task", "text-generation-with-past", "--weight-format", bits, *group)
            run(home.program("optimum-cli"), "export", "openvino", "-m", home.hf(), *words, model)
        yield model.name, model


def ctranslate2(home: Home) -> Models:
    """CTranslate2's converter."""
    for kind in ("int8", "float32"):
        model = home.files / f"ctranslate2_{kind}"
        if not (model / "model.bin").is_file():
            tool = home.program("ct2-transformers-converter")
            run(tool, "--model", home.hf(), "--quantization", kind, "--output_dir", model)
        yield model.name, model


# Each in an environment of its own: optimum-onnx and CTranslate2 want a transformers before 5.
PEERS = {
    "llama": Peer(("llama-cpp-python",), llama),
    "genai": Peer(("onnxruntime-genai==0.18.*", TORCH, "transformers", "onnx", "onnx-ir"), genai),
    "optimum": Peer(("optimum-onnx[onnxruntime]==0.1.0", TORCH), optimum),
    "openvino": Peer(
        ("openvino-genai==2026.4.*", "optimum-intel==2.2.0", "nncf==3.4.*", TORCH),
        openvino,
        # Cannot be imported beside a build of torch for the CPU alone, and transformers then cannot either.
        without=("torchvision",),
    ),
    "ctranslate2": Peer(("ctranslate2==4.8.*", "transformers==4.57.*", TORCH), ctranslate2),
}


def environment(folder: Path, name: str) -> Path:
    """The interpreter of a peer's environment, which is made unless it was finished before."""
    home = folder / name
    python = home / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    ready = home / ".ready"
    if not ready.is_file():
        venv.create(home, with_pip=True, clear=True)
        peer = PEERS[name]
        run(python, "-m", "pip", "install", "--quiet", *peer.packages)
        if peer.without:
            run(python, "-m", "pip", "uninstall", "--quiet", "--yes", *peer.without)
        ready.touch()
    return python


def arguments(folder: Path, source: Path, files: Path, name: str) -> Iterator[str]:
    """Words of the command line of `peers.py` for a peer; makes what they name."""
    try:
        python = environment(folder, name)
        yield from ("--python", f"{name}={python}")
        for called, model in PEERS[name].models(Home(python, source, files)):
            yield from (f"--{name}", f"{called}={model}")
    except SetupError as error:
        print(f"left out: {name}: {error}", file=sys.stderr)
        yield from ("--left-out", f"{name}={error}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path, help="GGUF file")
    parser.add_argument("--folder", type=Path, default=Path(".peers"), help="where all of it goes")
    parser.add_argument("--files", type=Path, help="where the models go, instead of --folder")
    parser.add_argument("--peer", action="append", choices=list(PEERS), help="only this one")
    options = parser.parse_args()
    files = options.files or options.folder
    files.mkdir(parents=True, exist_ok=True)
    words = ["python", "benchmarks/peers.py", "--source", options.source]
    words += ["--package", "int8=PACKAGE", "--eager", "--compile"]
    for name in options.peer or PEERS:
        words += arguments(options.folder, options.source, files, name)
    print(shlex.join([*map(str, words), "--against", "int8=q8_0"]))


if __name__ == "__main__":
    main()
