"""Quality figures against numbers worked by hand, and pieces against the whole."""

from __future__ import annotations

import json
import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from numpy.typing import NDArray

from onnxlm.proof import Check, VerifyReport
from onnxlm.quality import Quality, QualityMeter, log_softmax

LN2 = math.log(2.0)


def logits(*rows: list[float]) -> NDArray[np.float32]:
    """Logits of the given probabilities, shifted: softmax must not care."""
    with np.errstate(divide="ignore"):
        return (np.log(np.array(rows)) + 3.0).astype(np.float32)


def measure(
    reference: NDArray[np.float32], candidate: NDArray[np.float32], targets: list[int]
) -> Quality:
    meter = QualityMeter()
    meter.add(reference, candidate, np.array(targets))
    return meter.result()


def test_figures_worked_by_hand() -> None:
    """Position 1: 1/2 ln 2 + 1/4 ln 1 + 1/4 ln(1/2) = 1/4 ln 2; position 2: the same distribution."""
    reference = logits([0.5, 0.25, 0.25], [0.25, 0.5, 0.25])
    candidate = logits([0.25, 0.25, 0.5], [0.25, 0.5, 0.25])
    figures = measure(reference, candidate, [0, 0])
    assert figures.tokens == 2
    assert figures.kl == pytest.approx(LN2 / 8, rel=1e-6)
    assert figures.kl_max == pytest.approx(LN2 / 4, rel=1e-6)
    assert figures.top1 == 0.5
    # exp of the mean of -ln p(target): (1/2 * 1/4) ** (-1/2) and (1/4 * 1/4) ** (-1/2)
    assert figures.perplexity_reference == pytest.approx(math.sqrt(8), rel=1e-6)
    assert figures.perplexity == pytest.approx(4.0, rel=1e-6)
    assert figures.perplexity_change == pytest.approx(math.sqrt(2) - 1, rel=1e-6)


def test_the_direction_of_the_divergence() -> None:
    """KL(reference || candidate), not the other way: 0.9 ln 9 + 0.1 ln(1/9) against equal shares."""
    sharp, flat = logits([0.9, 0.1]), logits([0.5, 0.5])
    forward = 0.9 * math.log(1.8) + 0.1 * math.log(0.2)
    backward = 0.5 * math.log(1 / 1.8) + 0.5 * math.log(5)
    assert measure(sharp, flat, [0]).kl == pytest.approx(forward, rel=1e-6)
    assert measure(flat, sharp, [0]).kl == pytest.approx(backward, rel=1e-6)


def test_against_torch() -> None:
    generator = torch.Generator().manual_seed(0)
    reference, candidate = torch.randn((2, 40, 300), generator=generator) * 5
    targets = torch.randint(300, (40,), generator=generator)
    figures = measure(reference.numpy(), candidate.numpy(), targets.tolist())
    p, q = (torch.log_softmax(x.double(), -1) for x in (reference, candidate))
    kl = torch.nn.functional.kl_div(q, p, log_target=True, reduction="batchmean")
    loss = torch.nn.functional.cross_entropy(candidate.double(), targets)
    assert figures.kl == pytest.approx(kl.item(), rel=1e-9)
    assert figures.perplexity == pytest.approx(loss.exp().item(), rel=1e-9)
    assert figures.top1 == (reference.argmax(-1) == candidate.argmax(-1)).double().mean().item()


def test_impossible_tokens() -> None:
    """0 ln 0 is 0; what only the candidate rules out is infinitely far."""
    reference, candidate = logits([0.5, 0.5, 0.0]), logits([0.25, 0.5, 0.25])
    assert measure(reference, candidate, [0]).kl == pytest.approx(LN2 / 2, rel=1e-6)
    both = logits([0.25, 0.75, 0.0])
    assert measure(reference, both, [1]).kl == pytest.approx(
        0.5 * LN2 + 0.5 * math.log(2 / 3), rel=1e-6
    )
    figures = measure(candidate, reference, [2])
    assert (figures.kl, figures.perplexity, figures.verdict) == (math.inf, math.inf, "collapsed")


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_logit_that_is_no_number_is_seen(bad: float) -> None:
    reference = logits(*[[0.5, 0.25, 0.25]] * 100)
    candidate = reference.copy()
    candidate[57, 1] = bad
    figures = measure(reference, candidate, [0] * 100)
    assert figures.verdict == "collapsed"
    assert math.isnan(figures.kl)
    assert math.isnan(figures.kl_max)
    assert figures.to_dict()["kl"] is None


def test_large_logits_do_not_overflow() -> None:
    figures = measure(np.array([[1e4, 0.0]], np.float32), np.array([[0.0, 1e4]], np.float32), [0])
    assert figures.kl == pytest.approx(1e4)
    assert (figures.perplexity_reference, figures.perplexity) == (1.0, math.inf)


