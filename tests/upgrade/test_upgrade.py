"""What earlier versions left on a machine, and what this one makes of it.

`make` says which versions these were, and how the archives were made with them. Paths in them are absolute,
so each test runs in mounts of its own (`place.sh`).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from runner.ledger.schema import MIGRATIONS
from runner.serve.client import Client

HERE = Path(__file__).parent
PERSON = 1_900_000_000
HOME = "/srv/before/home"
RUNNER = "/srv/before/runner/.venv/bin/runner"
SOCKET = "daemon/serve.sock"
CLAUDE = ".config/Claude/claude_desktop_config.json"
PLAN_SECONDS = 240  # files have to be some seconds old before a plan rests on them
DAEMON_SECONDS = 120
# Of the second state's ledger: plugins, outcomes and keys.
CALLS = {
    ("notes", "ok", None),
    ("notes", "ok", "counted"),
    ("notes", "invalid_call", None),
    ("broken", "quarantined", None),
    ("broken", "quarantined", "refused"),
    ("example.kit", "ok", None),
    ("example.kit", "plugin_error", None),
    ("binding:north-greet", "ok", None),
    ("binding:north-notice", "ok", None),
    ("sleeper", "unknown", "lost"),
}
pytestmark = [pytest.mark.needs("root", "user"), pytest.mark.launches]
of_first = pytest.mark.parametrize("place", ["60deaf96"], indirect=True)
of_second = pytest.mark.parametrize("place", ["11e5f7d0"], indirect=True)
of_both = pytest.mark.parametrize("place", ["60deaf96", "11e5f7d0"], indirect=True)
# Moves all times in a database to now: the ledger removes what is older than a month. It ends without closing
# the file, so that the log stays as the killed daemon left it.
MAKE_RECENT = """
import os, sqlite3, sys, time
file = sqlite3.connect(sys.argv[1], isolation_level=None)
tables = [name for name, in file.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")]
columns = [(table, row[1:3]) for table in tables for row in file.execute(f"PRAGMA table_info({table})")]
times = [(table, name) for table, (name, kind) in columns if kind == "REAL"]
newest = max(file.execute(f"SELECT MAX({name}) FROM {table}").fetchone()[0] or 0 for table, name in times)
for table, name in times:
    file.execute(f"UPDATE {table} SET {name} = {name} + ?", (time.time() - newest,))
os._exit(0)
"""


class Place:
    """The mounts with the old state, and this version in the old one's place."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._pid = str(process.pid)
        self.home = self.at(HOME)

    def at(self, path: str) -> Path:
        return Path(f"/proc/{self._pid}/root{path}")

    def argv(self, *words: str, home: str = HOME) -> list[str]:
        """A command of the person, or of root if the home is root's."""
        become = (
            [] if home != HOME else ["setpriv", f"--reuid={PERSON}", f"--regid={PERSON}", "--clear-groups"]
        )
        env = ["PATH=/usr/bin:/bin", f"HOME={home}", "LANG=C.UTF-8", "RUNNER_DEBUG=1"]
        enter = ["nsenter", "--mount", "--target", self._pid, f"--wd={self.at(home)}"]
        return [*enter, *become, "env", "-i", *env, *words]

    def do(self, *words: str, home: str = HOME, stdin: str = "") -> subprocess.CompletedProcess[str]:
        argv = self.argv(*words, home=home)
        return subprocess.run(argv, input=stdin, capture_output=True, text=True, timeout=120)

    def run(self, *words: str, home: str = HOME, stdin: str = "") -> subprocess.CompletedProcess[str]:
        return self.do(RUNNER, *words, home=home, stdin=stdin)

    def ask(self, *words: str) -> Any:
        """What a verb says in JSON."""
        done = self.run(*words, "--json")
        assert done.returncode == 0, done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()]

    @contextmanager
    def daemon(self) -> Iterator[list[str]]:
        """`runner serve` as it was started before, until it is killed. Yields what it said up to its being
        ready."""
        self.at(f"{HOME}/{SOCKET}").unlink(missing_ok=True)
        words = [RUNNER, "serve", "--config", "served", "--socket", SOCKET, "--settings"]
        argv = self.argv(*words, "daemon/settings.toml", "--control", "daemon/control.toml")
        with subprocess.Popen(argv, text=True, stderr=subprocess.PIPE) as process:
            assert process.stderr is not None
            said: list[str] = []
            try:
                while not said or ": ready at " not in said[-1]:
                    said.append(process.stderr.readline())
                    assert said[-1], said
                yield said
            finally:
                process.kill()

    def call(self, *words: str, text: str = "") -> subprocess.CompletedProcess[str]:
        """Call a plugin of the daemon."""
        return self.run("call", "--via", f"{HOME}/{SOCKET}", *words, "--input", json.dumps({"text": text}))

    def door(self, path: str, document: Any = None) -> Any:
        with Client(str(self.at(f"{HOME}/{SOCKET}")), DAEMON_SECONDS) as client:
            return client.request("GET" if document is None else "POST", path, document).json()

    def make_recent(self) -> None:
        for name in ("ledger", "control"):
            done = self.do("python3", "-c", MAKE_RECENT, f".local/state/runner/serve/{name}.db")
            assert done.returncode == 0, done.stderr


