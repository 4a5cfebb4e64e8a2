"""Pages of `onnxlm bench --html` as Chromium lays them out: marks in sight, legible words, no request.

What stands where, and what was asked for, is found by a script that is put into a copy of the page. Oracles:
the report's numbers, WCAG's contrast, and the browser's own record of what a page loads.
"""

from __future__ import annotations

import contextlib
import dataclasses
import html
import json
import os
import re
import shutil
import signal
import subprocess
import threading
from itertools import product
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
from support.reports import contestant, flat, report, row

from onnxlm.cli.bench_page import page
from onnxlm.runtime.bench import Case
from onnxlm.runtime.bench_figures import Point
from onnxlm.runtime.bench_report import Curve, Report

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
PROGRAM = next((found for name in NAMES if (found := shutil.which(name))), None)

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(PROGRAM is None, reason=f"there is none of {', '.join(NAMES)} on the path"),
]

# Of every drawing: its box, the boxes of its marks and texts in the drawing's own place; and of the page.
LOOK = """<script>
addEventListener("load", () => {
const box = (e, from) => { const r = e.getBoundingClientRect();
  return [r.left - from.left, r.top - from.top, r.right - from.left, r.bottom - from.top]; };
const drawings = [...document.querySelectorAll("svg")].map(svg => { const from = svg.getBoundingClientRect();
  const all = tag => [...svg.querySelectorAll(tag)].map(e => box(e, from));
  return {size: [from.width, from.height], rect: all("rect"), circle: all("circle"), text: all("text")}; });
const colour = (e, what) => getComputedStyle(e)[what];
const root = document.documentElement;
const found = {drawings, wide: root.scrollWidth, seen: root.clientWidth,
  ground: colour(document.querySelector("section"), "backgroundColor"),
  inks: [colour(document.querySelector("td"), "color"), colour(document.querySelector("p"), "color"),
    colour(document.querySelector("svg .value"), "fill"),
    colour(document.querySelector("svg .tick"), "fill")],
  asked: performance.getEntriesByType("resource").map(entry => entry.name),
  rows: [...document.querySelectorAll("table")].map(t => t.querySelectorAll("tbody tr").length)};
const note = document.createElement("pre"); note.id = "found"; note.textContent = JSON.stringify(found);
document.body.append(note);
});
</script></body>"""


def open_page(file: Path, width: int = 1280, dark: bool = False) -> str:
    """The document after a browser has shown it."""
    assert PROGRAM is not None
    command = [
        *(PROGRAM, "--headless=new", "--no-sandbox", "--disable-gpu", "--dump-dom"),
        *("--disable-background-networking", "--disable-component-update", "--no-first-run"),
        *("--disable-sync", "--disable-extensions"),
        *(f"--user-data-dir={mkdtemp(dir=file.parent)}", f"--window-size={width},900"),
        "--proxy-server=http://127.0.0.1:9",  # nobody: nothing leaves the machine in any case
        *(("--blink-settings=preferredColorScheme=0",) if dark else ()),
        file.as_uri(),
    ]
    # Once in a while it takes minutes to begin or to end, and at the next try it does not.
    return next(filter(None, (_dumped(command) for _ in range(3))), "")


def _dumped(command: list[str]) -> str:
    """The document that a browser prints; empty where none came within a minute."""
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    ) as browser:
        assert browser.stdout is not None

        def end() -> None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(browser.pid, signal.SIGKILL)

        limit = threading.Timer(60, end)
        limit.start()
        lines = []
        for line in browser.stdout:
            lines.append(line)
            if "</html>" in line:
                break
        limit.cancel()
        end()
    return "".join(lines) if lines and "</html>" in lines[-1] else ""


def look(text: str, folder: Path, **how: Any) -> dict[str, Any]:
    """What the script finds on a page."""
    file = folder / "looked_at.html"
    file.write_text(text.replace("</body>", LOOK), encoding="utf-8")
    found = re.search(r'<pre id="found">(.*?)</pre>', open_page(file, **how), re.DOTALL)
    assert found is not None
    facts: dict[str, Any] = json.loads(html.unescape(found[1]))
    return facts


