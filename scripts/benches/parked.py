"""What the start of a plugin costs if its cage was parked: until the first byte of /usr/bin/echo arrives.

For comparison: the same cage by bubblewrap alone, and a launch by the library.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from sandbox.look import SETTLED_SECONDS
from scripts.benches import launch
from scripts.benches.caller import RUNNER, Caller, failed
from scripts.benches.hosting import go_on, hosting, read_document
from scripts.benches.launch import WARM_UP, Command
from scripts.benches.rows import Against, Row, Table

MANIFEST = """\
[plugin]
id = "bench"
version = "1.0.0"
name = "Bench"
description = "Says a word."
min_nexo_version = ">=0.1"
[plugin.entrypoint]
command = "/usr/bin/echo"
args = ["word"]
[plugin.sandbox]
enabled = true
"""

RAW, LAUNCHED = "raw bwrap", "a launch by the library"
RELEASED, TAKEN = "a parked cell that is released", "that, and all facts asked again"


def bench(caller: Caller, rounds: int) -> list[Table]:
    manifest = caller.write("plugin/nexo-plugin.toml", MANIFEST)
    argv = [RUNNER, "exec", manifest]
    caller.output_of(argv)  # fills the caches
    raw = launch.raw(caller, argv)
    time.sleep(SETTLED_SECONDS + 0.2)  # a cell that rests on files that changed just now is not parked
    # Passed as source: the user that is measured may not be allowed to read the checkout.
    script = caller.write("host/parked_host.py", Path(__file__).with_name("parked_host.py").read_text())
    taken: dict[str, list[float]] = {RAW: [], LAUNCHED: [], RELEASED: [], TAKEN: []}
    with hosting(caller, [sys.executable, "-I", script, manifest]) as process:
        for turn in range(WARM_UP + rounds):
            alone = _first_byte(caller, raw)
            go_on(process)
            told = read_document(process)
            if turn >= WARM_UP:
                for name, seconds in zip(taken, (alone, *told), strict=True):
                    taken[name].append(seconds * 1000)
    over = (Against(RAW, (RAW,)), Against(LAUNCHED, (LAUNCHED,)))
    headlines = {TAKEN: "the start of a parked plugin"}
    rows = [
        Row(name, "ms", samples, over if name in (RELEASED, TAKEN) else (), headlines.get(name, ""))
        for name, samples in taken.items()
    ]
    about = f"{rounds} starts of /usr/bin/echo each, by turns, until its first byte"
    return [Table("parked", "parked cells", caller.name, about, rows)]


def _first_byte(caller: Caller, command: Command) -> float:
    with command.opened():
        start = time.perf_counter()
        with caller.start(
            command.argv,
            {},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=tuple(command.files),
        ) as process:
            assert process.stdout is not None
            first = os.read(process.stdout.fileno(), 1)
            taken = time.perf_counter() - start
            _, errors = process.communicate()
    if not first or process.returncode or errors:
        raise failed(command.argv, process.returncode, errors)
    return taken
