"""The options of an entry that a host starts with `runner run`: they come with a file, and print nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from runner.cli.approving.subject import unwrap_subject
from runner.launch.read import load
from runner.launch.stages import Invocation, Stopwatch


def _unwrap(folder: Path, *options: str) -> str:
    """The name of the command behind an entry with these options."""
    file = folder / ".mcp.json"
    record = json.dumps({"file": str(file)})
    args = ["run", "--wrapped", record, "--name", "db", *options, "--", "/bin/true"]
    file.write_text(json.dumps({"mcpServers": {"db": {"command": "/opt/runner", "args": args}}}))
    return unwrap_subject(load(Invocation(str(file)), Stopwatch())).loaded.plugin.name


def test_sound_options_are_taken(tmp_path: Path) -> None:
    assert _unwrap(tmp_path, "--memory", "1G") == "db"


REFUSED: dict[tuple[str, ...], str] = {
    ("--help",): "they ask for help",
    ("-h",): "they ask for help",
    ("--nonsense",): "unrecognized arguments: --nonsense",
    ("--read",): "argument --read: expected one argument",
}


@pytest.mark.parametrize("options", REFUSED, ids=" ".join)
def test_other_options_neither_print_nor_exit(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], options: tuple[str, ...]
) -> None:
    with pytest.raises(ValueError, match=f"in this entry cannot be used: {REFUSED[options]}"):
        _unwrap(tmp_path, *options)
    assert capfd.readouterr() == ("", "")
