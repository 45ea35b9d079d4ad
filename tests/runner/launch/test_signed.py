"""A policy that requires a signature: what is refused, and that the plugin sees what was checked."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from runner.launch import signed
from runner.launch.prepare import decide
from runner.launch.read import load
from runner.launch.rehearse import rehearse
from runner.launch.report import notes
from runner.launch.run import run
from runner.launch.signed import check_package, require_copy_mounted
from runner.launch.stages import Decided, Invocation, Stopwatch
from runner.outcome import EXEC_DEADLINE, EXEC_REFUSED, Failure
from runner.package import snapshot
from runner.package.keys import load_key, make_key
from runner.package.listing import SIGNATURE_NAME, list_package
from runner.package.signature import sign, write_signature
from sandbox.paths.file_identity import FileIdentity
from sandbox.plan.plan import Bind
from tests.conftest import SYSTEM_PATH, Caller
from tests.manifests import SANDBOX, nexo

Write = Callable[..., Path]

MANIFEST: dict[str, Any] = {
    "plugin_id": "shows",
    "display_name": "shows",
    "plugin_version": "1.0.0",
    "protocol_version": "rterm.plugin.v1",
    "process": {"command": "./bin/show", "env": ["LANG=C.UTF-8"]},
    "tools": [
        {"name": "show", "description": "d", "input_schema": {"type": "object"}, "approval_tier": "safe"}
    ],
}
SHOW = '#!/bin/sh\n# text: signed\necho "$0 in $PWD has" *\ngrep text: "$0"\nread line\n'
ENVIRON = {"PATH": SYSTEM_PATH, "HOME": "/nonexistent"}


class Package:
    """A plugin, its key, and policies with and without the requirement."""

    def __init__(self, folder: Path, write_file: Write) -> None:
        self.folder = folder
        self.root = folder / "shows"
        self.write_file = write_file
        # By its name, a copy is known as one of this package: root's folder is shared with other tests.
        self.manifest(MANIFEST | {"display_name": folder.name})
        write_file(self.root / "bin/show", SHOW, 0o755)
        make_key(str(folder / "key"), "acme")
        self.required = self.policy("required")
        self.optional = self.policy("optional")
        self.sign()

    def manifest(self, document: dict[str, Any]) -> None:
        self.write_file(self.root / "rterm-plugin.json", json.dumps(document))

    def policy(self, signature: str, more: str = "") -> Path:
        text = (
            f'version = 1\n{more}\n[packages]\nsignature = "{signature}"\ntrust = "{self.folder}/key.pub"\n'
        )
        return self.write_file(self.folder / f"{signature}.toml", text)

    def sign(self, key: str = "key", version: str = "1.0.0", later: float = 0.0) -> None:
        listing = list_package(str(self.root))
        signature = sign(listing, "shows", version, load_key(str(self.folder / key)), time.time() + later)
        write_signature(str(self.root), signature)

    def invocation(self) -> Invocation:
        return Invocation(str(self.root), policy=str(self.required))

    def decided(self) -> Decided:
        return decide(load(self.invocation(), Stopwatch()), ENVIRON, Stopwatch())


@pytest.fixture
def package(plugin_dir: Path, write_file: Write) -> Package:
    return Package(plugin_dir, write_file)


@pytest.fixture
def copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where copies are made by this process."""
    place = tmp_path / "packages"
    monkeypatch.setattr(snapshot, "packages_folder", lambda environ: str(place))
    return place


def _other_key(package: Package) -> None:
    make_key(str(package.folder / "other"), "mallory")
    package.sign("other")


def _link(package: Package) -> None:
    (package.root / "bin/show").rename(package.folder / "show")
    (package.root / "bin/show").symlink_to(package.folder / "show")


