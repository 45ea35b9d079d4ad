"""What a verb says of a session that the runner itself could not go on with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conftest import Caller
from tests.limits.altered import altered
from tests.runner.serve.shelf import put_example

# The session lacks something before it has heard of the launch: at once, or when the plugin runs.
LACKS = """
import errno
import trio
from pathlib import Path
from runner.launch.remote.remote_cell import RemoteCell
from sandbox.cell.cell import descendants

def is_plugin(pid):
    try:
        words = Path(f"/proc/{{pid}}/cmdline").read_bytes().split(b"\\0")
    except OSError:
        return False
    return b"python" in words[0] and words[1].endswith(b".py")

async def launched(self):
    await self._was_launched.wait()
    while {runs} and not any(map(is_plugin, descendants(self._pid))):
        await trio.sleep(0.01)
    raise OSError(errno.EMFILE, "Too many open files")

async def prepared(self):
    raise OSError(errno.EMFILE, "Too many open files")

RemoteCell.{name} = {name}
"""


@pytest.mark.launches
@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize(
    ("name", "runs", "code"), [("launched", True, "internal"), ("prepared", False, "launch_failed")]
)
def test_a_plugin_that_ran_is_not_one_that_could_not_be_launched(
    runner_as_user: Caller, plugin_dir: Path, name: str, runs: bool, code: str
) -> None:
    put_example("nexo", "nexo0", plugin_dir)
    runner_as_user.give(plugin_dir)
    report = runner_as_user.home / "report.json"
    caller = altered(runner_as_user, LACKS.format(name=name, runs=runs))
    done = caller("tools", "--report", str(report), str(plugin_dir / "nexo0"))
    outcome = json.loads(report.read_text())["outcome"]
    assert (outcome["code"], outcome["phase"]) == (code, "launch"), done
    assert "Too many open files" in outcome["message"]
    assert ("the plugin was ended" in outcome["message"]) is runs
