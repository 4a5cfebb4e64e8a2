"""Quality figures of hot packages through both graphs, against transformers on the text itself."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from importlib import resources
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from numpy.typing import NDArray
from support.hot import oracle_logits
from support.hot_packages import (
    CONFIG,
    LETTERS,
    Graphs,
    change_parameter,
    eager,
    edited,
    letter_tokenizer,
    oracle,
    package,
)
from tokenizers import processors

from onnxlm import io_spec
from onnxlm.calls import Floats
from onnxlm.errors import InputError
from onnxlm.export.reference import EagerReference
from onnxlm.package import Package
from onnxlm.quality import Quality
from onnxlm.runtime import load
from onnxlm.runtime.evaluate import (
    CHUNK,
    PackageRunner,
    measure_quality,
    start_of_text,
    windows,
)
from onnxlm.runtime.session import SessionConfig
from onnxlm.runtime.tokenizer import Tokenizer

TEXT = resources.files("onnxlm.data").joinpath("evaluation.txt").read_text(encoding="utf-8")
CONTEXT = CONFIG["max_position_embeddings"]
LETTER_TOKENIZER = Tokenizer(letter_tokenizer(), {}, len(LETTERS))
WINDOWS = windows(LETTER_TOKENIZER.encode(TEXT)[:301], [], CONTEXT)


def quality(opened: Package) -> dict[str, Quality]:
    runner = PackageRunner(load(opened.path, threads=1), SessionConfig(threads=1))
    return measure_quality(EagerReference(eager()), runner, WINDOWS)


def test_windows_predict_each_token_once() -> None:
    assert LETTER_TOKENIZER.decode(WINDOWS[0]) == TEXT[: CONTEXT + 1]
    assert [len(window) for window in WINDOWS] == [129, 129, 45]
    assert "".join(LETTER_TOKENIZER.decode(window[1:]) for window in WINDOWS) == TEXT[1:301]


def test_windows_begin_as_the_tokenizer_begins_a_text() -> None:
    backend = letter_tokenizer()
    backend.add_special_tokens(["<s>"])
    backend.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 96)])
    tokenizer = Tokenizer(backend, {"bos_token": "<s>"})
    assert start_of_text(tokenizer) == [96]
    assert start_of_text(LETTER_TOKENIZER) == []
    cut = windows(LETTER_TOKENIZER.encode(TEXT)[:301], [96], CONTEXT)
    assert {window[0] for window in cut} == {96}
    assert {len(window) for window in cut[:-1]} == {CONTEXT + 1}
    assert "".join(tokenizer.decode(window[2:]) for window in cut) == TEXT[1:301]


@pytest.mark.parametrize("ids", [[], [3]])
def test_a_text_that_predicts_nothing(ids: list[int]) -> None:
    with pytest.raises(InputError, match=rf"too short; found {len(ids)} tokens; allowed: 2 or"):
        windows(ids, [96], CONTEXT)


def loss_of(window: Sequence[int], start: int) -> list[float]:
    """-ln p of each token behind position `start`, transformers, one window alone."""
    logits = oracle_logits(oracle(), list(window[:-1]))
    losses = torch.nn.functional.cross_entropy(
        logits[start:].double(), torch.tensor(window[start + 1 :]), reduction="none"
    )
    return [float(loss) for loss in losses]


@pytest.mark.parametrize("lowering", ["ort", "portable"])
def test_a_right_package_loses_nothing(lowering: str) -> None:
    figures = quality(package(lowering))
    losses = {
        "prefill": [loss for window in WINDOWS for loss in loss_of(window, 0)],
        "decode": loss_of(WINDOWS[0], CHUNK),
    }
    assert {path: found.tokens for path, found in figures.items()} == {"prefill": 300, "decode": 64}
    for path, found in figures.items():
        expected = math.exp(sum(losses[path]) / len(losses[path]))
        assert found.perplexity_reference == pytest.approx(expected, rel=1e-5)
        assert found.perplexity == pytest.approx(expected, rel=1e-5)
        assert abs(found.perplexity_change) < 1e-5
        assert 0 < found.kl < found.kl_max < 1e-8
        assert (found.top1, found.verdict) == (1.0, "good")


def test_fp16_is_measured_to_be_near() -> None:
    figures = quality(package("ort", "fp16"))
    assert all(1e-8 < found.kl < 1e-4 and found.top1 > 0.98 for found in figures.values())


def test_decode_steps_are_limited_and_short_rows_have_none() -> None:
    runner = PackageRunner(load(package("ort").path, threads=1), SessionConfig(threads=1))
    reference = EagerReference(eager())
    limited = measure_quality(reference, runner, WINDOWS, decode_tokens=5)
    assert limited["decode"].tokens == 5
    two = measure_quality(reference, runner, [WINDOWS[0][:3]])
    assert {path: found.tokens for path, found in two.items()} == {"prefill": 2, "decode": 1}
    one = measure_quality(reference, runner, [WINDOWS[0][:2]])
    assert {path: found.tokens for path, found in one.items()} == {"prefill": 1}


@pytest.mark.parametrize("graph", [io_spec.PREFILL, io_spec.DECODE])
def test_each_graph_is_measured(graph: str) -> None:
    """A fault of one graph shows in its own figures; decode also sees the cache that prefill has filled."""

    def edit(_: Package, graphs: Graphs) -> None:
        norms = [n for n in graphs[graph].graph if n.op_type == "SkipSimplifiedLayerNormalization"]
        norms[-1].attributes.add(ir.AttrFloat32("epsilon", 3.0))

    figures = quality(edited(package("ort"), edit))
    other = {io_spec.PREFILL: io_spec.DECODE, io_spec.DECODE: io_spec.PREFILL}[graph]
    assert figures[graph].kl > 1e-4
    assert figures[other].kl < 1e-8


Change = Callable[[NDArray[Any]], NDArray[Any]]


def per_tensor_int8(weight: NDArray[Any]) -> NDArray[Any]:
    """Rounded to 255 steps of one size."""
    step = np.abs(weight).max() / 127
    return (np.round(weight / step) * step).astype(weight.dtype)


def per_row_int8(weight: NDArray[Any]) -> NDArray[Any]:
    return np.stack([per_tensor_int8(row) for row in weight])


def with_outlier(quantize: Change) -> Change:
    """One output channel 200 times the others while rounding, as an outlier of the weights."""

    def change(weight: NDArray[Any]) -> NDArray[Any]:
        weight[5] *= 200
        weight = quantize(weight)
        weight[5] /= 200
        return weight

    return change


def rewritten(change: Change) -> Package:
    """Every matrix of the layers changed."""

    def edit(source: Package, graphs: Graphs) -> None:
        for name in source.manifest.parameters:
            if name.startswith("layers.") and name.endswith("proj.weight"):
                change_parameter(source, graphs, name, change)

    return edited(package("ort"), edit)


def test_an_outlier_channel_is_flagged_and_a_scale_a_row_mends_it() -> None:
    collapsed = quality(rewritten(with_outlier(per_tensor_int8)))
    assert {found.verdict for found in collapsed.values()} == {"collapsed"}
    fine = quality(rewritten(with_outlier(per_row_int8)))
    assert {found.verdict for found in fine.values()} == {"good"}


def test_a_package_that_says_nothing_is_collapsed() -> None:
    figures = quality(rewritten(np.zeros_like))
    assert {found.verdict for found in figures.values()} == {"collapsed"}


class Counting:
    """A stream that tells how many of its pieces are alive at most."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._pieces: list[weakref.ref[Floats]] = []
        self.most = 0
        self.largest = 0

    def stream(self, ids: Sequence[int], chunk: int) -> Iterator[Floats]:
        for start in range(0, len(ids), chunk):
            alive = sum(piece() is not None for piece in self._pieces)
            self.most = max(self.most, alive + 1)
            part = ids[start : start + chunk]
            piece = np.zeros((len(part), self._vocab_size), dtype=np.float32)
            piece[np.arange(len(part)), part] = 1.0
            self.largest = max(self.largest, len(part))
            self._pieces.append(weakref.ref(piece))
            yield piece

    stream_decode = stream


def test_a_long_text_is_never_in_memory_at_once() -> None:
    reference, candidate = Counting(50), Counting(50)
    rows = [list(np.arange(2049) % 50)] * 2
    figures = measure_quality(reference, candidate, rows)  # type: ignore[arg-type]
    assert figures["prefill"].tokens == 4096
    assert figures["decode"].tokens == 256
    for stream in (reference, candidate):
        assert stream.largest == CHUNK
        assert stream.most <= 3
