"""`runner exec` uses a stored plan, and never one that something has changed under."""

from __future__ import annotations

import copy
import dataclasses
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.conftest import Caller
from tests.runner.launch.stored.stored_plugin import (
    CHANGED,
    DAMAGE,
    ENDED,
    MANIFEST,
    POLICY,
    REFUSED,
    USED,
    StoredPlugin,
    Write,
    append,
    entries,
    swap,
    unless_others_change,
)
from tests.tables import check_rows, one_case
from tests.template import settled

pytestmark = pytest.mark.launches


@pytest.fixture
def plugin(runner_as: Caller, plugin_dir: Path, write_file: Write) -> StoredPlugin:
    """Its plan is stored, and used."""
    made = StoredPlugin(settled(runner_as), plugin_dir, write_file)
    first = made.run()
    assert (first.returncode, first.stdout) == ENDED
    assert USED not in first.stderr and "not stored" not in first.stderr
    assert USED in made.run_again().stderr
    return made


@one_case("change", REFUSED)
def test_a_change_that_is_not_allowed_is_refused(
    runner_as: Caller, plugin_dir: Path, write_file: Write, change: str
) -> None:
    plugin = StoredPlugin(settled(runner_as), plugin_dir, write_file)
    plugin.use()
    make, rule = REFUSED[change]
    make(plugin)
    ended = plugin.run()
    assert USED not in ended.stderr
    assert ended.returncode in (126, 127), ended.stderr
    assert "text" not in ended.stdout and "does not hold" in ended.stderr
    assert rule.replace("_", " ") in ended.stderr.replace("_", " ") or ended.returncode == 127


def test_a_change_makes_the_plan_anew(plugin: StoredPlugin) -> None:
    def check(change: str, make: Callable[[StoredPlugin], object]) -> None:
        plugin.use()
        make(plugin)
        ended = plugin.run()
        assert USED not in ended.stderr and "does not hold" in ended.stderr
        assert (ended.returncode, ended.stdout) == ENDED

    check_rows(CHANGED, check)


def test_which_launches_share_a_plan(plugin: StoredPlugin) -> None:
    # Other words, variables and folders are other launches.
    other = plugin.run("an argument")
    assert USED not in other.stderr and other.stdout == "with s3cret-word and an argument\ntext\n"
    again = plugin.run_again("an argument")
    assert USED in again.stderr and again.stdout == other.stdout
    for env in (
        {"WORD": "another"},
        {"PATH": "/usr/bin"},
        {"XDG_RUNTIME_DIR": "/srv/run"},
        {"RUNNER_POLICY": "dev"},
    ):
        ended = plugin.run(env=env)
        assert USED not in ended.stderr and ended.returncode == 3, env
    assert plugin.run(env={"WORD": "another"}).stdout.startswith("with another and")
    assert USED not in plugin.run(cwd="/tmp").stderr
    # So is one of a runner with a lower limit: what a plugin gets depends on it, and the report says so.
    prefix = ("sh", "-c", 'ulimit -n 300 && exec "$@"', "sh", *plugin.caller.prefix)
    lower = copy.copy(plugin)
    lower.caller = dataclasses.replace(plugin.caller, prefix=prefix)
    ended = lower.run()
    assert USED not in ended.stderr and ended.returncode == 3
    assert USED in lower.run_again().stderr
    # A variable that nobody looks at may change, and so may the place of the report.
    plugin.use()
    for name in ("SESSION", "XDG_SESSION_ID"):
        assert USED in plugin.run_again(env={name: "17"}).stderr
    for number in range(2):
        report = plugin.caller.home / f"report-{number}.json"
        words = ("exec", f"--report={report}", "--policy", str(plugin.policy), str(plugin.folder))
        given = {"RUNNER_DEBUG": "1", "WORD": "s3cret-word"}
        ended = unless_others_change(plugin.place, partial(plugin.caller, *words, env=given, cwd="/"))
        assert USED in ended.stderr and report.exists()
    # Without a cache there is none.
    for _ in range(2):
        assert USED not in plugin.run(env={"RUNNER_CACHE": "off"}).stderr


def test_the_number_of_a_login_counts_if_the_plugin_is_given_it(
    runner_as: Caller, plugin_dir: Path, write_file: Write
) -> None:
    made = StoredPlugin(settled(runner_as), plugin_dir, write_file)
    made.policy.write_text(POLICY.format(place=made.place).replace('"WORD"', '"WORD", "XDG_SESSION_ID"'))
    made.program.write_text(f'#!{made.folder}/shell\necho "$XDG_SESSION_ID"\n')
    one = made.run(env={"XDG_SESSION_ID": "17"})
    assert USED in made.run_again(env={"XDG_SESSION_ID": "17"}).stderr  # the control
    two = made.run(env={"XDG_SESSION_ID": "18"})
    assert USED not in two.stderr
    assert (one.stdout, two.stdout) == ("17\n", "18\n")


