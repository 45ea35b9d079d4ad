"""A contract whose plugins have their folder at a fixed place, a scratch folder and secrets as files.

The toy of test_toy.py, with a box. Its secrets are searched for in everything that is not the plugin's own.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import elsewhere
from tests.conftest import Caller
from tests.runner.contracts.test_toy import toy_as, toy_as_user, tree, with_toy
from tests.tables import one_case

__all__ = ["toy_as", "toy_as_user", "tree", "with_toy"]

Write = Callable[..., Path]
SECRET = "box-s3cret-0123456789-of-the-test"

PROGRAM = """\
import base64, json, os, sys
print(json.dumps({"hello": "bear"}), flush=True)
key = open("/box/secrets/key", "rb").read()
sys.stderr.write("the key is "); sys.stderr.flush()
for letter in key.decode():
    sys.stderr.write(letter); sys.stderr.flush()
sys.stderr.write(base64.b64encode(b"Bearer " + key).decode() + "\\n"); sys.stderr.flush()
open("/box/scratch/made", "w").close()
for line in sys.stdin:
    asked = json.loads(line)
    did = {"key": key.decode() == asked.get("with"), "cwd": os.getcwd(), "argv": sys.argv[0],
           "scratch": os.listdir("/box/scratch"), "toy": sorted(os.listdir("/box/toy")),
           "words": [word for word in (*sys.argv, *os.environ.values()) if key.decode().strip() in word]}
    print(json.dumps({"id": asked["id"], "did": did}), flush=True)
