"""Staged writes with the real cage: what a plugin writes waits, and a person takes it."""

from __future__ import annotations

import json
import os
import pty
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT, SPARE_UID, SYSTEM_PATH, Caller

pytestmark = [pytest.mark.launches, pytest.mark.usefixtures("nothing_left")]

# What a plugin may do to a folder. The last line says what it saw.
CHANGE = """
cd "$1" && echo more >> a && rm b && rm -r sub && mkdir sub && echo new > sub/new
mkdir .vscode && echo '{}' > .vscode/tasks.json && ln -s /etc/passwd out && touch -t 200001010000 same
ls -A | tr '\\n' ' '
"""


class Project:
    """A person's folder."""

    def __init__(self, caller: Caller, folder: Path) -> None:
        self.caller, self.folder = caller, folder
        for name in ("a", "b", "same", "sub/old"):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(f"{name}\n")
        self.owner = caller.uid or SPARE_UID
        for path in (folder, *folder.rglob("*")):
            if not caller.uid:
                os.chown(path, self.owner, self.owner)
        if caller.uid:
            caller.give(folder)
        self.before = self.tree()

    def tree(self) -> dict[str, str]:
        return {
            str(path.relative_to(self.folder)): path.read_text() if path.is_file() else ""
            for path in sorted(self.folder.rglob("*"))
        }

    def run(self, code: str, *options: str, ends: int = 0) -> subprocess.CompletedProcess[str]:
        words = ("--write", str(self.folder), "--staged", *options)
        done = self.caller("run", *words, "--", "sh", "-c", code, "sh", str(self.folder))
        assert done.returncode == ends, done.stderr
        return done

    def stage(self, code: str) -> str:
        """Returns the id of what waits."""
        report = Path(self.caller.environ["TMPDIR"]) / "report"
        self.run(code, "--report", str(report))
        told = json.loads(report.read_text())["staged"]
        report.unlink()
        return "" if told is None else str(told["id"])

    def verb(self, *words: str, ends: int = 0) -> str:
        done = self.caller(*words)
        assert done.returncode == ends, done.stderr
        return done.stdout + done.stderr


@pytest.fixture
def project(runner_as: Caller, plugin_dir: Path) -> Iterator[Project]:
    found = Project(runner_as, plugin_dir / "project")
    yield found
    for each in json.loads(runner_as("changes", "--json").stdout)["changesets"]:
        if str(plugin_dir) in each["folders"][0]:  # root's store is the machine's
            runner_as("discard", each["id"])


@pytest.mark.both_callers
def test_it_waits_until_it_is_taken(project: Project) -> None:
    done = project.run(CHANGE)
    assert done.stdout.split() == [".vscode", "a", "out", "same", "sub"]
    assert project.tree() == project.before
    name = done.stderr.rpartition(" ")[2].strip()
    waits = "4 added, 1 modified, 2 removed; 3 of them cannot simply be applied"
    assert waits in done.stderr and f"runner diff {name}" in done.stderr
    listed = project.verb("changes")
    assert f"{name}  " in listed and str(project.folder) in listed
    told = json.loads(project.verb("diff", name, "--json"))["changes"]
    changes = {(each["change"], os.path.relpath(each["path"], project.folder)): each["rule"] for each in told}
    assert changes == {
        **dict.fromkeys((("D", "b"), ("D", "sub/old"), ("M", "a"), ("A", "sub/new")), None),
        **dict.fromkeys((("A", ".vscode"), ("A", ".vscode/tasks.json")), "guarded"),
        ("A", "out"): "link",
    }
    text = project.verb("diff", name)
    assert "+more" in text and "-b" in text and "set-id" not in text
    # The next run does not see it, and names it.
    again = project.run("cat $1/a")
    assert again.stdout == "a\n" and f"runner diff {name}" in again.stderr
    # Only a part, below the folder or by its full name.
    assert "1 modified" in project.verb("apply", name, "a")
    assert (project.folder / "a").read_text() == "a\nmore\n"
    assert "nothing was changed there" in project.verb("apply", name, "nowhere", ends=2)
    said = project.verb("apply", name, ends=1)
    assert f"D {project.folder}/b" in said and "guarded" in said and "absolute" in said
    assert project.tree() == {"a": "a\nmore\n", "same": "same\n", "sub": "", "sub/new": "new\n"}
    owners = {path.stat().st_uid for path in project.folder.rglob("*")}
    assert owners == {project.owner}
    project.verb("apply", name, "--force", f"{project.folder}/.vscode", ends=1)
    assert (project.folder / ".vscode/tasks.json").exists()
    assert f"discarded {name}" in project.verb("discard", name)
    assert name not in project.verb("changes")


