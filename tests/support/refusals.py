"""How every refused input must read: one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from onnxlm.errors import OnnxlmError
from onnxlm.models.checkpoint import read


def refusal(source: Path) -> str:
    """The message with which reading a checkpoint is refused."""
    with pytest.raises(OnnxlmError) as raised:
        read(source)
    message = str(raised.value)
    assert "\n" not in message
    return message
