"""The manifest cache: it returns only matching entries, trusts no directory of another user, and never
makes a launch fail."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from runner.cli.shared.policy_file import policy_faults
from runner.contracts import nexo
from runner.manifest import cache as manifest_cache
from runner.manifest.load import load, load_all
from runner.plugin import Entrypoint, Plugin
from sandbox import cache
from sandbox.document.diagnostic import Diagnostic
from sandbox.spec import EnvRequest, Limits, Network, PathRequest, SandboxSpec
from tests.conftest import ROOT

FULL = Plugin(
    id="demo",
    version="1.0.0",
    contract="nexo",
    name="Dé\udcffmo",
    description="d",
    manifest="/x/plugin.toml",
    root="/x",
    entrypoint=Entrypoint("./run", ("a", "b"), "/x", bare_environment=True),
    spec=SandboxSpec(
        enabled=True,
        paths=(PathRequest("/a", "read", False, ("p", 0)), PathRequest("${state_dir}", "write")),
        network=Network("allowlist", ("a:1",), ("n",)),
        env=(EnvRequest("A", "1"), EnvRequest("B", None, False, ("e", 1))),
        seccomp="strict",
        limits=Limits(memory=1, cpu=0.5, deadline=2.5, pids=3, io=4, output_lines=5, idle=6.0),
        where=(("memory", ("l", "memory")),),
    ),
    exports=(("tools", ("t",)),),
    capabilities=("c",),
    timeouts=(("call", 1.5),),
)
WARNINGS = (Diagnostic("/x/plugin.toml", 1, 2, "r", "m", "h", "warning"),)
EMPTY = Plugin("a", "", "mcp", "a", "", "/m", None, None, SandboxSpec())

NEXO = """\
[plugin]
id = "demo"
version = "1.0.0"
name = "Demo"
description = "d"
min_nexo_version = ">=0.1.0"
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "cache" / "runner"
    monkeypatch.setattr(cache, "directory", lambda: str(path))
    return path


def stored(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []


@pytest.mark.parametrize("plugin", [FULL, EMPTY])
def test_a_plugin_survives_encoding(folder: Path, plugin: Plugin) -> None:
    manifest_cache.store("k" * 64, plugin, WARNINGS)
    assert manifest_cache.load("k" * 64) == (plugin, WARNINGS)


def test_a_stored_entry_is_found_again_and_private(folder: Path) -> None:
    assert manifest_cache.load("k" * 64) is None
    manifest_cache.store("k" * 64, FULL, WARNINGS)
    assert manifest_cache.load("k" * 64) == (FULL, WARNINGS)
    assert manifest_cache.load("j" * 64) is None
    [entry] = stored(folder)
    assert folder.stat().st_mode & 0o777 == 0o700 and entry.stat().st_mode & 0o777 == 0o600


def test_an_entry_under_a_wrong_name_is_a_miss(folder: Path) -> None:
    manifest_cache.store("k" * 64, FULL, ())
    (folder / f"{'k' * 64}").rename(folder / f"{'j' * 64}")
    assert manifest_cache.load("j" * 64) is None


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"null", b"\xff", b"[" * 100_000, b'{"key": 1}'])
def test_a_damaged_entry_is_a_miss(folder: Path, raw: bytes) -> None:
    manifest_cache.store("k" * 64, FULL, ())
    (folder / f"{'k' * 64}").write_bytes(raw)
    assert manifest_cache.load("k" * 64) is None


def test_a_directory_others_can_write_to_is_not_used(folder: Path) -> None:
    manifest_cache.store("k" * 64, FULL, ())
    for mode, used in ((0o770, False), (0o707, False), (0o755, True)):
        folder.chmod(mode)
        assert (manifest_cache.load("k" * 64) is not None) is used


