"""runner new: a plugin to start from, all of it or nothing."""

from __future__ import annotations

import errno
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from runner.cli import main, new
from runner.contracts.registry import contract_names, example_folder, find_contract
from runner.manifest.load import load
from tests.conftest import Caller
from tests.tables import one_case, without_limits_note
from tests.template import prepared

NAMES = contract_names()


def run_as_printed(
    caller: Caller, commands: Sequence[str], folder: Path
) -> Iterator[subprocess.CompletedProcess[str]]:
    """Run lines as a person would paste them: bash says what the words of each are."""
    for command in commands:
        script = f"runner() {{ printf '%s\\0' \"$@\"; }}\n{command}\n"
        words = subprocess.run(["/bin/bash", "-c", script], cwd=folder, stdout=subprocess.PIPE, check=True)
        yield caller(*words.stdout.decode().split("\0")[:-1], cwd=folder, timeout=120)


def forget_state(caller: Caller, plugin: Path) -> None:
    """Remove what the plugin has kept in its place on this machine, if it asks for state at all."""
    done = caller("state", "remove", plugin)
    assert done.returncode == 0 or "has no state" in done.stderr, done.stderr


def need_a_second_file(folder: Path) -> None:
    """Have the program need a file beside it, as that of a plugin that grows."""
    [program] = [each for each in folder.rglob("*") if each.is_file() and os.access(each, os.X_OK)]
    (program.parent / "second.txt").write_text("found")
    needed = 'assert open(__file__.rpartition("/")[0] + "/second.txt").read() == "found"'
    text = program.read_text()
    assert text.count("\nimport sys\n") == 1
    program.write_text(text.replace("\nimport sys\n", f"\nimport sys\n{needed}\n"))


def printed_commands(said: str) -> list[str]:
    return re.findall(r"^  (runner .*)$", said, re.MULTILINE)


def tree(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    }


def only_plugin_id(folder: Path) -> str:
    read = load(str(folder))
    assert read.plugin is not None and read.diagnostics == ()
    return read.plugin.id.removeprefix(find_contract(read.plugin.contract).example.namespace)


# --- what is printed works ---------------------------------------------------------------------------------


@pytest.mark.launches
@pytest.mark.usefixtures("nothing_left")
@one_case("folder", ["hello", "my plugin's/one-more"])
@one_case("name", NAMES)
def test_the_commands_that_new_prints_work(
    runner_as: Caller, plugin_dir: Path, name: str, folder: str
) -> None:
    runner_as.give(plugin_dir)
    done = runner_as("new", name, folder, cwd=plugin_dir)
    assert (done.returncode, done.stderr) == (0, "")
    need_a_second_file(plugin_dir / folder)
    runner_as.give(plugin_dir / folder)
    commands = printed_commands(done.stdout)
    assert [command.split()[1] for command in commands] == ["check", "tools", "call", "exec"]
    if folder != "hello":  # how a folder is quoted does not depend on the verb
        commands = commands[::2]
    ended = list(run_as_printed(runner_as, commands, plugin_dir))
    forget_state(runner_as, plugin_dir / folder)
    found = [(each.returncode, without_limits_note(each.stderr)) for each in ended]
    assert found == [(0, "")] * len(commands)
    assert only_plugin_id(plugin_dir / folder).replace("_", "-") == os.path.basename(folder)