@pytest.mark.parametrize(
    ("answers", "told", "taken", "kept"),
    [
        (("l", "a"), ("+more", "applied: 0 added, 1 modified, 0 removed"), True, False),
        (("d",), (), False, False),
        (("what",), ("kept: runner diff",), False, True),
    ],
)
def test_at_a_terminal_the_person_decides_at_once(
    project: Project, answers: tuple[str, ...], told: tuple[str, ...], taken: bool, kept: bool
) -> None:
    ours, theirs = pty.openpty()
    words = ("run", "--write", str(project.folder), "--staged", "--", "sh", "-c", 'echo more >> "$1/a"', "sh")
    process = project.caller.start(
        *words, str(project.folder), stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
    )
    os.close(theirs)
    said = ""
    with open(ours, "r+b", buffering=0) as terminal:
        for answer in answers:
            while not said.endswith("[a/l/d/K] "):
                said += terminal.read(4096).decode()
            terminal.write(f"{answer}\n".encode())
            said += terminal.read(1).decode()
        with suppress(OSError):  # EIO: everybody has closed it
            while piece := terminal.read(4096):
                said += piece.decode()
    assert process.wait(60) == 0 and all(each in said for each in told), said
    assert ((project.folder / "a").read_text() == "a\nmore\n") is taken
    listed = json.loads(project.verb("changes", "--json"))["changesets"]
    assert any(str(project.folder) in each["folders"] for each in listed) is kept
    if kept:
        assert "changes that wait" in project.verb("state", "list")


def test_nothing_is_left_of_a_run_that_changed_nothing(project: Project) -> None:
    assert project.stage("cat $1/a; echo a > $1/a.new; rm $1/a.new") == ""
    done = project.run("echo x >> $1/a && printf 'a\\n' > $1/a")
    assert "wait" not in done.stderr


@pytest.mark.both_callers
def test_git_works_in_it(project: Project) -> None:
    """It commits in its layer, and sets a hook. The commit is taken, and the hook is not."""
    git = shutil.which("git", path=SYSTEM_PATH)
    if git is None:
        pytest.skip("needs git (apt-get install git)")
    alone = {"HOME": str(project.folder), "GIT_CONFIG_NOSYSTEM": "1", "PATH": SYSTEM_PATH}

    def own(*words: str) -> str:
        become = [
            "/usr/bin/setpriv",
            f"--reuid={project.owner}",
            f"--regid={project.owner}",
            "--clear-groups",
        ]
        words = ("git", "-c", "user.name=x", "-c", "user.email=x@x", "-C", str(project.folder), *words)
        prefix = become if os.geteuid() == 0 else []
        return subprocess.run([*prefix, *words], check=True, capture_output=True, text=True, env=alone).stdout

    own("init", "-q")
    own("add", "-A")
    own("commit", "-qm", "first")
    name = project.stage(
        "cd $1 && export HOME=/tmp && git config --global user.name x && git config --global user.email x@x"
        " && echo more >> a && git commit -qam second && git gc -q && echo evil > .git/hooks/pre-commit"
    )
    assert own("log", "--format=%s").split() == ["first"]
    said = project.verb("apply", name, ends=1)
    assert said.count("guarded") == 1 and ".git/hooks/pre-commit" in said
    assert own("log", "--format=%s").split() == ["second", "first"]
    assert own("status", "--porcelain") == "" and own("fsck", "--strict") == ""


