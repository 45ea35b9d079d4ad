"""The checks of shipped plugins, on the example, on a canary, and on one that breaks them."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

import pytest

from runner.contracts.registry import example_folder
from tests.conftest import Caller
from tests.runner.contracts.ainb.canaries import Nest
from tests.runner.contracts.ainb.real_plugin import check_plugin
from tests.tables import one_case

pytestmark = pytest.mark.usefixtures("nothing_left")

ALL = ["A01 identity", "A01 manifest", "A02 framing", "A02 viewport", "A03", "A05", "A11", "A14"]


@one_case("options", [(), ("--inspect",)])
def test_the_example(plugin_dir: Path, runner_as: Caller, options: tuple[str, ...]) -> None:
    folder = plugin_dir / "greeter"
    shutil.copytree(example_folder("ainb"), folder)
    (folder / "greeter").chmod(0o755)
    for path in (folder, *folder.rglob("*")):
        os.chown(path, runner_as.uid, runner_as.uid)
    assert check_plugin(runner_as, folder, *options) == ALL


def test_an_inspection_ends_a_plugin_that_is_another(plugin_dir: Path, runner_as: Caller) -> None:
    folder = Path(Nest(plugin_dir, runner_as).put("a01"))
    program = folder / "a01"
    program.write_text(program.read_text().replace('"name": NAME', '"name": "a02"'))
    init = {"jsonrpc": "2.0", "id": 1, "method": "plugin/init", "params": {}}
    body = json.dumps(init)
    done = runner_as("exec", "--inspect", folder, input=f"Content-Length: {len(body)}\r\n\r\n{body}")
    assert done.returncode == 128 + signal.SIGKILL
    assert "it says that it is 'a02', its manifest says 'a01'" in done.stderr
    assert done.stdout == ""


def test_a_canary(plugin_dir: Path, runner_as: Caller) -> None:
    folder = Nest(plugin_dir, runner_as).put("a05", namespaces=["a05"], screens=["a05"])
    assert check_plugin(runner_as, Path(folder)) == ALL


def test_what_does_not_apply_is_left_out(plugin_dir: Path, runner_as: Caller) -> None:
    folder = Nest(plugin_dir, runner_as).put("a01")
    assert not {"A02 viewport", "A05", "A14"} & set(check_plugin(runner_as, Path(folder)))


@one_case(
    ("old", "new"),
    [
        ('"0.0.1"', '"0.0.2"'),  # another version than the manifest's
        ("(x + y) % 26", "(time.monotonic_ns() % 26)"),  # a screen that never settles
        ('raise Refused(-32601, f"method', 'raise Refused(-32000, f"method'),
        ('"width": width, "height"', '"width": width - 1, "height"'),  # a cell outside of its own buffer
        ('"exit_code": 0', '"exit_code": "0"'),
    ],
)
def test_each_check_can_fail(plugin_dir: Path, runner_as: Caller, old: str, new: str) -> None:
    folder = Path(Nest(plugin_dir, runner_as).put("a05", namespaces=["a05"], screens=["a05"]))
    program = folder / "a05"
    text = program.read_text()
    assert old in text
    program.write_text(text.replace(old, new))
    with pytest.raises(AssertionError):
        check_plugin(runner_as, folder)
