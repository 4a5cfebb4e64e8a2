"""How many guessed tokens are worth a look: from how guesses came out, and from what calls cost here."""

from __future__ import annotations

from collections.abc import Sequence

from onnxlm.runtime.prompt_lookup import LONGEST_MATCH, Draft

# A longer call must promise this much more than a step: estimates are noisy, and a miss costs at once.
_MARGIN = 1.2
# Shares of right guesses by match, before a text has shown its own: from 19 greedy texts of SmolLM2-135M
# (copies, lists, code, prose), with the short matches rounded down, as prose is what loses by a guess.
_FIRST_CHANCE = {2: 0.5, 3: 0.5, 4: 0.6, 5: 0.7, 6: 0.7, 7: 0.7, 8: 0.95}
# Weight of the newest observation; the rest stays with what was known.
_NEWEST_STEP, _NEWEST_CALL, _NEWEST_GUESS = 0.15, 0.6, 0.1
# What a call of several tokens costs beyond a step before anything is measured, in steps: for being another
# graph, whose threads must wake, and for every token more.
_FIRST_JUMP, _FIRST_SLOPE = 0.1, 0.16
# So many tokens weigh as much as the jump when both are learned from one number.
_TOKENS_A_JUMP = 4
# What else runs on the machine only ever adds: a step counts as at most so many times what was expected. Of a
# call the step that it is measured by may have been the slow one: it counts as so far off either way.
_LONGEST_STEP, _FARTHEST_CALL = 2.0, 1.1
# How fast the first values come back while nothing is looked at: a bad moment must not count for ever.
_FORGETTING = 0.02


class StepCosts:
    """What a call with more tokens costs in steps, by rows; kept for as long as the sessions are open.

    In steps of the same time: what else runs on the machine slows both.
    """

    def __init__(self) -> None:
        self._steps: dict[int, float] = {}  # seconds of a decode step
        self._calls: dict[int, tuple[float, float]] = {}  # jump and slope

    def add(self, rows: int, tokens: int, seconds: float) -> None:
        """Take note of a call; one new token a row is a decode step."""
        step = self._steps.get(rows)
        if tokens == 1:
            known = seconds if step is None else step
            newest = min(seconds, _LONGEST_STEP * known)
            self._steps[rows] = known + _NEWEST_STEP * (newest - known)
        elif step is not None:
            self._learn(rows, tokens, seconds / step)

    def ratio(self, rows: int, tokens: int) -> float:
        """What a call with so many new tokens a row costs, in decode steps of as many rows."""
        jump, slope = self._call(rows)
        return 1.0 if tokens == 1 else 1 + jump + slope * (tokens - 1)

    def forget(self, rows: int) -> None:
        """Believe a little less that calls are dear."""
        jump, slope = self._call(rows)
        self._calls[rows] = (
            jump + _FORGETTING * min(0.0, _FIRST_JUMP - jump),
            slope + _FORGETTING * min(0.0, _FIRST_SLOPE - slope),
        )

    def _learn(self, rows: int, tokens: int, ratio: float) -> None:
        """Normalized least mean squares: the line moves towards the newest point, along its own direction."""
        expected = self.ratio(rows, tokens)
        seen = min(max(ratio, expected / _FARTHEST_CALL), expected * _FARTHEST_CALL)
        place = (tokens - 1) / _TOKENS_A_JUMP
        moved = _NEWEST_CALL * (seen - expected) / (1 + place**2)
        jump, slope = self._call(rows)
        self._calls[rows] = (
            max(0.0, jump + moved),
            max(0.0, slope + moved * place / _TOKENS_A_JUMP),
        )

    def _call(self, rows: int) -> tuple[float, float]:
        return self._calls.get(rows, (_FIRST_JUMP, _FIRST_SLOPE))


class DraftPolicy:
    """Decides how much of a draft is looked at, and learns from all of them, looked at or not.

    Args:
        costs: Of calls.

    The chance of a guess grows with the match before it, of which the guesses before it in the same draft are
    a part. It is counted for each length of match, so that a text which repeats itself without meaning it
    soon gets no drafts, and costs nothing.
    """

    def __init__(self, costs: StepCosts) -> None:
        self._costs = costs
        self._chance = dict(_FIRST_CHANCE)

    def learn(self, match: int, right: int, ended: bool) -> None:
        """Take note of a draft.

        Args:
            match: Its match.
            right: How many of its tokens came, from the first on.
            ended: Whether it was then found wrong, and not only at its end.
        """
        for place, came in enumerate([1.0] * right + [0.0] * ended):
            known = min(match + place, LONGEST_MATCH)
            self._chance[known] += _NEWEST_GUESS * (came - self._chance[known])

    def count(self, drafts: Sequence[Draft | None]) -> int:
        """How many tokens of each row's draft to look at; 0 for a plain step.

        Rows go on together, by as many tokens as come true in all of them.

        Args:
            drafts: Of each row that runs.
        """
        if any(draft is None for draft in drafts):
            return 0
        known = [draft for draft in drafts if draft is not None]
        best, best_speed, expected, all_right = 0, _MARGIN, 1.0, 1.0
        for count in range(1, min(len(draft.ids) for draft in known) + 1):
            for draft in known:
                all_right *= self._chance[min(draft.match + count - 1, LONGEST_MATCH)]
            expected += all_right
            speed = expected / self._costs.ratio(len(known), 1 + count)
            if speed > best_speed:
                best, best_speed = count, speed
        if not best:
            self._costs.forget(len(known))
        return best
