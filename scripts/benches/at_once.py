"""Many at once: how long launches take that begin together, and the memory of cages that wait."""

from __future__ import annotations

import os
import select
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path

from sandbox.look import SETTLED_SECONDS
from scripts.benches import launch
from scripts.benches.call import family, pss
from scripts.benches.caller import RUNNER, Caller, Unable, failed, reason
from scripts.benches.kill import MANIFEST
from scripts.benches.launch import RAW, WRITES, Command
from scripts.benches.peers import OURS, TRUE, FoundPeers, Job
from scripts.benches.resident import Resident, resident
from scripts.benches.rows import Against, Row, Table

TOGETHER, WAITING = 20, 10
WAIT = ("/usr/bin/cat",)  # ends when its stdin does, whatever is around it
SLEEP = ("/usr/bin/sleep", "2")  # what a library starts may have no stdin
_OPEN_SECONDS = 60.0
_OVER = (Against(RAW, (RAW,)),)


def bench(caller: Caller, rounds: int, found: FoundPeers) -> list[Table]:
    launches: dict[str, Callable[[], float]] = {}
    sizes: dict[str, list[float]] = {}
    notes = list(found.missing)
    quick, waits = _own(caller, TRUE), _own(caller, WAIT)
    time.sleep(SETTLED_SECONDS + 0.2)  # a plan that rests on files that changed just now is not stored
    for name in quick:
        together(caller, [quick[name]])
        waiting(caller, [waits[name]])
    with ExitStack() as stack:
        for name in quick:
            sizes[name] = [waiting(caller, [waits[name]] * WAITING)]
            launches[name] = partial(together, caller, [quick[name]] * TOGETHER)
        for peer in found.peers:
            job, wait = Job(quick[RAW], stays=True), Job(waits[RAW], WAIT)
            try:
                if peer.pypi:
                    with resident(caller, peer.command(caller, job._replace(program=SLEEP)).argv) as running:
                        size = growth(running)
                    running = stack.enter_context(resident(caller, peer.command(caller, job).argv))
                    launch_all = partial(_by_library, running)
                else:
                    jobs = [wait._replace(number=number) for number in range(WAITING)]
                    size = waiting(caller, [peer.command(caller, each) for each in jobs])
                    jobs = [job._replace(number=number) for number in range(TOGETHER)]
                    launch_all = partial(together, caller, [peer.command(caller, each) for each in jobs])
                launch_all()
            except Unable as fault:
                notes.append(f"{peer.name} is not measured: {reason(str(fault))}")
            else:
                sizes[peer.name], launches[peer.name] = [size], launch_all
        taken: dict[str, list[float]] = {name: [] for name in launches}
        for turn in range(rounds):
            at = turn % len(launches)
            for name in (*list(launches)[at:], *list(launches)[:at]):
                try:
                    taken[name].append(launches[name]())
                except Unable as fault:
                    if name in quick:
                        raise
                    notes.append(f"{name} is not measured: {reason(str(fault))}")
                    del launches[name], taken[name]
    about = f"until the last of {TOGETHER} has ended that began together, {rounds} times, by turns"
    held = (
        f"of {WAITING} that wait at once, for each: all processes but the program (PSS); of a library: what "
        "the program that calls it grows by"
    )
    return [
        Table("at-once", "launches at once", caller.name, about, _rows("ms", taken), tuple(notes)),
        Table("at-once", "memory of a cage that waits", caller.name, held, _rows("kB", sizes)),
    ]


def _rows(unit: str, found: Mapping[str, list[float]]) -> list[Row]:
    return [Row(name, unit, each, () if name == RAW else _OVER) for name, each in found.items()]


def _own(caller: Caller, program: Sequence[str]) -> dict[str, Command]:
    """Ours, and bubblewrap alone."""
    text = MANIFEST.format(command=program[0], arguments=[])
    ours = [RUNNER, "exec", caller.write(f"at-once/{Path(program[0]).name}/nexo-plugin.toml", text)]
    folder = launch.writable_folder(caller, "work-at-once")
    return {
        RAW: launch.raw(caller, ours),
        OURS: Command(ours, {}),
        WRITES: Command([RUNNER, "run", "--write", folder, "--", *program], {}),
    }


# --- launches at once ---------------------------------------------------------------------------------------


def together(caller: Caller, commands: Sequence[Command]) -> float:
    """Start all, and wait for the last. Returns milliseconds; raises Unable."""
    start = time.perf_counter()
    with ExitStack() as stack:
        started = [stack.enter_context(_running(caller, command)) for command in commands]
        for process, command in zip(started, commands, strict=True):
            _, errors = process.communicate()
            if process.returncode or errors:
                raise failed(command.argv, process.returncode, errors)
        return (time.perf_counter() - start) * 1000


def _by_library(running: Resident) -> float:
    return running.launch(TOGETHER).wall


@contextmanager
def _running(caller: Caller, command: Command) -> Iterator[subprocess.Popen[bytes]]:
    pipe = subprocess.PIPE
    with command.opened(), launch.high_descriptors():
        process = caller.start(
            command.argv, stdin=pipe, stdout=pipe, stderr=pipe, pass_fds=tuple(command.files)
        )
    with process:
        try:
            yield process
        except BaseException:
            process.kill()
            raise


# --- memory -------------------------------------------------------------------------------------------------


def waiting(caller: Caller, commands: Sequence[Command]) -> float:
    """The kilobytes of each sandbox while its program waits. Raises Unable."""
    with ExitStack() as stack:
        started = [stack.enter_context(_running(caller, command)) for command in commands]
        for process, command in zip(started, commands, strict=True):
            assert process.stdin and process.stdout and process.stderr
            with suppress(BrokenPipeError):  # it has ended, and its stderr says why
                os.write(process.stdin.fileno(), b"ready\n")
            if not select.select([process.stdout], [], [], _OPEN_SECONDS)[0]:
                raise Unable(f"{command.argv[0]} gave the program no stdin")
            if process.stdout.readline() != b"ready\n":
                process.kill()
                raise failed(command.argv, process.wait(), process.stderr.read())
        return sum(_around(process.pid, WAIT[0]) for process in started) / len(started)


def growth(running: Resident) -> float:
    """The kilobytes that a program grows by for each that it starts by a library. Raises Unable."""
    running.launch()  # what the first brings stays
    before = _around(running.pid, SLEEP[0])
    running.ask(WAITING)
    until = time.monotonic() + _OPEN_SECONDS
    while len([pid for pid in family(running.pid) if _runs(pid, SLEEP[0])]) < WAITING:
        if time.monotonic() > until:
            raise Unable("it starts no ten at once")
        time.sleep(0.01)
    after = _around(running.pid, SLEEP[0])
    running.answer()
    return (after - before) / WAITING


def _around(pid: int, program: str) -> float:
    """The memory of a process and its descendants, but those that run this program."""
    try:
        return sum(pss(each) for each in family(pid) if not _runs(each, program))
    except OSError as fault:
        raise Unable(f"memory cannot be read: {fault}") from None


def _runs(pid: int, program: str) -> bool:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip() == Path(program).name
    except OSError:
        return False  # it has ended
