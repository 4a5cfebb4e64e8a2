"""Long labels of a plot in two lines, so that a model's name and what sets its settings apart both stay."""

from __future__ import annotations


def label_lines(label: str, most: int) -> tuple[str, ...]:
    """The label in one line or two of at most so many characters.

    It is broken behind a comma or at another space where that goes, as near to its middle as can be. What is
    too long for two lines loses its middle: a name is known by its beginning, a case by its end.
    """
    if len(label) <= most:
        return (label,)
    if len(label) > 2 * most:
        return label[: most - 1] + "…", label[-most:]
    spaces = [
        i
        for i, sign in enumerate(label)
        if sign == " " and i <= most and len(label) - i - 1 <= most
    ]
    if not spaces:
        return label[:most], label[most:]
    # Between two settings, if it can be.
    between = [i for i in spaces if label[i - 1] == ","]
    at = min(between or spaces, key=lambda i: abs(i - len(label) / 2))
    return label[:at], label[at + 1 :]
