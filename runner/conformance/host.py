"""Tries a host: lets its command start a stand-in plugin, once for each run, and judges what that has seen.

The stand-in is a folder with a manifest and a program; runner/conformance/stand_in.py says how it reports
from a cage. It is not seen where the host runs its plugins on another machine, or runs a copy of the folder
in a cage that does not show the original.

The host's command is the caller's own, and runs with the caller's rights.
"""

from __future__ import annotations

import json
import os
import selectors
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing, suppress
from typing import Final

from runner.conformance import stand_in as stand_in_program
from runner.conformance.host_checks import RUNS, HostRun, StandIn
from runner.conformance.report import ConformanceReport, Verdict
from runner.conformance.told import CHANNELS, ToldListener, make_channels
from runner.contracts.registry import find_contract, host_stand_in

DEADLINE_SECONDS: Final = 60.0  # of one run
_LEFT_SECONDS: Final = 5.0  # how long a process of the stand-in may be there after its host
_OUTPUT_BYTES: Final = 2000  # the end of what the host prints, for a message
_LONGEST_WAIT_SECONDS: Final = 86400.0  # epoll_wait(2) counts milliseconds in an int: 24 days


class HostCommandFault(Exception):
    """The command cannot be tried. The message says why, and what to do."""


def load_stand_in(contract: str) -> StandIn:
    """Raises HostCommandFault."""
    stand_in = host_stand_in(find_contract(contract))
    if stand_in is None:
        raise HostCommandFault(f"the contract {contract} has no rules that a host can be tried by")
    return stand_in


def run_host(
    contract: str,
    command: Sequence[str],
    *,
    deadline: float = DEADLINE_SECONDS,
    runs: Sequence[str] = tuple(RUNS),
) -> ConformanceReport:
    """Try the host, in the plain run and those of `runs` that the contract has. Raises HostCommandFault."""
    stand_in = load_stand_in(contract)
    if not any(word in "".join(command) for word in ("{manifest}", "{folder}", "{command}")):
        raise HostCommandFault(
            "the host's command does not say where the stand-in plugin goes. Write {manifest}, {folder} or "
            "{command} in it: they become the path of its manifest, of its folder and of its program. "
            f"{stand_in.about}"
        )
    try:
        trial = _trial(command, stand_in, deadline, ("plain", *runs))
    except OSError as error:
        raise HostCommandFault(f"this machine lacks what a trial needs: {error}") from error
    verdicts = []
    for rule, check in stand_in.rules:
        finding = check(trial)
        exchange = () if finding.log is None else finding.log.exchange
        verdicts.append(Verdict(rule, finding.result, finding.reason, exchange))
    return ConformanceReport(contract, "host", shlex.join(command), tuple(verdicts))


def _trial(
    command: Sequence[str], stand_in: StandIn, deadline: float, runs: Sequence[str]
) -> dict[str, HostRun]:
    top = tempfile.mkdtemp(prefix="runner-host-")
    try:
        os.chmod(top, 0o755)  # a caged plugin may have a uid of its own, and has to read it
        folder = os.path.join(top, "stand_in")
        _write_files(stand_in, folder)
        return {
            name: _run(name, command, stand_in, folder, deadline) for name in stand_in.runs if name in runs
        }
    finally:
        shutil.rmtree(top, ignore_errors=True)


def _filled(word: str, stand_in: StandIn, folder: str) -> str:
    manifest = os.path.join(folder, next(iter(stand_in.files)))
    word = word.replace("{manifest}", manifest).replace("{folder}", folder)
    return word.replace("{command}", os.path.join(folder, stand_in.program))


def _write_files(stand_in: StandIn, folder: str) -> None:
    for name, text in stand_in.files.items():
        _write(os.path.join(folder, name), text)
    program = os.path.join(folder, stand_in.program)
    with open(stand_in_program.__file__, encoding="utf-8") as file:
        _write(program, file.read())
    os.chmod(program, 0o755)
    make_channels(os.path.join(os.path.dirname(program), "told"))


