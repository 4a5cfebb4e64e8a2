"""Tests that share an export run in one process."""

from __future__ import annotations

import pytest

pytest.importorskip("xdist")

from support.scheduling import family_or_file


@pytest.mark.parametrize(
    ("nodeid", "expected"),
    [
        ("tests/parity/test_graphs.py::test_decode[as written-cohere2-tiny-ort]", "cohere2"),
        ("tests/parity/test_gguf_families.py::test_logits[gpt_neox: tiny]", "gpt_neox"),
        ("tests/parity/test_quantized.py::test_codes[phi3-plain queries-ort-int8]", "phi3"),
        ("tests/unit/test_style.py::test_files_are_short", "tests/unit/test_style.py"),
        ("tests/unit/test_beam.py::test_x[optimum-3]", "tests/unit/test_beam.py"),
    ],
)
def test_the_family_or_the_file(nodeid: str, expected: str) -> None:
    assert family_or_file(nodeid) == expected
