"""What work costs in a sandbox, as ratio to the same work without one: compile, stat, open and read, start
programs, clone a repository.

The work measures itself, so no figure includes the start of a sandbox.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

from scripts.benches import launch, peers
from scripts.benches.caller import RUNNER, Caller, Unable, failed, reason
from scripts.benches.launch import FOLDERS_OWNER, WRITES, Command
from scripts.benches.peers import FoundPeers, Job
from scripts.benches.rows import Against, Row, Table

BARE, OURS = "bare", WRITES
TITLE = "work: "  # and which
FILES, PROGRAMS = 200, 100
_OVER_BARE = (Against(BARE, (BARE,)),)

# Its arguments: the folder that it works in, and how often it looks at each file. It prints a line of JSON
# with the seconds of each kind of work. All files are in the folder: everyone works on the same filesystem.
WORK = r"""
#include <fcntl.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec / 1e9;
}

static void fail(const char *what) { perror(what); exit(1); }

static void start(char *const argv[], char *const environ[]) {
    pid_t pid;
    int status;
    if (posix_spawn(&pid, argv[0], NULL, NULL, argv, environ)) fail(argv[0]);
    if (waitpid(pid, &status, 0) < 0 || status) fail(argv[0]);
}

int main(int argc, char *argv[]) {
    static char block[4096], home[4200];
    char path[64];
    struct stat found;
    int rounds = atoi(argv[2]);
    if (chdir(argv[1])) fail(argv[1]);
    snprintf(home, sizeof home, "HOME=%s", argv[1]);
    char *const variables[] = {home, "PATH=/usr/bin:/bin", "TMPDIR=.", "GIT_CONFIG_NOSYSTEM=1", NULL};

    double begin = now();
    for (int i = 0; i < rounds * FILES; i++) {
        snprintf(path, sizeof path, "files/%d", i % FILES);
        if (stat(path, &found)) fail(path);
    }
    printf("{\"stat\": %.9f", now() - begin);

    begin = now();
    for (int i = 0; i < rounds * FILES; i++) {
        snprintf(path, sizeof path, "files/%d", i % FILES);
        int file = open(path, O_RDONLY);
        if (file < 0 || read(file, block, sizeof block) <= 0) fail(path);
        close(file);
    }
    printf(", \"open and read\": %.9f", now() - begin);

    char *const nothing[] = {"/usr/bin/true", NULL};
    begin = now();
    for (int i = 0; i < PROGRAMS; i++) start(nothing, variables);
    printf(", \"fork and exec\": %.9f", now() - begin);

    char *const compile[] = {"/usr/bin/gcc", "-O1", "-c", "program.c", "-o", "program.o", NULL};
    begin = now();
    start(compile, variables);
    printf(", \"gcc\": %.9f", now() - begin);

    char *const clone[] = {"/usr/bin/git", "clone", "-q", "--no-local", "repository", "clone", NULL};
    begin = now();
    start(clone, variables);
    printf(", \"git clone\": %.9f}\n", now() - begin);
    return 0;
}
"""
KINDS = ("gcc", "stat", "open and read", "fork and exec", "git clone")


def bench(caller: Caller, rounds: int, looks: int, found: FoundPeers) -> list[Table]:
    """`looks`: how often the work looks at each file."""
    folder = make_folder(caller)
    program = (make_program(caller), str(folder), str(looks))
    ours = [RUNNER, "run", "--write", str(folder), "--", *program]
    commands = {BARE: Command([*program], {}), OURS: Command(ours, {})}
    for command in commands.values():
        work(caller, command, folder)
    with ExitStack() as stack:
        job = Job(launch.raw(caller, ours), program, str(folder))
        others, notes = peers.usable(caller, job, found, stack, lambda command: work(caller, command, folder))
        commands |= others
        taken, faults = interleave(caller, commands, rounds, folder)
        notes = (*notes, *faults)
    about = f"{rounds} times each, by turns: "
    told = {
        "gcc": "a compile of a file of C",
        "stat": f"{looks * FILES} calls, of {FILES} files",
        "open and read": f"{looks * FILES} times, {FILES} files of 4 KiB",
        "fork and exec": f"{PROGRAMS} starts of true, one after the other",
        "git clone": f"a repository of {FILES} files",
    }
    return [
        Table(
            "workloads",
            f"{TITLE}{kind}",
            caller.name,
            about + told[kind],
            [
                Row(name, "ms", [1000 * each[kind] for each in samples], () if name == BARE else _OVER_BARE)
                for name, samples in taken.items()
            ],
            notes if kind == KINDS[0] else (),
        )
        for kind in KINDS
    ]


def interleave(
    caller: Caller, commands: Mapping[str, Command], rounds: int, folder: Path
) -> tuple[dict[str, list[Mapping[str, float]]], list[str]]:
    """The samples of each, and a sentence about each peer that failed after all. Ours may not."""
    faults: list[str] = []
    taken: dict[str, list[Mapping[str, float]]] = {name: [] for name in commands}
    names = list(commands)
    for turn in range(rounds):
        at = turn % len(names)
        for name in (*names[at:], *names[:at]):
            if name not in taken:
                continue
            try:
                taken[name].append(work(caller, commands[name], folder))
            except Unable as fault:
                if name in (BARE, OURS):
                    raise
                faults.append(f"{name} is not measured: {reason(str(fault))}")
                del taken[name]
    return taken, faults


def work(caller: Caller, command: Command, folder: Path) -> Mapping[str, float]:
    """Do all of it once. Returns the seconds of each kind; raises Unable."""
    shutil.rmtree(folder / "clone", ignore_errors=True)
    (folder / "program.o").unlink(missing_ok=True)
    with (
        command.opened(),
        caller.start(
            command.argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=tuple(command.files),
        ) as process,
    ):
        out, err = process.communicate()
    if process.returncode or not out:
        raise failed(command.argv, process.returncode, err)
    seconds: Mapping[str, float] = json.loads(out)
    return seconds


def make_program(caller: Caller) -> str:
    """Not in the folder that it may write to: the runner lets no program write to itself."""
    missing = [name for name in ("gcc", "git") if not os.access(f"/usr/bin/{name}", os.X_OK)]
    if missing:
        raise Unable(f"there is no {' and no '.join(missing)} in /usr/bin")
    source, made = caller.write("work.c", WORK), f"{caller.own('work-program')}/work"
    numbers = (f"-DFILES={FILES}", f"-DPROGRAMS={PROGRAMS}")
    caller.output_of(["/usr/bin/gcc", "-O1", *numbers, "-o", made, source])
    return made


def make_folder(caller: Caller) -> Path:
    """A folder with all that the work needs. Everybody may write to it, whichever user a sandbox has."""
    folder = Path(caller.own("workloads"))
    for number in range(FILES):
        caller.write(f"workloads/files/{number}", f"{number:064}" * 64)
    function = "int f{0}(int a) {{ int s = {0}; while (a--) s = s * 31 + a; return s; }}\n"
    functions = "".join(function.format(number) for number in range(100))
    caller.write("workloads/program.c", f"#include <stdio.h>\n#include <stdlib.h>\n{functions}")
    # Git refuses the repository of another user, which the one who made it is in some sandboxes. The
    # disk is not what is measured.
    caller.write(
        "workloads/.gitconfig",
        "[safe]\n\tdirectory = *\n[core]\n\tfsync = none\n[user]\n\tname = bench\n\temail = bench\n",
    )
    git = ["/usr/bin/env", f"HOME={folder}", "/usr/bin/git", "-C", str(folder / "repository")]
    caller.own("workloads/repository")
    for argv in (
        [*git, "init", "-q"],
        ["/usr/bin/cp", "-r", str(folder / "files"), str(folder / "repository")],
        [*git, "add", "."],
        [*git, "commit", "-q", "-m", "bench"],
    ):
        caller.output_of(argv)
    owner = FOLDERS_OWNER if caller.uid == 0 else caller.uid
    for path in (folder, *folder.rglob("*")):
        if os.geteuid() == 0:
            os.chown(path, owner, owner)
        if not path.is_symlink():
            path.chmod(path.stat().st_mode | (0o777 if path.is_dir() else 0o666))
    return folder