"""


@pytest.fixture
def box(plugin_dir: Path, write_file: Write) -> Path:
    manifest = {
        "toy": "bear",
        "run": ["/usr/bin/python3", "-I", "bin/toy.py"],
        "tools": ["say"],
        "box": ["bin"],
        "secrets": ["key"],
    }
    write_file(plugin_dir / "box" / "toy.json", json.dumps(manifest))
    write_file(plugin_dir / "box" / "bin" / "toy.py", PROGRAM)
    write_file(plugin_dir / "key", f"{SECRET}\n")
    return plugin_dir / "box"


def asked(text: str) -> str:
    return json.dumps({"id": 1, "do": "say", "with": text}) + "\n"


DID: dict[str, Any] = {
    "key": True,
    "cwd": "/box/toy",
    "argv": "bin/toy.py",
    "scratch": ["made"],
    "toy": ["bin"],
    "words": [],
}


@pytest.mark.launches
@pytest.mark.usefixtures("nothing_left")
def test_exec_delivers_it(toy_as: Caller, box: Path) -> None:
    toy_as.give(box.parent)
    secret, report = f"key=@{box.parent}/key", box.parent / "report.json"
    words = ("--secret", secret, "--limit", "output=1M", "--report", report, box)
    done = toy_as("exec", *words, input=asked(f"{SECRET}\n"))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[1])["did"] == DID
    assert SECRET in done.stderr  # the plugin's own words, to the caller's own stderr
    found = json.loads(report.read_text())
    assert found["stderr"]["tail"].startswith("the key is [secret]") and SECRET not in report.read_text()
    assert base64.b64encode(f"Bearer {SECRET}".encode()).decode()[9:20] not in report.read_text()
    assert found["grant"]["memory_files"] == [{"dest": "/box/secrets/key", "mode": 0o400, "secret": "key"}]
    assert found["grant"]["scratch"]["path"] == "/box/scratch"
    scratch = found["grant"]["scratch"]
    assert scratch["effective"] == (scratch["requested"] or 64 << 20)
    assert {"path": str(box / "bin"), "inside": "/box/toy/bin"}.items() <= next(
        path for path in found["grant"]["paths"] if path["inside"]
    ).items()


@pytest.mark.launches
@pytest.mark.usefixtures("nothing_left")
def test_call_delivers_it(toy_as: Caller, box: Path) -> None:
    toy_as.give(box.parent)
    report = box.parent / "report.json"
    words = ("--secret", "key=env:KEY", "--report", report, box, "say", "--input", json.dumps(SECRET))
    done = toy_as("call", "--json", *words, env={"KEY": SECRET})
    assert done.returncode == 0 and json.loads(done.stdout) == DID, done.stderr
    assert SECRET not in report.read_text() + done.stderr
    tail = json.loads(report.read_text())["session"]["stderr_tail"]
    assert tail.startswith("the key is [secret]") and tail.count("[secret]") == 2
    listed = toy_as("tools", "--secret", f"key=@{box.parent}/key", box)
    assert listed.returncode == 0 and "say" in listed.stdout, listed.stderr


@pytest.mark.launches
@one_case("verb", ["exec", "call"])
def test_a_secret_that_is_missing_or_unknown(toy_as_user: Caller, box: Path, verb: str) -> None:
    words = ("say",) if verb == "call" else ()
    done = toy_as_user(verb, box, *words)
    assert done.returncode not in (0, 2) and "the plugin needs the secret 'key'" in done.stderr
    assert "--secret key=@FILE" in done.stderr
    given = ("--secret", f"key=@{box.parent}/key", "--secret", f"other=@{box.parent}/key")
    done = toy_as_user(verb, *given, box, *words)
    assert done.returncode not in (0, 2) and "no secret or file 'other'; its secrets are: key" in done.stderr
    assert SECRET not in done.stderr + done.stdout
    done = toy_as_user(verb, "--secret", f"key={SECRET}", box, *words)
    assert done.returncode == 2 and SECRET not in done.stderr and "write @FILE" in done.stderr


@pytest.mark.launches
@one_case("part", ["secrets", "box"])
def test_without_a_cage_there_is_no_such_file(
    toy_as: Caller, box: Path, write_file: Write, part: str
) -> None:
    toy_as.give(box.parent)
    policy = write_file(toy_as.home / "policy.toml", 'version = 1\nunsandboxed = "allow"\n', 0o600)
    toy_as.give(policy)
    manifest = {"toy": "bear", "run": ["/bin/true"], "wild": True}
    write_file(box / "toy.json", json.dumps(manifest))
    assert toy_as("exec", "--policy", policy, box).returncode == 0  # the control
    write_file(box / "toy.json", json.dumps({**manifest, part: ["bin"]}))
    given = ("--secret", f"bin=@{box.parent}/key") if part == "secrets" else ()
    done = toy_as("exec", "--policy", policy, *given, box)
    assert done.returncode != 0 and "files that exist only in a cage" in done.stderr
    done = toy_as("exec", *given, box)  # the default policy has a cage for it
    assert done.returncode == 0, done.stderr


@pytest.mark.launches
def test_explain_shows_the_places(toy_as: Caller, box: Path) -> None:
    toy_as.give(box.parent)
    done = toy_as("explain", box)
    assert done.returncode == 0, done.stderr
    for text in (
        "  /box/toy/bin  ",
        f"the plugin's folder; on the host {box}/bin",
        "scratch  /box/scratch",
        "the secret key: --secret key=@FILE",
        "in         /box/toy",
    ):
        assert text in done.stdout, done.stdout
    line = toy_as("explain", "--format", "argv", box).stdout
    assert f"--ro-bind {box}/bin /box/toy/bin" in line and "--file 15 /box/secrets/key" in line
    assert "--chdir /box/toy" in line


def places_of(secret: bytes, places: list[str]) -> list[str]:
    """The files in these folders, and the arguments and variables of other processes, that have it."""
    import os

    files = [
        os.path.join(folder, name)
        for place in places
        for folder, _, names in os.walk(place)
        for name in names
    ]
    others = [pid for pid in os.listdir("/proc") if pid.isdigit() and int(pid) != os.getpid()]
    files += [f"/proc/{pid}/{name}" for pid in others for name in ("cmdline", "environ")]
    found = []
    for path in files:
        try:
            with open(path, "rb") as file:
                if secret in file.read(1 << 22):
                    found.append(path)
        except OSError:
            continue
    return found


def opened(path: str, letters: list[int], places: list[str]) -> list[Any]:
    """In the library: twice over one fork server. A search while the plugin runs, and one afterwards."""
    import trio

    import runner

    secret = bytes(letters).decode()

    async def main() -> list[Any]:
        found: list[Any] = []
        for value in (secret, secret.encode()):
            async with runner.open_plugin(path, secrets={"key": value}) as plugin:
                found.append(await plugin.call("say", secret))
                found.append(places_of(secret.encode(), places))
            found.append(secret in str(plugin.report) or secret in plugin.stderr)
        found.append(places_of(secret.encode(), places))
        for wrong in ({"key": secret, "other": secret}, {"key": 5}):
            try:
                async with runner.open_plugin(path, secrets=wrong):
                    pass
            except (runner.PluginFailure, ValueError) as failure:
                found.append(str(failure))
        return found

    return trio.run(main)


@pytest.mark.launches
@pytest.mark.usefixtures("nothing_left")
def test_the_library_delivers_it_and_leaves_nothing(toy_as: Caller, box: Path) -> None:
    toy_as.give(box.parent)
    places = [str(box.parent), str(toy_as.home), "/dev/shm", "/var/lib/runner", "/run/runner"]
    # Its own: other tests have SECRET on command lines. As letters, or it would be on that of the process.
    secret = SECRET[::-1]
    (box.parent / "key").write_text(secret)
    letters = [ord(letter) for letter in secret]
    done = elsewhere.run(toy_as, opened, str(box), letters, places, using=(places_of,))
    control = [f"{box.parent}/key"]
    assert done[:7] == [DID, control, False, DID, control, False, control]
    assert "no secret or file 'other'; its secrets are: key" in done[7]
    assert done[8] == "secrets: the value of 'key' has to be text or bytes"
