"""A program that is running and starts others: a launch by it includes no start of an interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from scripts.benches.caller import Caller, failed
from scripts.benches.launch import Command, Sample, high_descriptors


class Resident:
    """scripts/benches/starter.py, which launches for each line that it gets."""

    def __init__(self, process: subprocess.Popen[bytes], argv: Sequence[str]) -> None:
        self.pid = process.pid
        self._process, self._argv = process, argv

    def ask(self, count: int) -> None:
        assert self._process.stdin
        with suppress(BrokenPipeError):  # it has ended, and its stderr says why
            os.write(self._process.stdin.fileno(), b"%d\n" % count)

    def answer(self) -> float:
        """Wait until all have ended. Returns the seconds of processor time; raises Unable."""
        assert self._process.stdout and self._process.stderr
        line = self._process.stdout.readline()
        if not line:
            raise failed(self._argv, self._process.wait(), self._process.stderr.read())
        answer = json.loads(line)
        if answer["status"] or answer["errors"]:
            raise failed(self._argv, answer["status"], answer["errors"].encode())
        return float(answer["seconds"])

    def launch(self, count: int = 1) -> Sample:
        """Launch so many at once."""
        start = time.perf_counter()
        self.ask(count)
        seconds = self.answer()
        return Sample((time.perf_counter() - start) * 1000, seconds * 1000)

    @property
    def command(self) -> Command:
        return Command([*self._argv], {}, launch=self.launch)


@contextmanager
def resident(caller: Caller, argv: Sequence[str]) -> Iterator[Resident]:
    pipe = subprocess.PIPE
    with high_descriptors():
        process = caller.start(argv, stdin=pipe, stdout=pipe, stderr=pipe)
    with process:
        try:
            yield Resident(process, argv)
        finally:
            process.kill()  # it may be in the middle of a launch
