"""Parity of a full-precision package with the eager model, through every way it is used.

The reference of each row is that row run alone, at once and without a cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from onnxlm.calls import Calls, Floats, Ids, Reference, Runner
from onnxlm.errors import InputError
from onnxlm.export.divergence import find_divergence
from onnxlm.package import Package
from onnxlm.progress import Progress, silent
from onnxlm.proof import Check, Divergence
from onnxlm.tolerances import PARITY, Tolerance

# Tokens: of the prompt, of given decode steps, of the greedy continuation, of steps behind a padded batch.
_PROMPT, _STEPS, _GREEDY, _BATCH_STEPS = 64, 32, 64, 8
_CHUNKS = (5, 1, 6)
_CHECKS = 5


@dataclass(frozen=True)
class _Outcome:
    """A check, and where it failed first: calls up to the failing one, and the row."""

    check: Check
    failed: tuple[Calls, int] | None = None


def tokens_wanted(context_length: int) -> int:
    """How many given tokens `check_parity` can use."""
    return min(_PROMPT + _STEPS, context_length)


def check_parity(
    runner: Runner,
    reference: Reference,
    package: Package,
    ids: Ids,
    progress: Progress = silent,
) -> tuple[list[Check], Divergence | None]:
    """Hold a full-precision package against the eager model.

    Args:
        runner: Runs the package.
        reference: The eager model in fp32.
        package: The package.
        ids: Given tokens, `tokens_wanted` of them or fewer; at least 13.
        progress: Told of the checks.

    Returns:
        The checks, and where the first that failed leaves the model.

    Raises:
        InputError: There are too few tokens.
    """
    least = sum(_CHUNKS) + 1
    if len(ids) < least:
        raise InputError(
            "too few tokens to verify with", found=len(ids), allowed=f"{least} or more"
        )
    tolerance = PARITY[package.manifest.precision]
    outcomes: list[_Outcome] = []
    for name, calls in _calls(ids).items():
        progress("check", len(outcomes), _CHECKS)
        outcomes.append(_compare(name, calls, runner, reference, tolerance))
    prompt = list(ids[: _prompt_length(ids)])
    count = min(_GREEDY, package.manifest.context_length - len(prompt))
    checks = [outcome.check for outcome in outcomes]
    progress("check", len(checks), _CHECKS)
    checks.append(_compare_greedy(prompt, count, runner, reference, tolerance))
    for outcome in outcomes:
        if outcome.failed is not None:
            progress("find the layer", 0, 0)
            graph = package.graph_path(outcome.failed[0].graph)
            name = outcome.check.name
            where = find_divergence(name, runner, reference, graph, outcome.failed, tolerance)
            return checks, where
    return checks, None


def _prompt_length(ids: Ids) -> int:
    return len(ids) * _PROMPT // (_PROMPT + _STEPS)


def _calls(ids: Ids) -> dict[str, Calls]:
    """What is run, by the name of the check."""
    prompt = _prompt_length(ids)
    lengths = (max(1, prompt // 12), max(2, prompt // 3), prompt)
    steps = min(_BATCH_STEPS, len(ids) - prompt - len(lengths) + 1)
    # Rows begin at different tokens, or a row that took its neighbour's cache would go unseen.
    rows = [ids[start : start + size + steps] for start, size in enumerate(lengths)]
    chunked = sum(_CHUNKS)
    return {
        f"prefill of {prompt} tokens": Calls.of_row(ids[:prompt], [prompt]),
        f"prefill in chunks of {_listed(_CHUNKS)}": Calls.of_row(ids[:chunked], _CHUNKS),
        f"decode of {len(ids) - prompt} given tokens": Calls.of_row(ids, [prompt]),
        f"padded batch of {_listed(lengths)}, {steps} steps": Calls.of_batch(rows, steps),
    }


def _listed(sizes: Sequence[int]) -> str:
    return ", ".join(map(str, sizes[:-1])) + f" and {sizes[-1]}"


def _compare(
    name: str, calls: Calls, runner: Runner, reference: Reference, tolerance: Tolerance
) -> _Outcome:
    found = runner.run(calls)
    differences, largest = [], 0.0
    for row, ours in enumerate(found):
        theirs = reference.logits(calls.tokens(row))[calls.kept(row)]
        differences.append(_worst(ours, theirs))
        largest = max(largest, float(np.abs(theirs).max()))
    allowed = tolerance.allowed(largest)
    difference = max(float(row.max()) for row in differences)
    check = Check(name, sum(map(len, differences)), difference, allowed)
    if check.ok:
        return _Outcome(check)
    call, row = min(
        (calls.call_of(row, calls.kept(row)[index]), row)
        for row, worst in enumerate(differences)
        for index in np.flatnonzero(worst > allowed)
    )
    return _Outcome(check, (calls.until(call), row))


def _worst(ours: Floats, theirs: Floats) -> Floats:
    """Largest difference at each position, [n]; infinite where a logit of either is no finite number."""
    with np.errstate(invalid="ignore"):  # inf - inf
        worst = np.abs(ours - theirs).max(axis=1)
    return np.where(np.isfinite(worst), worst, np.inf).astype(np.float32)


def _compare_greedy(
    prompt: list[int], count: int, runner: Runner, reference: Reference, tolerance: Tolerance
) -> Check:
    """Is each token the model's own choice behind those before it: equal, or within the tolerance of it."""
    tokens = np.array(runner.greedy(prompt, count))
    logits = reference.logits([*prompt, *tokens[:-1].tolist()])[len(prompt) - 1 :]
    allowed = tolerance.allowed(float(np.abs(logits).max()))
    margins = logits.max(axis=1) - logits[np.arange(len(tokens)), tokens]
    other = tokens != logits.argmax(axis=1)
    ties = int((other & (margins <= allowed)).sum())
    note = f"{int((~other).sum())} of {count} equal"
    note += f", {ties} tied within what is allowed" if ties else ""
    return Check(f"greedy, {count} tokens", count, float(margins.max()), allowed, note)