CHANGES: dict[str, tuple[Callable[[Package], object], str]] = {
    "unsigned": (lambda package: (package.root / SIGNATURE_NAME).unlink(), "has no marketplace"),
    "one byte": (lambda package: (package.root / "bin/show").write_text(SHOW + "\n"), "not those that were"),
    "added": (lambda package: (package.root / "bin/more").write_text(""), "not those that were"),
    "renamed": (
        lambda package: (package.root / "bin/show").rename(package.root / "bin/Show"),
        "not those that were",
    ),
    "removed": (lambda package: (package.root / "bin/show").unlink(), "not those that were"),
    "linked": (_link, "a symbolic link"),
    "other version": (lambda package: package.sign(version="2.0.0"), "the signature is for 'shows' '2.0.0'"),
    "untrusted": (_other_key, "'mallory', which signed the package, is not trusted"),
    "malformed": (lambda package: (package.root / SIGNATURE_NAME).write_text("{}"), "cannot be used"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_is_not_as_it_was_signed_is_refused(package: Package, copies: Path, name: str) -> None:
    change, said = CHANGES[name]
    change(package)
    for attempt in (
        lambda: rehearse(package.invocation(), ENVIRON),
        lambda: run(package.invocation(), ENVIRON, 0.0, None),  # type: ignore[arg-type]  # it comes not that far
    ):
        with pytest.raises(Failure) as failure:
            attempt()
        outcome = failure.value.outcome
        assert (outcome.code, outcome.phase, outcome.cause) == ("policy_denied", "policy", "signature")
        assert failure.value.exec_status == EXEC_REFUSED
        assert said in outcome.message and outcome.hint
    assert not copies.exists() or os.listdir(copies) == []


def test_the_check_gives_a_copy_in_place_of_the_folder(package: Package, copies: Path) -> None:
    """The control of the test above, and what becomes of the plugin."""
    with check_package(package.decided(), ENVIRON) as checked:
        plugin = checked.loaded.plugin
        assert plugin.root == checked.copy and Path(checked.copy).is_relative_to(copies)
        assert plugin.root_inside == checked.original == str(package.root)
        assert plugin.entrypoint is not None
        assert plugin.entrypoint.command == f"{checked.copy}/bin/show"
        assert plugin.entrypoint.directory == checked.copy
        assert plugin.manifest == f"{package.root}/rterm-plugin.json"  # its state is found by this
        assert checked.signed is not None and checked.signed.key_id == "acme"
    assert os.listdir(copies) == []


def test_a_folder_with_another_name_in_the_cage_keeps_it(package: Package, copies: Path) -> None:
    (package.root / "assets").mkdir()  # empty, so it is not in the copy
    decided = package.decided()
    parts = ("bin", "assets", "rterm-plugin.json")
    plugin = decided.loaded.plugin._replace(root_inside="/sandbox/package", root_parts=parts)
    moved = signed._at_copy(plugin, str(package.root), "/copies/x")
    assert (moved.root_inside, moved.root_parts) == ("/sandbox/package", parts)  # none of it is there
    with check_package(decided, ENVIRON) as checked:
        moved = signed._at_copy(plugin, str(package.root), checked.copy)
        assert moved.root_inside == "/sandbox/package"
        assert moved.root_parts == ("bin", "rterm-plugin.json")


def test_a_rehearsal_changes_nothing(package: Package, copies: Path) -> None:
    planned = rehearse(package.invocation(), ENVIRON)
    assert planned.decided.signed is not None and planned.decided.copy == ""
    assert planned.plugin.root == str(package.root)
    assert not copies.exists()


def test_a_signature_from_the_future_is_a_note(package: Package) -> None:
    assert [note for note in notes(rehearse(package.invocation(), ENVIRON)) if note.rule == "signature"] == []
    package.sign(later=3600.0)
    [note] = [note for note in notes(rehearse(package.invocation(), ENVIRON)) if note.rule == "signature"]
    assert "in the future" in note.message


def test_a_plugin_of_another_manifest_than_the_signed_one_is_refused(package: Package, copies: Path) -> None:
    """As if the file had been replaced between the decision and the copy."""
    decided = package.decided()
    plugin = decided.loaded.plugin._replace(description="of another text")
    other = decided._replace(loaded=decided.loaded._replace(plugin=plugin))
    with check_package(decided, ENVIRON):
        pass  # the control
    with pytest.raises(Failure, match="its manifest changed"), check_package(other, ENVIRON):
        pass
    assert os.listdir(copies) == []


def test_a_signature_that_is_replaced_meanwhile_is_refused(
    package: Package, copies: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = snapshot.take_snapshot

    def swap(root: str, environ: dict[str, str], look: Callable[[], None]) -> Any:
        package.sign()  # at another second
        text = (package.root / SIGNATURE_NAME).read_text()
        (package.root / SIGNATURE_NAME).write_text(text + "\n")
        return real(root, environ, look)

    monkeypatch.setattr("runner.launch.signed.take_snapshot", swap)
    with pytest.raises(Failure, match="its signature changed"), check_package(package.decided(), ENVIRON):
        pass


def test_a_faulty_trust_file_is_a_fault_of_the_policy(package: Package, copies: Path) -> None:
    for text in (None, "nonsense\n"):
        (package.folder / "key.pub").unlink()
        if text is not None:
            (package.folder / "key.pub").write_text(text)
        with pytest.raises(Failure) as failure, check_package(package.decided(), ENVIRON):
            pass
        assert failure.value.outcome.code == "policy_invalid"
        assert str(package.folder / "key.pub") in failure.value.outcome.message
        (package.folder / "key.pub").touch()


def test_the_deadline_runs_while_the_copy_is_made(package: Package, copies: Path) -> None:
    decided = package.decided()
    limits = decided.grant.limits._replace(deadline=60.0)
    decided = decided._replace(grant=decided.grant._replace(limits=limits))
    with check_package(decided, ENVIRON, time.monotonic()):
        pass  # the control
    with pytest.raises(Failure) as failure, check_package(decided, ENVIRON, time.monotonic() - 60.0):
        pass
    assert failure.value.outcome.code == "timeout" and failure.value.exec_status == EXEC_DEADLINE
    assert os.listdir(copies) == []


@pytest.mark.parametrize("name", ["missing", "unreadable"])
def test_messages_name_the_folder_and_not_the_copy(package: Package, monkeypatch: Any, name: str) -> None:
    copies = package.folder / "copies"
    monkeypatch.setattr(snapshot, "packages_folder", lambda environ: str(copies))
    if name == "missing":
        process = MANIFEST["process"] | {"command": "./bin/other"}
        package.manifest(MANIFEST | {"process": process})
    else:
        (package.root / "bin/show").chmod(0o600)
    package.sign()
    with pytest.raises(Failure) as failure:
        run(package.invocation(), ENVIRON, 0.0, None)  # type: ignore[arg-type]  # it comes not that far
    outcome = failure.value.outcome
    assert outcome.code == "launch_failed"
    text = f"{outcome.message} {outcome.hint}"
    assert str(copies) not in text and f"{package.root}/bin/" in text


# --- what a signature cannot cover --------------------------------------------------------------------------


def _refused(decided: Decided) -> str:
    with pytest.raises(Failure) as failure, check_package(decided, ENVIRON):
        pass
    assert failure.value.outcome.cause == "signature" and failure.value.outcome.hint
    return failure.value.outcome.message


def test_a_configuration_has_no_folder_to_sign(package: Package, write_file: Write) -> None:
    manifest = write_file(package.folder / "mcp.json", '{"mcpServers": {"x": {"command": "/bin/true"}}}')
    invocation = Invocation(str(manifest), policy=str(package.required))
    assert "no folder of its own" in _refused(decide(load(invocation, Stopwatch()), ENVIRON, Stopwatch()))


def test_a_plugin_without_a_cage_is_refused(package: Package) -> None:
    decided = package.decided()
    assert "without a cage" in _refused(decided._replace(grant=decided.grant._replace(unsandboxed=True)))


@pytest.mark.parametrize(
    ("command", "directory", "said"),
    [
        ("/opt/other/tool", "", "/opt/other/tool"),
        ("../tool", "", "/tool"),
        ("./bin/show", "/opt", "/opt"),
        ("sh", "/opt", "/opt"),
    ],
)
def test_a_program_from_elsewhere_is_refused(
    package: Package, command: str, directory: str, said: str
) -> None:
    decided = package.decided()
    entrypoint = decided.loaded.plugin.entrypoint
    assert entrypoint is not None
    entrypoint = entrypoint._replace(command=command, directory=directory or entrypoint.directory)
    plugin = decided.loaded.plugin._replace(entrypoint=entrypoint)
    message = _refused(decided._replace(loaded=decided.loaded._replace(plugin=plugin)))
    assert said in message and "neither in the plugin's folder" in message


def test_a_path_of_its_own_folder_is_refused(package: Package, write_file: Write) -> None:
    write_file(
        package.root.parent / "nexo/nexo-plugin.toml",
        nexo("shows", "/bin/true") + SANDBOX + f'fs_read_paths = ["{package.folder}/nexo/data"]\n',
    )
    package.policy("required", f'[read]\nceiling = ["{package.folder}"]\n')
    invocation = Invocation(str(package.folder / "nexo"), policy=str(package.required))
    decided = decide(load(invocation, Stopwatch()), ENVIRON, Stopwatch())
    assert f"it asks for {package.folder}/nexo/data" in _refused(decided)


@pytest.mark.parametrize(
    ("dest", "real", "shown"),
    [
        ("{inside}", "{copy}", True),
        ("/usr", "/usr", True),
        ("{inside}/bin", "/elsewhere", False),
        ("/elsewhere", "{original}/bin", False),
    ],
)
def test_a_plan_that_shows_the_original_is_refused(
    package: Package, copies: Path, dest: str, real: str, shown: bool
) -> None:
    with check_package(package.decided(), ENVIRON) as checked:
        words = {"inside": str(package.root), "copy": checked.copy, "original": checked.original}
        bind = Bind(dest.format(**words), real.format(**words), False, FileIdentity(0, 0, 0, 0))
        plan = rehearse(package.invocation(), ENVIRON).plan._replace(operations=(bind,))
        if shown:
            require_copy_mounted(checked, plan)
        else:
            with pytest.raises(Failure, match="was not checked"):
                require_copy_mounted(checked, plan)


# --- launches -----------------------------------------------------------------------------------------------


def _copies_of(caller: Caller, package: Package) -> list[str]:
    """Those of `package`, and every copy of a user, whose folder is the test's own."""
    if caller.name == "user":
        return _copies_of_user(caller)
    found = []
    for path in Path("/var/lib/runner/packages").glob("*/package/rterm-plugin.json"):
        with contextlib.suppress(FileNotFoundError):  # a copy of another test, just removed
            if f'"{package.folder.name}"' in path.read_text():
                found.append(str(path))
    return found


def _copies_of_user(caller: Caller) -> list[str]:
    folder = caller.home / ".local/state/runner/packages"
    return os.listdir(folder) if folder.exists() else []


@pytest.mark.usefixtures("nothing_left")
def test_a_signed_plugin_runs_in_its_usual_place(runner_as: Caller, package: Package) -> None:
    runner_as.give(package.folder)
    report = runner_as.home / "report.json"
    done = runner_as("exec", "--policy", package.required, "--report", report, package.root)
    assert (done.returncode, done.stderr) == (1, ""), done.stderr  # `read` meets the end of the file
    root = package.root
    assert done.stdout.splitlines() == [
        f"{root}/bin/show in {root} has bin {SIGNATURE_NAME} rterm-plugin.json",
        "# text: signed",
        'grep text: "$0"',
    ]
    layers = {layer["layer"]: layer for layer in json.loads(report.read_text())["layers"]}
    assert layers["signature"]["effective"] == "valid"
    assert "by acme at " in layers["signature"]["detail"]
    assert _copies_of(runner_as, package) == []
    (root / SIGNATURE_NAME).unlink()
    refused = runner_as("exec", "--policy", package.required, root)
    assert (refused.returncode, refused.stdout) == (EXEC_REFUSED, "")
    assert "policy_denied" in refused.stderr and f"has no {SIGNATURE_NAME}" in refused.stderr
    assert runner_as("exec", "--policy", package.optional, root).stdout.endswith('grep text: "$0"\n')


SWAPPING = """\
import sys
import runner.launch.run as stages
from runner.cli import main

real = stages.plan

def plan(*arguments):
    path = sys.argv.pop(1)
    text = open(path).read()
    open(path, "w").write(text.replace("text: signed", "text: swapped"))
    return real(*arguments)

stages.plan = plan
sys.exit(main(["exec", "--policy", sys.argv[2], sys.argv[3]]))
"""


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize(("required", "seen"), [(True, "signed"), (False, "swapped")])
def test_what_is_swapped_after_the_check_does_not_run(
    runner_as: Caller, package: Package, required: bool, seen: str
) -> None:
    """Without the requirement, which is the control, the swapped file runs."""
    runner_as.give(package.folder)
    policy = package.required if required else package.optional
    argv = [*runner_as.prefix, *runner_as.python, "-c", SWAPPING]
    done = subprocess.run(
        [*argv, package.root / "bin/show", policy, package.root],
        env=dict(runner_as.environ),
        cwd="/",
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert f"# text: {seen}\n" in done.stdout, done.stderr
    assert "text: swapped" in (package.root / "bin/show").read_text()  # it did happen
    assert _copies_of(runner_as, package) == []


SIGNALLED = """\
import contextlib, os, signal, sys
import runner.launch.signed as signed
import runner.package.snapshot as snapshot
from runner.cli import main

snapshot.PackageCopier.finish = lambda copy: os.kill(os.getpid(), int(sys.argv[1]))
if sys.argv[2] == "control":
    signed.unwinding_signals = lambda: contextlib.nullcontext(print)
sys.exit(main(["exec", "--policy", sys.argv[3], sys.argv[4]]))
"""


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_during_the_copy_leaves_no_copy(runner_as: Caller, package: Package, number: int) -> None:
    runner_as.give(package.folder)

    def left(how: str) -> list[str]:
        argv = [*runner_as.prefix, *runner_as.python, "-c", SIGNALLED, str(int(number)), how]
        argv += [str(package.required), str(package.root)]
        done = subprocess.run(argv, env=dict(runner_as.environ), stdin=subprocess.DEVNULL, timeout=60)
        assert done.returncode == -number
        return _copies_of(runner_as, package)

    assert left("attack") == []
    if number == signal.SIGTERM and runner_as.name == "user":  # root's folder is shared with other tests
        assert len(left("control")) == 1
        assert left("attack") == []  # which swept the other


@pytest.mark.needs("user")
@pytest.mark.usefixtures("nothing_left")
def test_what_a_killed_runner_leaves_is_removed_by_the_next(runner_as_user: Caller, package: Package) -> None:
    runner_as_user.give(package.folder)
    with runner_as_user.start("exec", "--policy", package.required, package.root) as process:
        assert process.stdout is not None
        assert b"bin/show in" in process.stdout.readline()
        [left] = _copies_of_user(runner_as_user)
        process.kill()
    assert _copies_of_user(runner_as_user) == [left]
    assert runner_as_user("exec", "--policy", package.required, package.root).stdout
    assert _copies_of_user(runner_as_user) == []


@pytest.mark.needs("user")
@pytest.mark.usefixtures("nothing_left")
def test_a_session_needs_the_signature_too(
    runner_as_user: Caller, plugin_dir: Path, write_file: Write
) -> None:
    root = plugin_dir / "shows"
    example = Path(signed.__file__).parents[1] / "contracts/rune/example"
    for path in example.iterdir():
        if path.is_file():
            write_file(root / path.name, path.read_text(), 0o755)
    make_key(str(plugin_dir / "key"), "acme")
    text = f'version = 1\n[packages]\nsignature = "required"\ntrust = "{plugin_dir}/key.pub"\n'
    policy = write_file(plugin_dir / "policy.toml", text)
    runner_as_user.give(plugin_dir)
    call = ("call", "--policy", policy, root, "greet", "--input", '{"name": "world"}')
    refused = runner_as_user(*call)
    assert refused.returncode == 21 and f"has no {SIGNATURE_NAME}" in refused.stderr
    signing = runner_as_user("package", "sign", root, "--key", plugin_dir / "key")
    assert (signing.returncode, signing.stderr) == (0, ""), signing.stdout
    done = runner_as_user(*call)
    assert (done.returncode, json.loads(done.stdout)) == (0, {"greeting": "Hello, world!"}), done.stderr
    assert _copies_of_user(runner_as_user) == []