@pytest.mark.launches
@pytest.mark.needs("root")
@one_case("name", NAMES)
def test_roots_umask_does_not_close_it_to_the_plugin(
    runner_as_root: Caller, plugin_dir: Path, name: str
) -> None:
    closing = prepared(runner_as_root, "import os\nos.umask(0o077)")
    done = closing("new", name, "a/hello", cwd=plugin_dir)
    assert done.returncode == 0 and done.stderr == ""
    for path in (plugin_dir / "a", *(plugin_dir / "a").rglob("*")):
        assert path.stat().st_mode & 0o044 == 0o044
    _, _, call, _ = printed_commands(done.stdout)
    [ended] = run_as_printed(runner_as_root, [call], plugin_dir)
    forget_state(runner_as_root, plugin_dir / "a" / "hello")
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.launches
@pytest.mark.needs("root")
def test_a_folder_that_plugins_cannot_see_is_named_at_once(runner_as_root: Caller, plugin_dir: Path) -> None:
    """Root's most likely place: its home, which no policy can show to a plugin."""
    home = plugin_dir / "closed"
    home.mkdir(0o700)
    done = runner_as_root("new", NAMES[0], home / "hello")
    assert done.returncode == 0 and (home / "hello").is_dir()
    assert "It would not be launched there:" in done.stderr and str(home) in done.stderr


# --- what is written ---------------------------------------------------------------------------------------


@one_case("name", NAMES)
def test_it_is_the_example_under_another_name(runner_as_user: Caller, plugin_dir: Path, name: str) -> None:
    runner_as_user.give(plugin_dir)
    example = Path(example_folder(name))
    own = only_plugin_id(example)
    assert runner_as_user("new", name, own, "--name", own, cwd=plugin_dir).returncode == 0
    assert tree(plugin_dir / own) == tree(example)
    assert runner_as_user("new", name, "zebra7", cwd=plugin_dir).returncode == 0
    written = tree(plugin_dir / "zebra7")
    renamed = {
        path.replace("zebra7", own): text.replace(b"zebra7", own.encode()) for path, text in written.items()
    }
    assert renamed == tree(example)
    assert only_plugin_id(plugin_dir / "zebra7") == "zebra7"
    assert not any(own.encode() in text for text in written.values())


@one_case("name", NAMES)
def test_a_name_other_than_the_folders_works_or_is_refused(
    runner_as_user: Caller, plugin_dir: Path, name: str
) -> None:
    runner_as_user.give(plugin_dir)
    for words, plugin in ((["other", "--name", "zebra8"], "zebra8"), (["My plugin"], "")):
        done = runner_as_user("new", name, *words, cwd=plugin_dir)
        if name == "ainb":
            assert done.returncode == 2 and "hosts need both to have the same name" in done.stderr
            assert os.listdir(plugin_dir) == []
            continue
        assert done.returncode == 0, done.stderr
        assert only_plugin_id(plugin_dir / words[0]) == plugin or not plugin
        assert runner_as_user("check", words[0], cwd=plugin_dir).returncode == 0


