"""Attention worked by hand: three tokens of width 4, two heads, and what a causal mask lets them see.

The first token asks for the second one's key and the other way round, and carries twice its own vector.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from onnxlm.models.layers.attention import Attention, AttentionContext, AttentionOptions, Cache
from onnxlm.models.layers.cached_attention import AttentionSpec, attend, visible_columns

TOKENS = torch.eye(4)[:3]
SWAP = torch.eye(4)[[1, 0, 2, 3]]
SCALE = 2**-0.5
# softmax([1 / sqrt(2), 0]) and, behind two zeros, softmax([0, 0, 1 / sqrt(2)]).
FIRST = math.exp(SCALE) / (math.exp(SCALE) + 1)
THIRD = math.exp(SCALE) / (math.exp(SCALE) + 2)
OUTPUT = torch.tensor(
    [
        [2.0, 0.0, 0.0, 0.0],
        [2 * FIRST, 2 * (1 - FIRST), 0.0, 0.0],
        [2 / 3, 2 / 3, 2 * THIRD, 0.0],
    ]
)


def block(kv_heads: int = 2, options: AttentionOptions | None = None) -> Attention:
    made = Attention(
        4, 2, AttentionSpec(2, kv_heads, SCALE), options or AttentionOptions(rope=None)
    )
    with torch.no_grad():
        for projection, weight in (
            (made.q_proj, torch.eye(4)),
            (made.k_proj, SWAP),
            (made.v_proj, 2 * torch.eye(4)),
            (made.o_proj, torch.eye(4)),
        ):
            if projection.weight.shape == weight.shape:
                projection.weight.copy_(weight)
    return made


def run(attention: Attention, x: Tensor, cache: Cache | None = None) -> tuple[Tensor, Cache]:
    """Tokens [S, 4] behind a cache."""
    heads = attention.spec.num_kv_heads
    past = (torch.zeros(1, heads, 0, 2),) * 2 if cache is None else cache
    columns = past[0].shape[2] + len(x)
    positions = torch.arange(columns)[None, columns - len(x) :]
    context = AttentionContext(torch.ones(1, columns, dtype=torch.int64), positions)
    with torch.no_grad():
        out, grown = attention(x[None], past, context)
    return out[0], grown


def test_figures_of_the_example() -> None:
    assert pytest.approx(0.6698, abs=5e-5) == FIRST
    assert OUTPUT[1, :2].tolist() == pytest.approx([1.3395, 0.6605], abs=5e-5)
    assert pytest.approx(0.5035, abs=5e-5) == THIRD


def test_three_tokens_at_once() -> None:
    out, (key, value) = run(block(), TOKENS)
    torch.testing.assert_close(out, OUTPUT)
    # The keys that the first head holds: the second token's vector stands at the first one, and vice versa.
    assert key[0, 0].tolist() == [[0.0, 1.0], [1.0, 0.0], [0.0, 0.0]]
    assert key[0, 1].tolist() == [[0.0, 0.0], [0.0, 0.0], [1.0, 0.0]]
    assert value[0, 0].tolist() == [[2.0, 0.0], [0.0, 2.0], [0.0, 0.0]]
    assert value[0, 1].tolist() == [[0.0, 0.0], [0.0, 0.0], [2.0, 0.0]]


def test_keys_come_from_the_matrix_of_keys() -> None:
    """With the values' matrix in its place the first token would find itself: other scores altogether."""
    wrong = block()
    with torch.no_grad():
        wrong.k_proj.weight.copy_(wrong.v_proj.weight)
    out, _ = run(wrong, TOKENS)
    own = math.exp(2 * SCALE) / (math.exp(2 * SCALE) + 1)
    assert out[1].tolist() == pytest.approx([2 * (1 - own), 2 * own, 0.0, 0.0])


@pytest.mark.parametrize("chunks", [(1, 1, 1), (1, 2), (2, 1)], ids=str)
def test_a_cache_gives_the_same(chunks: tuple[int, ...]) -> None:
    """A prompt, then tokens by themselves: keys and values of the past are never computed again."""
    attention = block()
    cache, parts = None, []
    for chunk in TOKENS.split(list(chunks)):
        out, cache = run(attention, chunk, cache)
        parts.append(out)
    torch.testing.assert_close(torch.cat(parts), OUTPUT)
    assert cache is not None
    assert [part.shape for part in cache] == [(1, 2, 3, 2)] * 2


def test_shares_of_the_first_head() -> None:
    """Values that name their column show the softmax itself."""
    query, key = TOKENS[None, None, :, :2], (TOKENS @ SWAP)[None, None, :, :2]
    columns = torch.eye(3)[None, None]
    visible = visible_columns(torch.ones(1, 3), 3, sliding_window=0)
    shares = attend(query, key, columns, visible, AttentionSpec(1, 1, SCALE))[0]
    expected = [[1.0, 0.0, 0.0], [FIRST, 1 - FIRST, 0.0], [1 / 3] * 3]
    torch.testing.assert_close(shares, torch.tensor(expected))
    torch.testing.assert_close(shares.sum(-1), torch.ones(3))


def seen(columns: int, new: int) -> list[list[int]]:
    mask = torch.ones(1, columns, dtype=torch.int64)
    visible: list[list[int]] = visible_columns(mask, new, sliding_window=0)[0].int().tolist()
    return visible


def test_mask_of_four_words() -> None:
    assert seen(4, 4) == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]]


def test_inference_needs_the_mask_too() -> None:
    """One new token sees all; several behind a past are masked from the end of the past on."""
    assert seen(4, 1) == [[1, 1, 1, 1]]
    assert seen(5, 3) == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]


def test_later_words_change_nothing_before_them() -> None:
    attention = block()
    other = TOKENS.clone()
    other[2] = torch.tensor([5.0, -3.0, 2.0, 1.0])
    torch.testing.assert_close(run(attention, other)[0][:2], OUTPUT[:2])


def test_linear_in_values_and_in_nothing_else() -> None:
    doubled = block()
    with torch.no_grad():
        doubled.v_proj.weight.mul_(2)
    torch.testing.assert_close(run(doubled, TOKENS)[0], 2 * OUTPUT)
    twice, _ = run(block(), 2 * TOKENS)
    assert (twice - 2 * OUTPUT).abs().max() > 0.3


def test_without_a_mask_and_positions_words_are_a_bag() -> None:
    """All see all: another order of the words is another order of the same outputs."""
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 1, 2, 5, 4)
    order = torch.tensor([3, 0, 4, 1, 2])
    spec, all_seen = AttentionSpec(2, 2, 0.5), torch.ones(1, 5, 5, dtype=torch.bool)
    straight = attend(query, key, value, all_seen, spec)
    turned = attend(query[:, :, order], key[:, :, order], value[:, :, order], all_seen, spec)
    torch.testing.assert_close(turned, straight[:, order])


def test_heads_that_share_keys_and_values() -> None:
    """One key-value head for both is two with the same matrices, at half the cache."""
    torch.manual_seed(1)
    shared, both = block(kv_heads=1), block(kv_heads=2)
    with torch.no_grad():
        for name in ("k_proj", "v_proj"):
            weight = torch.randn(2, 4)
            getattr(shared, name).weight.copy_(weight)
            getattr(both, name).weight.copy_(torch.cat((weight, weight)))
    x = torch.randn(3, 4)
    mixed, (key, _) = run(shared, x)
    torch.testing.assert_close(mixed, run(both, x)[0])
    assert key.shape == (1, 1, 3, 2)
    assert shared.state_shapes == {"key": (1, 2), "value": (1, 2)}