def test_neither_variables_nor_arguments_are_written(plugin: StoredPlugin) -> None:
    assert plugin.run("an-0ther-secret").returncode == 3
    found = entries(plugin)
    assert len(found) == 2
    for entry in found:
        raw = entry.read_bytes()
        assert b"s3cret-word" not in raw and b"an-0ther-secret" not in raw
        assert b"WORD" in raw  # its name is
        assert entry.stat().st_mode & 0o777 == 0o600 and entry.parent.stat().st_mode & 0o077 == 0
    # Nor one with slashes, which is looked up like a path.
    assert plugin.run("--token=wJalrSECRET/K7MDENG/bPx").returncode == 3
    assert plugin.run(env={"WORD": "user:/wJalrSECRET/K7MDENG/bPx"}).returncode == 3
    assert not any(b"SECRET" in entry.read_bytes() for entry in entries(plugin))


def test_a_secret_inside_of_another_text_keeps_the_plan_from_the_disk(
    runner_as: Caller, plugin_dir: Path, write_file: Write
) -> None:
    made = StoredPlugin(settled(runner_as), plugin_dir, write_file)
    ended = made.run(env={"WORD": "text of the policy", "RUNNER_POLICY": ""})
    assert "not stored" not in ended.stderr  # the control
    ended = made.run(env={"WORD": made.place.name})
    assert "the plan is not stored: the value of a variable" in ended.stderr


def test_a_damaged_file_is_no_plan(plugin: StoredPlugin) -> None:
    def check(_: str, damage: Callable[[Path], object]) -> None:
        plugin.use()
        [entry] = entries(plugin)
        try:
            damage(entry)
            ended = plugin.run()
        finally:
            is_folder = entry.is_dir() and not entry.is_symlink()
            shutil.rmtree(entry) if is_folder else entry.unlink(missing_ok=True)
            entry.with_name("aside").unlink(missing_ok=True)
        assert USED not in ended.stderr and ended.returncode == 3

    check_rows(DAMAGE, check)


def test_the_file_of_another_launch_is_no_plan(plugin: StoredPlugin) -> None:
    plugin.run("other")
    one, two = entries(plugin)
    one_raw, two_raw = one.read_bytes(), two.read_bytes()
    one.write_bytes(two_raw)
    two.write_bytes(one_raw)
    assert USED not in plugin.run().stderr
    assert USED not in plugin.run("other").stderr


@pytest.mark.needs("root")
def test_a_file_of_another_owner_is_no_plan(
    runner_as_root: Caller, plugin_dir: Path, write_file: Write
) -> None:
    made = StoredPlugin(settled(runner_as_root), plugin_dir, write_file)
    made.use()
    [entry] = entries(made)
    os.chown(entry, 12345, 12345)
    try:
        assert USED not in made.run().stderr
    finally:
        entry.unlink(missing_ok=True)