@pytest.fixture
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    state = str(HERE / f"{request.param}.tar.gz")
    argv = ["unshare", "--mount", "sh", str(HERE / "place.sh"), state, sys.prefix]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([*argv, "sh", "-c", "echo ready; exec cat"], text=True, **pipes) as process:  # type: ignore[call-overload]
        assert process.stdout.readline() == "ready\n"
        yield Place(process)
        process.stdin.close()


def test_what_people_have_beside_it_stays(tmp_path: Path) -> None:
    """The checkout may be below /srv. A folder there with the name of ours is not written to."""
    (tmp_path / "mounted").write_text("there\n")
    people = """
        mount --make-rprivate /
        mount -t tmpfs none /srv
        mkdir -p "/srv/a b/c" /srv/before /srv/theirs
        mount --bind "$1" "/srv/a b/c"
        mount --bind /srv/before /srv/theirs
        ln -s "a b" /srv/.link
        echo kept >/srv/file
        shift
        exec sh "$@"
    """
    look = "cat /srv/.link/c/mounted /srv/file; ls -A /srv/before /srv/theirs"
    argv = ["unshare", "--mount", "sh", "-ec", people, "sh", str(tmp_path)]
    argv += ["-c", (HERE / "place.sh").read_text(), "sh", "-", "-", "sh", "-c", look]  # its file is hidden
    said = subprocess.check_output(argv, text=True, timeout=60)
    assert said == "there\nkept\n/srv/before:\nlib\npasswd\nrunner\n\n/srv/theirs:\n"


@of_both
def test_state_stays_with_its_plugin(place: Place) -> None:
    """The plugin was called once before, by a person and by root: it finds what it wrote."""
    count = ("call", "plugins/counter", "counter_count", "--input", '{"text": ""}')
    [state] = (place.home / ".local/state/runner/plugins").glob("counter.*")
    assert (state / "calls").read_text() == "x"
    assert place.run(*count).stdout == '{"calls": 2}\n'
    assert state.name in place.run("state", "list").stdout
    # As root, its files have the uid that was reserved for it.
    [state] = place.at("/var/lib/runner/plugins").glob("counter.*")
    uid = state.stat().st_uid
    assert place.at(f"/var/lib/runner/uids/{uid}").exists()
    assert place.run(*count, home="/srv/before/root").stdout == '{"calls": 2}\n'
    assert ((state / "calls").read_text(), (state / "calls").stat().st_uid) == ("xx", uid)


@of_first
def test_approvals_are_asked_for_again_and_plans_made_anew(place: Place) -> None:
    """An approval of that version does not name the program, so it does not count: messages say that."""
    refused = place.run("exec", "plugins/reader")
    assert refused.returncode == 126
    assert "does not count: an earlier version recorded it" in refused.stderr
    assert f"to allow it: runner allow {HOME}/plugins/reader" in refused.stderr
    listed = place.run("allow", "--list").stdout
    assert listed.count("it does not count any more: it is from an earlier version") == 2
    # The second yes needs no more words than the first: what was added then is still there.
    for words in (("plugins/reader",), (".cursor/mcp.json", "--server", "plain")):
        assert place.run("allow", *words, "--yes").returncode == 0
    listed = place.run("allow", "--list").stdout
    assert listed.count(f"read  {HOME}/documents") == 2 and "not count" not in listed

    check_plans(place)


