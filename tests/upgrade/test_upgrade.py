"""What an earlier version left on a machine, and what this one makes of it.

`make` says which version that was, and how state.tar.gz was made with it. Paths in it are absolute, so each
test runs in mounts of its own (`place.sh`).
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
PERSON = 1_900_000_000
HOME = "/srv/before/home"
PLAN_SECONDS = 60  # files have to be some seconds old before a plan rests on them
pytestmark = [pytest.mark.needs("root", "user"), pytest.mark.launches]


class Place:
    """The mounts with the old state, and this version in the old one's place."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._pid = str(process.pid)
        self.home = self.at(HOME)

    def at(self, path: str) -> Path:
        return Path(f"/proc/{self._pid}/root{path}")

    def run(self, *words: str, home: str = HOME, stdin: str = "") -> subprocess.CompletedProcess[str]:
        """Run `runner` as the person, or as root if the home is root's."""
        become = (
            [] if home != HOME else ["setpriv", f"--reuid={PERSON}", f"--regid={PERSON}", "--clear-groups"]
        )
        argv = ["nsenter", "--mount", "--target", self._pid, f"--wd={self.at(home)}", *become]
        argv += ["/srv/before/runner/.venv/bin/runner", *words]
        env = {"PATH": "/usr/bin:/bin", "HOME": home, "LANG": "C.UTF-8", "RUNNER_DEBUG": "1"}
        return subprocess.run(argv, env=env, input=stdin, capture_output=True, text=True, timeout=120)


@pytest.fixture
def place() -> Iterator[Place]:
    argv = ["unshare", "--mount", "sh", str(HERE / "place.sh"), str(HERE / "state.tar.gz"), sys.prefix]
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

    # The plan of that version is not taken, not even in the place of one of ours.
    cache = place.home / ".cache/runner"
    [old] = cache.glob("plan-*")
    until = time.monotonic() + PLAN_SECONDS
    while not (plans := [path for path in cache.glob("plan-*") if path != old]):
        assert time.monotonic() < until
        assert place.run("plan", "plugins/reader").returncode == 0
    [own] = plans
    done = place.run("exec", "plugins/reader")
    assert (done.returncode, "a stored plan is used" in done.stderr) == (0, True)
    own.write_bytes(old.read_bytes())
    done = place.run("exec", "plugins/reader")
    assert (done.returncode, "a stored plan is used" in done.stderr) == (0, False)
    assert own.read_bytes() != old.read_bytes()  # made anew


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


def test_a_signed_package_is_still_trusted(place: Place) -> None:
    verify = ("package", "verify", "plugins/signed", "--trust", "key.pub")
    assert place.run(*verify).returncode == 0
    with (place.home / "plugins/signed/plugin.py").open("a") as file:
        file.write("#\n")
    assert place.run(*verify).returncode != 0
