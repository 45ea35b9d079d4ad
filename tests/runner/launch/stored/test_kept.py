"""`runner exec` takes a plan that was kept, and never one that something has changed under."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.conftest import Caller
from tests.runner.launch.stored.kept_plugin import (
    CHANGED,
    DAMAGE,
    MANIFEST,
    POLICY,
    REFUSED,
    SETTLED,
    USED,
    KeptPlugin,
    Write,
    append,
    entries,
    swap,
)
from tests.tables import one_case


class Plugin(KeptPlugin):
    def run(
        self, *args: str, env: Mapping[str, str] | None = None, cwd: str = "/"
    ) -> subprocess.CompletedProcess[str]:
        words = ("exec", "--policy", str(self.policy), str(self.folder))
        given = {"RUNNER_DEBUG": "1", "WORD": "s3cret-word", **(env or {})}
        return self.caller(*words, *(("--", *args) if args else ()), env=given, cwd=cwd)


@pytest.fixture
def plugin(runner_as: Caller, plugin_dir: Path, write_file: Write) -> Plugin:
    """Its plan is kept, and used."""
    made = Plugin(runner_as, plugin_dir, write_file)
    time.sleep(SETTLED)
    first = made.run()
    assert first.returncode == 3 and USED not in first.stderr and "not kept" not in first.stderr
    second = made.run()
    assert USED in second.stderr
    assert (second.returncode, second.stdout) == (first.returncode, first.stdout)
    assert first.stdout == "with s3cret-word and \ntext\n"
    return made


@pytest.mark.launches
@pytest.mark.parametrize("change", REFUSED)
def test_a_change_that_is_not_allowed_is_refused(plugin: Plugin, change: str) -> None:
    make, rule = REFUSED[change]
    make(plugin)
    ended = plugin.run()
    assert USED not in ended.stderr
    assert ended.returncode in (126, 127), ended.stderr
    assert "text" not in ended.stdout and "does not hold" in ended.stderr
    assert rule.replace("_", " ") in ended.stderr.replace("_", " ") or ended.returncode == 127


@pytest.mark.launches
@pytest.mark.parametrize("change", CHANGED)
def test_a_change_makes_the_plan_anew(plugin: Plugin, change: str) -> None:
    CHANGED[change](plugin)
    ended = plugin.run()
    assert USED not in ended.stderr and "does not hold" in ended.stderr
    assert (ended.returncode, ended.stdout) == (3, "with s3cret-word and \ntext\n")


@pytest.mark.launches
def test_other_words_variables_and_folders_are_other_launches(plugin: Plugin) -> None:
    other = plugin.run("an argument")
    assert USED not in other.stderr and other.stdout == "with s3cret-word and an argument\ntext\n"
    again = plugin.run("an argument")
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


@pytest.mark.launches
def test_a_variable_that_nobody_looks_at_may_change(plugin: Plugin) -> None:
    for name in ("SESSION", "XDG_SESSION_ID"):
        assert USED in plugin.run(env={name: "17"}).stderr


@pytest.mark.launches
def test_the_number_of_a_login_counts_if_the_plugin_is_given_it(
    runner_as: Caller, plugin_dir: Path, write_file: Write
) -> None:
    made = Plugin(runner_as, plugin_dir, write_file)
    made.policy.write_text(POLICY.format(place=made.place).replace('"WORD"', '"WORD", "XDG_SESSION_ID"'))
    made.program.write_text(f'#!{made.folder}/shell\necho "$XDG_SESSION_ID"\n')
    time.sleep(SETTLED)
    one = made.run(env={"XDG_SESSION_ID": "17"})
    assert USED in made.run(env={"XDG_SESSION_ID": "17"}).stderr  # the control
    two = made.run(env={"XDG_SESSION_ID": "18"})
    assert USED not in two.stderr
    assert (one.stdout, two.stdout) == ("17\n", "18\n")


@pytest.mark.launches
def test_neither_variables_nor_arguments_are_written(plugin: Plugin) -> None:
    plugin.run("an-0ther-secret")
    found = entries(plugin)
    assert len(found) == 2
    for entry in found:
        raw = entry.read_bytes()
        assert b"s3cret-word" not in raw and b"an-0ther-secret" not in raw
        assert b"WORD" in raw  # its name is
        assert entry.stat().st_mode & 0o777 == 0o600 and entry.parent.stat().st_mode & 0o077 == 0


@pytest.mark.launches
def test_a_secret_inside_of_another_text_keeps_the_plan_from_the_disk(
    runner_as: Caller, plugin_dir: Path, write_file: Write
) -> None:
    made = Plugin(runner_as, plugin_dir, write_file)
    time.sleep(SETTLED)
    ended = made.run(env={"WORD": "text of the policy", "RUNNER_POLICY": ""})
    assert "not kept" not in ended.stderr  # the control
    ended = made.run(env={"WORD": made.place.name})
    assert "the plan is not kept: the value of a variable" in ended.stderr


@pytest.mark.launches
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_no_plan(plugin: Plugin, damage: str) -> None:
    [entry] = entries(plugin)
    try:
        DAMAGE[damage](entry)
        ended = plugin.run()
    finally:
        shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink(missing_ok=True)
        entry.with_name("aside").unlink(missing_ok=True)
    assert USED not in ended.stderr and ended.returncode == 3


@pytest.mark.launches
def test_the_file_of_another_launch_is_no_plan(plugin: Plugin) -> None:
    plugin.run("other")
    one, two = entries(plugin)
    one_raw, two_raw = one.read_bytes(), two.read_bytes()
    one.write_bytes(two_raw)
    two.write_bytes(one_raw)
    assert USED not in plugin.run().stderr
    assert USED not in plugin.run("other").stderr


@pytest.mark.launches
@pytest.mark.needs("root")
def test_a_file_of_another_owner_is_no_plan(
    runner_as_root: Caller, plugin_dir: Path, write_file: Write
) -> None:
    made = Plugin(runner_as_root, plugin_dir, write_file)
    time.sleep(SETTLED)
    made.run()
    assert USED in made.run().stderr
    [entry] = entries(made)
    os.chown(entry, 12345, 12345)
    try:
        assert USED not in made.run().stderr
    finally:
        entry.unlink(missing_ok=True)


@pytest.mark.launches
@pytest.mark.needs("root")
def test_another_mount_makes_the_plan_anew(
    runner_as_root: Caller, plugin_dir: Path, write_file: Write
) -> None:
    """A mount on a source hides what was scanned."""
    made = Plugin(runner_as_root, plugin_dir, write_file)
    time.sleep(SETTLED)
    made.run()
    assert USED in made.run().stderr
    made.caller = _with_mount(made, f"mount -t tmpfs none {made.read} && echo hidden > {made.read}/file")
    ended = made.run()
    assert USED not in ended.stderr
    assert ended.stdout == "with s3cret-word and \nhidden\n"


@pytest.mark.launches
@pytest.mark.needs("root")
def test_a_mount_where_nothing_was_looked_at_is_seen(
    runner_as_root: Caller, plugin_dir: Path, write_file: Write
) -> None:
    """The system's folders are shown without a scan. A filesystem of the kernel's that is mounted there would
    be shown with them."""
    made = Plugin(runner_as_root, plugin_dir, write_file)
    time.sleep(SETTLED)
    made.run()
    assert USED in made.run().stderr
    made.caller = _with_mount(made, "mount -t proc none /usr/share/doc")
    ended = made.run()
    assert USED not in ended.stderr
    assert ended.returncode == 126 and "kernel_filesystem" in ended.stderr


def _with_mount(made: Plugin, command: str) -> Caller:
    """Its caller, in a mount namespace of its own after this command."""
    prefix = ("unshare", "--mount", "sh", "-c", f'{command} && exec "$@"', "sh", *made.caller.prefix)
    return dataclasses.replace(made.caller, prefix=prefix)


@pytest.mark.launches
def test_the_cache_can_be_switched_off(plugin: Plugin) -> None:
    for _ in range(2):
        assert USED not in plugin.run(env={"RUNNER_CACHE": "off"}).stderr


@pytest.mark.launches
def test_what_was_changed_a_moment_ago_is_not_kept(plugin: Plugin) -> None:
    append(plugin.manifest, "# more\n")
    ended = plugin.run()
    assert f"not kept: {plugin.manifest} was changed a moment ago" in ended.stderr
    assert USED not in plugin.run().stderr


@pytest.mark.launches
def test_a_plan_that_cannot_be_carried_out_is_made_anew_and_forgotten(plugin: Plugin) -> None:
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
    assert USED in plugin.run().stderr  # the control: it is a plan
    swap(plugin)
    ended = plugin.run()
    assert "cannot be carried out" in ended.stderr
    assert (ended.returncode, ended.stdout) == (3, "with s3cret-word and \ntext\n")
    assert not entry.exists() or entry.read_bytes() != before


@pytest.mark.launches
@pytest.mark.parametrize(
    ("arguments", "env"),
    [
        (("--token=wJalrSECRET/K7MDENG/bPx",), {}),
        ((), {"WORD": "user:/wJalrSECRET/K7MDENG/bPx"}),
    ],
    ids=["argument", "variable"],
)
def test_a_secret_with_slashes_is_not_kept_as_a_path(
    plugin: Plugin, arguments: tuple[str, ...], env: dict[str, str]
) -> None:
    ended = plugin.run(*arguments, env=env)
    assert ended.returncode == 3
    for entry in entries(plugin):
        assert b"SECRET" not in entry.read_bytes()


@pytest.mark.launches
def test_where_the_report_goes_does_not_matter(plugin: Plugin) -> None:
    for number in range(2):
        report = plugin.caller.home / f"report-{number}.json"
        words = ("exec", f"--report={report}", "--policy", str(plugin.policy), str(plugin.folder))
        ended = plugin.caller(*words, env={"RUNNER_DEBUG": "1", "WORD": "s3cret-word"}, cwd="/")
        assert USED in ended.stderr and report.exists()


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
elif how == "gap of a variable that is not set":
    entry = entry._replace(gaps=(("variable", "NOT_SET"), *entry.gaps[1:]))
cache.store(name, marshal.dumps(tuple(entry)))
"""


