"""A cache that keeps the tokens of a sliding window beside one that keeps all: bytes, prompt, steps.

One package with random weights in which, as in Gemma 3, five layers of six have a window. Both batches run
the same graphs; one is told that no state has a window, and so keeps every token. Logits are compared.

    python benchmarks/window_cache.py --json benchmarks/results/window_cache.json
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from pathlib import Path

import numpy as np
from random_packages import VOCABULARY, make, ratio, save
from torch import nn

from onnxlm.models.layers.attention import Attention
from onnxlm.models.layers.cached_attention import AttentionSpec
from onnxlm.models.layers.decoder import DecoderLM, Positions
from onnxlm.models.layers.decoder_layers import DecoderLayer
from onnxlm.models.layers.mlp import GatedMLP
from onnxlm.models.layers.norm import RMSNorm
from onnxlm.models.layers.rotary import RopeConfig, rope_tables
from onnxlm.runtime import load
from onnxlm.runtime.engine import Batch
from onnxlm.runtime.foreign_load import ForeignLoad

HIDDEN, INNER, LAYERS, CONTEXT = 1024, 2048, 6, 32768
HEADS, KV_HEADS, WIDTH, WINDOW = 16, 8, 64, 512
WINDOWED, WHOLE = "window", "all tokens"


def build() -> DecoderLM:
    """Random weights."""

    def layer(index: int) -> DecoderLayer:
        window = 0 if index % LAYERS == LAYERS - 1 else WINDOW
        spec = AttentionSpec(HEADS, KV_HEADS, WIDTH**-0.5, sliding_window=window)
        return DecoderLayer(
            Attention(HIDDEN, WIDTH, spec),
            GatedMLP(HIDDEN, INNER, bias=False, activation="silu"),
            RMSNorm(HIDDEN, 1e-6),
            RMSNorm(HIDDEN, 1e-6),
        )

    embedding, head = (
        nn.Embedding(VOCABULARY, HIDDEN),
        nn.Linear(HIDDEN, VOCABULARY, bias=False),
    )
    tables = rope_tables(RopeConfig(rope_theta=1e6), WIDTH, CONTEXT)
    layers = [layer(index) for index in range(LAYERS)]
    return DecoderLM(
        embedding, layers, RMSNorm(HIDDEN, 1e-6), head, Positions(rope={"default": tables})
    ).eval()


def measure(batches: dict[str, Batch], cached: int, rounds: int, steps: int) -> dict[str, float]:
    """Run a prompt once with each, then rounds of steps in changing order."""
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, cached + rounds * steps).tolist()
    prompts: dict[str, float] = {}
    logits = {}
    for name, batch in batches.items():
        began = time.perf_counter()
        logits[name] = batch.prefill_logits([tokens[:cached]])[0]
        prompts[name] = time.perf_counter() - began
    apart = float(np.abs(logits[WINDOWED] - logits[WHOLE]).max())
    times: dict[str, list[float]] = {name: [] for name in batches}
    load_meter = ForeignLoad()
    for turn in range(rounds):
        for name in list(batches) if turn % 2 else list(reversed(batches)):
            batch, own = batches[name], []
            for token in tokens[cached + turn * steps :][:steps]:
                batch.set_tokens([token])
                began = time.perf_counter()
                logits[name] = batch.decode_logits()[0]
                own.append(time.perf_counter() - began)
            times[name].append(float(np.median(own)))
        apart = max(apart, float(np.abs(logits[WINDOWED] - logits[WHOLE]).max()))
    return {
        "cached": cached,
        **{f"{name} bytes": batch.cache.nbytes for name, batch in batches.items()},
        **{f"{name} prompt s": round(seconds, 2) for name, seconds in prompts.items()},
        **{f"{name} ms": round(float(np.median(t)) * 1e3, 3) for name, t in times.items()},
        "step, window / all tokens": round(ratio(times, WINDOWED, WHOLE), 3),
        "difference": apart,
        "foreign_load": round(load_meter.cores() or 0.0, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add = parser.add_argument
    add("--packages", type=Path, default=Path("build/window_cache"), help="where packages are kept")
    add("--cached", default="1024,4096,16384", help="tokens of the prompt")
    add("--rounds", type=int, default=7)
    add("--steps", type=int, default=48)
    add("--threads", type=int, default=0)
    add("--json", type=Path)
    options = parser.parse_args()
    options.packages.mkdir(parents=True, exist_ok=True)
    package = make(options.packages, "window", build, ("fp32",))["fp32"]
    sessions = load(package.path, threads=options.threads).sessions
    whole = tuple(dataclasses.replace(state, window=0) for state in sessions.states)
    rows = []
    for cached in map(int, options.cached.split(",")):
        batches = {
            WINDOWED: Batch(sessions, 1),
            WHOLE: Batch(dataclasses.replace(sessions, states=whole), 1),
        }
        row = measure(batches, cached, options.rounds, options.steps)
        rows.append(row)
        print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
    shown = {"threads": options.threads, "steps": options.steps, "rounds": options.rounds}
    save(options.json, "onnxlm.window_cache/1", shown, rows)


if __name__ == "__main__":
    main()
