"""Plots as shapes of SVG: bars, lines and points over plain axes. A template writes them out.

Colours are CSS classes, so that one page is legible on light and on dark ground. Coordinates are pixels of
the drawing's own box; a browser scales it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from onnxlm.cli.chart_labels import label_lines

WIDTH = 1000.0
# Of a character at the size of labels, in pixels; generous, since fonts differ.
_CHARACTER = 6.9
# Characters left of a bar.
_LABEL = 63
_ROW, _BAR = 26.0, 15.0
_PLOT_HEIGHT = 300.0
COLOURS = 12

Attributes = dict[str, str | float]


@dataclass(frozen=True)
class Shape:
    """One element.

    Attributes:
        tag: Of SVG.
        attributes: By name.
        text: What it holds.
        hint: What it says when it is pointed at.
    """

    tag: str
    attributes: Mapping[str, str | float]
    text: str = ""
    hint: str = ""


@dataclass
class Drawing:
    """A plot.

    Attributes:
        title: What it shows, in a few words.
        caption: How to read it.
        height: Of its box; the width is `WIDTH`.
        shapes: From back to front.
        legend: Names by colour.
    """

    title: str
    caption: str
    height: float
    shapes: list[Shape] = field(default_factory=list)
    legend: list[tuple[str, int]] = field(default_factory=list)

    @property
    def width(self) -> float:
        """Of its box."""
        return WIDTH

    def line(self, x1: float, y1: float, x2: float, y2: float, style: str) -> None:
        """A straight line."""
        ends: Attributes = {"x1": _px(x1), "y1": _px(y1), "x2": _px(x2), "y2": _px(y2)}
        self.shapes.append(Shape("line", {**ends, "class": style}))

    def write(
        self, x: float, y: float, text: str, anchor: str = "start", style: str = "label"
    ) -> None:
        """A line of text."""
        place: Attributes = {"x": _px(x), "y": _px(y), "text-anchor": anchor, "class": style}
        if text:
            self.shapes.append(Shape("text", place, text))


@dataclass(frozen=True)
class Bar:
    """One horizontal bar.

    Attributes:
        label: Left of it.
        parts: Lengths of its pieces with their colours, from the left.
        text: Right of it.
        ends: Lowest and highest, drawn as a whisker.
        hint: What it says when it is pointed at.
    """

    label: str
    parts: tuple[tuple[float, int], ...]
    text: str
    ends: tuple[float, float] | None = None
    hint: str = ""

    @property
    def reach(self) -> float:
        """Where it or its whisker ends."""
        return max(sum(length for length, _ in self.parts), *(self.ends or (0.0,)))


def bar_chart(title: str, caption: str, axis: str, bars: Sequence[Bar]) -> Drawing:
    """Horizontal bars from zero.

    Args:
        title: What they show.
        caption: How to read them.
        axis: Name and unit of the lengths.
        bars: From the top.
    """
    labels = [label_lines(bar.label, _LABEL) for bar in bars]
    left = max(len(line) for lines in labels for line in lines) * _CHARACTER + 14
    right = max(len(bar.text) for bar in bars) * _CHARACTER + 16
    row = _ROW + 8 if any(len(lines) > 1 for lines in labels) else _ROW
    bottom = 8 + row * len(bars)
    drawing = Drawing(title, caption, bottom + 44)
    ticks = nice_ticks(max(bar.reach for bar in bars))
    x = _scale(0, ticks[-1], left, WIDTH - right)
    for tick in ticks:
        drawing.line(x(tick), 4, x(tick), bottom, "grid")
        drawing.write(x(tick), bottom + 16, tick_text(tick, ticks), "middle", "tick")
    drawing.write((left + WIDTH - right) / 2, bottom + 36, axis, "middle", "axis")
    for i, bar in enumerate(bars):
        middle = 8 + (i + 0.5) * row
        for j, line in enumerate(labels[i]):
            drawing.write(left - 8, middle + 11 - 7 * len(labels[i]) + 14 * j, line, "end")
        _draw_bar(drawing, bar, x, middle)
        drawing.write(x(bar.reach) + 7, middle + 4, bar.text, style="value")
    return drawing


def _draw_bar(drawing: Drawing, bar: Bar, x: Callable[[float], float], middle: float) -> None:
    """Its pieces, and its whisker."""
    at = 0.0
    for length, colour in bar.parts:
        box: Attributes = {"x": _px(x(at)), "width": _px(x(at + length) - x(at))}
        box |= {"y": _px(middle - _BAR / 2), "height": _px(_BAR)}
        box |= {"class": f"fill c{colour % COLOURS}"}
        drawing.shapes.append(Shape("rect", box, hint=bar.hint))
        at += length
    if bar.ends is not None:
        low, high = bar.ends
        drawing.line(x(low), middle, x(high), middle, "whisker")
        for end in bar.ends:
            drawing.line(x(end), middle - 4, x(end), middle + 4, "whisker")


@dataclass(frozen=True)
class Series:
    """A line of a colour through points (x, y, lowest y, highest y)."""

    name: str
    points: tuple[tuple[float, float, float, float], ...]
    colour: int


def line_chart(
    title: str, caption: str, axes: tuple[str, str], series: Sequence[Series]
) -> Drawing:
    """Lines with bands from lowest to highest, over an x axis of doublings.

    Args:
        title: What they show.
        caption: How to read them.
        axes: Names and units of x and y.
        series: All x are above 0.
    """
    xs = sorted({x for one in series for x, *_ in one.points})
    drawing = Drawing(title, caption, _PLOT_HEIGHT + 60)
    ticks = nice_ticks(max(high for one in series for *_, high in one.points))
    left, right = _left_of(ticks), WIDTH - 24
    margin = 0.08 * (math.log2(xs[-1] / xs[0]) or 1)
    place = _scale(math.log2(xs[0]) - margin, math.log2(xs[-1]) + margin, left, right)
    x: Callable[[float], float] = lambda value: place(math.log2(value))  # noqa: E731
    y = _scale(0, ticks[-1], _PLOT_HEIGHT, 12)
    _frame(drawing, axes, (left, right), (ticks, y))
    for value in xs:
        drawing.line(x(value), _PLOT_HEIGHT, x(value), _PLOT_HEIGHT + 4, "frame")
        drawing.write(x(value), _PLOT_HEIGHT + 18, f"{value:,.0f}", "middle", "tick")
    for one in series:
        colour = f"c{one.colour % COLOURS}"
        upper = [(x(p[0]), y(p[3])) for p in one.points]
        lower = [(x(p[0]), y(p[2])) for p in reversed(one.points)]
        drawing.shapes.append(
            Shape("polygon", {"points": _path([*upper, *lower]), "class": f"band {colour}"})
        )
        middle = [(x(p[0]), y(p[1])) for p in one.points]
        drawing.shapes.append(
            Shape("polyline", {"points": _path(middle), "class": f"stroke {colour}"})
        )
        for (px, py), point in zip(middle, one.points, strict=True):
            hint = f"{one.name}: {point[1]:.4g} at {point[0]:,.0f}"
            _dot(drawing, px, py, (4, colour), hint)
        drawing.legend.append((one.name, one.colour % COLOURS))
    return drawing


@dataclass(frozen=True)
class Dot:
    """A labelled point.

    Attributes:
        x: Right of the origin.
        y: Above it.
        label: Beside it.
        note: Below the label.
        colour: Number of its colour.
    """

    x: float
    y: float
    label: str
    note: str
    colour: int


def scatter_chart(title: str, caption: str, axes: tuple[str, str], dots: Sequence[Dot]) -> Drawing:
    """Labelled points over axes from zero; arguments as in `line_chart`."""
    drawing = Drawing(title, caption, _PLOT_HEIGHT + 60)
    ticks_x, ticks_y = (
        nice_ticks(max(getattr(dot, name) for dot in dots) * 1.08) for name in ("x", "y")
    )
    left, right = _left_of(ticks_y), WIDTH - 24
    x = _scale(0, ticks_x[-1], left, right)
    y = _scale(0, ticks_y[-1], _PLOT_HEIGHT, 12)
    _frame(drawing, axes, (left, right), (ticks_y, y))
    for tick in ticks_x:
        drawing.line(x(tick), 12, x(tick), _PLOT_HEIGHT, "grid")
        drawing.write(x(tick), _PLOT_HEIGHT + 18, tick_text(tick, ticks_x), "middle", "tick")
    taken = [(x(dot.x) - 9, x(dot.x) + 9, y(dot.y)) for dot in dots]
    for dot in sorted(dots, key=lambda dot: -dot.y):
        px, py = x(dot.x), y(dot.y)
        width = max(len(dot.label), len(dot.note)) * _CHARACTER + 12
        anchor, start = ("end", px - width) if px + width > right else ("start", px + 12)
        at = _free_height(py, [h for a, b, h in taken if start < b and a < start + width])
        taken.append((start, start + width, at))
        shift = -12 if anchor == "end" else 12
        _dot(drawing, px, py, (8, f"c{dot.colour % COLOURS}"), f"{dot.label}: {dot.note}")
        drawing.write(px + shift, at - 1, dot.label, anchor, "value")
        drawing.write(px + shift, at + 14, dot.note, anchor, "tick")
    return drawing


def _free_height(wanted: float, taken: Sequence[float]) -> float:
    """The nearest height inside the plot where a label and its note meet none of those that are taken."""
    inside = (
        h for h in (wanted + 8 * step for step in range(-40, 41)) if 12 <= h <= _PLOT_HEIGHT - 20
    )
    free = (h for h in inside if all(abs(h - other) >= 34 for other in taken))
    return min(free, key=lambda height: abs(height - wanted), default=wanted)


def nice_ticks(most: float, wanted: int = 6) -> list[float]:
    """Round numbers from 0 to the first that is not below `most`: steps of 1, 2 or 5 of a power of ten."""
    if most <= 0:
        return [0.0, 1.0]
    rough = most / wanted
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * k for k in (1, 2, 5, 10) if power * k >= rough * (1 - 1e-9))
    count = math.ceil(most / step - 1e-9)
    return [step * i for i in range(count + 1)]


def tick_text(value: float, ticks: Sequence[float]) -> str:
    """A tick's number, with as many decimals as its neighbours need."""
    step = ticks[1] - ticks[0]
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    return f"{value:,.{decimals}f}"