@pytest.mark.launches
@pytest.mark.parametrize(
    "how", ["unsandboxed", "no keyring", "fewer facts", "another class", "gap of a variable that is not set"]
)
def test_a_file_that_no_launch_wrote_is_no_plan(plugin: Plugin, how: str) -> None:
    """Nobody else can write it. Should somebody, it is at least none without a cage, and stops no launch."""
    [entry] = entries(plugin)
    before = entry.read_bytes()
    caller = plugin.caller
    argv = [*caller.prefix, *caller.python, "-c", FORGE, entry.name, how]
    subprocess.run(argv, env={**caller.environ}, check=True, cwd="/")
    assert entry.read_bytes() != before
    ended = plugin.run()
    assert (ended.returncode, ended.stdout) == (3, "with s3cret-word and \ntext\n")
    assert "cannot be" in ended.stderr
    assert USED in plugin.run().stderr  # made anew


@pytest.mark.launches
@one_case("cache", ["on", "off", "elsewhere"])
def test_no_plugin_is_given_a_cache(
    runner_as: Caller, plugin_dir: Path, write_file: Write, cache: str
) -> None:
    """Not even one that is not in force: what lies there would be believed later."""
    made = Plugin(runner_as, plugin_dir, write_file)
    folder = Path("/var/cache/runner") if runner_as.uid == 0 else runner_as.home / ".cache/runner"
    made.run()  # there is one
    made.manifest.write_text(MANIFEST.format(place=folder).replace(f"{folder}/read", str(folder)))
    made.policy.write_text(POLICY.format(place=folder))
    env = {"on": {}, "off": {"RUNNER_CACHE": "off"}, "elsewhere": {"XDG_CACHE_HOME": str(made.place)}}[cache]
    ended = made.run(env=env)
    assert ended.returncode == 126 and "the runner's own" in ended.stderr, ended.stderr


@pytest.mark.launches
def test_a_lower_limit_of_the_runner_is_another_launch(plugin: Plugin) -> None:
    """What a plugin gets depends on it, and the report says so."""
    prefix = ("sh", "-c", 'ulimit -n 300 && exec "$@"', "sh", *plugin.caller.prefix)
    plugin.caller = dataclasses.replace(plugin.caller, prefix=prefix)
    ended = plugin.run()
    assert USED not in ended.stderr and ended.returncode == 3
    assert USED in plugin.run().stderr


@pytest.mark.launches
def test_a_plugin_with_very_many_folders_is_decided_each_time(
    runner_as: Caller, plugin_dir: Path, write_file: Write
) -> None:
    """Its plan would fill the cache."""
    made = Plugin(runner_as, plugin_dir, write_file)
    for number in range(5000):
        (made.read / f"{'x' * 200}{number}").mkdir()
    time.sleep(SETTLED)
    for _ in range(2):
        ended = made.run()
        assert ended.returncode == 3 and USED not in ended.stderr
        assert "not kept: it rests on too much" in ended.stderr