@pytest.mark.needs("root")
def test_a_filesystem_without_exec_is_named_where_it_matters(
    runner_as_root: Caller, plugin_dir: Path
) -> None:
    """Nothing is tried out in the folder for temporary files, which often has none."""
    script = """
        cd "$1" && shift && mkdir tmp && mount -t tmpfs -o noexec none tmp && export TMPDIR="$PWD/tmp"
        "$@" new ainb hello && "$@" check hello; echo "there: $?"
        "$@" new ainb tmp/hello; echo "in tmp: $?"; ls tmp
    """
    done = subprocess.run(
        ["unshare", "-m", "/bin/sh", "-c", script, "sh", plugin_dir, *runner_as_root.command()],
        env=dict(runner_as_root.environ),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "there: 0\n" in done.stdout, done.stderr
    assert done.stdout.endswith("in tmp: 2\n")  # nothing was left
    assert "'hello' beside the manifest is on a filesystem that is mounted noexec" in done.stderr
    assert only_plugin_id(plugin_dir / "hello") == "hello"


@pytest.mark.parametrize("name", NAMES)
def test_programs_are_executable_even_if_the_wheel_has_forgotten_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(example_folder(name), tmp_path / "unpacked")
    for path in (tmp_path / "unpacked").rglob("*"):
        path.chmod(0o644)
    monkeypatch.setattr(new, "example_folder", lambda _: str(tmp_path / "unpacked"))
    assert main(["new", name, str(tmp_path / "hello")]) == 0
    files = [path for path in (tmp_path / "hello").rglob("*") if path.is_file()]
    modes = {path: path.stat().st_mode & 0o111 for path in files}
    for file, mode in modes.items():
        program = file.read_bytes().startswith(b"#!")
        assert bool(mode) == program
    assert any(modes.values())


@one_case("given", [".", "empty", "link", "empty/", "deep/er/still"])
def test_an_empty_folder_is_filled_and_a_missing_one_is_made(
    runner_as_user: Caller, plugin_dir: Path, given: str
) -> None:
    (plugin_dir / "here" / "empty").mkdir(parents=True)
    if given == ".":
        (plugin_dir / "here" / "empty").rmdir()
    (plugin_dir / "link").symlink_to("here/empty")
    runner_as_user.give(plugin_dir)
    where = plugin_dir if given == "link" else plugin_dir / "here"
    done = runner_as_user("new", NAMES[0], given, cwd=where)
    assert done.returncode == 0, done.stderr
    assert len(tree(where / given)) == len(tree(Path(example_folder(NAMES[0]))))
    assert (plugin_dir / "link").is_symlink()


def test_nothing_is_written_or_changed_through_a_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A plugin that can write to the folder above swaps the new folder for a link at once."""
    victim = tmp_path / "victim"
    victim.mkdir(mode=0o700)

    def mkdir(path: str, *args: Any, **more: Any) -> None:
        real(path, *args, **more)
        if os.path.basename(path) == "swapped":
            (tmp_path / "swapped").rename(tmp_path / "moved")
            (tmp_path / "swapped").symlink_to(victim)

    words = ["new", NAMES[0], str(tmp_path / "swapped")]
    assert main(words) == 0  # the control
    shutil.rmtree(tmp_path / "swapped")
    real = os.mkdir
    monkeypatch.setattr(os, "mkdir", mkdir)
    assert main(words) == 2
    assert f"{tmp_path}/swapped is a symbolic link to {victim}" in capsys.readouterr().err
    assert (os.listdir(victim), victim.stat().st_mode & 0o777) == ([], 0o700)


# --- its name ----------------------------------------------------------------------------------------------


def test_the_folders_name_is_spelled_as_the_contract_wants_it(
    runner_as_user: Caller, plugin_dir: Path
) -> None:
    runner_as_user.give(plugin_dir)
    for folder, name in {"My-Plugin": "my_plugin", "a.b c": "a_b_c", "plain": "plain"}.items():
        done = runner_as_user("new", "nexo", folder, cwd=plugin_dir)
        assert (done.returncode, done.stderr) == (0, "") and only_plugin_id(plugin_dir / folder) == name
        assert f" {name}_greet " in done.stdout
    for folder, name in {"Grüße": "greeter", "7up": "greeter", "x" * 200: "greeter"}.items():
        done = runner_as_user("new", "nexo", folder, cwd=plugin_dir)
        assert done.returncode == 0 and only_plugin_id(plugin_dir / folder) == name
        assert "cannot be the id of a nexo plugin; --name chooses another id" in done.stderr


@pytest.mark.parametrize(
    "name", ["", "a b", 'a"b', "a'b", "a\nb", "../x", "-x", "é", "a" * 65, "{x}", "${state_dir}", "a\\u0041"]
)
@pytest.mark.parametrize("contract", NAMES)
def test_a_name_that_no_file_could_hold_is_refused(
    contract: str, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["new", contract, str(tmp_path / "x"), f"--name={name}"]) == 2
    assert "use letters, digits, '.', '_' and '-'" in capsys.readouterr().err
    assert os.listdir(tmp_path) == []


def test_a_name_the_contract_refuses_is_refused_in_its_words(
    runner_as_user: Caller, plugin_dir: Path
) -> None:
    runner_as_user.give(plugin_dir)
    done = runner_as_user("new", "nexo", "x", "--name", "My-Plugin", cwd=plugin_dir)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert "--name 'My-Plugin' does not fit a plugin of nexo" in done.stderr and "lower-case" in done.stderr
    assert os.listdir(plugin_dir) == []


# --- refused, and nothing left -----------------------------------------------------------------------------


def test_nothing_is_overwritten(
    runner_as_user: Caller, plugin_dir: Path, write_file: Callable[..., Path]
) -> None:
    write_file(plugin_dir / "full" / ".hidden", "mine")
    write_file(plugin_dir / "file", "mine")
    (plugin_dir / "dangling").symlink_to("nowhere")
    (plugin_dir / "loop").symlink_to("loop")
    (plugin_dir / "to-full").symlink_to("full")
    runner_as_user.give(plugin_dir)
    before = sorted(map(str, plugin_dir.rglob("*")))
    for given, complaint in {
        "full": "full is not empty, and nothing is overwritten",
        "to-full": "to-full is not empty",
        "file": "file is not a folder",
        "file/below": "file is not a folder",
        "dangling": "dangling is a link to nowhere, which does not exist",
        "dangling/below": "dangling is a link to nowhere, which does not exist",
        "loop": "loop is a link to loop, which does not exist",
        "": "the path of DIR is empty",
    }.items():
        done = runner_as_user("new", NAMES[0], given, cwd=plugin_dir)
        assert (done.returncode, done.stdout) == (2, ""), given
        assert complaint in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr
    assert sorted(map(str, plugin_dir.rglob("*"))) == before
    assert (plugin_dir / "full" / ".hidden").read_text() == "mine"


@pytest.mark.needs("user")
def test_a_place_that_cannot_be_written_is_named(runner_as_user: Caller, plugin_dir: Path) -> None:
    (plugin_dir / "closed").mkdir(0o755)  # not the caller's
    (plugin_dir / "private").mkdir(0o700)
    for given, reason in {
        "closed": "Permission denied",
        "closed/a/b": "Permission denied",
        "private": "Permission denied",
        "private/x": "Permission denied",
        "x" * 300: "File name too long",
    }.items():
        done = runner_as_user("new", NAMES[0], given, cwd=plugin_dir)
        assert (done.returncode, done.stdout) == (1, ""), given
        assert f"{reason}; nothing was written, name another DIR\n" in done.stderr, done.stderr
    assert sorted(path.name for path in plugin_dir.rglob("*")) == ["closed", "private"]


@pytest.mark.parametrize("existing", [True, False])
@pytest.mark.parametrize(
    "interruption", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()]
)
def test_a_failure_half_way_leaves_nothing(
    existing: bool,
    interruption: BaseException,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path / "a" / "b"
    if existing:
        folder.mkdir(parents=True)
    written: list[str] = []

    def fail_at_the_second(fd: int, mode: int) -> None:
        path = os.readlink(f"/proc/self/fd/{fd}")
        if path.startswith(str(folder)):
            written.append(path)
            if len(written) == 2:
                raise interruption

    monkeypatch.setattr(os, "fchmod", fail_at_the_second)
    assert main(["new", NAMES[0], str(folder)]) in (1, 130)
    assert len(written) == 2
    assert sorted(tmp_path.rglob("*")) == ([folder.parent, folder] if existing else [])


def test_a_contract_without_an_example_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(new, "example_folder", lambda name: str(tmp_path / "none"))
    assert main(["new", NAMES[0], str(tmp_path / "x")]) == 1
    assert f"the contract {NAMES[0]} has no example" in capsys.readouterr().err
    assert os.listdir(tmp_path) == []


def test_a_contract_is_guessed(runner_as_user: Caller) -> None:
    done = runner_as_user("new", NAMES[0] + "x", "somewhere")
    assert done.returncode == 2
    assert f"did you mean '{NAMES[0]}'?" in done.stderr and all(name in done.stderr for name in NAMES)


def test_every_contract_tells_what_to_call() -> None:
    for name in NAMES:
        example = find_contract(name).example
        assert example.call and example.input.startswith("{")