def test_thousands_of_files_and_folders_in_place_of_others(project: Project) -> None:
    """As an installation of packages leaves them, and the next one replaces them."""
    make = (
        "cd $1 && mkdir -p node_modules/.bin && for i in $(seq 300); do mkdir -p node_modules/p$i/lib;"
        " for j in 1 2 3 4 5 6 7 8; do echo $i $j > node_modules/p$i/lib/$j; done; done;"
        " ln -s ../p1/lib/1 node_modules/.bin/one"
    )
    name = project.stage(make)
    assert "2400 added" not in project.verb("diff", name, "--stat", "sub/../node_modules/p1")
    project.verb("apply", name)
    assert len(list((project.folder / "node_modules").rglob("*"))) == 300 * 10 + 2
    name = project.stage(
        f"rm -rf $1/node_modules; {make}; rm -r $1/node_modules/p7; echo x > $1/node_modules/p7"
    )
    told = project.verb("diff", name, "--stat")
    assert told.splitlines()[-1] == "1 added, 0 modified, 10 removed"
    project.verb("apply", name)
    assert (project.folder / "node_modules/p7").read_text() == "x\n"
    assert (project.folder / "node_modules/p8/lib/1").read_text() == "8 1\n"


def test_a_folder_that_is_gone(project: Project) -> None:
    """Part of it was applied before."""
    name = project.stage("echo x > $1/a; echo x > $1/b")
    project.verb("apply", name, "a")
    project.folder.rename(project.folder.with_name("moved"))
    for verb in ("diff", "apply"):
        assert f"{project.folder} cannot be compared" in project.verb(verb, name, ends=2)
    assert f"discarded {name}" in project.verb("discard", name)


def test_a_folder_that_was_put_in_the_place_of_another(project: Project) -> None:
    """Its files are older than the run, and so is what its own times say."""
    other = project.folder.with_name("other")
    shutil.copytree(project.folder / "sub", other)
    for path in (other, *other.rglob("*")):
        os.chown(path, project.owner, project.owner)
    name = project.stage("echo more >> $1/sub/old")
    (project.folder / "sub").rename(project.folder / "sub.bak")
    other.rename(project.folder / "sub")
    (project.folder / "sub/new").touch()
    assert "conflict" in project.verb("apply", name, ends=1)
    assert (project.folder / "sub/old").read_text() == "sub/old\n"


REFUSED: list[tuple[str, str]] = [("a", "it is a file"), ("", "belongs to root")]


@pytest.mark.needs("root")
def test_where_nothing_can_be_staged_nothing_starts(runner_as_root: Caller, plugin_dir: Path) -> None:
    folder = plugin_dir / "roots"
    folder.mkdir()
    (folder / "a").touch()
    os.chown(folder / "a", SPARE_UID, SPARE_UID)
    for name, why in REFUSED:
        words = ("run", "--write", str(folder / name), "--staged", "--", "sh", "-c", f"echo x > {folder}/b")
        done = runner_as_root(*words)
        assert done.returncode == 126 and why in done.stderr and os.listdir(folder) == ["a"]


def test_a_guarded_link_into_the_folder_is_refused(project: Project) -> None:
    """It leads to a file that would be applied as any other, and that git runs."""
    (project.folder / ".git/hooks").mkdir(parents=True)
    (project.folder / ".git/HEAD").write_text("ref: refs/heads/main\n")
    (project.folder / ".git/hooks/pre-commit").symlink_to("../../a")
    for path in project.folder.rglob("*"):
        os.chown(path, project.owner, project.owner, follow_symlinks=False)
    done = project.run("echo evil >> $1/a", ends=126)
    assert "symbolic link" in done.stderr and "narrower folder" in done.stderr


