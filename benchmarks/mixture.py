"""Decode time of layers with experts beside dense layers that do as much work for a token.

The dense model's feed-forward blocks are as wide as the two experts of a token together. Of the mixtures, one
has twice the experts (no more work for a token) and one runs twice as many of them. All else is the same.
Each step's token is random: dense weights may stay in the processor's caches, those of all experts do not.
`--one-token` takes that out. Ratios are medians over the rounds, in which all models of a precision take
turns, in changing order.

    python benchmarks/mixture.py --json benchmarks/results/mixture.json
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from random_packages import VOCABULARY, Stepper, make, ratio, rounds_of, save
from torch import nn

from onnxlm.models.layers.attention import Attention
from onnxlm.models.layers.cached_attention import AttentionSpec
from onnxlm.models.layers.decoder import DecoderLM, Positions
from onnxlm.models.layers.decoder_layers import DecoderLayer
from onnxlm.models.layers.mlp import GatedMLP
from onnxlm.models.layers.moe import Experts, SoftmaxRouter, SparseMLP
from onnxlm.models.layers.norm import RMSNorm
from onnxlm.models.layers.rotary import RopeConfig, rope_tables

# Too large for the caches of a core, the dense layers as well: else the ratio is that of a cache to memory.
HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, WIDTH, CONTEXT = 1024, 2048, 8, 16, 4, 64, 512
PRECISIONS = ("fp32", "int8", "int4")
DENSE = "dense"


@dataclass(frozen=True)
class Mixture:
    """Experts of a layer, and how many of them run for a token."""

    experts: int
    top_k: int

    @property
    def name(self) -> str:
        return f"{self.top_k} of {self.experts}"


BASE, MORE, ACTIVE = Mixture(8, 2), Mixture(16, 2), Mixture(8, 4)


def build(mixture: Mixture | None) -> DecoderLM:
    """Random layers: of a mixture, or dense ones as wide as two experts."""

    def block() -> nn.Module:
        if mixture is None:
            return GatedMLP(HIDDEN, BASE.top_k * INNER)
        router = SoftmaxRouter(HIDDEN, mixture.experts, mixture.top_k, normalize=True)
        return SparseMLP(router, Experts(HIDDEN, INNER, mixture.experts))

    def layer() -> DecoderLayer:
        spec = AttentionSpec(HEADS, KV_HEADS, scale=WIDTH**-0.5)
        norms = RMSNorm(HIDDEN, 1e-5), RMSNorm(HIDDEN, 1e-5)
        return DecoderLayer(Attention(HIDDEN, WIDTH, spec), block(), *norms)

    embedding = nn.Embedding(VOCABULARY, HIDDEN)
    head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
    tables = {"default": rope_tables(RopeConfig(), WIDTH, CONTEXT)}
    layers = [layer() for _ in range(LAYERS)]
    return DecoderLM(embedding, layers, RMSNorm(HIDDEN, 1e-5), head, Positions(rope=tables))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add = parser.add_argument
    add("--packages", type=Path, default=Path("build/mixture"), help="where packages are kept")
    add("--rounds", type=int, default=9)
    add("--steps", type=int, default=64)
    add("--cached", type=int, default=64, help="tokens in the cache")
    add("--threads", type=int, default=0)
    add("--one-token", action="store_true", help="every step runs the same token")
    add("--json", type=Path)
    return parser.parse_args()


def main() -> None:
    options = parse()
    options.packages.mkdir(parents=True, exist_ok=True)
    models = {
        DENSE: make(options.packages, DENSE, lambda: build(None), PRECISIONS),
        **{
            mixture.name: make(
                options.packages,
                mixture.name.replace(" ", "-"),
                lambda mixture=mixture: build(mixture),  # type: ignore[misc]
                PRECISIONS,
            )
            for mixture in (BASE, MORE, ACTIVE)
        },
    }
    rows = []
    for precision in PRECISIONS:
        steppers = {
            name: Stepper(
                packages[precision],
                options.threads,
                options.cached,
                options.steps,
                options.one_token,
            )
            for name, packages in models.items()
        }
        times, foreign = rounds_of(steppers, options.rounds)
        row = {
            "precision": precision,
            **{f"{name} ms": round(float(np.median(t)) * 1e3, 3) for name, t in times.items()},
            "2 of 8 / dense": round(ratio(times, BASE.name, DENSE), 3),
            "2 of 16 / 2 of 8": round(ratio(times, MORE.name, BASE.name), 3),
            "4 of 8 / 2 of 8": round(ratio(times, ACTIVE.name, BASE.name), 3),
            "foreign_load": round(foreign, 3),
        }
        rows.append(row)
        print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
    names = ("threads", "steps", "cached", "rounds", "one_token")
    shown = {name: getattr(options, name) for name in names}
    save(options.json, "onnxlm.mixture/1", shown, rows)


if __name__ == "__main__":
    main()
