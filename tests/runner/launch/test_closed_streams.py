"""A plugin that closes stdin or stdout and lives on: its host sees that at once, through `runner exec`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import elsewhere
from tests.conftest import Caller
from tests.manifests import nexo
from tests.tables import one_case

pytestmark = pytest.mark.usefixtures("nothing_left")

MANIFEST = nexo("closing", "./plugin")
PLUGIN = """\
#!/usr/bin/python3 -I
import os, signal
os.write(1, b'{"jsonrpc":"2.0","method":"last"}\\n')
os.close(1)
os.read(0, 100)
os.close(0)
os.write(2, b"closed\\n")
signal.pause()
"""


def host(argv: list[str], how: str) -> dict[str, Any]:
    """Starts the runner as hosts do: with pipes, or like node with sockets. What it sees while the plugin
    lives, and how the runner then ends."""
    import os
    import select
    import signal
    import socket
    import subprocess

    if how == "sockets":
        pairs = [socket.socketpair() for _ in range(2)]
        (in_w, in_r), (out_r, out_w) = [[end.detach() for end in pair] for pair in pairs]
    else:
        in_r, in_w = os.pipe()
        out_r, out_w = os.pipe()
    runner = subprocess.Popen(argv, stdin=in_r, stdout=out_w, stderr=subprocess.PIPE, bufsize=0)
    os.close(in_r)
    os.close(out_w)

    def read(fd: int, what: str) -> bytes:
        assert select.select([fd], [], [], 60)[0], what
        return os.read(fd, 100)

    told: dict[str, Any] = {"said": read(out_r, "a word").decode()}
    told["end of stdout"] = read(out_r, "the end of stdout").decode()
    told["lives"] = runner.poll() is None
    os.write(in_w, b"go\n")
    assert runner.stderr is not None
    told["stderr"] = read(runner.stderr.fileno(), "a word on stderr").decode()

    def refused() -> bool:
        try:
            os.write(in_w, b"more\n")
        except BrokenPipeError:
            return True
        return False

    told["stdin is closed"] = bool(wait_for(refused, step=0.01))  # type: ignore[name-defined] # noqa: F821
    told["still lives"] = runner.poll() is None
    runner.send_signal(signal.SIGTERM)
    told["status"] = runner.wait(60)
    return told


@one_case("how", ["pipes", "sockets", "--inspect"])
def test_a_host_sees_what_its_plugin_closes(
    runner_as: Caller, plugin_dir: Path, write_file: Callable[..., Path], how: str
) -> None:
    write_file(plugin_dir / "plugin", PLUGIN, 0o755)
    manifest = write_file(plugin_dir / "nexo-plugin.toml", MANIFEST)
    options = [how] if how.startswith("-") else []
    argv = [*runner_as.python, "-m", "runner", "exec", *options, str(manifest)]
    assert elsewhere.run(runner_as, host, argv, how) == {
        "said": '{"jsonrpc":"2.0","method":"last"}\n',
        "end of stdout": "",
        "lives": True,
        "stderr": "closed\n",
        "stdin is closed": True,
        "still lives": True,
        "status": 128 + 15,
    }
