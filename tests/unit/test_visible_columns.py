"""Which columns a query sees, and what soft-capping does to its scores: small cases worked by hand."""

from __future__ import annotations

import math

import pytest
import torch

from onnxlm.errors import ConfigError
from onnxlm.models.architectures._windows import sliding_windows
from onnxlm.models.config import ConfigReader
from onnxlm.models.layers.cached_attention import AttentionSpec, attend, visible_columns


def seen(mask: list[int], new_tokens: int, window: int) -> list[str]:
    """A row's visibility, a string of 0 and 1 for each new token."""
    (visible,) = visible_columns(torch.tensor([mask]), new_tokens, window).int().tolist()
    return ["".join(map(str, line)) for line in visible]


def test_without_a_window_everything_up_to_itself() -> None:
    assert seen([1, 1, 1, 1], 4, 0) == ["1000", "1100", "1110", "1111"]


def test_a_window_counts_the_token_itself() -> None:
    assert seen([1, 1, 1, 1], 4, 2) == ["1000", "1100", "0110", "0011"]
    assert seen([1, 1, 1, 1], 4, 1) == ["1000", "0100", "0010", "0001"]


def test_a_window_reaches_into_the_cache() -> None:
    """Three cached columns, two new ones."""
    assert seen([1, 1, 1, 1, 1], 2, 3) == ["01110", "00111"]


def test_a_window_counts_tokens_and_not_padding() -> None:
    """Tokens in columns 1, 2, 4 and 5: three back from column 5 is column 2."""
    assert seen([0, 1, 1, 0, 1, 1], 2, 3) == ["011010", "001011"]


def test_scores_are_capped_before_the_softmax() -> None:
    """Scores 6 and 0 become 2 tanh(3) and 0; the query takes as much of each value as softmax says."""
    query = torch.tensor([[[[3.0]]]])
    key = torch.tensor([[[[4.0], [0.0]]]])
    value = torch.tensor([[[[1.0], [0.0]]]])
    spec = AttentionSpec(1, 1, scale=0.5, softcap=2.0)
    mixed = attend(query, key, value, torch.tensor([[[True, True]]]), spec)
    capped = 2 * math.tanh(3.0)
    assert mixed.item() == pytest.approx(math.exp(capped) / (math.exp(capped) + 1), abs=1e-6)
    assert mixed.item() < 0.88  # uncapped: 0.9975


def test_a_capped_score_that_is_masked_stays_masked() -> None:
    query, value = torch.tensor([[[[9.0]]]]), torch.tensor([[[[5.0], [1.0]]]])
    spec = AttentionSpec(1, 1, scale=1.0, softcap=1.0)
    visible = torch.tensor([[[False, True]]])
    assert attend(query, value, value, visible, spec).item() == 1.0


def windows(config: dict[str, object], window: int | None = 4, layers: int = 3) -> tuple[int, ...]:
    reader = ConfigReader(config, "config.json")
    return sliding_windows(reader, layers, window, lambda index: index == 1)


def test_layers_have_windows_by_their_type() -> None:
    types = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
    assert windows({"layer_types": types}) == (4, 0, 4)
    assert windows({}) == (0, 4, 0)
    assert windows({"layer_types": ["full_attention"] * 3}, window=None) == (0, 0, 0)


@pytest.mark.parametrize(
    ("types", "window", "message"),
    [
        (["full_attention"], 4, "'layer_types'; found .* one for each of 3 layers"),
        ("full_attention", 4, "'layer_types'; found 'full_attention'; allowed: a list of str"),
        (["full_attention", "full_attention", 3], 4, "allowed: a list of str"),
        (["chunked_attention"] * 3, 4, "found chunked_attention; allowed: sliding_attention"),
        (["sliding_attention"] * 3, None, "need a sliding_window; allowed: above 0"),
        (["sliding_attention"] * 3, 0, "need a sliding_window; found 0; allowed: above 0"),
    ],
    ids=str,
)
def test_types_of_layers_that_are_refused(types: object, window: int | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        windows({"layer_types": types}, window)
