"""Files that tell programs outside what to run: no grant lets a plugin write them. Nothing is left behind.

Each attack runs in the cage, where it must fail, and without one in a copy of the project, where it must
succeed.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from runner.contracts.registry import all_host_places
from sandbox.paths.guarded import MOST_PROJECTS, guarded_table
from tests.conftest import SPARE_UID, SYSTEM_PATH, Caller
from tests.tables import one_case

NAMES = [
    (row.name, row.content)
    for row in guarded_table(all_host_places().project).values()
    if not row.optional and row.sign is None
]

# What runs in the cage and in the control: each attack, in its own process, as JSON on stdout.
PROBE = """
import ctypes, json, os, sys

def text(path, content="evil", mode="w"):
    with open(path, mode) as file:
        file.write(content)

def exchange(one, other):
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.renameat2(-100, one.encode(), -100, other.encode(), 2):
        raise OSError(ctypes.get_errno(), "renameat2")

def reopen(path):
    fd = os.open(path, os.O_RDONLY)
    text(f"/proc/self/fd/{fd}")

told = []
for attack in json.loads(sys.argv[1]):
    read, write = os.pipe()
    if os.fork() == 0:
        try:
            exec(attack)
            answer = "done"
        except OSError as error:
            answer = os.strerror(error.errno)
        os.write(write, answer.encode())
        os._exit(0)
    os.close(write)
    told.append(open(read).read())
    os.wait()
print(json.dumps(told), flush=True)
if len(sys.argv) > 2:
    sys.stdin.readline()
    try:
        exec(sys.argv[2])
        print("done", flush=True)
    except OSError as error:
        print(os.strerror(error.errno), flush=True)
"""

EXISTING = (
    "text('.mcp.json')",
    "reopen('.mcp.json')",
    "os.truncate('.mcp.json', 0)",
    "os.chmod('.mcp.json', 0o600)",
    "os.unlink('.mcp.json')",
    "os.rename('.mcp.json', 'away')",
    "os.replace('beside', '.mcp.json')",
    "exchange('beside', '.mcp.json')",
    "os.link('.mcp.json', 'other'); text('other')",
    "text('.vscode/tasks.json')",
    "text('.vscode/settings.json')",
    "os.unlink('.vscode/settings.json')",
    "os.rename('.vscode', 'away'); os.mkdir('.vscode')",
    "exchange('sub', '.vscode')",
    "os.rename('sub', '.vscode/sub')",
    "text('.git/hooks/pre-commit')",
    "os.rename('.git/hooks', '.git/away'); os.mkdir('.git/hooks')",
    "os.rename('.git', 'away'); os.mkdir('.git')",
    "exchange('sub', '.git')",
    "text('.git/config')",
    "os.replace('beside', '.git/config')",
    "text('.git/commondir')",
    "text('.git/config.worktree')",
    "os.makedirs('.git/modules/m'); text('.git/modules/m/config')",
    "os.symlink('/tmp/x', '.cursor')",
    "text('sub/deep/.mcp.json')",
    "os.rename('sub', 'away')",
    "os.rename('sub/deep', 'sub/away')",
    "text('sub/deep/.git/hooks/pre-commit')",
    "text('sub/deep/.git/commondir')",
    "text('sub/deep/.git/config', mode='x')",
    "text('sub/deep/.git/config.worktree')",
    "text('mcp.json')",
    "text('bare.git/hooks/post-receive')",
    "text('bare.git/config')",
    "os.rename('bare.git', 'away')",
    "os.rename('bare.git/hooks', 'away')",
)
BARE = ("bare.git/hooks", "bare.git/objects", "bare.git/refs")
ALLOWED = (
    "text('new')",
    "text('beside')",
    "os.mkdir('folder'); text('folder/x')",
    "text('.git/index.lock'); os.rename('.git/index.lock', '.git/index')",
    "text('sub/x')",
    "text('sub/deep/x')",
    "os.rename('new', 'renamed')",
    "text('bare.git/refs/x')",
)
MISSING = (
    *(f"text({name!r}, mode='x')" for name, content in NAMES if content is not None),
    *(f"os.mkdir({name!r})" for name, content in NAMES if content is None),
    *(f"os.symlink('sub', {name!r})" for name, _ in NAMES),
    "os.mkdir('.git')",
    "text('.git', 'gitdir: sub', mode='x')",
)


@pytest.fixture
def owner(runner_as: Caller) -> int:
    """The owner of the project: root's plugins write as a mapped owner."""
    return runner_as.uid or SPARE_UID + 5


