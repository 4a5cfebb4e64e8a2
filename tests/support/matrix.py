"""Which family is tested in which forms: each in two, and a few in all there are.

A family costs seconds for each form that it is exported to. So by default each is exported once as fused and
once as portable graphs; what families share (other variants of a config, fp16, the lowering for runtimes of
older opsets, schemes) goes through a few that together have every block. The `exhaustive` tests do
everything with all.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from onnxlm.export.lowerings import find_lowering, lowering_names
from onnxlm.models.registry import architecture_names
from support.exported import CASES

# Rotary positions and a gated FFN; learned positions, LayerNorm and biases; a bias by distance; caps, windows
# and sandwiched norms; sinks and softmax experts; a latent cache and sigmoid experts.
REPRESENTATIVES = ("llama", "gpt2", "bloom", "gemma2", "gpt_oss", "deepseek_v3")
_THREE = REPRESENTATIVES[:3]
_EVERYWHERE = ("ort", "portable")


def cases(rows: Iterable[tuple[Any, ...]], default: Any) -> list[Any]:
    """Parameters of a test, those for which `default(*row)` does not hold marked `exhaustive`."""
    return [
        pytest.param(row, marks=() if default(*row) else pytest.mark.exhaustive, id=_id(row))
        for row in rows
    ]


def exports(*updates: str) -> list[Any]:
    """(family, variant, lowering) of every export whose caches are updated in one of these ways."""
    wanted = [
        low for low in lowering_names() if not updates or find_lowering(low).state_update in updates
    ]
    rows = [(*case, lowering) for case in CASES for lowering in wanted]
    return cases(rows, is_default)


def tiny_exports() -> list[Any]:
    """(family, lowering) of every tiny model."""
    rows = [(family, lowering) for family in architecture_names() for lowering in lowering_names()]
    return cases(rows, lambda family, lowering: is_default(family, "tiny", lowering))


def half_exports() -> list[Any]:
    """(family, lowering) of every tiny model in fp16."""
    rows = [(family, lowering) for family in architecture_names() for lowering in lowering_names()]
    return cases(rows, lambda family, lowering: lowering == "ort" and family in REPRESENTATIVES)


def is_default(family: str, variant: str, lowering: str) -> bool:
    """Whether a form is tested where nothing else is asked for."""
    if lowering not in _EVERYWHERE:
        return variant == "tiny" and family in _THREE
    return variant == "tiny" or family in REPRESENTATIVES


def _id(row: tuple[Any, ...]) -> str:
    return "-".join(str(part).removeprefix("torch.") for part in row)