def _write(path: str, text: str) -> None:
    os.makedirs(os.path.dirname(path), mode=0o755, exist_ok=True)
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
    os.chmod(path, 0o644)


def _run(name: str, command: Sequence[str], stand_in: StandIn, folder: str, deadline: float) -> HostRun:
    beside = os.path.dirname(os.path.join(folder, stand_in.program))
    told = os.path.join(beside, "told")
    manifest = any("{manifest}" in word or "{folder}" in word for word in command)
    replies = {kind: reply._asdict() for kind, reply in stand_in.replies.items()}
    kept = {key: getattr(stand_in, key) for key in ("framing", "large", "ask", "extra")}
    table = {"run": name, "told": told, "channels": CHANNELS, "replies": replies, **kept}
    _write(os.path.join(beside, "stand_in.json"), json.dumps({**table, "manifest": manifest}))
    with closing(ToldListener(told)) as listener, closing(_Printed()) as output:
        words = [_filled(word, stand_in, folder) for word in command]
        status = _watch(name, words, listener, deadline, output)
        printed = output.text()
    if listener.alive:
        make_channels(told)  # ends the process, and the next run has the channels for itself
    if listener.lost:
        raise HostCommandFault(
            "the machine is too busy: the kernel dropped what the stand-in told; try again"
        )
    if name == "plain" and not listener.logs:
        ended = f"did not end in {deadline:g} s (--deadline)" if status is None else f"ended with {status}"
        raise HostCommandFault(
            f"the host's command {ended}, and no process of the stand-in was seen: the host did not start "
            f"it, or its cage does not show the stand-in's folder. It printed: {printed or 'nothing'}"
        )
    return HostRun(status, listener.logs)


class _Printed:
    """The end of what the host prints. All of it is read, so that a host that prints much goes on."""

    def __init__(self) -> None:
        self._read, self.write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        os.set_blocking(self.write, True)
        self._kept = bytearray()

    def close(self) -> None:
        os.close(self._read)
        os.close(self.write)

    def fileno(self) -> int:
        return self._read

    def receive(self) -> None:
        """Take what is there, a bounded part of it: other things are to be looked at, too."""
        with suppress(BlockingIOError):
            self._kept += os.read(self._read, 1 << 16)
            del self._kept[:-_OUTPUT_BYTES]

    def text(self) -> str:
        self.receive()
        return self._kept.decode("utf-8", "replace").strip()


def _watch(
    name: str, command: Sequence[str], listener: ToldListener, deadline: float, output: _Printed
) -> int | None:
    """Run the command until it has ended, and until no process of the stand-in is left. Returns its status;
    None: it was ended at the deadline."""
    # A signal that ends the checker ends the host, too: none may come between the start and the `try`.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
    try:
        host = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output.write,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_SETMASK, mask),
        )
    except OSError as error:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        raise HostCommandFault(f"{command[0]} cannot be started: {error.strerror}") from error
    until = time.monotonic() + deadline
    called = False
    try:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        with os.fdopen(os.pidfd_open(host.pid), "rb") as ended, selectors.DefaultSelector() as selector:
            selector.register(listener, selectors.EVENT_READ)
            selector.register(ended, selectors.EVENT_READ)
            selector.register(output, selectors.EVENT_READ)
            while host.poll() is None and (left := until - time.monotonic()) > 0:
                selector.select(min(left, _LONGEST_WAIT_SECONDS))
                listener.receive()
                output.receive()
                if name == "silent" and not called and any(log.of("called") for log in listener.logs):
                    called = True
                    host.send_signal(signal.SIGINT)
            status = host.poll()
            selector.unregister(ended)
            if status is None:  # it may print for ever
                selector.unregister(output)
            until = time.monotonic() + _LEFT_SECONDS
            # A host that runs on has its plugin still: there is nothing to wait for.
            while (left := until - time.monotonic()) > 0 and selector.select(
                left if listener.alive and status is not None else 0.0
            ):
                listener.receive()
                output.receive()  # what is left prints, too, and ends when it could
    finally:
        if host.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(host.pid, signal.SIGKILL)
            host.wait()
    return status