def _give(path: Path, owner: int) -> None:
    if os.geteuid() == 0:
        for each in [path, *path.rglob("*")]:
            os.chown(each, owner, owner, follow_symlinks=False)
            if owner == 0 and not each.is_symlink():
                each.chmod(0o777 if each.is_dir() else 0o666)


@pytest.fixture
def project(plugin_dir: Path, owner: int) -> Path:
    return _make_project(plugin_dir, owner)


def _make_project(plugin_dir: Path, owner: int) -> Path:
    place = plugin_dir / "project"
    for name in (".vscode", ".git/hooks", ".git/objects", ".git/refs", "sub/deep/.git/hooks", *BARE):
        (place / name).mkdir(parents=True)
    for name in (".mcp.json", "mcp.json", ".vscode/settings.json", "sub/deep/.mcp.json"):
        (place / name).write_text('{"mcpServers": {}}')
    (place / ".git/config").write_text("[core]\n")
    for name in (".git/HEAD", "sub/deep/.git/HEAD", "bare.git/HEAD"):
        (place / name).write_text("ref: refs/heads/main\n")
    (place / "beside").write_text("")
    _give(place, owner)
    return place


@pytest.fixture
def empty(plugin_dir: Path, owner: int) -> Path:
    place = plugin_dir / "empty"
    (place / "sub").mkdir(parents=True)
    _give(place, owner)
    return place


def _run(caller: Caller, project: Path, attacks: tuple[str, ...], *options: str) -> list[str]:
    python = "/usr/bin/python3"
    probe = ("--", python, "-c", PROBE, json.dumps(attacks))
    done = caller("run", *(options or ("--project=write",)), *probe, cwd=project)
    assert done.returncode == 0, done.stderr
    told: list[str] = json.loads(done.stdout)
    return told


def _snapshot(place: Path) -> dict[str, tuple[int, int, str]]:
    found = {}
    for path in sorted(place.rglob("*")):
        status = path.lstat()
        content = path.read_text() if path.is_file() else ""
        found[str(path.relative_to(place))] = status.st_mode, status.st_ino, content
    return found


def _control(place: Path, copy: Path, attack: str) -> str:
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(place, copy)
    done = subprocess.run(
        [sys.executable, "-c", PROBE, json.dumps([attack])],
        cwd=copy,
        capture_output=True,
        text=True,
        check=True,
        env={"PATH": SYSTEM_PATH},
    )
    (told,) = json.loads(done.stdout)
    return str(told)


def test_existing_host_files_cannot_be_changed(runner_as: Caller, project: Path, tmp_path: Path) -> None:
    controls = {attack: _control(project, tmp_path / "copy", attack) for attack in EXISTING}
    assert controls == dict.fromkeys(EXISTING, "done")
    before = _snapshot(project)
    told = dict(zip(EXISTING, _run(runner_as, project, EXISTING), strict=True))
    assert {attack for attack, answer in told.items() if answer == "done"} == set()
    assert _snapshot(project) == before  # and nothing of ours is left
    # Beside these the plugin can write.
    assert _run(runner_as, project, ALLOWED) == ["done"] * len(ALLOWED)
    assert (project / "renamed").read_text() == "evil" and (project / ".git/index").exists()


def test_nor_with_a_uid_that_is_reserved_for_the_plugin(runner_as_root: Caller, plugin_dir: Path) -> None:
    """Of a project that belongs to root no owner is mapped."""
    place = plugin_dir / "roots"
    (place / ".git").mkdir(parents=True)
    (place / ".git/HEAD").write_text("")
    (place / ".mcp.json").write_text("{}")
    _give(place, 0)
    attacks = ("text('.mcp.json')", "os.unlink('.mcp.json')", "os.mkdir('.vscode')", "os.mkdir('.git/hooks')")
    told = _run(runner_as_root, place, (*attacks, "text('beside')", "text('.git/x')"))
    assert told[-2:] == ["done", "done"] and "done" not in told[:-2]
    assert sorted(os.listdir(place)) == [".git", ".mcp.json", "beside"]
    assert sorted(os.listdir(place / ".git")) == ["HEAD", "x"]


