"""Configurations that somebody else, or an accident, has put there."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import trio

from runner.lifecycle.supervisor import open_supervisor
from runner.serve.roster import Roster, from_anywhere
from runner.serve.sources import scan
from runner.serve.watch import open_watch
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
    os.mkfifo(plugin_dir / "pipe.tar", 0o600)  # to open it is to wait for who writes to it
    (plugin_dir / "zero.tgz").symlink_to("/dev/zero")
    found = scan((str(plugin_dir),))
    assert {each.name for each in found.sources} == {"greeter", "acme.devkit"}
    faulty = ["circle.json", "gone.json", "pipe.json", "pipe.tar", "zero.tgz"]
    assert [os.path.basename(each.path) for each in found.faults] == faulty


def test_a_tar_that_others_can_write_is_not_unpacked(
    plugin_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It could fill root's disk: what is unpacked stays."""
    unpacked: list[str] = []
    put_plugins(plugin_dir)

    def unpack(path: str) -> str:
        unpacked.append(path)
        return str(plugin_dir / "devkit")

    monkeypatch.setattr("runner.manifest.unpack.unpack", unpack)
    tar = plugin_dir / "devkit.tar"
    for mode, is_used in ((0o666, False), (0o644, True)):
        tar.touch()
        tar.chmod(mode)
        found = scan((str(tar),))
        assert bool(found.sources) is bool(unpacked) is is_used
        assert is_used or "can be written by its group or by everybody" in found.faults[0].message


def test_the_policy_in_a_command_to_copy_is_the_same_in_every_folder() -> None:
    assert from_anywhere("strict") == "strict"
    for name in ("mine.toml", "./mine"):
        assert from_anywhere(name) == os.path.abspath(name)


def test_a_server_that_is_switched_off_is_left_out(plugin_dir: Path) -> None:
    file = plugin_dir / "mcp.json"
    servers = {"on": {"command": "/bin/cat"}, "off": {"command": "/bin/cat", "disabled": True}}
    file.write_text(json.dumps({"mcpServers": servers}))
    file.chmod(0o644)
    found = scan((str(file),))
    assert [each.name for each in found.sources] == ["on"]
    assert [each.message for each in found.faults] == ["off: it is disabled in this file: left out"]


def test_what_changes_between_a_reading_and_its_watch_is_read(plugin_dir: Path, tmp_path: Path) -> None:
    put_plugins(plugin_dir)
    said: list[str] = []

    async def main() -> None:
        async with open_supervisor() as supervisor:
            paths, policy = (str(plugin_dir),), str(tmp_path / "policy.toml")
            roster = Roster(supervisor, None, paths, policy, None, {**os.environ}, said.append)
            with open_watch() as watch:
                assert watch is not None

                def follow(folders: tuple[str, ...]) -> bool:
                    """It was read before, and nothing tells that it has changed."""
                    (plugin_dir / "words/mcp.json").write_text("{")
                    return watch.set(folders)

                roster.follow = follow
                await roster.reload()
                assert [each.name for each in roster.sources()] == ["acme.devkit"]
                assert [each.path for each in roster.faults] == [str(plugin_dir / "words")]
                assert {str(tmp_path), "/etc/runner"} <= {*roster.watched}  # where a policy may change
                assert not watch.set(roster.watched)  # nothing is new: one reading is enough
                (plugin_dir / "more").mkdir(mode=0o755)
                assert watch.set((*roster.watched, str(plugin_dir / "more")))

    trio.run(main)
