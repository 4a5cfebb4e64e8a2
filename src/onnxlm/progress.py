"""How long work tells of itself, without knowing who shows it."""

from __future__ import annotations

from collections.abc import Callable

# Called with (stage, done, total); a total of 0 means that the stage's length is not known.
Progress = Callable[[str, int, int], None]


def silent(stage: str, done: int, total: int) -> None:
    """Show nothing."""
