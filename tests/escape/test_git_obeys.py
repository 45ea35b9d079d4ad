"""What git runs outside of the cage, after a plugin had its folder for writing: tried with the real git.

Each attack runs without a cage in a copy first, where git must obey it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import ROOT, SPARE_UID, SYSTEM_PATH, Caller
from tests.limits.cage import policy

# Makes the folder of its first argument a repository with a config that git runs. The second is its .git.
REPOSITORY = """
repository() {
    mkdir -p $1/objects $1/refs && echo 'ref: refs/heads/x' > $1/HEAD
    printf '[core]\\nrepositoryformatversion = 0\\nfsmonitor = "touch %s; false"\\n' $2 > $1/config
}
"""
TOP = "echo x > .git/HEAD; repository . $PWD/ran; printf 'bare = false\\nworktree = .\\n' >> config"
# The same, with what makes a folder a repository elsewhere.
ELSEWHERE = (
    "echo x > .git/HEAD; repository src/r $PWD/ran; mv src/r/HEAD .; echo src/r > commondir; "
    "printf '[extensions]\\nworktreeConfig = true\\n' >> src/r/config; "
    "printf '[core]\\nbare = false\\nworktree = %s\\n' $PWD > config.worktree"
)
# `git status` runs in a repository that the index calls a submodule.
SUBMODULE = (
    "repository node_modules/x/.git $PWD/ran; "
    "git update-index --add --cacheinfo 160000,$(git rev-parse HEAD),node_modules/x"
)
DEEPER = "repository src/.git $PWD/src/ran"
TODO = "echo 'exec touch ran' >> .git/rebase-merge/git-rebase-todo"


@pytest.fixture
def owner(runner_as: Caller) -> int:
    return runner_as.uid or SPARE_UID + 5


def _git(place: Path, *args: str, owner: int) -> subprocess.CompletedProcess[str]:
    """git, as the person whose folder it is: it obeys no config of a stranger."""
    environ = {
        "PATH": SYSTEM_PATH,
        "HOME": "/nonexistent",
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_EDITOR": "true",
        "GIT_SEQUENCE_EDITOR": "sed -i s/^pick/edit/",
        "GIT_CEILING_DIRECTORIES": str(place.parent),
        **{f"GIT_{who}_{what}": "x" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")},
    }
    user = owner if os.geteuid() == 0 else None
    return subprocess.run(
        ["git", *args],
        cwd=place,
        env=environ,
        capture_output=True,
        text=True,
        user=user,
        group=user,
        check=False,
    )


@pytest.fixture
def project(plugin_dir: Path, owner: int) -> Path:
    """A repository with two commits, a file and a folder."""
    place = plugin_dir / "project"
    (place / "src").mkdir(parents=True)
    (place / "src/x").write_text("x")
    if os.geteuid() == 0:
        for each in (place, *place.rglob("*")):
            os.chown(each, owner, owner)
    for args in (["init", "-q"], ["add", "src"], ["commit", "-qm", "1"]):
        done = _git(place, *args, owner=owner)
        assert done.returncode == 0, done.stderr
    _git(place, "commit", "-qm", "2", "--allow-empty", owner=owner)
    return place


def _copy(place: Path, owner: int) -> Path:
    copy = place.parent / "copy"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(place, copy)
    if os.geteuid() == 0:
        for each in (copy, *copy.rglob("*")):
            os.chown(each, owner, owner)
    return copy


def _uncaged(place: Path, attack: str, owner: int) -> None:
    user = owner if os.geteuid() == 0 else None
    subprocess.run(["/bin/sh", "-c", REPOSITORY + attack], cwd=place, check=True, user=user, group=user)


def test_no_folder_becomes_a_repository_unseen(runner_as: Caller, project: Path, owner: int) -> None:
    copy = _copy(project, owner)
    _uncaged(copy, f"{TOP}; {DEEPER}", owner)
    for place in (copy, copy / "src"):
        _git(place, "status", owner=owner)
        assert (place / "ran").exists(), "git must obey it in the control"

    report = runner_as.home / "report.json"
    options = ("--project=write", "--report", report)
    done = runner_as("run", *options, "--", "/bin/sh", "-c", f"{REPOSITORY}{TOP}; {DEEPER}", cwd=project)
    assert not (project / "refs").exists()  # nothing of ours is left
    _git(project, "status", owner=owner)
    assert not (project / "ran").exists()
    # An existing folder cannot be kept from becoming a repository: it is named.
    found = f"{project}/src/.git/config"
    assert f"runner: while it ran, {found} was made or changed, which git obeys\n" in done.stderr
    told = json.loads(report.read_text())["obeyed"]
    assert told["changed"] == [{"path": found, "obeyed_by": "git"}]
    assert (told["more"], told["incomplete"]) == (0, "") and told["entries"] > 10


def test_a_repository_in_parts_and_one_that_nobody_looks_for(
    runner_as: Caller, project: Path, owner: int
) -> None:
    for attack in (ELSEWHERE, SUBMODULE):
        copy = _copy(project, owner)
        _uncaged(copy, attack, owner)
        _git(copy, "status", owner=owner)
        assert (copy / "ran").exists(), "git must obey it in the control"

    run = ("run", "--project=write", "--", "/bin/sh", "-c")
    done = runner_as(*run, f"{REPOSITORY}{SUBMODULE}", cwd=project)
    found = f"{project}/node_modules/x/.git/config"
    assert f"runner: while it ran, {found} was made or changed, which git obeys\n" in done.stderr
    runner_as(*run, f"{REPOSITORY}{ELSEWHERE}", cwd=project)
    shutil.rmtree(project / "node_modules")
    assert (project / "HEAD").exists() and not (project / "commondir").exists()
    _git(project, "status", owner=owner)
    assert not (project / "ran").exists()


def test_however_it_ends(runner_as: Caller, project: Path, write_file: Callable[..., Path]) -> None:
    """Killed, ended with the runner by a signal, and in a session."""
    found = f"{project}/src/.git/config was made or changed"
    script = f"{REPOSITORY}repository src/.git x; echo ready; exec "
    done = runner_as("run", "--project=write", "--", "/bin/sh", "-c", f"{script}kill -9 $$", cwd=project)
    assert done.returncode == 137 and found in done.stderr, done.stderr
    shutil.rmtree(project / "src/.git")
    command = ("run", "--project=write", "--", "/bin/sh", "-c", f"{script}sleep 600")
    with runner_as.start(*command, cwd=project) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == b"ready\n"
            process.terminate()
            _, err = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 143 and found in err.decode(), err
    shutil.rmtree(project / "src/.git")

    # A folder that cannot be listed can be entered, and git finds .git in it by its name.
    closed = "mkdir closed && repository closed/.git x && chmod 300 closed"
    done = runner_as("run", "--project=write", "--", "/bin/sh", "-c", REPOSITORY + closed, cwd=project)
    expected = "closed cannot be listed" if runner_as.uid else "closed/.git/config was made or changed"
    assert f"{project}/{expected}" in done.stderr
    (project / "closed").chmod(0o700)  # nobody else gets it so

    example = ROOT / "runner/contracts/nexo/example"
    manifest = (example / "plugin.toml").read_text().replace("# fs_read_paths", "# ")
    manifest = manifest.replace("# fs_write_paths = [", f'fs_write_paths = ["{project}"] #')
    program = (example / "plugin.py").read_text()
    line = next(each for each in program.splitlines() if each.startswith("import json"))
    write = f"import os; os.mkdir({str(project)!r} + '/src/.vscode')"
    plugin = write_file(project.parent / "plugin/nexo-plugin.toml", manifest).parent
    write_file(plugin / "plugin.py", program.replace(line, f"{line}\n{write}"), 0o755)
    allowed = write_file(project.parent / "policy.toml", policy(write=(str(project),)))
    report = runner_as.home / "report.json"
    words = (plugin, "greeter_greet", "--input", '{"name": "x"}', "--policy", allowed, "--report", report)
    done = runner_as("call", *words)
    assert done.returncode == 0, done.stderr
    found = f"{project}/src/.vscode"
    assert f"runner: while it ran, {found} was made or changed, which VS Code obeys\n" in done.stderr
    changed = json.loads(report.read_text())["obeyed"]["changed"]
    assert {"path": found, "obeyed_by": "VS Code"} in changed


def test_the_state_of_a_rebase(runner_as: Caller, project: Path, owner: int) -> None:
    # A new one is named. While there is none, git sees none: a stand-in would be one.
    made = f"git status; mkdir .git/rebase-merge; {TODO}"
    done = runner_as("run", "--project=write", "--", "/bin/sh", "-c", made, cwd=project)
    assert "rebas" not in done.stdout
    named = f"{project}/.git/rebase-merge was made or changed, which git rebase --continue obeys"
    assert named in done.stderr
    shutil.rmtree(project / ".git/rebase-merge")

    begun = _git(project, "rebase", "-i", "--root", owner=owner)
    assert (project / ".git/rebase-merge/git-rebase-todo").exists(), begun.stderr
    copy = _copy(project, owner)
    _uncaged(copy, TODO, owner)
    for _ in range(4):
        _git(copy, "rebase", "--continue", owner=owner)
    assert (copy / "ran").exists(), "git must obey it in the control"

    commit = "git -c user.name=x -c user.email=x commit -q --allow-empty -m caged && git log -1 --format=%s"
    ways = ("mv .git/rebase-merge .git/y", TODO, "mkdir .git/rebase-apply", commit)
    done = runner_as("run", "--project=write", "--", "/bin/sh", "-c", "; ".join(ways), cwd=project)
    assert "Read-only file system" in done.stderr and "busy" in done.stderr
    assert done.stdout == "caged\n", done.stderr  # it can still commit
    assert f"{project}/.git/rebase-apply was made or changed" in done.stderr
    assert f"{project}/.git/rebase-merge was" not in done.stderr
    os.rmdir(project / ".git/rebase-apply")
    for _ in range(4):
        _git(project, "rebase", "--continue", owner=owner)
    assert not (project / "ran").exists() and not (project / ".git/rebase-merge").exists()


def test_git_works_beside_the_stand_ins(runner_as: Caller, project: Path) -> None:
    """With a stand-in HEAD, `git diff HEAD` would fail."""
    script = "git diff HEAD && git log --oneline HEAD | wc -l && git reset --hard HEAD -q && git status -s"
    done = runner_as("run", "--project=write", "--", "/bin/sh", "-c", script, cwd=project)
    assert done.returncode == 0, done.stderr
    first, *untracked = done.stdout.splitlines()
    assert first == "2"
    # The files among the stand-ins: few, because `git add -A` takes them in.
    names = [".crush.json", ".mcp.json", "crush.json", "opencode.json", "opencode.jsonc", "refs"]
    assert untracked == [f"?? {name}" for name in names]
    assert "while it ran" not in done.stderr