def test_what_is_missing_cannot_be_made(runner_as: Caller, empty: Path, tmp_path: Path) -> None:
    controls = {attack: _control(empty, tmp_path / "copy", attack) for attack in MISSING}
    assert controls == dict.fromkeys(MISSING, "done")
    told = _run(runner_as, empty, (*MISSING, "text('beside')"), "--write", str(empty), "--cwd", str(empty))
    assert told[-1] == "done" and "done" not in told[:-1]
    assert sorted(os.listdir(empty)) == ["beside", "sub"]


def test_nor_in_projects_directly_below(
    runner_as: Caller, plugin_dir: Path, owner: int, tmp_path: Path
) -> None:
    """`--write ~/work`, with as many projects as are guarded, and a folder that is none."""
    work = plugin_dir / "work"
    projects = [f"p{number}" for number in range(MOST_PROJECTS)]
    for name in (*(f"{project}/.vscode" for project in projects), "p0/.git/objects", "other"):
        (work / name).mkdir(parents=True)
    (work / "p0/.git/HEAD").write_text("ref: refs/heads/main\n")
    _give(work, owner)
    attacks = (
        "text('p0/.mcp.json', mode='x')",
        "os.mkdir('p0/.idea')",
        "os.mkdir('p0/refs')",
        "os.mkdir('p0/.git/hooks')",
        "text('p0/.git/config', mode='x')",
        "os.mkdir('p1/.git')",
        f"os.mkdir('{projects[-1]}/.git')",
        "os.rename('p1', 'away')",
    )
    controls = {attack: _control(work, tmp_path / "copy", attack) for attack in attacks}
    assert controls == dict.fromkeys(attacks, "done")
    before = _snapshot(work)
    told = _run(runner_as, work, attacks)
    assert "done" not in told, dict(zip(attacks, told, strict=True))
    assert _snapshot(work) == before
    done = runner_as("run", "--project=write", "--", "/bin/mkdir", "other/.idea", cwd=work)
    assert f"{work}/other/.idea was made or changed, which a JetBrains IDE obeys" in done.stderr
    # That is one project too many now: what is missing in one can be made, and is named.
    done = runner_as("run", "--project=write", "--", "/bin/mkdir", "p1/.git", cwd=work)
    assert done.returncode == 0 and f"{work}/p1/.git was made or changed, which git obeys" in done.stderr


@pytest.mark.needs("root")
def test_a_plugin_cannot_write_the_configuration_of_its_host(account_as: Caller, project: Path) -> None:
    file = project / ".mcp.json"
    attacks = ("text('.mcp.json')", "open('.mcp.json').read()", "text('new')", "os.unlink('.mcp.json')")
    record = json.dumps({"file": str(file), "format": "2"})
    args = ["run", "--wrapped", record, "--name", "x"]
    args += ["--", "/usr/bin/python3", "-c", PROBE, json.dumps(attacks)]
    file.write_text(json.dumps({"mcpServers": {"x": {"command": "/opt/runner", "args": args}}}))
    before = file.read_text()
    allowed = account_as("allow", "--yes", "--write", project, file, cwd=project)
    assert allowed.returncode == 0, allowed.stderr
    done = account_as(*args, cwd=project)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told[2] == "done" and told.count("done") == 1  # nor read it: it holds other servers' secrets
    assert file.read_text() == before


@contextmanager
def _waiting(caller: Caller, place: Path, last: str) -> Iterator[subprocess.Popen[bytes]]:
    """A plugin that has started, and tries `last` when it gets a line."""
    probe = ("--", "/usr/bin/python3", "-c", PROBE, "[]", last)
    process = caller.start("run", "--project=write", *probe, cwd=place)
    with process:
        try:
            assert process.stdout is not None and process.stdout.readline() == b"[]\n", process.stderr
            yield process
        finally:
            process.kill()


def _finish(process: subprocess.Popen[bytes]) -> str:
    out, err = process.communicate(b"\n", 60)
    assert process.returncode == 0, err
    return out.decode().strip()