def test_a_link_is_not_used(folder: Path, tmp_path: Path) -> None:
    manifest_cache.store("k" * 64, FULL, ())
    shutil.move(folder, tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    assert manifest_cache.load("k" * 64) is None
    folder.unlink()
    shutil.move(tmp_path / "elsewhere", folder)
    entry = folder / f"{'k' * 64}"
    entry.rename(tmp_path / "entry")
    entry.symlink_to(tmp_path / "entry")
    assert manifest_cache.load("k" * 64) is None


def test_an_entry_others_can_write_to_or_that_blocks_is_not_used(folder: Path) -> None:
    manifest_cache.store("k" * 64, FULL, ())
    entry = folder / f"{'k' * 64}"
    entry.chmod(0o666)
    assert manifest_cache.load("k" * 64) is None
    entry.unlink()
    os.mkfifo(entry)
    assert manifest_cache.load("k" * 64) is None


@pytest.mark.needs("root")
def test_an_entry_or_directory_of_another_user_is_not_used(folder: Path) -> None:
    manifest_cache.store("k" * 64, FULL, ())
    os.chown(folder, 54321, 54321)
    assert manifest_cache.load("k" * 64) is None


# --- where a directory of one's own cannot be written -------------------------------------------------------


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that stands for /tmp, and a home that not even root can write."""
    path = tmp_path / "shared"
    path.mkdir()
    path.chmod(0o1777)
    monkeypatch.setattr(cache, "_SHARED", (str(path), str(path)))
    monkeypatch.setattr(cache, "_own_directory", lambda: "/read-only/runner")
    monkeypatch.setattr(cache, "_can_be_written", lambda path: not path.startswith("/read-only/"))
    return path / f"runner-cache-{os.geteuid()}"


def test_a_directory_named_by_uid_is_used_if_the_home_cannot_be_written(shared: Path) -> None:
    assert cache.directory() == str(shared)
    assert cache.unusable(str(shared)) == "" and not shared.exists()
    manifest_cache.store("k" * 64, FULL, WARNINGS)
    assert manifest_cache.load("k" * 64) == (FULL, WARNINGS)
    [entry] = stored(shared)
    assert shared.stat().st_mode & 0o777 == 0o700 and entry.stat().st_mode & 0o777 == 0o600
    assert cache.unusable(str(shared)) == ""


def test_the_directory_in_the_home_is_preferred(
    shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shared place is then not read at all: its content cannot be trusted."""
    manifest_cache.store("k" * 64, FULL, ())
    monkeypatch.setattr(cache, "_own_directory", lambda: str(tmp_path / "new/cache/runner"))
    assert cache.directory() == str(tmp_path / "new/cache/runner")
    assert manifest_cache.load("k" * 64) is None


def test_the_shared_place_can_be_switched_off_too(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNNER_CACHE", "off")
    manifest_cache.store("k" * 64, FULL, ())
    assert cache.directory() is None and not shared.exists()


@pytest.mark.needs("root")
def test_another_users_directory_with_our_name_is_not_used(shared: Path) -> None:
    """Another user's directory under our name, with an entry that would be valid if it were ours."""
    manifest_cache.store("k" * 64, FULL, ())
    assert manifest_cache.load("k" * 64) is not None  # the control
    os.chown(shared, 54321, 54321)
    assert manifest_cache.load("k" * 64) is None
    manifest_cache.store("j" * 64, FULL, ())
    assert len(stored(shared)) == 1  # and nothing is given to them
    assert "somebody else" in cache.unusable(str(shared))


def test_a_link_under_its_name_is_not_followed(shared: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    shared.symlink_to(tmp_path / "elsewhere")
    manifest_cache.store("k" * 64, FULL, ())
    assert stored(tmp_path / "elsewhere") == []
    assert manifest_cache.load("k" * 64) is None
    assert cache.unusable(str(shared)) != ""


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o750, 0o705])
def test_a_directory_with_open_permissions_is_not_used(shared: Path, mode: int) -> None:
    manifest_cache.store("k" * 64, FULL, ())
    shared.chmod(mode)
    assert manifest_cache.load("k" * 64) is None
    shared.chmod(0o700)
    assert manifest_cache.load("k" * 64) is not None


@pytest.mark.parametrize(("mode", "used"), [(0o0777, False), (0o0775, False), (0o1777, True), (0o0755, True)])
def test_a_parent_in_which_others_could_replace_it_is_not_used(shared: Path, mode: int, used: bool) -> None:
    manifest_cache.store("k" * 64, FULL, ())
    shared.parent.chmod(mode)
    assert (manifest_cache.load("k" * 64) is not None) is used
    assert (cache.unusable(str(shared)) == "") is used


@pytest.mark.needs("root")
def test_a_parent_of_another_user_is_not_used(shared: Path) -> None:
    manifest_cache.store("k" * 64, FULL, ())
    os.chown(shared.parent, 54321, 54321)
    assert manifest_cache.load("k" * 64) is None


def test_the_cache_directory_is_never_granted_to_a_plugin(shared: Path) -> None:
    """A plugin that could write there could write the next policy."""
    from runner.launch.denylist import _own_places

    assert str(shared) in _own_places(os.environ, ())


def test_failure_to_write_is_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    for place in (str(tmp_path / "file"), str(tmp_path / "file" / "x"), "/proc/nope/x", None):
        monkeypatch.setattr(cache, "directory", lambda place=place: place)
        manifest_cache.store("k" * 64, FULL, ())
        assert manifest_cache.load("k" * 64) is None


def test_the_oldest_entries_are_removed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "ENTRIES", 3)
    for number in range(5):
        manifest_cache.store(str(number) * 64, FULL, ())
        os.utime(folder / f"{str(number) * 64}", (number, number))
    assert [path.name[0] for path in stored(folder)] == ["2", "3", "4"]


def test_the_directory_of_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RUNNER_CACHE", raising=False)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("XDG_CACHE_HOME", "/tmp/attacker")
    assert cache.directory() == "/var/cache/runner"
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert cache.directory() == "/tmp/attacker/runner"
    monkeypatch.setenv("HOME", "/home/me")
    for unusable in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", unusable)
        assert cache.directory() == "/home/me/.cache/runner"
    monkeypatch.setenv("RUNNER_CACHE", "off")
    assert cache.directory() is None


