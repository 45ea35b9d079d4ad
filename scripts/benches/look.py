"""What looking costs: help, explain, check, contracts and doctor, beside an interpreter that does nothing."""

from __future__ import annotations

import sys
import time

from sandbox.look import SETTLED_SECONDS
from scripts.benches.caller import RUNNER, Caller
from scripts.benches.launch import MANIFEST, PYTHON, Command, interleave
from scripts.benches.rows import Against, Row, Table

_EMPTY = Against(PYTHON, (PYTHON,))
_WITH_SITE = "python -I"
_OVER = (_EMPTY, Against(_WITH_SITE, (_WITH_SITE,)))


def bench(caller: Caller, rounds: int) -> list[Table]:
    """The manifest is known: each command has run before."""
    manifest = caller.write("look/nexo-plugin.toml", MANIFEST)
    commands = {
        PYTHON: [sys.executable, "-I", "-S", "-c", "pass"],
        _WITH_SITE: [sys.executable, "-I", "-c", "pass"],
        "runner --help": [RUNNER, "--help"],
        "runner exec --help": [RUNNER, "exec", "--help"],
        "runner serve --help": [RUNNER, "serve", "--help"],
        "runner explain": [RUNNER, "explain", manifest],
        "runner check": [RUNNER, "check", manifest],
        "runner contracts": [RUNNER, "contracts"],
        "runner doctor": [RUNNER, "doctor"],
    }
    time.sleep(SETTLED_SECONDS + 0.2)  # what rests on files that changed just now is not stored
    for argv in commands.values():
        caller.output_of(argv)
    taken = interleave(caller, {name: Command(argv, {}) for name, argv in commands.items()}, rounds)
    rows = [
        Row(name, "ms", [each.cpu for each in samples], _OVER if name.startswith("runner") else ())
        for name, samples in taken.items()
    ]
    about = f"processor time of {rounds} runs each, interleaved, for a manifest that is known"
    notes = ("the doctor starts bubblewrap, whose own children are not counted",)
    return [Table("look", "looking", caller.name, about, rows, notes)]
