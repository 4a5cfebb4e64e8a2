"""`onnxlm providers`: what the table says of a provider that is not there either."""

from __future__ import annotations

import re

from support.commands import run_process


def test_what_goes_with_one_type_of_activations_says_so() -> None:
    ran = run_process("providers")
    assert ran.code == 0
    cells = {line.split()[0]: re.split(" {2,}", line) for line in ran.out.splitlines()}
    assert cells["cuda"][3] == "ort (float16 only), portable, plain"
    assert cells["cpu"][3].strip() == "ort, portable, plain"
    assert 'pip install "onnxruntime-gpu>=1.32" ' in ran.err
