"""What calls cost: for each framing, for answers of several sizes, with and without --inspect."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from scripts.benches import launch, talker
from scripts.benches.caller import RUNNER, Caller
from scripts.benches.hosting import hosting, live_host, read_document
from scripts.benches.launch import Command
from scripts.benches.rows import PER_SECOND, Against, Row, Table

RAW, SESSION, DIRECT, INSPECTED = "raw bwrap", "session", "runner exec", "runner exec --inspect"
OVER_RAW, OVER_DIRECT = Against(RAW, (RAW,)), Against(DIRECT, (DIRECT,))
SMALL_BYTES = 5
SIZES = {1 << 10: "1 KiB", 64 << 10: "64 KiB", 4 << 20: "4 MiB"}


def command_for_host(command: Command) -> tuple[list[str], dict[str, str]]:
    """The command line and files in the form that live_host.py takes."""
    return command.argv, {str(number): path for number, path in command.files.items()}


def describe_plugin(caller: Caller, speech: talker.Speech) -> dict[str, Any]:
    """Write a plugin, and return its description for live_host.py."""
    manifest = talker.install(caller, speech)
    # Not in the default state directory, where nothing should be left.
    state = caller.own(f"states-{speech.contract}")
    argv = [RUNNER, "exec", "--state-dir", f"{state}/own", manifest]
    bare = launch.raw(caller, argv)  # fills the caches, too
    return {
        "manifest": manifest,
        "exec": argv,
        "state": f"{state}/own",
        "call": speech.call,
        "heard": speech.asked("heard"),
        "framing": speech.framing,
        "others": {RAW: command_for_host(_without_state(bare, state))},
    }


def _without_state(command: Command, state: str) -> Command:
    """The command with an empty folder in place of the state directory, which raw bwrap may not enter as
    root."""
    words = list(command.argv)
    for at, word in enumerate(words):
        if word == "--bind" and words[at + 1].startswith(state):
            words[at : at + 3] = ["--perms", "0700", "--tmpfs", words[at + 2]]
    return Command(words, command.files)


# --- framings -----------------------------------------------------------------------------------------------


def bench_framings(caller: Caller, calls: int, onces: int) -> list[Table]:
    """`onces`: calls of contracts whose plugins answer one call each."""
    one_by_one: list[Row] = []
    at_once: list[Row] = []
    for speech in talker.SPEECHES:
        if speech.once:
            told = {**describe_plugin(caller, speech), "calls": onces}
            with hosting(caller, live_host(caller, "once", told)) as process:
                taken = read_document(process)["taken"]
            one_by_one += _rates(f"{_title(speech)}, a process for each call", taken, 1)
            continue
        told = {
            **describe_plugin(caller, speech),
            "sizes": [[SMALL_BYTES, calls]],
            "pipelined": max(2, calls // 4),
        }
        with hosting(caller, live_host(caller, "talk", told)) as process:
            taken, many = read_document(process)["taken"], read_document(process)
        headline = "calls of an open session, one by one" if speech.contract == "mcp" else ""
        one_by_one += _rates(_title(speech), taken, 1, headline)
        headline = f"the same, {many['at_once']} at once" if speech.contract == "mcp" else ""
        at_once += _rates(_title(speech), many["taken"], many["at_once"], headline)
    about = (
        f"{calls} each ({onces} where each starts a process), by turns, with answers of {SMALL_BYTES} bytes"
    )
    raw = "raw bwrap is read by trio and json.loads, with the same frames and no checks"
    return [
        Table("framings", "calls per second by framing", caller.name, f"{about}; {raw}", one_by_one),
        Table(
            "framings",
            f"calls per second by framing, {many['at_once']} at once",
            caller.name,
            f"{max(2, calls // 4)} times {many['at_once']} each, by turns; {raw}",
            at_once,
        ),
    ]


def _title(speech: talker.Speech) -> str:
    return f"{'lines' if speech.framing == 'lines' else 'Content-Length'} ({speech.contract})"


def _rates(title: str, taken: Mapping[str, list[list[float]]], each: int, headline: str = "") -> list[Row]:
    """One sample for each block of calls: a single call is too short to measure."""
    raw = f"{title}, {RAW}"
    rates = {name: [each * len(block) / sum(block) for block in blocks] for name, blocks in taken.items()}
    return [
        Row(raw, PER_SECOND, rates[RAW]),
        Row(f"{title}, session", PER_SECOND, rates[SESSION], (Against(RAW, (raw,)),), headline),
    ]


# --- sizes, and --inspect -----------------------------------------------------------------------------------


def bench_answers(caller: Caller, counts: Mapping[int, int]) -> list[Table]:
    """`counts`: how many of each size."""
    speech = next(each for each in talker.SPEECHES if each.contract == "mcp")
    told = describe_plugin(caller, speech)
    argv = told["exec"]
    told["others"] |= {
        DIRECT: command_for_host(Command(argv, {})),
        INSPECTED: command_for_host(Command([*argv[:2], "--inspect", *argv[2:]], {})),
    }
    told |= {"sizes": [[SMALL_BYTES, counts[min(counts)]], *map(list, counts.items())], "pipelined": 0}
    with hosting(caller, live_host(caller, "talk", told)) as process:
        found = [read_document(process) for _ in told["sizes"]]
    return [_answers(caller, document["size"], document["taken"]) for document in found]


def _answers(caller: Caller, size: int, taken: Mapping[str, list[list[float]]]) -> Table:
    unit, scale = ("ms", 1e3) if size > 1 << 20 else ("µs", 1e6)
    name = SIZES.get(size, f"{size} bytes")
    flat = {name: [scale * each for block in blocks for each in block] for name, blocks in taken.items()}
    rows = [
        Row(RAW, unit, flat[RAW]),
        Row(
            SESSION,
            unit,
            flat[SESSION],
            (OVER_RAW,),
            f"a call with an answer of {name}" if size > 1 << 20 else "",
        ),
        Row(DIRECT, unit, flat[DIRECT], (OVER_RAW,)),
        Row(INSPECTED, unit, flat[INSPECTED], (OVER_RAW, OVER_DIRECT)),
    ]
    about = (
        f"{len(flat[RAW])} calls each, by turns; all but the session, which has its own reader, are read by "
        "trio and json.loads"
    )
    return Table("answers", f"answers of {name}, and --inspect", caller.name, about, rows)
