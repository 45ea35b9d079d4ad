"""What memory, a call and one more start cost as sessions grow."""

from __future__ import annotations

from typing import Any

from scripts.benches import talker, talks
from scripts.benches.call import OURS, memory
from scripts.benches.caller import Caller, Unable
from scripts.benches.hosting import go_on, hosting, live_host, read_document
from scripts.benches.machine import available_bytes
from scripts.benches.rows import Against, Row, Table

# An upper estimate for one session with its plugin, and the part of free memory that may be used.
SESSION_BYTES = 20 << 20
MOST_OF_MEMORY = 0.6
WARM_UP_CALLS = 10
HEADLINE = 100  # sessions of the headline about memory, or the most that were opened below that


def affordable(counts: tuple[int, ...], available: int) -> tuple[tuple[int, ...], str]:
    """The counts that fit into memory, and a sentence about those that do not."""
    most = int(available * MOST_OF_MEMORY) // SESSION_BYTES
    fitting = tuple(count for count in counts if count <= most) or counts[:1]
    without = [str(count) for count in counts if count not in fitting]
    if not without:
        return fitting, ""
    return fitting, (
        f"{' and '.join(without)} sessions are left out: {available >> 20} MiB of memory are available, and "
        f"{SESSION_BYTES >> 20} MiB are reckoned for each"
    )


def bench(caller: Caller, counts: tuple[int, ...], calls: int, starts: int) -> list[Table]:
    fitting, note = affordable(counts, available_bytes())
    speech = next(each for each in talker.SPEECHES if each.contract == "mcp")
    told = talks.describe_plugin(caller, speech)
    told |= {"counts": fitting, "calls": calls, "starts": starts, "warm_up": WARM_UP_CALLS}
    told["raw"] = told["others"][talks.RAW]
    notes = [note] if note else []
    stops: list[tuple[dict[str, Any], dict[str, int], dict[str, Any]]] = []
    with hosting(caller, live_host(caller, "grow", told)) as process:
        for _ in fitting:
            opened = read_document(process)
            taken = {}
            if "count" in opened:
                sizes = memory(process.pid)
                go_on(process)
                taken = read_document(process)
                stops.append((opened, sizes, taken))
            if stopped := {**opened, **taken}.get("stopped"):
                notes.append(stopped)
                break
        read_document(process)
    if not stops:
        raise Unable(notes[-1])
    return [_memory(caller, stops, tuple(notes)), _calls(caller, stops), _starts(caller, stops)]


def _memory(caller: Caller, stops: list[Any], notes: tuple[str, ...]) -> Table:
    rows = []
    # The same number for every caller, if possible: not all can open as many.
    shown = max((opened["count"] for opened, _, _ in stops if opened["count"] <= HEADLINE), default=0)
    for opened, sizes, _ in stops:
        count = opened["count"]
        if -1 in sizes.values():
            notes = (*notes, f"memory of {count} is not known: this user cannot read some of the processes")
            continue
        bwrap = f"{count} open: bwrap alone"
        beside = [(sum(sizes[name] for name in OURS) + sizes["bwrap"]) / count]
        rows += [
            Row(bwrap, "kB", [sizes["bwrap"] / count]),
            Row(
                f"{count} open: all but the plugin",
                "kB",
                beside,
                (Against("bwrap alone", (bwrap,)),),
                f"memory of each of {count} sessions beside the plugin" if count == shown else "",
            ),
            *(Row(f"{count} open: {name}", "kB", [sizes[name] / count]) for name in OURS),
            Row(f"{count} open: the plugin", "kB", [sizes["plugin"] / count]),
        ]
    about = "for each session; a page that several processes share is divided among them (PSS)"
    return Table("growth", "memory as sessions grow", caller.name, about, rows, notes)


def _calls(caller: Caller, stops: list[Any]) -> Table:
    first = _open(stops[0][0])
    rows = [
        Row(
            _open(opened),
            "µs",
            [1e6 * each for each in taken["calls"]],
            (Against(first, (first,)),) if opened is not stops[0][0] else (),
        )
        for opened, _, taken in stops
    ]
    about = f"{len(stops[0][2]['calls'])} calls, one after the other, of one session after the other"
    return Table("growth", "a call as sessions grow", caller.name, about, rows)


def _starts(caller: Caller, stops: list[Any]) -> Table:
    first = f"{_open(stops[0][0])}: one more session"
    rows: list[Row] = []
    for opened, _, taken in stops:
        if not taken["starts"]:
            continue
        raw, ours = f"{_open(opened)}: one more raw bwrap", f"{_open(opened)}: one more session"
        begins = opened is stops[0][0]
        over = (Against("raw bwrap", (raw,)), *(() if begins else (Against(first, (first,)),)))
        headline = "start of a session from a host, until it is greeted" if begins else ""
        rows += [
            Row(raw, "ms", [1e3 * each for each in taken["starts"]["raw bwrap"]]),
            Row(ours, "ms", [1e3 * each for each in taken["starts"]["session"]], over, headline),
        ]
    opened = ", ".join(f"{each['count']} in {each['opened']:.1f} s" for each, _, _ in stops[1:])
    count = len(stops[0][2]["starts"]["session"])
    about = f"{count} each, by turns, until the plugin has answered the greeting"
    return Table("growth", "a start as sessions grow", caller.name, f"{about}; opened: {opened}", rows)


def _open(opened: dict[str, Any]) -> str:
    return f"{opened['count']} open"
