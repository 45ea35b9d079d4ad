"""One run of the benchmark, as text for a terminal, as docs/performance.md, as README.md's table, as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sandbox.speed.value import NamedTuple
from scripts.benches.machine import Load, Machine
from scripts.benches.rows import Against, Row, Table

FORMAT = 1  # of the JSON document
BEGIN = "<!-- scripts/bench writes from here -->"
END = "<!-- to here -->"

SLOW = (90, 99)  # percentiles
_DIGITS = 3  # that are shown


class Run(NamedTuple):
    """One run of the benchmark."""

    command: str  # as it was typed
    date: str  # in UTC
    machine: Machine
    load: Load
    tables: Sequence[Table]


class MarkersMissing(Exception):
    """A page has no place for the table."""


# --- figures ------------------------------------------------------------------------------------------------


def figure(number: float) -> str:
    """Three digits, and whole numbers from a thousand on: more would claim what nobody measured."""
    if abs(number) >= 1000:
        return f"{number:.0f}"
    text = f"{number:.{_DIGITS}g}"
    return f"{float(text):.{_DIGITS}f}".rstrip("0").rstrip(".") if "e" in text else text


def cells(row: Row) -> list[str]:
    """The unit and the figures of a row. A single sample is its own best and worst, and stands there once."""
    if len(row.samples) == 1:
        return [row.unit, figure(row.median), "", *("" for _ in SLOW)]
    numbers = (row.median, row.best, *(row.worse_than(percent) for percent in SLOW))
    return [row.unit, *map(figure, numbers)]


def ratios(table: Table, row: Row, labels: Sequence[str]) -> list[str]:
    """By median and by best sample, for each label; empty where a row is not compared with it."""
    mine = {against.label: against for against in row.against}
    return [_ratio(table, row, mine.get(label)) for label in labels]


def _ratio(table: Table, row: Row, against: Against | None) -> str:
    found = against and table.ratio(row, against)
    if not found:
        return ""
    return f"{found.median:.2f}" + (f" / {found.best:.2f}" if len(row.samples) > 1 else "")


def labels_of(table: Table) -> list[str]:
    return list(dict.fromkeys(against.label for row in table.rows for against in row.against))


# --- a terminal ---------------------------------------------------------------------------------------------


def as_text(table: Table) -> str:
    labels = labels_of(table)
    head = ["", "unit", "median", "best", *(f"p{percent}" for percent in SLOW)]
    head += [f"over {label}" for label in labels]
    lines = [[row.name, *cells(row), *ratios(table, row, labels)] for row in table.rows]
    widths = [max(len(line[at]) for line in (head, *lines)) for at in range(len(head))]
    shown = [f"{table.title}, as {table.caller}: {table.about}"]
    for line in (head, *lines) if lines else ():
        words = [
            word.ljust(width) if at < 2 else word.rjust(width)
            for at, (word, width) in enumerate(zip(line, widths, strict=True))
        ]
        shown.append(f"  {'  '.join(words)}".rstrip())
    return "\n".join((*shown, *(f"  note: {note}" for note in table.notes)))


# --- pages --------------------------------------------------------------------------------------------------


def as_page(run: Run) -> str:
    """docs/performance.md."""
    sections: dict[str, list[Table]] = {}
    for table in run.tables:
        sections.setdefault(table.title, []).append(table)
    text = [
        "# Performance",
        f"`{run.command}` wrote this page on {run.date}. {_WARNING}",
        *_facts(run),
        _HOW_TO_READ,
        *(_section(title, tables) for title, tables in sections.items()),
    ]
    return "\n\n".join(text) + "\n"


_WARNING = "Times are those of one machine on one day. The ratios say more."
_HOW_TO_READ = """\
## How to read it