@pytest.fixture(scope="module")
def full() -> Report:
    """Four packages on two providers, two baselines, four cases, curves; one row could not run."""
    who = [
        contestant(name, precision=name, provider=on, file_bytes=size, quality={"kl": 0.0035})
        for (name, size), on in product(
            (("fp32", 540_000_000), ("int8", 150_000_000), ("int4", 103_000_000)),
            ("cpu", "openvino"),
        )
    ]
    who += [contestant("eager PyTorch", provider="torch", precision="fp32", baseline=True)]
    cases = [Case(length, 64, batch) for length, batch in product((128, 1024), (1, 8))]
    rates = [90.0, 100.0, 110.0]
    rows = [
        row(i, [rate * (i + 1) for rate in rates], [rate * (i + 1) / 5 for rate in rates], case)
        for case in cases
        for i in range(len(who))
    ]
    rows[3] = dataclasses.replace(rows[3], speed=None, repeats=0, rounds=(), failure="no provider")
    lengths = (64, 512, 4096)
    curves = [
        Curve(
            i,
            Case(64, 16, 1, lengths),
            3,
            None,
            tuple(Point(n, flat(900.0 * (i + 1) / n), 1.0, 2.0, 3.0) for n in lengths),
        )
        for i in range(len(who))
    ]
    return report(who, rows, curves)


@pytest.mark.parametrize("width", [1280, 500])
def test_marks_and_words_are_in_sight(full: Report, tmp_path: Path, width: int) -> None:
    found = look(page(full), tmp_path, width=width)
    first, steps, context, size = found["drawings"]
    # 4 cases of 7 contestants, of which one was not run; 7 curves of 3 points; 6 packages.
    assert [len(d["rect"]) for d in (first, steps)] == [27, 27]
    assert [len(d["circle"]) for d in (context, size)] == [21, 6]
    for drawing in found["drawings"]:
        wide, high = drawing["size"]
        assert wide >= 800  # a narrow window scrolls: text of a shrunken plot could not be read
        for left, top, right, bottom in [*drawing["rect"], *drawing["circle"], *drawing["text"]]:
            assert right - left >= 0.5
            assert bottom - top > 2
            assert -0.5 <= left < right <= wide + 0.5
            assert -0.5 <= top < bottom <= high + 0.5
    assert found["wide"] == found["seen"]  # plots and tables scroll, the page does not
    assert found["rows"] == [28, 7, 7, 1]


def test_bars_are_as_long_as_the_times(full: Report, tmp_path: Path) -> None:
    bars = look(page(full), tmp_path)["drawings"][0]["rect"]
    times = [
        r.speed.ttft_ms.median
        for c in full.plan.cases
        for r in full.rows
        if r.case == c and r.speed
    ]
    lengths = [right - left for left, _, right, _ in bars]
    unit = sum(lengths) / sum(times)
    assert lengths == pytest.approx([time * unit for time in times], abs=0.5)


@pytest.mark.parametrize("dark", [False, True])
def test_words_stand_out_from_their_ground(full: Report, tmp_path: Path, dark: bool) -> None:
    """WCAG 2.1, 1.4.3: a contrast of at least 4.5."""
    found = look(page(full), tmp_path, dark=dark)
    ground = luminance(found["ground"])
    assert (ground < 0.1) == dark
    for ink in found["inks"]:
        high, low = sorted((ground, luminance(ink)), reverse=True)
        assert (high + 0.05) / (low + 0.05) >= 4.5


def luminance(colour: str) -> float:
    """Relative luminance of `rgb(r, g, b)` by WCAG's definition."""
    shares = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in shares]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_a_page_asks_for_nothing(full: Report, tmp_path: Path) -> None:
    text = page(full)
    assert look(text, tmp_path)["asked"] == []
    # And the browser tells when a page does.
    mark = "http://elsewhere.invalid/mark.png"
    asking = text.replace("</main>", f'<img src="{mark}"></main>')
    assert look(asking, tmp_path)["asked"] == [mark]
