"""Re-quantize a GGUF file with llama.cpp; run it with the interpreter that has llama-cpp-python.

.peers/llama/bin/python benchmarks/requantize.py model.gguf folder q8_0 q4_0 q4_k_m
"""

from __future__ import annotations

import argparse
import ctypes
import os
from pathlib import Path

import llama_cpp as llama


def requantize(source: Path, target: Path, kind: str, threads: int) -> None:
    """Write `target`, or nothing if llama.cpp fails."""
    params = llama.llama_model_quantize_default_params()
    params.ftype = getattr(llama, f"LLAMA_FTYPE_MOSTLY_{kind.upper()}")
    params.nthread = threads
    params.allow_requantize = True
    part = target.with_suffix(".part")
    status = llama.llama_model_quantize(
        str(source).encode(), str(part).encode(), ctypes.byref(params)
    )
    if status != 0:
        part.unlink(missing_ok=True)
        raise SystemExit(f"{source}: llama.cpp cannot write it as {kind} (status {status})")
    os.replace(part, target)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("kinds", nargs="+", help="q8_0, q4_0, q4_k_m, ...")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    for kind in options.kinds:
        target = options.folder / f"{kind}.gguf"
        if not target.is_file():
            requantize(options.source, target, kind, options.threads)


if __name__ == "__main__":
    main()