def _left_of(ticks: Sequence[float]) -> float:
    """Room for the numbers of a vertical axis and its name."""
    return 34 + max(len(tick_text(tick, ticks)) for tick in ticks) * _CHARACTER


def _frame(
    drawing: Drawing,
    axes: tuple[str, str],
    sides: tuple[float, float],
    vertical: tuple[Sequence[float], Callable[[float], float]],
) -> None:
    """The axes' names, the lines across and the numbers left of them."""
    (left, right), (ticks, y) = sides, vertical
    for tick in ticks:
        drawing.line(left, y(tick), right, y(tick), "frame" if tick == 0 else "grid")
        drawing.write(left - 8, y(tick) + 4, tick_text(tick, ticks), "end", "tick")
    drawing.write((left + right) / 2, _PLOT_HEIGHT + 44, axes[0], "middle", "axis")
    middle = _PLOT_HEIGHT / 2
    turned: Attributes = {"x": 14, "y": _px(middle), "text-anchor": "middle", "class": "axis"}
    turned["transform"] = f"rotate(-90 14 {_px(middle)})"
    drawing.shapes.append(Shape("text", turned, axes[1]))


def _dot(drawing: Drawing, x: float, y: float, look: tuple[float, str], hint: str) -> None:
    radius, colour = look
    place: Attributes = {"cx": _px(x), "cy": _px(y), "r": radius, "class": f"dot {colour}"}
    drawing.shapes.append(Shape("circle", place, hint=hint))


def _scale(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    return lambda value: start + (value - low) / (high - low) * (end - start)


def _path(points: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{_px(x)},{_px(y)}" for x, y in points)


def _px(value: float) -> float:
    return round(value, 1)