def check_plans(place: Place) -> None:
    """A plan of that version is not taken, not even in the place of one of ours."""
    cache = place.home / ".cache/runner"
    old = set(cache.glob("plan-*"))
    assert old
    until = time.monotonic() + PLAN_SECONDS
    while not (plans := set(cache.glob("plan-*")) - old):
        assert time.monotonic() < until
        assert place.run("plan", "plugins/reader").returncode == 0
    [own] = plans
    done = place.run("exec", "plugins/reader")
    assert (done.returncode, "a stored plan is used" in done.stderr) == (0, True)
    for each in old:
        own.write_bytes(each.read_bytes())
        done = place.run("exec", "plugins/reader")
        assert (done.returncode, "a stored plan is used" in done.stderr) == (0, False)
        assert own.read_bytes() != each.read_bytes()  # made anew


@of_second
def test_approvals_still_count(place: Place) -> None:
    """They name the program, and it is the same. What a person added by options is still there."""
    listed = place.run("allow", "--list").stdout
    assert "not count" not in listed and "UNUSABLE" not in listed
    assert listed.count(f"read  {HOME}/documents") == 2
    assert listed.count(f"write     {HOME}/out") == listed.count("api.example.com:443") == 1
    former = json.loads(place.run("allow", "--list", "--json").stdout)
    plugins = ("talker", "talker", "plain", "reader", "wide")  # one talker is behind the gateway
    assert sorted(each["id"] for each in former["approvals"]) == sorted(plugins)
    for name in ("reader", "wide"):
        done = place.run("exec", f"plugins/{name}")
        assert done.returncode == 0, done.stderr
    assert place.run("run", "--name", "echo", "--", "/usr/bin/cat", stdin="hello\n").stdout == "hello\n"
    # One more host, with all that was allowed before.
    assert place.run("allow", "plugins/wide", "--net", "b.example.com", "--yes").returncode == 0
    listed = place.run("allow", "--list").stdout
    for part in (f"write     {HOME}/out", "api.example.com:443", "b.example.com", "variable  GREETING"):
        assert part in listed


@of_second
def test_plans_are_made_anew(place: Place) -> None:
    check_plans(place)


@of_first
def test_a_wrapped_configuration_works_is_mended_and_comes_back(place: Place) -> None:
    config = place.home / ".cursor/mcp.json"
    before, wrapped = ((place.home / f"mcp.json.{name}").read_bytes() for name in ("before", "wrapped"))
    assert config.read_bytes() == wrapped != before
    # The host still starts what is written there, and stderr says what to do.
    option = f'{{"file":"{HOME}/.cursor/mcp.json","args":"absent"}}'
    run = place.run("run", "--wrapped", option, "--name", "plain", "--", "/usr/bin/cat", stdin="hello\n")
    assert (run.returncode, run.stdout) == (0, "hello\n")
    assert f"write it anew: runner wrap {HOME}/.cursor/mcp.json" in run.stderr
    assert "runner allow /srv/before/home/.cursor/mcp.json --server plain" in run.stderr
    checked = place.run("check", ".cursor/mcp.json")
    assert checked.returncode == 20 and checked.stdout.count("wrapped_unsafely") == 2
    # Undone directly, and undone after this version wrote it anew: every byte is as it was.
    undo = ("wrap", ".cursor/mcp.json", "--undo", "--yes")
    assert place.run(*undo).returncode == 0
    assert config.read_bytes() == before
    config.write_bytes(wrapped)
    assert place.run("wrap", ".cursor/mcp.json", "--yes").returncode == 0
    assert config.read_bytes() not in (before, wrapped)
    assert place.run("check", ".cursor/mcp.json").returncode == 0
    assert place.run(*undo).returncode == 0
    assert config.read_bytes() == before
    # What that version kept of the file is still there, beside what this one kept.
    kept = [path.read_bytes() for path in sorted((place.home / ".local/state/runner/backups").iterdir())]
    assert kept[0] == before and len(kept) == 4
    assert os.stat(config).st_uid == PERSON


