"""What a launch costs as the folders grow that a plugin may read."""

from __future__ import annotations

import json
from pathlib import Path

from scripts.benches import launch
from scripts.benches.caller import RUNNER, Caller
from scripts.benches.launch import Command, policy
from scripts.benches.rows import Against, Table

MANIFEST = """\
[plugin]
id = "binds"
version = "1.0.0"
name = "Binds"
description = "Sees folders, and reads none."
min_nexo_version = ">=0.1"
[plugin.entrypoint]
command = "/usr/bin/true"
[plugin.sandbox]
enabled = true
fs_read_paths = {paths}
"""


def bench(caller: Caller, counts: tuple[int, ...], rounds: int) -> list[Table]:
    shown = Path(caller.folder, "shown")
    text = policy({}).replace("[read]\ndefault = []\nceiling = []", f'[read]\nceiling = ["{shown}"]')
    rules = caller.write("policies/binds.toml", text)
    commands: dict[str, Command] = {}
    over: dict[str, tuple[Against, ...]] = {}
    first = _name("runner exec", counts[0])
    for count in counts:
        for number in range(count):
            caller.write(f"shown/{number}/file", "")
        paths = [str(shown / str(number)) for number in range(count)]
        manifest = caller.write(f"binds-{count}/plugin.toml", MANIFEST.format(paths=json.dumps(paths)))
        argv = [RUNNER, "exec", "--policy", rules, manifest]
        caller.output_of(argv)  # fills the caches
        raw, ours = _name("raw bwrap", count), _name("runner exec", count)
        commands[raw] = launch.raw(caller, argv)
        commands[ours] = Command(argv, {})
        over[ours] = (Against("raw bwrap with as many", (raw,)), Against(first, (first,)))
    taken = launch.interleave(caller, commands, rounds)
    about = (
        f"{rounds} launches of /usr/bin/true each, interleaved; each bind is a folder of its own, read-only"
    )
    return launch.tables("binds", "launch as binds grow", caller, about, taken, over)


def _name(what: str, count: int) -> str:
    return f"{what}, {count} bind{'s' if count > 1 else ''}"
