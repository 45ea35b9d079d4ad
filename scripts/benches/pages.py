"""Runs of the benchmark: text for a terminal, a JSON document of each, and docs/performance.md about all.

The page and its plots are made from the documents alone, so that they can be made again without measuring.
There is one document for each architecture.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sandbox.speed.value import NamedTuple
from scripts.benches import plots
from scripts.benches.machine import Load, Machine
from scripts.benches.rows import LEFT_OUT, Against, Row, Table

FORMAT = 2  # of the JSON document
Document = Mapping[str, Any]  # the JSON document, or a table or a row of it

SLOW = (90, 99)  # percentiles
_DIGITS = 3  # that are shown


class Run(NamedTuple):
    """One run of the benchmark."""

    command: str  # as it was typed
    date: str  # in UTC
    machine: Machine
    load: Load
    tables: Sequence[Table]


# --- figures ------------------------------------------------------------------------------------------------


def figure(number: float) -> str:
    """Three significant digits, and whole numbers from a thousand on: more would suggest false precision."""
    if abs(number) >= 1000:
        return f"{number:.0f}"
    text = f"{number:.{_DIGITS}g}"
    return f"{float(text):.{_DIGITS}f}".rstrip("0").rstrip(".") if "e" in text else text


def cells(row: Row) -> list[str]:
    """The unit and the figures of a row. A single sample is shown once, not as best and worst too."""
    if len(row.samples) == 1:
        return [row.unit, figure(row.median), "", *("" for _ in SLOW)]
    numbers = (row.median, row.best, *(row.worse_than(percent) for percent in SLOW))
    return [row.unit, *map(figure, numbers)]


def ratios(table: Table, row: Row, labels: Sequence[str]) -> list[str]:
    """The ratios by median and by best sample, for each label; empty if the row is not compared with it."""
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


# --- the page -----------------------------------------------------------------------------------------------


def as_page(documents: Sequence[Document]) -> str:
    """docs/performance.md, from the documents in docs/performance."""
    parts = [
        "# Performance",
        _SOURCE,
        *(_machine(document) for document in documents),
        _HOW_TO_READ,
        "## In short",
        _in_short(documents),
        _IN_WORDS,
        "## Where others are ahead",
        _ahead(documents),
        "## A launch, and other sandboxes",
        f"![Time of a launch, for the runner and other sandboxes]({plots.LAUNCH})",
        "## Work in a sandbox",
        _ABOUT_WORK,
        *(each for document in documents for each in _work(document)),
        "## As sessions grow",
        f"![Memory, a call and a start against the number of open sessions]({plots.SESSIONS})",
        *(each for document in documents for each in _details(document)),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def architecture_of(document: Document) -> str:
    return str(document["machine"]["architecture"])


def _machine(document: Document) -> str:
    """The machine of a run, and what happened meanwhile."""
    facts = ", ".join(
        f"{name} {value}" for name, value in document["machine"].items() if name != "architecture"
    )
    name = architecture_of(document)
    file = f"[{name}.json](performance/{name}.json)"
    told = (
        f"**{name}**, measured on {document['date']}: {facts}. {file}, made by\n"
        f"`{document['command']}`.\n{document['load']['sentence']}{_samples(document)}"
    )
    return "\n\n".join(part for part in (told, _left_out(document)) if part)


def _details(document: Document) -> list[str]:
    """The tables of one machine."""
    name = architecture_of(document)
    found = [
        f"## On {name}",
        "\n".join(f"- {note}" for note in _notes(document, "peers", "memory as sessions grow")),
    ]
    for title, shown in (
        (f"Launches on {name}", _LAUNCHES),
        (f"Sessions on {name}", _GROWTH),
        (f"Calls, ends, images, hosts and networks on {name}", _OTHERS),
    ):
        found += [f"### {title}", _beside_each_other(document, _of_tables(shown))]
    return found


_SOURCE = """\
`scripts/bench` measured this, with one run for each architecture. [performance](performance) has the whole
runs, with more tables than this page. `scripts/bench --from docs/performance/x86_64.json --write` makes the
page and its plots again. Times are those of one machine on one day. The ratios say more. Two machines are
not compared here: each column and each line names its own."""
_HOW_TO_READ = """\
Alternatives that are compared were measured by turns in one run. Each figure is a median; *p99* is on the
slow side, and with fewer than 100 samples the worst one. *6 × raw bwrap* means six times as much as that.
*raw bwrap* is bubblewrap itself with the arguments and the seccomp filter that the runner gives it (`runner
explain --format argv`), without cgroups, rlimits, the runner's init, its clocks and its report. *Root* and
*ordinary user* are who starts the runner. `runner exec` takes [stored plans](plans.md), but for rows that say
*decided anew*. *runner-console* is the script that pip makes: `runner` starts it outside of a
virtual environment."""
_IN_WORDS = """\
Most of a launch is the start of the interpreter and its imports. Most of a cold `runner call` is the import
of trio. Limits cost little, by cgroup as by rlimit. A plugin that waits costs at most about 1 % of a
processor, for limits that have to be measured, and mostly nothing."""
_ABOUT_WORK = """\
The same work, by turns, without a sandbox and in each. Figures are times as much as without one (medians);
the work measures itself, so the start of the sandbox is not in them. The files are in one folder that each
may write to. [peers.py](../scripts/benches/peers.py) has how each is configured."""
# The tables that the page shows, and what it puts in front of the names of their rows.
_LAUNCHES = {
    "launch": "",
    "parked cells": "",
    "launches at once": "20 at once: ",
    "memory of a cage that waits": "memory of a cage that waits: ",
}
_GROWTH = {
    "memory as sessions grow": "memory, ",
    "a call as sessions grow": "a call, ",
    "a start as sessions grow": "",
}
_OTHERS = {
    "cold calls, to the end": "a cold call, to the end: ",
    "calls per second by framing": "",
    "calls per second by framing, 16 at once": "16 at once: ",
    "answers of 1 KiB, and --inspect": "an answer of 1 KiB: ",
    "calls through a daemon": "a call, ",
    "calls through a daemon, 32 at once": "32 at once, ",
    "memory of idle plugins of a daemon": "memory of idle plugins: ",
    "end": "the end of ",
    "looking": "",
    "launch as binds grow": "",
    "launch with a network": "a launch, ",
    "throughput": "a download ",
    "memory of the gate": "memory of the gate ",
    "requests": "a request with TLS, ",
    "a small image": "a small image: ",
    "staged writes": "staged writes: ",
    "calls through the gateway": "MCP: ",
    "the start of the gateway": "MCP: the gateway's start, ",
    "memory of 5 sessions of a host with 10 servers each": "memory of 5 hosts with 10 servers each: ",
    "the start of 5 sessions of a host with 10 servers each": "their start: ",
}


class Race(NamedTuple):
    """A table that has the runner beside other sandboxes."""

    title: str
    ours: str  # our row
    what: str  # what was done
    no_others: tuple[str, ...] = ()  # rows that are no sandbox of others


_WORK = "work: "
_EXEC, _WRITES, _PYTHON = "runner exec, default policy", "runner run --write", "python -I -S"
_NOISE = 0.03  # a smaller part is not told apart
RACES = (
    Race("peers", _EXEC, "`/usr/bin/true` by `runner exec`", (_PYTHON, _WRITES)),
    Race("peers", _WRITES, "`/usr/bin/true` by `runner run --write`", (_PYTHON, _EXEC)),
    *(
        Race(title, ours, f"{what} by `{verb}`", (other,))
        for title, what in (
            ("launches at once", "20 launches at once"),
            ("memory of a cage that waits", "memory of a cage that waits"),
        )
        for ours, verb, other in (
            (_EXEC, "runner exec", _WRITES),
            (_WRITES, "runner run --write", _EXEC),
        )
    ),
    Race("a small image", "runner run --image", "a start in an image", ("runner run, this machine's files",)),
    *(
        Race(_WORK + kind, _WRITES, f"work: {kind}", ("bare",))
        for kind in ("gcc", "stat", "open and read", "fork and exec", "git clone")
    ),
)


def _samples(document: Document) -> str:
    kept = any(row["samples"] for table in document["tables"] for row in table["rows"])
    return "" if kept else " The single samples of this run were not kept."


def _of_tables(shown: Mapping[str, str]) -> Callable[[Document, Document], str]:
    """Name the rows of these tables that are compared with others, or all if none is. What is shown in short
    already is left out of the last section, which has to fit the page."""

    def name(table: Document, row: Document) -> str:
        if table["title"] not in shown or (row["headline"] and shown is _OTHERS):
            return ""
        compared = row["against"] or not any(each["against"] for each in table["rows"])
        return shown[table["title"]] + row["name"] if compared else ""

    return name


def _beside_each_other(document: Document, name: Callable[[Document, Document], str]) -> str:
    """One table of the rows that have a name, with two columns for each caller."""
    callers = _callers(document)
    found: dict[str, dict[str, Sequence[str]]] = {}
    for table in document["tables"]:
        for row in table["rows"]:
            if called := name(table, row):
                found.setdefault(called, {})[table["as"]] = _median_and_p99(row)
    head = ["", *(word for caller in callers for word in (f"as {caller}", "p99"))]
    lines = [f"| {' | '.join(head)} |", "|---|" + "---|---:|" * len(callers)]
    for called, by_caller in found.items():
        words = [called, *(word for who in callers for word in by_caller.get(who, ("not measured", "")))]
        lines.append(f"| {' | '.join(map(_cell, words))} |")
    return "\n".join(lines)


def _in_short(documents: Sequence[Document]) -> str:
    """The rows that have a headline, a column for each machine and caller, and the first ratio."""
    columns = [(document, who) for document in documents for who in _callers(document)]
    found: dict[str, dict[str, str]] = {}
    for document in documents:
        for table in document["tables"]:
            for row in table["rows"]:
                if row["headline"]:
                    column = f"{architecture_of(document)}, as {table['as']}"
                    found.setdefault(row["headline"], {})[column] = _told(row, row["against"][:1])
    heads = [f"{architecture_of(document)}, as {who}" for document, who in columns]
    lines = [f"| {' | '.join(['', *heads])} |", f"|---|{'---|' * len(heads)}"]
    for headline, cell in found.items():
        words = [headline, *(cell.get(head, "not measured") for head in heads)]
        lines.append(f"| {' | '.join(map(_cell, words))} |")
    return "\n".join(lines)


def _callers(document: Document) -> list[str]:
    return list(dict.fromkeys(table["as"] for table in document["tables"] if table["rows"]))


def _ahead(documents: Sequence[Document]) -> str:
    """A line for each figure of ours that another sandbox betters."""
    lines = []
    for document in documents:
        for race in RACES:
            for table in document["tables"]:
                rows = {row["name"]: row for row in table["rows"]}
                if table["title"] != race.title or race.ours not in rows:
                    continue
                own = rows[race.ours]["median"]
                others = sorted(
                    (row["median"], name)
                    for name, row in rows.items()
                    if name not in (race.ours, *race.no_others) and row["median"] < own * (1 - _NOISE)
                )
                if others:
                    told = ", ".join(f"{name} {figure(median)}" for median, name in others)
                    lines.append(
                        f"- {architecture_of(document)}, as {table['as']}, {race.what}: {told}; the runner "
                        f"{figure(own)} {rows[race.ours]['unit']}."
                    )
    return "\n".join([_ABOUT_AHEAD, "", *(lines or ["- Nowhere."])])


_ABOUT_AHEAD = f"""\
Made from the figures: each median of another sandbox that is better than ours by more than {_NOISE:.0%}. They
confine in different ways: [attacks](attacks.md#other-sandboxes) has what each held."""


def _work(document: Document) -> list[str]:
    """A table of ratios to the same work without a sandbox."""
    tables = [table for table in document["tables"] if table["title"].startswith(_WORK) and table["rows"]]
    name = architecture_of(document)
    if not tables:
        return [f"On {name}: not measured."]
    kinds = list(dict.fromkeys(table["title"].removeprefix(_WORK) for table in tables))
    callers = list(dict.fromkeys(table["as"] for table in tables))
    found: dict[str, dict[tuple[str, str], str]] = {}
    bare = []
    for table in tables:
        kind = table["title"].removeprefix(_WORK)
        for row in table["rows"]:
            if ratio := next((each["ratio"] for each in row["against"]), None):
                found.setdefault(row["name"], {})[table["as"], kind] = figure(ratio["median"])
            elif table["as"] == callers[0]:
                bare.append(
                    f"{kind} {figure(row['median'])} {row['unit']} ({table['about'].partition(': ')[2]})"
                )
    columns = [(who, kind) for who in callers for kind in kinds]
    lines = [f"| on {name} | {' | '.join(f'{kind}, as {who}' for who, kind in columns)} |"]
    lines.append(f"|---|{'---:|' * len(columns)}")
    for sandbox, cell in found.items():
        lines.append(f"| {' | '.join([_cell(sandbox), *(cell.get(at, '–') for at in columns)])} |")
    notes = [note for note in _notes(document, tables[0]["title"]) if "is not measured" in note]
    told = [f"Without a sandbox, on {name} as {callers[0]}: {'; '.join(bare)}."]
    return ["\n".join(lines), *told, "\n".join(f"- {note}" for note in notes)]


def _told(row: Document, compared: Sequence[Document]) -> str:
    parts = [f"{figure(row['median'])} {row['unit']}"]
    for against in compared:
        if against["ratio"] is not None:
            parts.append(f"{against['ratio']['median']:.2f} × {against['label']}")
    return ", ".join(parts)


def _median_and_p99(row: Document) -> tuple[str, str]:
    """Median and p99. The second is empty if there is at most one sample."""
    return _told(row, row["against"]), "" if row["p99"] is None else figure(row["p99"])


def _notes(document: Document, *titles: str) -> list[str]:
    """The notes of the tables with these titles, without duplicates. One that is not about all who ran these
    names its own."""
    found: dict[str, list[str]] = {}
    for table in document["tables"]:
        if table["title"] in titles:
            for note in table["notes"]:
                found.setdefault(note, []).append(table["as"])
    callers = _callers(document)
    return [note if [*who] == callers else f"as {' and '.join(who)}: {note}" for note, who in found.items()]


def _left_out(document: Document) -> str:
    """The parts that failed, and why. Empty: none did."""
    faults = [
        f"- {table['part']}, as {table['as']}: {'; '.join(table['notes'])}"
        for table in document["tables"]
        if not table["rows"] and table["about"] == LEFT_OUT
    ]
    return "\n".join(("**Not measured.**", "", *faults)) if faults else ""


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


# --- JSON ---------------------------------------------------------------------------------------------------


def as_document(run: Run) -> Document:
    return {
        "format": FORMAT,
        "command": run.command,
        "date": run.date,
        "machine": dict(run.machine.facts()),
        "load": {**dict(zip(run.load._fields, run.load, strict=True)), "sentence": run.load.sentence()},
        "tables": [_table(table) for table in run.tables],
    }


def as_lines(document: Document) -> str:
    """The document as a file: a line for each table and each row, so that two runs can be compared by line.
    A string in it has no bare quote, so what is replaced is always the start of an object."""
    text = json.dumps(document, ensure_ascii=False)
    return text.replace('{"part": ', '\n{"part": ').replace('{"name": ', '\n  {"name": ') + "\n"


def _table(table: Table) -> Document:
    return {
        "part": table.part,
        "title": table.title,
        "as": table.caller,
        "about": table.about,
        "rows": [_row(table, row) for row in table.rows],
        "notes": list(table.notes),
    }


def _row(table: Table, row: Row) -> Document:
    several = len(row.samples) > 1
    return {
        "name": row.name,
        "headline": row.headline,
        "unit": row.unit,
        "median": _rounded(row.median),
        "best": _rounded(row.best) if several else None,
        **{f"p{percent}": _rounded(row.worse_than(percent)) if several else None for percent in SLOW},
        "against": [
            {
                "label": against.label,
                "rows": list(against.rows),
                "ratio": ratio and {"median": _rounded(ratio.median), "best": _rounded(ratio.best)},
            }
            for against in row.against
            for ratio in (table.ratio(row, against),)
        ],
        "samples": [_rounded(sample) for sample in row.samples],
    }


def _rounded(number: float) -> float:
    """Round to five digits: clocks are no better, and the file stays small."""
    return float(f"{number:.5g}")
