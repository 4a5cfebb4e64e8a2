"""What bounds a model on this machine: the rate at which threads read memory and multiply matrices.

A decode step reads every weight once; a prompt multiplies every weight by every token.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import onnxruntime as ort

from onnxlm.runtime.onnx_wire import _length_delimited, _varint_bytes
from onnxlm.runtime.session import SessionConfig, session_options

# Several times any cache, so that every pass comes from memory.
BUFFER_BYTES = 256 << 20
# Of each of the matrices: large enough for a kernel's best rate, and a matter of milliseconds.
MATRIX_SIZE = 1024
# Of each rate, in which the best pass is found: clocks rise and threads wake within it.
MEASURE_S = 0.06
# Element types of onnx.proto.
_FLOAT, _UINT8, _INT8, _INT32 = 1, 2, 3, 6


class MemoryReader:
    """A buffer and the threads that read it.

    Args:
        threads: How many read at once.
        nbytes: Size of the buffer.
    """

    def __init__(self, threads: int, nbytes: int = BUFFER_BYTES) -> None:
        # Ones: pages that were never written are all the same page of zeros.
        values = np.ones(nbytes // 8, dtype=np.int64)
        self.nbytes = values.nbytes
        self._parts = np.array_split(values, threads)
        self._pool = ThreadPoolExecutor(threads)

    def read(self) -> float:
        """Read all of it once; seconds."""
        start = time.perf_counter()
        # numpy lets go of Python's lock while it looks for the largest, which takes less time than to load.
        list(self._pool.map(np.max, self._parts))
        return time.perf_counter() - start


def read_bytes_per_s(threads: int, passes: int = 8) -> float:
    """The best rate of some passes: what disturbs one only makes it slower."""
    reader = MemoryReader(threads)
    return reader.nbytes / min(reader.read() for _ in range(passes))


class MatrixProduct:
    """A product of two square matrices by ONNX Runtime's own CPU kernels.

    Args:
        threads: Threads of the session.
        integer: Unsigned by signed bytes, as quantized kernels multiply, instead of float32.
        size: Rows of a matrix.
    """

    def __init__(self, threads: int, integer: bool, size: int = MATRIX_SIZE) -> None:
        kinds = (_UINT8, _INT8, _INT32) if integer else (_FLOAT, _FLOAT, _FLOAT)
        dtypes = (np.uint8, np.int8) if integer else (np.float32, np.float32)
        model = _model("MatMulInteger" if integer else "MatMul", kinds)
        self.flops = 2 * size**3
        options = session_options(SessionConfig(threads=threads))
        self._session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        # The result has a buffer of its own: new memory each time would take longer than filling it.
        self._binding = self._session.io_binding()
        for name, dtype in zip("ab", dtypes, strict=True):
            self._binding.bind_cpu_input(name, np.ones((size, size), dtype))
        made = np.zeros((size, size), np.int32 if integer else np.float32)
        self.result = ort.OrtValue.ortvalue_from_numpy(made)
        self._binding.bind_ortvalue_output("y", self.result)

    def multiply(self) -> float:
        """Do it once; seconds."""
        start = time.perf_counter()
        self._session.run_with_iobinding(self._binding)
        return time.perf_counter() - start


@dataclass
class Roofline:
    """A contestant of a benchmark that only reads memory and multiplies.

    Attributes:
        threads: How many threads do.
    """

    threads: int
    _reader: MemoryReader | None = None
    _products: tuple[MatrixProduct, MatrixProduct] | None = None

    def prepare(self) -> str:
        """Make the buffers and the sessions."""
        self._reader = MemoryReader(self.threads)
        self._products = (MatrixProduct(self.threads, False), MatrixProduct(self.threads, True))
        return f"onnxruntime {ort.__version__}, numpy {np.__version__}"

    def rates(self) -> dict[str, float]:
        """The best of some passes each: what disturbs one only makes it slower."""
        if self._reader is None or self._products is None:
            raise RuntimeError("rates() without prepare()")
        fp32, int8 = (
            product.flops / _best_s(product.multiply, MEASURE_S) for product in self._products
        )
        return {
            "read_bytes_per_s": self._reader.nbytes / _best_s(self._reader.read, MEASURE_S),
            "fp32_flops_per_s": fp32,
            "int8_ops_per_s": int8,
        }


def _best_s(call: Callable[[], float], least_s: float) -> float:
    """The shortest of calls that take so long together, two or more; a call returns its seconds."""
    times = [call(), call()]
    while sum(times) < least_s:
        times.append(call())
    return min(times)


def _model(op_type: str, kinds: tuple[int, int, int]) -> bytes:
    """A serialized model of one node, y = op(a, b), of these element types and any shape."""

    def text(number: int, value: str) -> bytes:
        return _length_delimited(number, value.encode("ascii"))

    def value_info(number: int, name: str, kind: int) -> bytes:
        tensor_type = _length_delimited(1, b"\x08" + _varint_bytes(kind))
        return _length_delimited(number, text(1, name) + _length_delimited(2, tensor_type))

    node = text(1, "a") + text(1, "b") + text(2, "y") + text(3, "product") + text(4, op_type)
    values = ((11, "a"), (11, "b"), (12, "y"))
    infos = b"".join(
        value_info(number, name, kind) for (number, name), kind in zip(values, kinds, strict=True)
    )
    graph = _length_delimited(1, node) + text(2, "roofline") + infos
    opset = b"\x10" + _varint_bytes(13)
    return b"\x08\x08" + _length_delimited(7, graph) + _length_delimited(8, opset)
