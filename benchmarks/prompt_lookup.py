"""Guessed tokens beside plain steps: the same prompts, greedily, in turns.

Every prompt is run both ways round after round; the ratio of a prompt is the median of its rounds' ratios
of decode time, and a round's two runs follow each other, in changing order. Tokens of both are compared.

    python benchmarks/prompt_lookup.py packages/int8 --rounds 5 --json results.json
"""

from __future__ import annotations

import statistics
import time

from record import Record, parser

from onnxlm.runtime import LanguageModel, load
from onnxlm.runtime.draft_policy import StepCosts
from onnxlm.runtime.engine import Batch
from onnxlm.runtime.speculation import SpeculativeBatch

_PASSAGE = (
    "The lighthouse on the northern cape was built in 1842 by a company of masons from the south. It has a "
    "tower of grey granite, forty metres high, and a lamp that is seen from a distance of thirty kilometres. "
    "For more than a century two keepers lived there with their families. They grew potatoes and kept goats, "
    "and once a month a boat brought flour, oil and letters. In 1967 the lamp was made automatic, and the "
    "last keeper, Anna Lindqvist, moved to the village. Today the keepers' house is a small museum."
)
_CODE = """class Account:
    def __init__(self, owner, balance):
        self.owner = owner
        self.balance = balance

    def deposit(self, amount):
        if amount <= 0:
            raise ValueError("amount must be positive")
        self.balance = self.balance + amount
        return self.balance

    def withdraw(self, amount):
        if amount <= 0:
            raise ValueError("amount must be positive")
        self.balance = self.balance - amount
        return self.balance
"""
# Name, prompt, whether SmolLM2-135M's greedy answer copies from it.
PROMPTS = (
    (
        "repeat a passage",
        f"{_PASSAGE}\n\nThe same text again:\n\nThe lighthouse on the northern cape",
        True,
    ),
    (
        "correct a text",
        f"{_PASSAGE.replace('granite', 'granit').replace('distance', 'distanse')}\n\n"
        "The same text with its spelling corrected:\n\nThe lighthouse on the northern cape",
        True,
    ),
    # A model of this size is asked for a copy and writes another class.
    ("repeat code", f"{_CODE}\n\n# The same class again:\n\n{_CODE.splitlines()[0]}\n", False),
    ("story", "Once upon a time, in a small village at the foot of a mountain,", False),
    ("explain", "The main reason why the sky looks blue during the day is that", False),
    (
        "question",
        f"{_PASSAGE}\n\nQuestion: What is the best way to travel to an island?\nAnswer:",
        False,
    ),
    (
        "dialogue",
        '"I never thought we would meet here," said the old man, and looked out of',
        False,
    ),
    ("history", "The causes of the French Revolution were many, but historians agree that", False),
)


def decode(
    model: LanguageModel, ids: list[int], count: int, costs: StepCosts | None
) -> tuple[list[int], float]:
    """Tokens behind a prompt and the seconds of all steps; plain where there are no costs."""
    inner = Batch(model.sessions, 1)
    batch = inner if costs is None else SpeculativeBatch(inner, [()], [10], costs)
    tokens = batch.prefill_tokens([ids])
    batch.set_tokens(tokens)
    made = tokens.tolist()
    began = time.perf_counter()
    while len(made) < count:
        made.append(int(batch.decode_tokens()[0]))
    return made, time.perf_counter() - began


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("package")
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--new-tokens", type=int, default=128)
    options = arguments.parse_args()
    record = Record(options, "onnxlm.prompt_lookup/1")
    model = load(options.package, threads=options.threads)
    costs = StepCosts()
    prompts = [(name, model.encode(text), copies) for name, text, copies in PROMPTS]
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name, _, _ in prompts}
    same = dict.fromkeys(seconds, True)
    for turn in range(options.rounds):
        for name, ids, _ in prompts:
            runs = {}
            for guesses in (False, True) if turn % 2 else (True, False):
                runs[guesses] = decode(model, ids, options.new_tokens, costs if guesses else None)
            seconds[name].append((runs[False][1], runs[True][1]))
            same[name] &= runs[False][0] == runs[True][0]
    medians = {True: [], False: []}
    for name, ids, copies in prompts:
        ratios = [plain / guessed for plain, guessed in seconds[name]]
        rate = (options.new_tokens - 1) / statistics.median(plain for plain, _ in seconds[name])
        medians[copies].append(statistics.median(ratios))
        record.add(
            prompt=name,
            copies=copies,
            prompt_tokens=len(ids),
            plain_tokens_per_s=rate,
            ratio=medians[copies][-1],
            lowest_ratio=min(ratios),
            highest_ratio=max(ratios),
            same_tokens=same[name],
        )
    record.finish(
        {
            "least gain where a text copies": (min(medians[True]), ">=", 1.8),
            "least ratio where none does": (min(medians[False]), ">=", 0.95),
        }
    )


if __name__ == "__main__":
    main()