@of_both
def test_a_signed_package_is_still_trusted(place: Place) -> None:
    verify = ("package", "verify", "plugins/signed", "--trust", "key.pub")
    assert place.run(*verify).returncode == 0
    with (place.home / "plugins/signed/plugin.py").open("a") as file:
        file.write("#\n")
    assert place.run(*verify).returncode != 0


@of_second
def test_wrapped_entries_and_a_gateway_work_and_come_back(place: Place) -> None:
    config, desktop = (place.home / each for each in (".cursor/mcp.json", CLAUDE))
    wrapped = json.loads(config.read_bytes())["mcpServers"]
    for entry in wrapped.values():
        done = place.do(entry["command"], *entry["args"], stdin="hello\n")
        assert (done.returncode, done.stdout) == (0, "hello\n"), done.stderr
        assert "runner wrap" not in done.stderr
    for name in (".cursor/mcp.json", CLAUDE):
        assert place.run("check", name).returncode == 0
    assert "There is nothing to change." in place.run("wrap", ".cursor/mcp.json", "--yes").stdout
    # The record of tools is that version's. What a person saw then is what counts.
    server = place.home / "plugins/talker/server.py"
    server.write_text(server.read_text().replace("Counts the words", "Counts all words"))
    done = place.do("python3", "ask")
    assert done.stdout == "['talker__greet']\nHello, you!\n", done.stderr
    assert "'count' is withheld: it differs from what a person saw: description" in done.stderr
    # Undone, every byte is as it was.
    for file, words, before in (
        (config, (".cursor/mcp.json",), "mcp.json.before"),
        (desktop, (CLAUDE, "--gateway"), "claude.before"),
    ):
        assert place.run("wrap", *words, "--undo", "--yes").returncode == 0
        assert file.read_bytes() == (place.home / before).read_bytes()
        assert os.stat(file).st_uid == PERSON


@of_second
def test_packages_in_the_store_are_used(place: Place) -> None:
    assert place.run("install", "--list").stdout == "demo: demo 1.0\n"
    assert place.run("install", "--verify").returncode == 0
    [python] = (place.home / ".local/share/runner/store/sets").glob("*/tree/bin/python")
    words = ("call", "uvx.json", "--server", "demo", "greet", "--input", '{"name": "you"}')
    done = place.run(*words)
    if os.path.exists(python.readlink()):  # of the machine on which it was fetched
        assert json.loads(done.stdout)["content"][0]["text"] == "Hello, you!", done.stderr
    assert place.run("install", "--update").returncode == 0
    done = place.run(*words)
    assert json.loads(done.stdout)["content"][0]["text"] == "Hello, you!", done.stderr


def states(place: Place) -> dict[str, str]:
    return {each["name"]: each["state"] for each in place.door("/plugins")["plugins"]}


def until(what: Any) -> None:
    end = time.monotonic() + DAEMON_SECONDS
    while not what():
        assert time.monotonic() < end


