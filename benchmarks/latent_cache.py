"""Decode time and cache of latent attention (DeepSeek-V2, V3) beside the same weights with expanded heads.

Both models compute the same, and the logits of both are compared over a short prompt. One keeps a compressed
vector a token, the other every head's key and value, as `transformers` does. Values are narrower than keys
and are padded to their width, which GroupQueryAttention wants: the formula is given with and without padding.

    python benchmarks/latent_cache.py --json benchmarks/results/latent_cache.json
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from random_packages import VOCABULARY, Stepper, make, ratio, rounds_of, save
from torch import Tensor, nn

from onnxlm.models.layers.attention import AttentionContext, Cache
from onnxlm.models.layers.cached_attention import AttentionSpec, cached_attention, split_heads
from onnxlm.models.layers.decoder import DecoderLM, Positions
from onnxlm.models.layers.decoder_layers import DecoderLayer
from onnxlm.models.layers.mla import LatentAttention, LatentSpec
from onnxlm.models.layers.mlp import GatedMLP
from onnxlm.models.layers.norm import RMSNorm
from onnxlm.models.layers.rotary import RopeConfig, rope_tables
from onnxlm.runtime.engine import Batch

HIDDEN, INNER, LAYERS, CONTEXT = 1024, 2048, 3, 8192
# Widths of a head and of the latent vector are DeepSeek-V3's.
SPEC = LatentSpec(
    num_heads=16,
    q_lora_rank=384,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    scale=192**-0.5,
    eps=1e-6,
)
KEY_WIDTH = SPEC.qk_nope_head_dim + SPEC.qk_rope_head_dim
LATENT, EXPANDED = "latent", "expanded"


class ExpandedAttention(nn.Module):
    """The weights of a `LatentAttention`, with keys and values of all heads made and kept for each token."""

    def __init__(self, latent: LatentAttention) -> None:
        super().__init__()
        self.spec = latent.spec
        self.latent = latent
        heads, inner = self.spec.num_heads, self.spec.kv_lora_rank
        self.k_proj = nn.Linear(inner, heads * self.spec.qk_nope_head_dim, bias=False)
        self.v_proj = nn.Linear(inner, heads * self.spec.v_head_dim, bias=False)
        with torch.no_grad():
            self.k_proj.weight.copy_(latent.k_up.weight.flatten(0, 1))
            self.v_proj.weight.copy_(latent.v_up.weight.transpose(1, 2).flatten(0, 1))
        self.o_proj = latent.o_proj
        del latent.k_up, latent.v_up, latent.o_proj

    @property
    def state_shapes(self) -> dict[str, tuple[int, int]]:
        shape = (self.spec.num_heads, KEY_WIDTH)
        return {"key": shape, "value": shape}

    def forward(self, x: Tensor, cache: Cache, context: AttentionContext) -> tuple[Tensor, Cache]:
        spec, latent = self.spec, self.latent
        heads, narrow = spec.num_heads, spec.qk_nope_head_dim
        both = latent.kv_a_proj(x)
        compressed = latent.kv_a_layernorm(both[..., : spec.kv_lora_rank])
        turned = split_heads(latent._rotate(both[..., spec.kv_lora_rank :], context, 1), 1)
        shared = turned.expand(*turned.shape[:2], heads, spec.qk_rope_head_dim)
        key = torch.cat((split_heads(self.k_proj(compressed), heads), shared), dim=-1)
        values = split_heads(self.v_proj(compressed), heads)
        value = nn.functional.pad(values, (0, KEY_WIDTH - spec.v_head_dim))
        query = split_heads(latent._queries(x), heads)
        turning = latent._rotate(query[..., narrow:].flatten(-2), context, heads)
        query = torch.cat((query[..., :narrow], split_heads(turning, heads)), dim=-1)
        mixed, present_key, present_value = cached_attention(
            query.flatten(-2),
            key.flatten(-2),
            value.flatten(-2),
            (cache[0], cache[1]),
            context.attention_mask,
            context.position_ids,
            None,
            AttentionSpec(heads, heads, scale=spec.scale),
        )
        narrowed = split_heads(mixed, heads)[..., : spec.v_head_dim].flatten(-2)
        return self.o_proj(narrowed), (present_key, present_value)


def build(expanded: bool) -> DecoderLM:
    """Random layers; the same weights for both kinds, as long as the seed is the same."""
    layers = []
    for _ in range(LAYERS):
        latent = LatentAttention(HIDDEN, SPEC)
        mlp = GatedMLP(HIDDEN, INNER)
        # New layers, which are overwritten, draw random numbers too.
        with torch.random.fork_rng():
            attention = ExpandedAttention(latent) if expanded else latent
        norms = RMSNorm(HIDDEN, 1e-6), RMSNorm(HIDDEN, 1e-6)
        layers.append(DecoderLayer(attention, mlp, *norms))
    embedding = nn.Embedding(VOCABULARY, HIDDEN)
    head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
    tables = {"default": rope_tables(RopeConfig(), SPEC.qk_rope_head_dim, CONTEXT)}
    return DecoderLM(embedding, layers, RMSNorm(HIDDEN, 1e-6), head, Positions(rope=tables))


def token_bytes() -> dict[str, int]:
    """Bytes of a cached token by formula, fp32; the expanded form without padding too."""
    numbers = {
        LATENT: SPEC.kv_lora_rank + SPEC.qk_rope_head_dim,
        EXPANDED: SPEC.num_heads * 2 * KEY_WIDTH,
        "expanded, not padded": SPEC.num_heads * (KEY_WIDTH + SPEC.v_head_dim),
    }
    return {name: 4 * LAYERS * count for name, count in numbers.items()}


def largest_difference(steppers: dict[str, Stepper]) -> float:
    """Of the logits behind a prompt and four steps, as a share of the largest logit."""
    ids = np.random.default_rng(1).integers(0, VOCABULARY, 24).tolist()
    seen = {}
    for name, stepper in steppers.items():
        batch = Batch(stepper.model.sessions, 1)
        logits = [batch.prefill_logits([ids[:20]]).copy()]
        for token in ids[20:]:
            batch.set_tokens(np.array([token]))
            logits.append(batch.decode_logits().copy())
        seen[name] = np.concatenate(logits)
    apart = np.abs(seen[LATENT] - seen[EXPANDED]).max()
    return float(apart / np.abs(seen[EXPANDED]).max())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add = parser.add_argument
    add("--packages", type=Path, default=Path("build/latent_cache"), help="where packages are kept")
    add("--cached", default="128,1024,4096", help="tokens in the cache")
    add("--rounds", type=int, default=7)
    add("--steps", type=int, default=16)
    add("--threads", type=int, default=0)
    add("--json", type=Path)
    options = parser.parse_args()
    options.packages.mkdir(parents=True, exist_ok=True)
    packages = {
        LATENT: make(options.packages, LATENT, lambda: build(False), ("fp32",))["fp32"],
        EXPANDED: make(options.packages, EXPANDED, lambda: build(True), ("fp32",))["fp32"],
    }
    rows, formula = [], token_bytes()
    for cached in map(int, options.cached.split(",")):
        steppers = {
            name: Stepper(package, options.threads, cached, options.steps)
            for name, package in packages.items()
        }
        times, foreign = rounds_of(steppers, options.rounds)
        caches = {name: stepper.batch.cache for name, stepper in steppers.items()}
        measured = {n: cache.nbytes // int(cache.capacity) for n, cache in caches.items()}
        if measured != {name: formula[name] for name in measured}:
            raise SystemExit(f"bytes a token: {measured}, by formula {formula}")
        row = {
            "cached": cached,
            **{f"{name} ms": round(float(np.median(t)) * 1e3, 3) for name, t in times.items()},
            "latent / expanded": round(ratio(times, LATENT, EXPANDED), 3),
            **{f"{name} bytes": count * cached for name, count in formula.items()},
            "difference": largest_difference(steppers),
            "foreign_load": round(foreign, 3),
        }
        rows.append(row)
        print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
    shown = {"threads": options.threads, "steps": options.steps, "rounds": options.rounds}
    save(options.json, "onnxlm.latent_cache/1", shown, rows)


if __name__ == "__main__":
    main()
