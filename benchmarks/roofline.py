"""The least time of a decode step: bytes of weights that it reads, by the rate at which memory is read.

python benchmarks/roofline.py packages/int8 packages/int4 model.gguf --threads 2
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import gguf
import onnx

from onnxlm.cli.terminal import print_table
from onnxlm.runtime.roofline import read_bytes_per_s
from onnxlm.runtime.session import usable_cores

# A lookup reads one row of its table.
_LOOKUPS = {"Gather", "GatherBlockQuantized"}
_STEP = "decode.onnx"


def bytes_per_step(path: str | Path) -> int:
    """Bytes of weights that one decode step reads: of a folder with an ONNX graph, or a GGUF file.

    Raises:
        FileNotFoundError: There is neither, or several graphs of which none is named as a decode step.
    """
    path = Path(path)
    if path.suffix == ".gguf":
        return _of_gguf(path)
    graphs = [path / _STEP] if (path / _STEP).is_file() else list(path.glob("*.onnx"))
    if len(graphs) != 1:
        raise FileNotFoundError(f"{path}: is no GGUF file and holds neither {_STEP} nor one graph")
    return _of_graph(graphs[0])


def _of_graph(file: Path) -> int:
    graph = onnx.load(file, load_external_data=False).graph
    read: set[str] = set()
    for node in graph.node:
        if node.op_type not in _LOOKUPS:
            read.update(node.input)
    return sum(_size(tensor) for tensor in graph.initializer if tensor.name in read)


def _size(tensor: onnx.TensorProto) -> int:
    width = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
    return math.prod(tensor.dims) * width


def _of_gguf(file: Path) -> int:
    tensors = gguf.GGUFReader(file).tensors
    own_head = any(tensor.name == "output.weight" for tensor in tensors)
    # Without a head of its own the table of embeddings is the head, and read whole.
    skipped = {"token_embd.weight"} if own_head else set()
    return sum(int(tensor.n_bytes) for tensor in tensors if tensor.name not in skipped)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="+", help="packages, genai folders, GGUF files")
    parser.add_argument("--threads", type=int, default=0, help="0 is all cores")
    arguments = parser.parse_args()
    threads = arguments.threads or usable_cores()
    rate = read_bytes_per_s(threads)
    print(f"{threads} threads read {rate / 1e9:.1f} GB/s")
    rows = []
    for model in arguments.models:
        count = bytes_per_step(model)
        rows.append((Path(model).name, f"{count / 1e6:.1f}", f"{rate / count:.1f}"))
    print_table(("model", "MB a step", "tok/s at most"), rows)


if __name__ == "__main__":
    main()
