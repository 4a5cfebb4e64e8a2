"""A profile as one page with plots."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from onnxlm.cli.charts import COLOURS, Bar, Drawing, bar_chart
from onnxlm.cli.page import write_page
from onnxlm.runtime.bench_tables import number, percent

if TYPE_CHECKING:
    from onnxlm.runtime.profile_report import Phase, Profile

_TITLES = {"prefill": "Prefill of a prompt", "decode": "A decode step"}
# Of the time of a phase; operator types that take less share a bar.
_SMALL = 0.002
_OTHER_COLOUR = COLOURS - 1


def profile_page(profile: Profile) -> str:
    """One HTML page: operators and layers of each phase, then the tables."""
    machine = profile.machine
    facts = [
        ("Package", profile.package),
        ("Precision", profile.precision),
        ("Ran on", profile.provider),
        ("Threads", str(profile.threads)),
        ("Prompt tokens", str(profile.prompt_tokens)),
        ("New tokens", str(profile.new_tokens)),
        ("Batch", str(profile.batch)),
        ("Processor", machine.cpu),
        *sorted(machine.libraries.items()),
    ]
    colours = _colours(profile)
    drawings = [
        draw(phase, colours) for draw in (_by_operator, _by_place) for phase in profile.phases
    ]
    lead = f"Means of {profile.repeats} runs under ONNX Runtime's profiler"
    return write_page(("onnxlm profile", lead), facts, drawings, profile.tables(), profile.notes())


def _colours(profile: Profile) -> dict[str, int]:
    """Operator types that take most have a colour of their own, the same in every plot."""
    shares: dict[str, float] = {}
    for phase in profile.phases:
        for part in phase.operators():
            if part.nodes:
                shares[part.name] = max(part.share, shares.get(part.name, 0.0))
    longest = sorted(shares, key=lambda name: -shares[name])
    return {name: i for i, name in enumerate(longest[:_OTHER_COLOUR])}


def _by_operator(phase: Phase, colours: Mapping[str, int]) -> Drawing:
    bars, small = [], []
    for part in phase.operators():
        if part.nodes and part.share < _SMALL:
            small.append(part)
            continue
        roof = "" if part.of_roofline is None else f", {percent(part.of_roofline)} of roofline"
        text = f"{number(part.ms)} ms, {part.share:.1%}{roof}"
        colour = colours.get(part.name, _OTHER_COLOUR)
        bars.append(Bar(part.name, ((part.ms, colour),), text, hint=f"{part.nodes} nodes"))
    if small:
        ms, share = sum(part.ms for part in small), sum(part.share for part in small)
        hint = ", ".join(part.name for part in small)
        text = f"{number(ms)} ms, {share:.1%}"
        bars.append(Bar(f"{len(small)} other types", ((ms, _OTHER_COLOUR),), text, hint=hint))
    caption = f"{number(phase.wall_ms)} ms in all, by operator type. Means of {phase.calls} calls."
    return bar_chart(_TITLES[phase.name], caption, "milliseconds a call", bars)


def _by_place(phase: Phase, colours: Mapping[str, int]) -> Drawing:
    """Each place's bar in pieces, one an operator type; those that take least share a colour."""
    bars = []
    for place in phase.places():
        pieces = dict.fromkeys(range(COLOURS), 0.0)
        for cell in phase.cells:
            if cell.place == place.name:
                pieces[colours.get(cell.op_type, _OTHER_COLOUR)] += cell.ms
        parts = tuple((ms, colour) for colour, ms in pieces.items() if ms)
        bars.append(Bar(place.name, parts, f"{number(place.ms)} ms", hint=f"{place.nodes} nodes"))
    caption = "Each bar in pieces by operator type."
    title = f"{_TITLES[phase.name]}, by layer"
    drawing = bar_chart(title, caption, "milliseconds a call", bars)
    present = {cell.op_type for cell in phase.cells}
    drawing.legend = [(name, colour) for name, colour in colours.items() if name in present]
    if present - colours.keys():
        drawing.legend.append(("others", _OTHER_COLOUR))
    return drawing
