"""The generator against its published vectors, and what its numbers depend on."""

from __future__ import annotations

import numpy as np
import pytest

from onnxlm.runtime.randomness import fresh_seed, philox4x32, uniforms


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        (
            "00000000 00000000 00000000 00000000",
            "00000000 00000000",
            "6627e8d5 e169c58d bc57ac4c 9b00dbd8",
        ),
        (
            "ffffffff ffffffff ffffffff ffffffff",
            "ffffffff ffffffff",
            "408f276d 41c83b0e a20bc7c6 6d5451fd",
        ),
        (
            "243f6a88 85a308d3 13198a2e 03707344",
            "a4093822 299f31d0",
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_generator_gives_the_published_vectors(counter: str, key: str, expected: str) -> None:
    """The known-answer vectors that its authors publish (Random123, kat_vectors)."""

    def words(text: str) -> tuple[np.ndarray, ...]:
        return tuple(np.array([int(word, 16)], dtype=np.uint64) for word in text.split())

    got = philox4x32(words(counter), words(key))
    assert [f"{int(word[0]):08x}" for word in got] == expected.split()


def test_uniforms_use_all_bits_of_seed_and_step() -> None:
    seeds = np.array([1, 2, 1 + (1 << 32), 1 << 63, 1, 1], dtype=np.uint64)
    steps = np.array([0, 0, 0, 0, 1, 1 << 32])
    numbers = uniforms(seeds, steps)
    assert len(set(numbers)) == 6
    assert ((numbers >= 0) & (numbers < 1)).all()


def test_fresh_seeds_differ() -> None:
    seeds = {fresh_seed() for _ in range(50)}
    assert len(seeds) == 50
    assert all(0 <= seed < 2**64 for seed in seeds)
