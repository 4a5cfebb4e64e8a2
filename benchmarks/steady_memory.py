"""Resident memory over many generations of mixed lengths: after a warm-up it must not grow.

    python benchmarks/steady_memory.py packages/int8 --generations 1000 --json results.json

Each generation takes a prompt and a number of new tokens at random (seed 0), by turns one row, several rows,
and a stream that is given up in its middle. Growth is between two means: over the last tenth of the
generations, and over the tenth behind the warm-up, which is the first fifth.
"""

from __future__ import annotations

import statistics
from pathlib import Path

import numpy as np
from record import Record, parser

from onnxlm.runtime import LanguageModel, load

# Bytes that the heap may move by.
AIM_MB = 8.0


def resident_bytes() -> int:
    """What this process has in memory, files that it maps included."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * 4096


def generate(model: LanguageModel, turn: int, random: np.random.Generator, args: object) -> None:
    """One generation."""
    longest, most = args.prompt_tokens, args.new_tokens  # type: ignore[attr-defined]

    def prompt() -> list[int]:
        size = int(random.integers(1, longest + 1))
        return random.integers(0, model.sessions.vocab_size, size).tolist()

    fields = {"max_new_tokens": int(random.integers(1, most + 1)), "eos_token_id": []}
    kind = turn % 4
    if kind == 0:
        model.generate([prompt() for _ in range(int(random.integers(2, 5)))], **fields)
    elif kind == 1:
        stream = model.stream(prompt(), **fields)
        next(stream, None)
        stream.close()
    else:
        drawn = {"do_sample": True, "top_k": 50, "top_p": 0.9, "seed": turn} if kind == 2 else {}
        model.generate(prompt(), **fields, **drawn)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("package", type=Path)
    options.add_argument("--generations", type=int, default=1000)
    options.add_argument("--prompt-tokens", type=int, default=96, help="of a prompt, at most")
    options.add_argument("--new-tokens", type=int, default=16, help="of a row, at most")
    args = options.parse_args()
    model = load(args.package, threads=args.threads)
    record = Record(args, "onnxlm.steady_memory/1")
    random, sizes = np.random.default_rng(0), []
    for turn in range(args.generations):
        generate(model, turn, random, args)
        sizes.append(resident_bytes() / 1e6)
        if turn % max(1, args.generations // 20) == 0:
            record.add(generation=turn, rss_mb=sizes[-1])
    tenth = args.generations // 10
    early, late = sizes[2 * tenth : 3 * tenth], sizes[-tenth:]
    growth = statistics.mean(late) - statistics.mean(early)
    record.finish({f"MB that {7 * tenth} generations added": (growth, "<=", AIM_MB)})


if __name__ == "__main__":
    main()
