"""How many guessed tokens are worth a look: from how guesses came out, and from what calls cost here."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from onnxlm.runtime.prompt_lookup import LONGEST_MATCH, NGRAM, Draft

# A longer call must promise this much more than a step: estimates are noisy, and a miss costs at once.
_MARGIN = 1.1
# Weight of the newest observation; the rest stays with what was known.
_NEWEST_TIME, _NEWEST_GUESS = 0.15, 0.1
# Before anything is measured: what a token more costs, as a part of a step.
_FIRST_SLOPE = 0.25


class StepCosts:
    """Seconds of calls, by rows and by new tokens a row; kept for as long as the sessions are open."""

    def __init__(self) -> None:
        self._seconds: dict[tuple[int, int], float] = {}

    def add(self, rows: int, tokens: int, seconds: float) -> None:
        """Take note of a call; one new token a row is a decode step."""
        key = (rows, tokens)
        # What else runs on the machine only ever adds: a long call counts as twice what was to be expected.
        known = self._seconds.get(key)
        if known is None:
            step = self._seconds.get((rows, 1))
            self._seconds[key] = min(seconds, 2 * step * self.ratio(*key)) if step else seconds
            return
        self._seconds[key] = known + _NEWEST_TIME * (min(seconds, 2 * known) - known)

    def ratio(self, rows: int, tokens: int) -> float:
        """What a call with so many new tokens a row costs, in decode steps of as many rows."""
        step = self._seconds.get((rows, 1))
        measured = [n for r, n in self._seconds if r == rows and n > 1]
        if step is None or not measured:
            return 1 + _FIRST_SLOPE * (tokens - 1)
        nearest = min(measured, key=lambda n: abs(n - tokens))
        slope = (self._seconds[rows, nearest] / step - 1) / (nearest - 1)
        return 1 + max(0.0, slope) * (tokens - 1)


class DraftPolicy:
    """Decides how much of a draft is looked at, and learns from all of them, looked at or not.

    Args:
        costs: Of calls.

    The chance of a guess grows with the match before it; it is counted for each length of match, so that a
    text which repeats itself without meaning it soon gets no drafts, and costs nothing.
    """

    def __init__(self, costs: StepCosts) -> None:
        self._costs = costs
        # By length of match: the share of guesses that came true.
        self._chance = {match: match / (match + 4) for match in range(NGRAM, LONGEST_MATCH + 1)}

    def learn(self, match: int, right: int, ended: bool) -> None:
        """Take note of a draft.

        Args:
            match: Its match.
            right: How many of its tokens came, from the first on.
            ended: Whether it was then found wrong, and not only at its end.
        """
        for came in [1.0] * right + [0.0] * ended:
            chance = self._chance[match]
            self._chance[match] = chance + _NEWEST_GUESS * (came - chance)

    def count(self, drafts: Sequence[Draft | None]) -> int:
        """How many tokens of each row's draft to look at; 0 for a plain step.

        Rows go on together, by as many tokens as come true in all of them.

        Args:
            drafts: Of each row that runs.
        """
        if any(draft is None for draft in drafts):
            return 0
        known = [draft for draft in drafts if draft is not None]
        all_right = float(np.prod([self._chance[draft.match] for draft in known]))
        best, best_speed, expected = 0, _MARGIN, 1.0
        for count in range(1, min(len(draft.ids) for draft in known) + 1):
            expected += all_right**count
            speed = expected / self._costs.ratio(len(known), 1 + count)
            if speed > best_speed:
                best, best_speed = count, speed
        return best