def test_the_key_covers_every_input() -> None:
    base: dict[str, Any] = {"path": "/a", "raw": b"x", "contract": None, "server": None, "home": "/h"}
    changes: list[dict[str, Any]] = [
        {},
        {"path": "/b"},
        {"raw": b"y"},
        {"contract": "mcp"},
        {"server": "s"},
        {"server": ""},
        {"server": "-"},
        {"home": "/i"},
        {"path": "/a/", "home": "h"},
    ]
    keys = [manifest_cache.key(**{**base, **change}) for change in changes]
    assert len(set(keys)) == len(keys)
    assert keys[0] == manifest_cache.key(**base)


def test_warnings_are_stored_and_errors_are_not(tmp_path: Path, folder: Path) -> None:
    path = tmp_path / "plugin.toml"
    path.write_text(NEXO + "unknown = 1\n")
    first = load(str(path))
    assert len(stored(folder)) == 1
    assert load(str(path)) == first
    assert [d.rule for d in first.diagnostics] == ["unknown_key"]
    path.write_text(NEXO.replace("demo", "Demo"))
    assert load(str(path)).plugin is None
    assert len(stored(folder)) == 1


def test_a_changed_manifest_is_read_again(tmp_path: Path, folder: Path) -> None:
    path = tmp_path / "plugin.toml"
    path.write_text(NEXO)
    assert load(str(path)).plugin is not None
    path.write_text(NEXO.replace('"Demo"', '"Other"'))
    found = load(str(path)).plugin
    assert found is not None and found.name == "Other"


def test_the_warning_about_a_shadowed_file_is_not_cached(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "plugin.toml").write_text(NEXO)
    (tmp_path / "nexo-plugin.toml").write_text("")
    for _ in range(2):
        assert "manifest_shadowed" in [d.rule for d in load(str(tmp_path)).diagnostics]
    (tmp_path / "nexo-plugin.toml").unlink()
    assert "manifest_shadowed" not in [d.rule for d in load(str(tmp_path)).diagnostics]


def test_only_the_first_reading_of_a_manifest_or_a_policy_imports_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, policy = tmp_path / "plugin.toml", tmp_path / "policy.toml"
    path.write_text(NEXO)
    program = (
        "import sys; from runner.manifest import load as manifest; from sandbox import cache;"
        "from sandbox.policy.load import load_policy;"
        f"cache.directory = lambda: {str(tmp_path / 'cache')!r};"
        f"assert manifest.load({str(path)!r}).plugin;"
        "print(*(name for name in ('pydantic', 'tomllib', 'yaml', 'hashlib') if name in sys.modules));"
        f"load_policy({str(policy)!r}, {{}});"
        "print(*(name for name in ('pydantic', 'tomllib', 'yaml', 'hashlib') if name in sys.modules))"
    )

    def imported(text: str) -> list[str]:
        """What was imported when the manifest was read, and then the policy."""
        policy.write_text(text)
        argv = [sys.executable, "-c", program]
        done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=True)
        return ["models" if "pydantic" in line else line for line in done.stdout.splitlines()]

    old, new, checked = "version = 1\n", "version = 1\nscan_limit = 7\n", "version = 1\nscan_limit = 8\n"
    assert [imported(text) for text in (old, old, new, new, old)] == [
        ["models", "models"],
        ["", ""],
        ["", "models"],  # the changed policy, but not the manifest
        ["", ""],
        ["", ""],
    ]
    policy.write_text(checked)
    monkeypatch.setattr(cache, "directory", lambda: str(tmp_path / "cache"))
    assert policy_faults(str(policy)) == ()
    assert imported(checked) == ["", ""]


def test_check_takes_a_known_manifest_and_looks_at_its_files(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = tmp_path / "nexo-plugin.toml"
    manifest.write_text(f'{NEXO}[plugin.entrypoint]\ncommand = "./program"\n')
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    [first] = load_all(str(manifest))
    assert first.plugin is not None and len(stored(folder)) == 1

    def read(*_: Any, **__: Any) -> Any:
        raise AssertionError("it is known")

    monkeypatch.setattr(nexo.CONTRACT, "read", read, raising=False)
    assert load_all(str(manifest)) == (first,)
    assert load(str(manifest)).plugin == first.plugin  # a launch knows it too
    program.unlink()
    [again] = load_all(str(manifest))
    assert again.plugin is None and [each.rule for each in again.diagnostics] == ["program_missing"]
    [refused] = load_all(str(manifest), config="{}")  # which no key of the cache covers
    assert "config_foreign" in [each.rule for each in refused.diagnostics]
    manifest.write_text(manifest.read_text() + "\n")
    with pytest.raises(AssertionError, match="it is known"):
        load_all(str(manifest))


@pytest.mark.parametrize(("count", "entries"), [(16, 16), (17, 0)])
def test_a_file_with_many_plugins_pushes_out_no_others(
    folder: Path, tmp_path: Path, count: int, entries: int
) -> None:
    servers = {f"s{number}": {"command": "/bin/true"} for number in range(count)}
    manifest = tmp_path / "mcp.json"
    manifest.write_text(json.dumps({"mcpServers": servers}))
    read = load_all(str(manifest))
    assert [each.plugin is not None for each in read] == [True] * count
    assert len(stored(folder)) == entries
