"""The plots of docs/performance.md, as SVG: a launch beside other sandboxes, and cost against open sessions.

Each picture has its own colours for light and for dark pages. A picture in a page does not inherit the page's
colours, so a media query chooses.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from sandbox.speed.value import NamedTuple

LAUNCH, SESSIONS = "performance-launch.svg", "performance-sessions.svg"

_WIDTH = 760
_STYLE = """\
<style>
  :root { color: #1f2328; --ours: #0969da; --line: #d1d9e0 }
  @media (prefers-color-scheme: dark) { :root { color: #e6edf3; --ours: #58a6ff; --line: #3d444d } }
  text { fill: currentColor; font: 12px sans-serif }
  .end { text-anchor: end } .middle { text-anchor: middle } .title { font-weight: bold }
  .grid { stroke: var(--line) }
  .ours { stroke: var(--ours); fill: var(--ours) } .other { stroke: currentColor; fill: currentColor }
   polyline { fill: none !important; stroke-width: 2 }
  .hollow { fill-opacity: 0; stroke-width: 1.5 }
</style>"""


def draw(documents: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Each picture by the name of its file. The machines stand below each other."""
    return {LAUNCH: launch(documents), SESSIONS: sessions(documents)}


def _picture(height: int, title: str, parts: Sequence[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img">'
    return "\n".join((head, f"<title>{escape(title)}</title>", _STYLE, *parts, "</svg>\n"))


def _text(x: float, y: float, words: str, kind: str = "") -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" class="{kind}">{escape(words)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{kind}"/>'


def _dot(x: float, y: float, kind: str) -> str:
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" class="{kind}"/>'


def _tables(document: Mapping[str, Any], title: str) -> dict[str, Mapping[str, Any]]:
    """The rows of the tables with this title: by caller, and then by name."""
    return {
        table["as"]: {row["name"]: row for row in table["rows"]}
        for table in document["tables"]
        if table["title"] == title and table["rows"]
    }


def _architecture(document: Mapping[str, Any]) -> str:
    return str(document["machine"]["architecture"])


# --- a launch beside other sandboxes ------------------------------------------------------------------------


def launch(documents: Sequence[Mapping[str, Any]]) -> str:
    """Times on a logarithmic axis, because the slowest takes eighty times as long as the fastest."""
    height, parts = 0, []
    for document in documents:
        new, bottom = _launches(document, height)
        parts += new
        height = bottom + 56
    return _picture(height, "Launch of /usr/bin/true, for the runner and other sandboxes", parts)


def _launches(document: Mapping[str, Any], above: int) -> tuple[list[str], int]:
    """One machine's part of the picture, and where its axis is."""
    tables = _tables(document, "peers")
    names = list(dict.fromkeys(name for rows in tables.values() for name in rows))
    times = [row["median"] for rows in tables.values() for row in rows.values()]
    low = math.floor(math.log10(min(times, default=1)))
    high = math.ceil(math.log10(max(times, default=10) * 1.01))
    left, right, top, step = 200, _WIDTH - 90, above + 40, 34
    bottom = top + step * len(names)

    def at(milliseconds: float) -> float:
        return left + (right - left) * (math.log10(milliseconds) - low) / (high - low)

    title = f"Launch of /usr/bin/true on {_architecture(document)}, median in ms (logarithmic)"
    parts = [_text(left, above + 16, title, "title")]
    for power in range(low, high + 1):
        x = at(10.0**power)
        parts += [
            _line(x, top - 12, x, bottom, "grid"),
            _text(x, bottom + 16, f"{10.0**power:g} ms", "middle"),
        ]
    for row_at, name in enumerate(names):
        y = top + step * row_at + step / 2
        kind = "ours" if name.startswith("runner") else "other"
        parts.append(_text(left - 12, y + 4, name, "end"))
        for shift, rows in zip((-6, 6), tables.values(), strict=False):
            if name in rows:
                x = at(rows[name]["median"])
                label = f"{rows[name]['median']:.3g}"
                parts += [
                    _dot(x, y + shift, kind + (" hollow" if shift > 0 else "")),
                    _text(x + 8, y + shift + 4, label),
                ]
    callers = ", ".join(f"{mark} as {who}" for mark, who in zip("●○", tables, strict=False))
    return [*parts, _text(left, bottom + 36, callers)], bottom


# --- cost against open sessions -----------------------------------------------------------------------------


class Panel(NamedTuple):
    """One small plot. The rows of its table are named "N open" and what follows: a colon and a series."""

    title: str
    table: str
    ours: str
    other: str
    logarithmic: bool = False


PANELS = (
    Panel(
        "Memory of each, kB (log.)", "memory as sessions grow", ": all but the plugin", ": bwrap alone", True
    ),
    Panel("One more start, ms", "a start as sessions grow", ": one more session", ": one more raw bwrap"),
    Panel("A call, µs", "a call as sessions grow", "", "none"),
)


def series(rows: Mapping[str, Any], ending: str) -> list[tuple[int, float]]:
    """How many sessions were open, and the median then."""
    found = ((re.fullmatch(rf"(\d+) open{re.escape(ending)}", name), row) for name, row in rows.items())
    return [(int(match[1]), row["median"]) for match, row in found if match]


def sessions(documents: Sequence[Mapping[str, Any]]) -> str:
    parts, above = [], 0
    width, height = 176, 170
    # A run of some parts may have none of these tables.
    whole = [each for each in documents if any(_tables(each, panel.table) for panel in PANELS)]
    for document in whole or documents:
        top = above + 64
        caller = ""
        for number, panel in enumerate(PANELS):
            tables = _tables(document, panel.table)
            caller = next(iter(tables), caller)
            rows = tables.get(caller, {})
            left = 56 + number * (width + 64)
            parts += _panel(panel, rows, left, top, width, height)
        note = "x: open sessions (logarithmic); blue: the runner; black or white: bubblewrap alone"
        name = _text(56, above + 16, f"On {_architecture(document)}, as {caller}", "title")
        parts += [name, _text(56, top + height + 48, note)]
        above = top + height + 68
    return _picture(above, "What a session costs as sessions grow", parts)


def _panel(panel: Panel, rows: Mapping[str, Any], left: int, top: int, width: int, height: int) -> list[str]:
    lines = {kind: series(rows, end) for kind, end in (("ours", panel.ours), ("other", panel.other))}
    points = [point for line in lines.values() for point in line]
    parts = [_text(left, top - 16, panel.title, "title")]
    if not points:
        return [*parts, _text(left, top + height / 2, "not measured")]
    most = math.log10(max(count for count, _ in points)) or 1.0
    ticks = _ticks([value for _, value in points], panel.logarithmic)

    def high(value: float) -> float:
        low, top_value = ticks[0], ticks[-1]
        part = (
            math.log(value / low) / math.log(top_value / low)
            if panel.logarithmic
            else (value - low) / (top_value - low)
        )
        return top + height * (1 - part)

    for tick in ticks:
        parts += [
            _line(left, high(tick), left + width, high(tick), "grid"),
            _text(left - 6, high(tick) + 4, f"{tick:g}", "end"),
        ]
    for count in sorted({count for count, _ in points}):
        parts.append(_text(left + width * math.log10(count) / most, top + height + 18, str(count), "middle"))
    for kind, line in lines.items():
        places = [(left + width * math.log10(count) / most, high(value)) for count, value in line]
        parts.append(f'<polyline class="{kind}" points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in places)}"/>')
        parts += [_dot(x, y, kind) for x, y in places]
    return parts


def _ticks(values: Sequence[float], logarithmic: bool) -> list[float]:
    """From the first to the last they hold all values: powers of ten, or even steps from zero."""
    if logarithmic:
        first, last = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
        return [10.0**power for power in range(first, max(last, first + 1) + 1)]
    step = 10.0 ** math.floor(math.log10(max(values)))
    step = next(step * part for part in (0.2, 0.5, 1, 2) if max(values) <= 5 * step * part)
    return [step * number for number in range(math.ceil(max(values) / step) + 1)]
