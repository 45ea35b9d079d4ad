"""A signed package starts its own files and the system's. Each attack is made without the requirement too."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest

from runner.launch.plan import plan
from runner.launch.prepare import decide
from runner.launch.read import load
from runner.launch.rehearse import rehearse
from runner.launch.signed import check_package
from runner.launch.sources import Sources
from runner.launch.stages import Invocation, Planned, Stopwatch
from runner.outcome import EXEC_REFUSED, Failure
from runner.package import snapshot
from runner.package.keys import load_key, make_key
from runner.package.listing import list_package
from runner.package.program import _paths_in
from runner.package.signature import sign, write_signature
from tests.conftest import SYSTEM_PATH, Caller
from tests.manifests import SANDBOX, nexo
from tests.tables import one_case

Write = Callable[..., Path]

EVIL = "#!/bin/sh\necho not signed\n"


class Bench:
    """A signed nexo plugin, and a folder `evil` beside it that no signature covers."""

    def __init__(self, folder: Path, write_file: Write) -> None:
        self.folder = folder
        self.root = folder / "signed"
        self.evil = folder / "evil"
        self.write_file = write_file
        for name in ("bin/tool", "app.js", "app.py", "plain"):
            write_file(self.evil / name, EVIL, 0o755)
        (self.evil / "python").symlink_to("/usr/bin/python3")
        (self.evil / "link").symlink_to(self.evil / "bin/tool")
        make_key(str(folder / "key"), "acme")
        self.environ = {"PATH": f"{self.evil}/bin:{self.evil}:{SYSTEM_PATH}", "HOME": "/nonexistent"}

    def fill(self, text: str) -> str:
        return text.replace("EVIL", str(self.evil)).replace("ROOT", str(self.root))

    def publish(self, command: str, args: list[str], script: str, *, reads: bool, env: str = "") -> None:
        self.write_file(self.root / "bin/run", self.fill(script), 0o755)
        self.write_file(self.root / "main.py", "print('signed')\n", 0o755)
        manifest = (
            nexo("signed", self.fill(command))
            + f"args = {json.dumps([self.fill(arg) for arg in args])}\n{self.fill(env)}\n{SANDBOX}"
        )
        if reads:
            manifest += f'fs_read_paths = ["{self.evil}"]\n'
        self.write_file(self.root / "nexo-plugin.toml", manifest)
        listing, key = list_package(str(self.root)), load_key(str(self.folder / "key"))
        write_signature(str(self.root), sign(listing, "signed", "1.0.0", key, time.time()))

    def policy(self, signature: str) -> Path:
        text = (
            f'version = 1\n[read]\nceiling = ["{self.evil}"]\n[env]\nceiling = ["*"]\n'
            f'[packages]\nsignature = "{signature}"\ntrust = "{self.folder}/key.pub"\n'
        )
        return self.write_file(self.folder / f"{signature}.toml", text)

    def planned(self, signature: str) -> Planned:
        """As for a launch: with a copy, if a signature is required."""
        invocation = Invocation(str(self.root), policy=str(self.policy(signature)))
        decided = decide(load(invocation, Stopwatch()), self.environ, Stopwatch())
        check = check_package(decided, self.environ) if signature == "required" else nullcontext(decided)
        with check as checked, Sources() as sources:
            return plan(checked, self.environ, Stopwatch(), sources)

    def rehearsed(self) -> Planned:
        return rehearse(Invocation(str(self.root), policy=str(self.policy("required"))), self.environ)


@pytest.fixture
def bench(plugin_dir: Path, write_file: Write, monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setattr(snapshot, "packages_folder", lambda environ: str(plugin_dir / "copies"))
    return Bench(plugin_dir, write_file)


SH = "#!/bin/sh\n"

# command, args, bin/run, whether the plugin can read EVIL, what the message names
OUTSIDE = {
    "found on PATH": ("tool", [], SH, False, "EVIL/bin/tool"),
    "found on PATH and granted": ("tool", [], SH, True, "EVIL/bin/tool"),
    "a link on PATH": ("link", [], SH, False, "EVIL/link"),
    "a link on PATH to the system": ("python", ["main.py"], SH, False, "EVIL/python"),
    "env": ("./bin/run", [], "#!/usr/bin/env tool\n", False, "EVIL/bin/tool"),
    "env and a link to the system": ("./bin/run", [], "#!/usr/bin/env python\n", False, "EVIL/python"),
    "env -S": ("./bin/run", [], "#!/usr/bin/env -S tool -x\n", False, "EVIL/bin/tool"),
    "env with a path": ("./bin/run", [], "#!/usr/bin/env EVIL/bin/tool\n", True, "EVIL/bin/tool"),
    "env with a PATH": ("./bin/run", [], "#!/usr/bin/env -S PATH=/bin:EVIL sh\n", True, "EVIL"),
    "the interpreter": ("./bin/run", [], "#!EVIL/bin/tool\n", True, "EVIL/bin/tool"),
    "the interpreter, in the ceiling": ("./bin/run", [], "#!EVIL/bin/tool\n", False, "EVIL/bin/tool"),
    "a link as interpreter": ("./bin/run", [], "#!EVIL/python\n", True, "EVIL/python"),
    "the argument of a #! line": ("./bin/run", [], "#!/usr/bin/python3 EVIL/app.py\n", True, "EVIL/app.py"),
    "a script for node": ("node", ["EVIL/app.js"], SH, True, "EVIL/app.js"),
    "a script by a relative path": ("node", ["../evil/app.js"], SH, True, "EVIL/app.js"),
    "a script without a suffix": ("/usr/bin/python3", ["-u", "EVIL/plain"], SH, True, "EVIL/plain"),
    "a folder": ("/usr/bin/python3", ["EVIL"], SH, True, "EVIL"),
    "what node requires": ("node", ["-r", "EVIL/app.js", "main.py"], SH, True, "EVIL/app.js"),
    "what node requires, in a word": ("node", ["--require=EVIL/app.js", "main.py"], SH, True, "EVIL/app.js"),
    "sh -c": ("sh", ["-c", "EVIL/plain now"], SH, True, "EVIL/plain"),
    "a program for env": ("/usr/bin/env", ["EVIL/plain"], SH, True, "EVIL/plain"),
    "a PATH for env": ("/usr/bin/env", ["PATH=EVIL/bin", "tool"], SH, True, "EVIL/bin"),
}  # fmt: skip


@pytest.mark.needs("node")
@one_case("name", OUTSIDE)
def test_code_from_elsewhere_is_refused(bench: Bench, name: str) -> None:
    command, args, script, reads, said = OUTSIDE[name]
    bench.publish(command, args, script, reads=reads)
    bench.planned("optional")  # the control: only the signature stands in the way
    attempts: list[Callable[[], Planned]] = [lambda: bench.planned("required")]
    if "link" not in name:  # a rehearsal does not look at the names of links
        attempts.append(bench.rehearsed)
    for attempt in attempts:
        with pytest.raises(Failure) as failure:
            attempt()
        outcome = failure.value.outcome
        assert (outcome.code, outcome.cause, failure.value.exec_status) == (
            "policy_denied",
            "signature",
            EXEC_REFUSED,
        )
        assert f" {bench.fill(said)}, which is neither in the plugin's folder {bench.root}" in outcome.message
        assert "sign it again" in outcome.hint


INSIDE = {
    "a script of the package": ("./bin/run", [], SH, False),
    "its absolute name": ("ROOT/bin/run", [], SH, False),
    "the system's interpreter, although PATH has another": ("./bin/run", [], "#!/usr/bin/env sh\n", False),
    "options of env": ("./bin/run", [], "#!/usr/bin/env -S LANG=C python3 -u\n", False),
    "a program of the system": ("/bin/true", [], SH, False),
    "on PATH, of the system": ("node", ["main.py"], SH, False),
    "data behind a script": ("/usr/bin/python3", ["main.py", "EVIL/plain"], SH, True),
    "data behind its absolute name": ("/usr/bin/python3", ["ROOT/main.py", "EVIL/plain"], SH, True),
    "data behind ${plugin_dir}": ("/usr/bin/python3", ["${plugin_dir}/main.py", "EVIL/app.py"], SH, True),
    "a module": ("/usr/bin/python3", ["-m", "main", "EVIL/app.py"], SH, True),
    "data for a program of the package": ("./bin/run", ["EVIL/app.py"], SH, True),
    "data for a program that runs nothing": ("/bin/cat", ["EVIL/plain"], SH, True),
}  # fmt: skip


@pytest.mark.needs("node")
@one_case("name", INSIDE)
def test_code_of_the_package_and_of_the_system_is_started(bench: Bench, name: str) -> None:
    command, args, script, reads = INSIDE[name]
    bench.publish(command, args, script, reads=reads)
    assert bench.planned("required").decided.signed is not None
    assert bench.rehearsed().decided.signed is not None


def test_a_path_that_shows_programs_of_others_is_refused(bench: Bench) -> None:
    """In the cage `env` searches the PATH that the plugin gets, and the manifest may say which."""
    env = '[plugin.entrypoint.env]\nPATH = "EVIL/bin:/usr/bin"'
    bench.publish("./bin/run", [], "#!/usr/bin/env sh\n", reads=False, env=env)
    bench.planned("required")  # nothing is there in the cage
    bench.publish("./bin/run", [], "#!/usr/bin/env sh\n", reads=True, env=env)
    bench.planned("optional")
    with pytest.raises(Failure, match=f"its PATH has {bench.evil}/bin, which is neither"):
        bench.planned("required")


def test_an_interpreter_of_another_place_is_refused(bench: Bench, write_file: Write) -> None:
    """A virtual environment in the package names the Python that it is of."""
    bench.publish("./bin/run", [], SH, reads=False)
    home = bench.folder / "python"
    write_file(home / "bin/python3", EVIL, 0o755)
    (home / "lib/python3.11").mkdir(parents=True)
    write_file(home / "lib/python3.11/os.py", "")
    write_file(bench.root / "pyvenv.cfg", f"home = {home}/bin\n")
    bench.publish("./bin/run", [], SH, reads=False)
    shown = [path.path for path in bench.planned("optional").plan.shown if path.origin == "the program"]
    assert shown  # the control
    with pytest.raises(Failure, match=f"it starts {home}/"):
        bench.planned("required")


def test_the_path_that_the_runner_sets_is_no_note(bench: Bench) -> None:
    bench.publish("tool", [], SH, reads=False)
    planned = bench.planned("optional")
    assert f"{bench.evil}/bin:" in dict(planned.plan.env)["PATH"]
    assert [note for note in planned.plan.notes if note.rule == "outside"] == []


@pytest.mark.parametrize(
    ("word", "paths"),
    [
        ("/a", ["/a"]),
        ("../a", ["../a"]),
        ("a", []),
        ("-x", []),
        ("-I/a", ["/a"]),
        ("--require=/a", ["/a"]),
        ("PATH=/a:b:/c", ["/a", "/c"]),
        ("/a=/b", ["/a=/b"]),
        ("--title=a/b", ["a/b"]),
    ],
)
def test_paths_in_words(word: str, paths: list[str]) -> None:
    assert list(_paths_in(word)) == paths


@pytest.mark.usefixtures("nothing_left")
@one_case("command", ["tool", "./bin/run"])
def test_nothing_of_the_callers_path_runs(
    runner_as: Caller, plugin_dir: Path, write_file: Write, command: str
) -> None:
    bench = Bench(plugin_dir, write_file)
    bench.publish(command, [], "#!/usr/bin/env tool\n", reads=False)
    required, optional = bench.policy("required"), bench.policy("optional")
    runner_as.give(plugin_dir)
    path = {"PATH": bench.environ["PATH"]}
    control = runner_as("exec", "--policy", optional, bench.root, env=path)
    assert (control.returncode, control.stdout, control.stderr) == (0, "not signed\n", "")
    refused = runner_as("exec", "--policy", required, bench.root, env=path)
    assert (refused.returncode, refused.stdout) == (EXEC_REFUSED, "")
    assert f"it starts {bench.evil}/bin/tool, which is neither in" in refused.stderr