@pytest.mark.needs("root")
def test_another_mount_makes_the_plan_anew(
    runner_as_root: Caller, plugin_dir: Path, write_file: Write
) -> None:
    with subprocess.Popen(
        ["unshare", "--mount", "cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as there:
        assert there.stdin is not None and there.stdout is not None
        there.stdin.write(b"it is there\n")
        there.stdin.flush()
        there.stdout.readline()
        enter = ("nsenter", f"--mount=/proc/{there.pid}/ns/mnt")
        caller = settled(runner_as_root)
        caller = dataclasses.replace(caller, prefix=(*enter, *caller.prefix))
        made = StoredPlugin(caller, plugin_dir, write_file)
        made.use()  # the control: in a namespace where nothing changes
        # A mount on a source hides what was scanned.
        subprocess.run([*enter, "mount", "-t", "tmpfs", "none", made.read], check=True)
        subprocess.run([*enter, "sh", "-c", f"echo hidden > {made.read}/file"], check=True)
        ended = made.run()
        assert USED not in ended.stderr and "does not hold" in ended.stderr
        assert ended.stdout == "with s3cret-word and \nhidden\n"
        subprocess.run([*enter, "umount", made.read], check=True)
        made.use()
        # The system's folders are shown without a scan. A filesystem of the kernel's that is mounted there
        # would be shown with them.
        subprocess.run([*enter, "mount", "-t", "proc", "none", "/usr/share/doc"], check=True)
        ended = made.run()
        assert USED not in ended.stderr and "does not hold" in ended.stderr
        assert ended.returncode == 126 and "kernel_filesystem" in ended.stderr


def test_what_was_changed_a_moment_ago_is_not_stored(plugin: StoredPlugin, runner_as: Caller) -> None:
    plugin.caller = runner_as
    append(plugin.manifest, "# more\n")
    tomorrow = time.time() + 86400.0  # it cannot settle by itself
    os.utime(plugin.manifest, (tomorrow, tomorrow))
    ended = plugin.run()
    assert f"not stored: {plugin.manifest} was changed a moment ago" in ended.stderr
    assert USED not in plugin.run().stderr


def test_a_plan_that_cannot_be_carried_out_is_made_anew_and_forgotten(plugin: StoredPlugin) -> None:
    """Its sources are looked at once more when they are opened. Here the facts are kept from seeing it."""
    [entry] = entries(plugin)
    before = entry.read_bytes()
    code = (
        "import sys, marshal; from sandbox import cache; from runner.launch.stored.entry import PlanEntry\n"
        "name, real = sys.argv[1:]\n"
        "entry = PlanEntry(*marshal.loads(cache.load(name)))\n"
        "facts = [{k: v for k, v in part.items() if real not in str(k)} for part in entry.facts]\n"
        "cache.store(name, marshal.dumps(tuple(entry._replace(facts=tuple(facts)))))\n"
    )
    caller = plugin.caller
    subprocess.run(
        [*caller.prefix, *caller.python, "-c", code, entry.name, str(plugin.read)],
        env={**caller.environ},
        check=True,
        cwd="/",
    )
    assert entry.read_bytes() != before
    assert USED in plugin.run_again().stderr  # the control: it is a plan
    swap(plugin)
    ended = plugin.run()
    assert "cannot be carried out" in ended.stderr
    assert (ended.returncode, ended.stdout) == ENDED
    assert not entry.exists() or entry.read_bytes() != before


FORGE = """\
import marshal, sys
from sandbox import cache
from runner.launch.stored.entry import PlanEntry

name, how = sys.argv[1:]
entry = PlanEntry(*marshal.loads(cache.load(name)))
if how == "unsandboxed":
    [at] = [at for at, field in enumerate(entry.plan) if isinstance(field, list) and field[0] == "Provision"]
    assert entry.plan[at][1] is False
    entry.plan[at][1] = True
elif how == "no keyring":
    layers = next(field for field in entry.plan[1] if isinstance(field, list) and field[0] == "Layers")
    assert layers[4] is True
    layers[4] = False
elif how == "fewer facts":
    entry = entry._replace(facts=entry.facts[:-1])
elif how == "another class":
    entry.plan[1][0] = "Unknown"
elif how == "blank of an unset variable":
    entry = entry._replace(blanks=(("variable", "NOT_SET"), *entry.blanks[1:]))
cache.store(name, marshal.dumps(tuple(entry)))
"""


FORGED = ("unsandboxed", "no keyring", "fewer facts", "another class", "blank of an unset variable")


def test_a_file_that_no_launch_wrote_is_no_plan(plugin: StoredPlugin) -> None:
    """Nobody else can write it. Should somebody, it is at least none without a cage, and stops no launch."""

    def check(how: str, _: str) -> None:
        plugin.use()
        [entry] = entries(plugin)
        before = entry.read_bytes()
        caller = plugin.caller
        argv = [*caller.prefix, *caller.python, "-c", FORGE, entry.name, how]
        subprocess.run(argv, env={**caller.environ}, check=True, cwd="/")
        assert entry.read_bytes() != before
        ended = plugin.run()
        assert (ended.returncode, ended.stdout) == ENDED
        assert "cannot be" in ended.stderr
        assert USED in plugin.run_again().stderr  # made anew

    check_rows(dict.fromkeys(FORGED, ""), check)


@one_case("cache", ["on", "off", "elsewhere"])
def test_no_plugin_is_given_a_cache(
    runner_as: Caller, plugin_dir: Path, write_file: Write, cache: str
) -> None:
    """Not even one that is not in force: what lies there would be believed later."""
    made = StoredPlugin(settled(runner_as), plugin_dir, write_file)
    folder = Path("/var/cache/runner") if runner_as.uid == 0 else runner_as.home / ".cache/runner"
    made.run()  # there is one
    made.manifest.write_text(MANIFEST.format(place=folder).replace(f"{folder}/read", str(folder)))
    made.policy.write_text(POLICY.format(place=folder))
    env = {"on": {}, "off": {"RUNNER_CACHE": "off"}, "elsewhere": {"XDG_CACHE_HOME": str(made.place)}}[cache]
    ended = made.run(env=env)
    assert ended.returncode == 126 and "the runner's own" in ended.stderr, ended.stderr


def test_a_plugin_with_very_many_folders_is_decided_each_time(
    runner_as: Caller, plugin_dir: Path, write_file: Write
) -> None:
    """Its plan would fill the cache."""
    made = StoredPlugin(settled(runner_as), plugin_dir, write_file)
    for number in range(5000):
        (made.read / f"{'x' * 200}{number}").mkdir()
    for _ in range(2):
        ended = made.run()
        assert ended.returncode == 3 and USED not in ended.stderr
        assert "not stored: it rests on too much" in ended.stderr