@of_second
@pytest.mark.bound(600)
def test_a_ledger_is_migrated_and_settings_have_to_name_folders(place: Place) -> None:
    place.make_recent()
    at = ("--socket", SOCKET)
    with place.daemon() as said:
        told = "".join(said)
        assert "of 1 nobody knows what they did" in told
        # That version gave settings to any plugin of this name. This one asks for its folder.
        assert f'write folder = "{HOME}/served/notes"' in told
        assert {*states(place).values()} == {"pending"}

        # All calls are there. Of the one that was in flight nobody knows.
        calls = {(each["plugin"], each["code"], each["key"]) for each in place.ask("ctl", "calls", *at)}
        assert calls == CALLS
        deliveries = {each["id"]: each["state"] for each in place.door("/deliveries")["deliveries"]}
        assert [deliveries.pop(each) for each in ("arrived", "died", "waits")] == ["acked", "dead", "queued"]
        assert list(deliveries.values()) == ["acked"]  # of the control plane
        assert "died" in place.run("ctl", "dead", *at).stdout
        event = {"type": "run.completed", "subject": {"kind": "run", "id": "run"}}
        again = {"plugin": "example.kit", "hook": "notice", "id": "arrived", "event": event}
        assert (
            place.door("/deliveries", again)["state"] == "acked"
        )  # it is the same, and is not delivered again
        # The keys that were used stand for the same calls, also while the plugin may not start.
        known = place.call("notes", "notes_count", "--key", "counted", text="one two three")
        assert (known.returncode, known.stdout) == (0, '{"words": 3}\n')
        assert "key_reused" in place.call("notes", "notes_count", "--key", "counted", text="one").stderr
        lost = place.call("sleeper", "sleeper_count", "--key", "lost")
        assert "nobody knows what it did" in lost.stderr and "call with a new key" in lost.stderr

        refused = place.call("sleeper", "sleeper_count")
        assert "settings.toml have a fault; mend that" in refused.stderr
        # What the messages say mends it.
        settings = place.home / "daemon/settings.toml"
        named = f'[notes]\nfolder = "{HOME}/served/notes"'
        settings.write_text(settings.read_text().replace("[notes]", named))
        place.run("ctl", "reload", *at)
        until(lambda: "pending" not in states(place).values())
        assert place.call("notes", "notes_count", text="one two").stdout == '{"words": 2}\n'
        until(lambda: place.door("/deliveries/waits")["state"] == "acked")
        # The call with this key never came to its plugin: it is made now.
        refused = place.call("broken", "broken_count", "--key", "refused")
        assert "crashed" in refused.stderr
        assert place.run("ctl", "stop", "notes", *at).returncode == 0
        until(lambda: states(place)["broken"] == "quarantined")
    with place.daemon():
        held = states(place)
        assert (held["notes"], held["broken"]) == ("stopped", "quarantined")
        assert len(place.ask("ctl", "calls", *at)) > len(CALLS)
    version = (
        "import sqlite3, sys; print(*sqlite3.connect(sys.argv[1]).execute('PRAGMA user_version').fetchone())"
    )
    ledger = place.do("python3", "-c", version, ".local/state/runner/serve/ledger.db")
    assert ledger.stdout == f"{len(MIGRATIONS)}\n"


@of_second
def test_a_control_plane_keeps_its_packages_and_bindings(place: Place) -> None:
    place.make_recent()
    at, north = ("--socket", SOCKET), ("--token-file", "daemon/north.token")
    with place.daemon():
        [package] = place.run("package", "list", *at).stdout.splitlines()[1:]
        assert package.split()[:3] == ["example~kit@0.1.0", "installed", "trusted"]
        for token in ((), north):  # the operator's own list, and that of an org
            listed = place.run("binding", "list", *at, *token).stdout
            rows = [line.split() for line in listed.splitlines()[1:]]
            assert [(row[0], row[-1]) for row in rows] == [("north-greet", "3"), ("north-notice", "1")]
        records = place.run("binding", "records", "--org", "north", *at).stdout
        assert [line.split()[2:5] for line in records.splitlines()[1:]] == [
            ["north-notice", "notice", "succeeded"],
            ["north-greet", "greet", "succeeded"],
        ]
        assert len(place.run("binding", "history", "north-greet", *at).stdout.splitlines()) == 4
        words = ("binding", "invoke", "tools/greet", "--input", '{"name": "north"}')
        done = place.run(*words, *at, *north)
        assert json.loads(done.stdout)["structured_output"] == {"greeting": "Hello, north!"}, done.stderr
        # The event with this id has arrived, and is not delivered again.
        event = (
            "event",
            "run.completed",
            "--id",
            "event",
            "--event",
            '{"subject": {"kind": "run", "id": "run-1"}}',
        )
        assert "acked" in place.run("binding", *event, "--org", "north", *at).stdout
        assert place.run("binding", "rollback", "north-greet", "2", *at).returncode == 0
        assert "50" in place.run("binding", "show", "north-greet", *at).stdout


@of_second
def test_a_name_that_two_plugins_ask_for_is_nobodys(place: Place) -> None:
    """Before, it was that of the first folder by alphabet, and nothing recorded which one that was."""
    folder = place.home / "served"
    shutil.copytree(folder / "broken", folder / "a")  # with the same id
    with place.daemon() as said:
        told = "".join(said)
        assert "none of them had it before" in told
        assert f'the name with folder = "{HOME}/served/broken" in the table [broken] of the settings' in told
        assert "broken" not in states(place)