def test_two_at_once_and_the_last_one_removes_the_stand_ins(runner_as: Caller, empty: Path) -> None:
    attack = "os.rename('.vscode', 'away')"
    with _waiting(runner_as, empty, attack) as first, _waiting(runner_as, empty, attack) as second:
        assert json.loads((empty / ".mcp.json").read_text()) == {"mcpServers": {}}  # means nothing to a host
        assert os.listdir(empty / ".vscode") == []
        assert _finish(first) == "Device or resource busy"
        assert (empty / ".vscode").is_dir()
        assert _finish(second) == "Device or resource busy"
    assert os.listdir(empty) == ["sub"]


def test_what_a_killed_runner_leaves_is_removed_by_the_next(runner_as: Caller, empty: Path) -> None:
    with _waiting(runner_as, empty, "None") as process:
        process.kill()
    assert (empty / ".vscode").is_dir()
    assert _run(runner_as, empty, ("text('.vscode/x')",)) != ["done"]
    assert os.listdir(empty) == ["sub"]


def test_a_stand_in_that_the_host_has_filled_stays(runner_as: Caller, empty: Path) -> None:
    with _waiting(runner_as, empty, "text('.vscode/tasks.json')") as process:
        (empty / ".vscode/settings.json").write_text("{}")
        (empty / "opencode.json").write_text('{"a": 1}')
        assert _finish(process) == "Read-only file system"
    assert sorted(os.listdir(empty)) == [".vscode", "opencode.json", "sub"]
    assert os.listdir(empty / ".vscode") == ["settings.json"]


def _refused(caller: Caller, *options: str | Path, cwd: Path | str = "/") -> str:
    done = caller("run", *options, "--", "/usr/bin/true", cwd=cwd)
    assert done.returncode == 126, (done.returncode, done.stderr)
    return done.stderr


def test_a_folder_that_cannot_be_guarded_is_refused(runner_as: Caller, project: Path, owner: int) -> None:
    assert "hard link" in _linked(runner_as, project)
    shutil.move(project / ".vscode", project / "real")
    (project / ".vscode").symlink_to("real")
    _give(project, owner)
    assert f"{project}/.vscode is a symbolic link" in _refused(runner_as, "--write", project)


@one_case(
    ("link", "target", "refused"),
    [
        (".git/hooks/pre-commit", "../../scripts/x", True),
        (".vscode/tasks.json", "../scripts/x", True),
        (".vscode/tasks.json", "../scripts/missing", True),
        (".vscode/tasks.json", "settings.json", False),
        (".vscode/tasks.json", "../.mcp.json", False),
        (".vscode/tasks.json", "/etc/hostname", False),
        ("sub/.mcp.json", "../scripts/x", True),
        ("sub/.mcp.json", "/etc/hostname", False),
        ("sub/.git", "../scripts", True),
        ("sub/.vscode", "../scripts", True),
        ("sub/deep/.vscode", "../../.vscode", False),
        ("bare.git/hooks/post-receive", "../../scripts/x", True),
    ],
)
def test_a_link_to_what_the_plugin_writes_is_refused(
    runner_as: Caller, plugin_dir: Path, owner: int, link: str, target: str, refused: bool
) -> None:
    project = _make_project(plugin_dir, owner)
    (project / "scripts").mkdir()
    (project / "scripts/x").write_text("")
    (project / link).symlink_to(target)
    _give(project, owner)
    if not refused:
        told = _run(runner_as, project, (f"text({link!r})", "text('new')"))
        assert told[0] != "done" and told[1] == "done"
        return
    message = _refused(runner_as, "--write", project)
    end = os.path.normpath(project / link / ".." / target)
    assert f"{project / link} is a symbolic link to {end}, which it could change" in message


def test_the_folder_itself_is_a_bare_repository(runner_as: Caller, project: Path) -> None:
    attacks = ("text('hooks/post-receive')", "text('config')", "os.rename('hooks', 'away')", "text('refs/x')")
    told = _run(runner_as, project / "bare.git", attacks)
    assert told[-1] == "done" and "done" not in told[:-1]
    assert sorted(os.listdir(project / "bare.git")) == ["HEAD", "hooks", "objects", "refs"]