Alternatives that stand in one table were measured by turns in one run. *Best* is the smallest time, or the
highest rate: the sample that other programs disturbed least. *p90* and *p99* are on the slow side; with fewer
than 100 samples p99 is the worst sample. A column *over X* has two ratios, of the medians and of the best
samples: 1.00 means as much as X. *raw bwrap* is bubblewrap itself with the arguments and the seccomp filter
that the runner gives it (`runner explain --format argv`), without cgroups, rlimits, the runner's init, its
clocks and its report. *Root* and *ordinary user* are who starts the runner. `runner exec` takes
[stored plans](plans.md), but for the first of a kind, and where a row says *decided anew*. *runner-console*
is the script that pip makes for a command: `runner` starts it where it is not in a virtual environment."""


def _facts(run: Run) -> list[str]:
    machine = [f"| {name} | {_cell(value)} |" for name, value in run.machine.facts()]
    return ["\n".join(("| machine | |", "|---|---|", *machine)), f"**The load.** {run.load.sentence()}"]


def _section(title: str, tables: Sequence[Table]) -> str:
    whole = [f"## {title[0].upper()}{title[1:]}"]
    for table in tables:
        whole.append(f"**As {table.caller}.** {table.about[0].upper()}{table.about[1:]}.")
        if table.rows:
            whole.append(as_markdown(table))
        if table.notes:
            whole.append("\n".join(f"- {note}" for note in table.notes))
    return "\n\n".join(whole)


def as_markdown(table: Table) -> str:
    labels = labels_of(table)
    head = ["", "unit", "median", "best", *(f"p{percent}" for percent in SLOW)]
    head += [f"over {label}" for label in labels]
    lines = [f"| {' | '.join(map(_cell, head))} |", "|---|---|" + "---:|" * (len(head) - 2)]
    for row in table.rows:
        words = [row.name, *cells(row), *ratios(table, row, labels)]
        lines.append(f"| {' | '.join(map(_cell, words))} |")
    return "\n".join(lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def as_short_table(run: Run) -> str:
    """What README.md shows: the rows that have a headline, with a column for each caller."""
    callers = list(dict.fromkeys(table.caller for table in run.tables if table.rows))
    found: dict[str, dict[str, str]] = {}
    for table in run.tables:
        for row in table.rows:
            if row.headline:
                found.setdefault(row.headline, {})[table.caller] = _headline(table, row)
    head = ["", *(f"as {caller}" for caller in callers)]
    lines = [f"| {' | '.join(head)} |", "|---|" + "---|" * len(callers)]
    for headline, by_caller in found.items():
        words = [headline, *(by_caller.get(caller, "not measured") for caller in callers)]
        lines.append(f"| {' | '.join(map(_cell, words))} |")
    about = f"{run.machine.processors} processors, {run.machine.kernel}, {run.date}. {run.load.sentence()}"
    return "\n".join((*lines, "", f"Medians. {about}"))


def _headline(table: Table, row: Row) -> str:
    parts = [f"{figure(row.median)} {row.unit}"]
    for against in row.against:
        ratio = table.ratio(row, against)
        if ratio is not None:
            parts.append(f"{ratio.median:.2f} × {against.label}")
    return ", ".join(parts)


def replace_between(text: str, content: str) -> str:
    """`text` with `content` between the two markers. Raises MarkersMissing."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end or BEGIN in rest or END in after or END in before:
        raise MarkersMissing(f"there has to be one line {BEGIN!r} and one line {END!r} after it")
    return f"{before}{BEGIN}\n{content}\n{END}{after}"


# --- JSON ---------------------------------------------------------------------------------------------------


def as_document(run: Run) -> Mapping[str, Any]:
    return {
        "format": FORMAT,
        "command": run.command,
        "date": run.date,
        "machine": dict(run.machine.facts()),
        "load": {**dict(zip(run.load._fields, run.load, strict=True)), "sentence": run.load.sentence()},
        "tables": [_table(table) for table in run.tables],
    }


def _table(table: Table) -> Mapping[str, Any]:
    return {
        "part": table.part,
        "title": table.title,
        "as": table.caller,
        "about": table.about,
        "rows": [_row(table, row) for row in table.rows],
        "notes": list(table.notes),
    }


def _row(table: Table, row: Row) -> Mapping[str, Any]:
    return {
        "name": row.name,
        "unit": row.unit,
        "median": row.median,
        "best": row.best,
        **{f"p{percent}": row.worse_than(percent) for percent in SLOW},
        "against": [
            {
                "label": against.label,
                "rows": list(against.rows),
                "ratio": ratio and {"median": ratio.median, "best": ratio.best},
            }
            for against in row.against
            for ratio in (table.ratio(row, against),)
        ],
        "samples": list(row.samples),
    }
