"""The file of a stored plan."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.conftest import ROOT


def test_a_message_that_nobody_reads_ends_no_launch() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    code = "from runner.launch.stored.entry import say; say('unheard'); print('launched')"
    env = {**os.environ, "RUNNER_DEBUG": "1", "PYTHONPATH": str(ROOT)}
    argv = [sys.executable, "-c", code]
    done = subprocess.run(argv, env=env, stdout=subprocess.PIPE, stderr=writer, text=True, cwd="/")
    os.close(writer)
    assert (done.returncode, done.stdout) == (0, "launched\n")