def test_options_of_others_that_stage(
    runner_as: Caller, project: Project, plugin_dir: Path, write_file: Any
) -> None:
    """A server's own wish, and a person's yes that holds only so."""
    entry: dict[str, Any] = {"command": "/bin/sh", "args": ["-c", f"echo x > {project.folder}/new"]}
    asks = {"x-sandbox": {"write": [str(project.folder)], "staged": True}}
    file = write_file(
        plugin_dir / "mcp.json", json.dumps({"mcpServers": {"own": entry | asks, "other": entry}})
    )
    runner_as.give(file)
    for words in (
        ("--server", "own", "--yes"),
        ("--server", "other", "--write", str(project.folder), "--staged", "--yes"),
    ):
        said = runner_as("allow", str(file), *words)
        assert said.returncode == 0 and "waits for you" in said.stdout + said.stderr, said
        done = runner_as("exec", str(file), *words[:2])
        assert done.returncode == 0 and "1 added" in done.stderr, done.stderr
        # From the stored plan, too.
        assert "1 added" in runner_as("exec", str(file), *words[:2]).stderr
        assert project.tree() == project.before


def test_wrong_words(runner_as_user: Caller) -> None:
    for words, said in (
        (("diff",), "no changes wait"),
        (("apply", "1f2e3d4c"), "no changes wait"),
        (("discard", "1f2e3d4c"), "no changes wait"),
        (("discard", "--all", "1f2e3d4c"), "leave the ids out"),
        (("changes", "x"), "unrecognized arguments"),
    ):
        done = runner_as_user(*words)
        assert done.returncode == 2 and said in done.stderr, done.stderr
    assert runner_as_user("changes").stdout == "no changes wait\n"
    assert runner_as_user("discard", "--all").returncode == 0


# A folder on a small disk of its own, which is there in this process's mounts only.
_ON_SMALL_DISK = """
set -e
place=$0 runner=$1
mount -t tmpfs -o size=1m,uid=$2,gid=$2,mode=755 none "$place"
printf 'old\\n' > "$place/a"; chown "$2:$2" "$place/a"
runner() { "$runner" -m runner "$@"; }
runner run --write "$place" --staged -- sh -c 'head -c 4m /dev/zero > "$0/big"; echo new > "$0/a"' "$place"
found='import json, sys
print(*(each["id"] for each in json.load(sys.stdin)["changesets"] if sys.argv[1] in each["folders"]))'
id=$(runner changes --json | "$runner" -c "$found" "$place")
status=0; runner apply "$id" || status=$?
echo "first: $status $(cat "$place/a") $(ls -A "$place" | tr '\\n' ' ')"
mount -o remount,size=16m "$place"
runner apply "$id"
echo "then: $(cat "$place/a") $(stat -c %s "$place/big") $(ls -A "$place" | tr '\\n' ' ')"
"""


@pytest.mark.needs("root")
def test_a_full_disk(plugin_dir: Path) -> None:
    """What fits is taken, what does not is left whole, and nothing lies around."""
    place = plugin_dir / "place"
    place.mkdir()
    words = ["unshare", "--mount", "sh", "-c", _ON_SMALL_DISK, str(place), sys.executable, str(SPARE_UID)]
    environ = {"PATH": SYSTEM_PATH, "HOME": str(plugin_dir), "PYTHONPATH": str(ROOT), "LANG": "C.UTF-8"}
    done = subprocess.run(words, capture_output=True, text=True, env=environ, cwd="/")
    assert done.returncode == 0, done.stderr
    assert "first: 1 new a" in done.stdout and "No space left on device" in done.stderr
    assert f"then: new {4 << 20} a big" in done.stdout and ".runner" not in done.stdout


@pytest.mark.broad
@pytest.mark.bound(600)
def test_a_hundred_thousand_files(project: Project) -> None:
    make = (
        "import os, sys\n"
        "for number in range(1000):\n"
        "    os.mkdir(f'{sys.argv[1]}/d{number}')\n"
        "    for each in range(100):\n"
        "        open(f'{sys.argv[1]}/d{number}/f{each}', 'w').write(str(each))\n"
    )
    name = project.stage(f'exec python3 -c "$(printf %s {shlex.quote(make)})" "$1"')
    assert project.verb("diff", name, "--stat").splitlines()[-1] == "101000 added, 0 modified, 0 removed"
    done = project.caller("apply", name, timeout=300)
    assert done.returncode == 0 and "applied: 101000 added" in done.stdout
    assert sum(len(files) for _, _, files in os.walk(project.folder)) == 100_004