@one_case("name", [".mcp.json", ".git", ".vscode"])
def test_a_state_directory_holds_no_guarded_name(runner_as: Caller, plugin_dir: Path, name: str) -> None:
    place = plugin_dir / "state"
    (place / name).mkdir(parents=True)
    chosen = ("--name", "x", "--state-dir", place)
    told = _refused(runner_as, *chosen)
    assert f"it holds {name}, which tells programs outside" in told and "--state-dir" in told


def _linked(caller: Caller, project: Path) -> str:
    os.link(project / ".git/config", project / "copy")
    try:
        return _refused(caller, "--write", project)
    finally:
        os.unlink(project / "copy")


@one_case("name", [".vscode", ".git/hooks", ".mcp.json", "sub/deep/.git/hooks"])
def test_no_grant_is_or_lies_below_a_guarded_name(runner_as: Caller, project: Path, name: str) -> None:
    assert "which tells programs outside what to run" in _refused(runner_as, "--write", project / name)


def test_a_second_grant_opens_no_way(runner_as: Caller, project: Path) -> None:
    for name in ("sub", "sub/deep"):
        assert "would be mounted below" in _refused(runner_as, "--write", project, "--write", project / name)


@one_case(
    "name",
    [
        ".config/runner",
        ".config/runner/approvals/tools",
        ".config/runner/gateway",
        ".config",
        ".cursor",
        ".codex/x",
    ],
)
def test_no_grant_opens_the_places_of_a_home(runner_as: Caller, plugin_dir: Path, name: str) -> None:
    """As `--write`, and through a link."""
    home = plugin_dir / "home"
    (home / ".config/runner/approvals").mkdir(parents=True)
    (home / name).mkdir(parents=True, exist_ok=True)
    (home / "work").mkdir()
    _give(home, runner_as.uid or SPARE_UID + 5)
    environ = {"HOME": str(home), "XDG_CONFIG_HOME": str(home / ".config")}

    def run(*options: str | Path) -> subprocess.CompletedProcess[str]:
        return runner_as("run", *options, "--", "/usr/bin/true", env=environ)

    assert run("--write", home / name).returncode == 126
    (plugin_dir / "link").symlink_to(home / name)
    assert run("--write", plugin_dir / "link").returncode == 126
    control = run("--write", home / "work")
    assert control.returncode == 0, control.stderr


def test_a_configuration_elsewhere_is_protected_too(runner_as: Caller, plugin_dir: Path) -> None:
    place = plugin_dir / "xdg"
    for name in ("runner/approvals", "zed", "codex", "other"):
        (place / name).mkdir(parents=True)
    _give(place, runner_as.uid or SPARE_UID + 5)
    environ = {"XDG_CONFIG_HOME": str(place), "CODEX_HOME": str(place / "codex")}
    for name, status in (("runner", 126), ("zed", 126), ("codex", 126), ("", 126), ("other", 0)):
        done = runner_as("run", "--write", place / name, "--", "/usr/bin/true", env=environ)
        assert done.returncode == status, (name, done.stderr)
    # Entries of `runner wrap` have their approvals, and a gateway its servers, below the home all the same.
    own = plugin_dir / "home/.config/runner/gateway"
    own.mkdir(parents=True)
    (plugin_dir / "home/free").mkdir()
    _give(plugin_dir / "home", runner_as.uid or SPARE_UID + 5)
    environ["HOME"] = str(plugin_dir / "home")
    for path, status in ((own, 126), (own.parent, 126), (plugin_dir / "home/free", 0)):
        done = runner_as("run", "--write", path, "--", "/usr/bin/true", env=environ)
        assert done.returncode == status, (path, done.stderr)


@one_case("name", [".vscode", ".git/hooks", ".claude/new"])
def test_nor_as_a_state_directory(runner_as: Caller, project: Path, name: str) -> None:
    chosen = ("--name", "x", "--state-dir", project / name)
    assert "which tells programs outside what to run" in _refused(runner_as, *chosen)


def test_approvals_and_places_of_hosts_are_no_state_directories(runner_as: Caller) -> None:
    home = Path(runner_as.home)
    for place in (home / ".cursor", home / ".config/runner/approvals", home / ".config/runner/approvals/x"):
        told = _refused(runner_as, "--name", "x", "--state-dir", place)
        assert "no plugin may write it" in told or "which is the runner's own" in told
        assert not place.exists()
