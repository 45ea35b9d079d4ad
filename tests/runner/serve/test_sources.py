"""Configurations that somebody else, or an accident, has put there."""

from __future__ import annotations

import os
from pathlib import Path

from runner.serve.roster import from_anywhere
from runner.serve.sources import scan
from tests.runner.serve.served import put_plugins


def test_a_manifest_that_others_can_write_is_not_used(plugin_dir: Path) -> None:
    put_plugins(plugin_dir)
    assert {each.name for each in scan((str(plugin_dir),)).sources} == {"greeter", "acme.devkit"}
    (plugin_dir / "words/mcp.json").chmod(0o666)  # in a folder that nobody else can write
    found = scan((str(plugin_dir),))
    assert [each.name for each in found.sources] == ["acme.devkit"]
    assert [each.path for each in found.faults] == [str(plugin_dir / "words")]
    assert "the manifest can be written by its group or by everybody" in found.faults[0].message


def test_what_is_no_file_is_a_fault_or_left_out(plugin_dir: Path) -> None:
    put_plugins(plugin_dir)
    (plugin_dir / "circle").symlink_to("circle")
    (plugin_dir / "circle.json").symlink_to("circle.json")
    (plugin_dir / "gone.json").symlink_to("nowhere")
    os.mkfifo(plugin_dir / "pipe.json", 0o600)
    found = scan((str(plugin_dir),))
    assert {each.name for each in found.sources} == {"greeter", "acme.devkit"}
    assert [os.path.basename(each.path) for each in found.faults] == ["circle.json", "gone.json", "pipe.json"]


def test_the_policy_in_a_command_to_copy_is_the_same_in_every_folder() -> None:
    assert from_anywhere("strict") == "strict"
    for name in ("mine.toml", "./mine"):
        assert from_anywhere(name) == os.path.abspath(name)