@pytest.mark.parametrize(
    ("reference", "candidate", "targets"),
    [((3, 5), (3, 4), 3), ((3, 5), (2, 5), 3), ((3, 5), (3, 5), 2)],
)
def test_streams_that_do_not_belong_together(
    reference: tuple[int, int], candidate: tuple[int, int], targets: int
) -> None:
    with pytest.raises(ValueError, match="shapes"):
        measure(np.zeros(reference, np.float32), np.zeros(candidate, np.float32), [0] * targets)


FLOATS = st.floats(-50, 50, width=32)


@st.composite
def cut_texts(draw: st.DrawFn) -> tuple[NDArray[np.float32], NDArray[np.float32], list[int]]:
    """Two streams of logits [n, V] and where to cut them."""
    shape = draw(st.tuples(st.integers(1, 12), st.integers(1, 9)))
    pair = [draw(arrays.arrays(np.float32, shape, elements=FLOATS)) for _ in range(2)]
    cuts = draw(st.lists(st.integers(0, shape[0]), max_size=4))
    return pair[0], pair[1], [0, *sorted(cuts), shape[0]]


@settings(max_examples=200, deadline=None)
@given(cut_texts(), st.integers(0, 2**16))
def test_pieces_give_exactly_what_the_whole_gives(
    text: tuple[NDArray[np.float32], NDArray[np.float32], list[int]], seed: int
) -> None:
    reference, candidate, cuts = text
    targets = np.random.default_rng(seed).integers(0, reference.shape[1], len(reference))
    meter = QualityMeter()
    for start, end in pairwise(cuts):
        meter.add(reference[start:end], candidate[start:end], targets[start:end])
    assert meter.result() == measure(reference, candidate, targets.tolist())


@settings(max_examples=200, deadline=None)
@given(cut_texts())
def test_bounds(text: tuple[NDArray[np.float32], NDArray[np.float32], list[int]]) -> None:
    reference, candidate, _ = text
    targets = [0] * len(reference)
    figures = measure(reference, candidate, targets)
    assert 0 <= figures.kl <= figures.kl_max * (1 + 1e-12)
    assert 0 <= figures.top1 <= 1
    same = measure(reference, reference, targets)
    assert (same.kl, same.top1, same.perplexity_change) == (0, 1, 0)
    assert np.exp(log_softmax(reference)).sum(axis=1) == pytest.approx(1.0)


def test_slices_of_a_piece_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """A piece larger than what is computed at once."""
    reference, candidate = np.random.default_rng(0).normal(size=(2, 23, 7)).astype(np.float32)
    whole = measure(reference, candidate, [1] * 23)
    monkeypatch.setattr("onnxlm.quality._SLICE_VALUES", 5 * 7)
    assert measure(reference, candidate, [1] * 23) == whole


def figures(kl: float, top1: float, change: float = 0.0) -> Quality:
    return Quality(100, kl, kl, top1, 10.0, 10.0 * (1 + change), change)


@pytest.mark.parametrize(
    ("kl", "top1", "verdict"),
    [
        (0.003, 0.97, "good"),  # 8-bit blocks
        (0.1, 0.85, "good"),
        (0.062, 0.84, "degraded"),
        (0.303, 0.744, "degraded"),  # 4-bit blocks rounded to nearest
        (0.5, 0.5, "degraded"),
        (0.51, 0.9, "collapsed"),
        (0.2, 0.49, "collapsed"),
        (0.7, 0.585, "collapsed"),  # the same with blocks of 128
        (math.nan, 0.9, "collapsed"),
    ],
)
def test_verdicts(kl: float, top1: float, verdict: str) -> None:
    assert figures(kl, top1).verdict == verdict
    report = VerifyReport(
        "p", "r", "int8", "ort", "cpu", "t", quality={"prefill": figures(kl, top1)}
    )
    assert report.ok == (verdict != "collapsed")


def test_a_report() -> None:
    good, bad = Check("prefill", 64, 1e-5, 1e-4), Check("decode", 32, math.inf, 1e-4)
    report = VerifyReport("p", "r", "fp32", "ort", "cpu", "t", checks=(good, bad))
    assert not report.ok
    read = json.loads(report.to_json())
    assert read["ok"] is False
    assert [(c["ok"], c["difference"]) for c in read["checks"]] == [(True, 1e-5), (False, None)]
    assert report.check_rows()[1] == ("decode", "FAILED", "32", "inf", "1.00e-04")

    report = VerifyReport(
        "p",
        "r",
        "fp32",
        "ort",
        "cpu",
        "t",
        checks=(good,),
        quality={"decode": figures(0.25, 0.875, 0.5)},
    )
    assert report.ok
    assert report.quality_rows() == [
        ("decode", "degraded", "100", "0.2500", "0.875", "15", "10", "+50.00%")
    ]
    quality, parity = report.figures()
    assert quality["decode_kl"] == 0.25
    assert quality["decode_tokens"] == 100
    assert parity == {"prefill": {"difference": 1e-5, "allowed": 1e-4}}


def test_nothing_checked_is_not_ok() -> None:
    assert not VerifyReport("p", "r", "fp32", "ort", "cpu", "t").ok


def test_a_difference_that_is_no_number_fails() -> None:
    assert not Check("prefill", 1, math.nan, 1e-4).ok
