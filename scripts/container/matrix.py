"""Run the image of the Dockerfile in containers of every kind, and check what plugins do there.

There are two processes. The outer one makes a directory and cleans up. The inner one, in mount and pid
namespaces of its own, builds the image and runs the containers. However it ends, the kernel removes its
mounts and processes, and only files and empty cgroups are left.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn

from scripts.container import filter as container_filter
from scripts.container.image import BuildError, Image, build, copied, read_dockerfile, shifted
from scripts.container.runc import DOCKER_CAPABILITIES, USER_NAMESPACE, Config, Done, Mount, Runc

ROOT = Path(__file__).resolve().parent.parent.parent
CANNOT_RUN = 77
_NEEDED = {"mmdebstrap": "mmdebstrap", "runc": "runc", "unshare": "util-linux"}
_CGROUP_SECONDS = 5.0
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_SIX = ("CAP_SETUID", "CAP_SETGID", "CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_FOWNER", "CAP_KILL")
_OWNED = ("uid=1000", "gid=1000")  # as docs/containers.md has it for --tmpfs

_OK, _UNAVAILABLE, _NO_CAGE, _REFUSED = 0, 22, 125, 126


_HOMES = {0: "/root", 1000: "/home/runner"}  # as the image's /etc/passwd has them


class Row(NamedTuple):
    """One kind of container. `says`: what the message names if plugins cannot start; empty if they can."""

    name: str
    users: tuple[int, ...] = (0, 1000)
    seccomp: dict[str, Any] | None = None
    masked: bool = False
    read_only: bool = False
    no_new_privileges: bool = False
    user_namespace: bool = False
    capabilities: tuple[str, ...] = DOCKER_CAPABILITIES
    says: tuple[str, ...] = ()


def _rows() -> tuple[Row, ...]:
    shipped = json.loads(container_filter.OUTPUT.read_text())
    additions = container_filter.ADDITIONS
    no_call = {
        name: container_filter.profile(tuple(each for each in additions if each != name))
        for name in additions
    }
    seccomp_words = ("seccomp filter", "seccomp=")
    return (
        Row("seccomp=unconfined"),
        Row("the shipped filter", seccomp=shipped),
        Row("and a read-only root", seccomp=shipped, read_only=True),
        Row("and no-new-privileges", seccomp=shipped, no_new_privileges=True),
        Row("and a user namespace", seccomp=shipped, user_namespace=True),
        Row(
            "and all three",
            seccomp=shipped,
            read_only=True,
            no_new_privileges=True,
            user_namespace=True,
        ),
        Row("and no capability", users=(1000,), seccomp=shipped, no_new_privileges=True, capabilities=()),
        Row(
            "and all of these",
            users=(1000,),
            seccomp=shipped,
            read_only=True,
            no_new_privileges=True,
            user_namespace=True,
            capabilities=(),
        ),
        Row("and six capabilities", users=(0,), seccomp=shipped, capabilities=_SIX),
        Row("and CAP_SYS_ADMIN", seccomp=shipped, capabilities=(*DOCKER_CAPABILITIES, "CAP_SYS_ADMIN")),
        # These cannot work, and have to say why.
        Row("no capability", users=(0,), seccomp=shipped, capabilities=(), says=("CAP_SETUID", "--cap-add")),
        Row(
            "Docker's defaults",
            seccomp=container_filter.profile(()),
            masked=True,
            says=(*seccomp_words, "masked", "keyring", "systempaths=unconfined"),
        ),
        Row("Docker's filter", seccomp=container_filter.profile(()), says=seccomp_words),
        Row("Docker's filter, killing", seccomp=_killing(), says=(*seccomp_words, "SIGSYS")),
        Row("masked /proc", seccomp=shipped, masked=True, says=("masked", "systempaths=unconfined")),
        *(
            Row(f"filter without {name}", seccomp=document, says=(*seccomp_words, name))
            for name, document in no_call.items()
        ),
    )


def _killing() -> dict[str, Any]:
    """A filter that kills for mount and pivot_root, as systemd's do, and allows the rest."""
    entry = {"names": ["mount", "pivot_root"], "action": "SCMP_ACT_KILL_PROCESS"}
    return {"defaultAction": "SCMP_ACT_ALLOW", "syscalls": [entry]}


class Case(NamedTuple):
    row: Row
    user: int

    @property
    def title(self) -> str:
        return f"{self.row.name} as {'root' if self.user == 0 else f'uid {self.user}'}"


class Bench:
    """The image, and how to run it."""

    def __init__(self, image: Image, work: Path, runc: Runc) -> None:
        self._image = image
        self._work = work
        self._runc = runc
        self._shifted: Path | None = None

    def run(
        self,
        case: Case,
        *words: str,
        stdin: str = "",
        state: Path | None = None,
        memory: int | None = None,
        scratch: bool = True,
        argv: tuple[str, ...] | None = None,
        environment: Mapping[str, str] = MappingProxyType({}),
        end_after: str | None = None,
        plugins: Path = ROOT / "tests/plugins",
        volumes: tuple[Mount, ...] = (),
    ) -> Done:
        row = case.row
        with self._root(row) as root:
            mounts = [Mount(str(plugins), "/plugins", ("ro",)), *volumes]
            if row.read_only:
                # The image's own directory would be read-only. Engines copy its owner to a new volume.
                mounts += [Mount("tmpfs", "/tmp")] if scratch else []
                mounts += [Mount("tmpfs", "/run")] if case.user == 0 else []
                mounts += [] if state is not None else [Mount("tmpfs", "/var/lib/runner", _OWNED)]
            if state is not None:
                mounts.append(Mount(str(state), "/var/lib/runner"))
            config = Config(
                root=root,
                argv=argv or (*self._image.entrypoint, *words),
                environment={**self._image.environment, "HOME": _HOMES.get(case.user, "/"), **environment},
                user=(case.user, case.user),
                capabilities=row.capabilities,
                seccomp=row.seccomp,
                masked=row.masked,
                read_only=row.read_only,
                no_new_privileges=row.no_new_privileges,
                user_namespace=row.user_namespace,
                memory=memory,
                mounts=tuple(mounts),
            )
            return self._runc.run(config, stdin=stdin, end_after=end_after)

    @contextmanager
    def _root(self, row: Row) -> Iterator[Path]:
        """A layer of its own above the image, removed afterwards."""
        lower = self._image.root
        if row.user_namespace:
            self._shifted = self._shifted or shifted(lower, self._work / "shifted", USER_NAMESPACE[0])
            lower = self._shifted
        layer = Path(tempfile.mkdtemp(dir=self._work, prefix="layer-"))
        layer.chmod(0o755)
        for name in ("upper", "work", "root"):
            (layer / name).mkdir()
        shutil.copystat(lower, layer / "upper")
        held = lower.stat()
        os.chown(layer / "upper", held.st_uid, held.st_gid)
        (layer / "upper/.dockerenv").touch()  # the runner recognises Docker by this file
        options = f"lowerdir={lower},upperdir={layer}/upper,workdir={layer}/work"
        subprocess.run(["mount", "-t", "overlay", "overlay", "-o", options, str(layer / "root")], check=True)
        try:
            yield layer / "root"
        finally:
            subprocess.run(["umount", "--lazy", str(layer / "root")], check=True)
            shutil.rmtree(layer)


# --- checks of every row ------------------------------------------------------------------------------------

Check = Callable[[Bench, Case], tuple[str, Done]]  # returns what is wrong, "" if nothing is


def _exec(bench: Bench, case: Case) -> tuple[str, Done]:
    done = bench.run(case, "exec", "/plugins/demo", "--", "/home", stdin="hello\n")
    if case.row.says:
        return _refused(case, done, _NO_CAGE), done
    return _fine(done, "12 of 12 as it should be"), done


def _call(bench: Bench, case: Case) -> tuple[str, Done]:
    done = bench.run(case, "call", "/plugins/nexo_bare", "bare_echo", "--input", '{"text": "hello"}')
    if case.row.says:
        return _refused(case, done, _UNAVAILABLE), done
    return _fine(done, '"text": "hello"'), done


def _doctor(bench: Bench, case: Case) -> tuple[str, Done]:
    done = bench.run(case, "doctor")
    if case.row.says:
        return _refused(case, done, _UNAVAILABLE), done
    return _fine(done, "policy /etc/runner/policy.toml"), done


def _fine(done: Done, expected: str) -> str:
    if done.code != _OK:
        return f"ended with {done.code}"
    return "" if expected in done.output else f"did not say {expected!r}"


def _refused(case: Case, done: Done, code: int) -> str:
    if done.code != code:
        return f"ended with {done.code} instead of {code}"
    missing = [word for word in case.row.says if word not in done.output + done.error]
    return f"did not name {', '.join(missing)}" if missing else ""


_CHECKS: dict[str, Check] = {"exec": _exec, "call": _call, "doctor": _doctor}


# --- checks of one row --------------------------------------------------------------------------------------


def _oom(bench: Bench, case: Case) -> tuple[str, Done]:
    """The container's own memory limit ends a plugin: reported as oom, not as signal 9."""
    with _plugin(bench, _GREEDY) as plugins:
        done = bench.run(case, "exec", "/plugins/greedy", memory=96 << 20, plugins=plugins)
    if done.code != 137:
        return f"ended with {done.code} instead of 137", done
    return "" if "ran out of memory" in done.error else "did not say that memory ran out", done


def _terminated(bench: Bench, case: Case) -> tuple[str, Done]:
    """docker stop sends SIGTERM to the runner, which is the container's first process."""
    with _plugin(bench, _WAITING) as plugins:
        done = bench.run(case, "exec", "/plugins/waiting", end_after="here", plugins=plugins)
    return "" if done.code == 143 and done.seconds < 60 else f"ended with {done.code}", done


def _state(bench: Bench, case: Case) -> tuple[str, Done]:
    """A volume keeps state from one container to the next. Engines give it the owner and mode it has in the
    image. A Kubernetes emptyDir is world-writable."""
    for owner, mode in ((1000, 0o711), (0, 0o777)):
        state = Path(tempfile.mkdtemp(dir=bench._work))
        os.chown(state, owner, owner)
        state.chmod(mode)
        for expected in ("run number 1", "run number 2"):
            done = bench.run(case, "exec", "/plugins/demo", stdin="\n", state=state)
            if wrong := _fine(done, expected):
                return wrong, done
    return "", done


def _another_uid(bench: Bench, case: Case) -> tuple[str, Done]:
    """A uid that the image does not know, with a home and a place for state."""
    places = {"HOME": "/tmp", "XDG_STATE_HOME": "/tmp"}
    other = case._replace(user=4711)
    done = bench.run(other, "exec", "/plugins/demo", "--", "/home", stdin="\n", environment=places)
    return _fine(done, "12 of 12 as it should be"), done


def _cached(bench: Bench, case: Case) -> tuple[str, Done]:
    """A read-only image caches if /tmp is writable, and works without a cache if it is not."""
    read_only = case._replace(row=case.row._replace(read_only=True))
    where = "/run" if case.user == 0 else "/tmp"
    entries = f"find {where}/runner-cache-{case.user} -type f -size +0 -printf cached"
    script = f"runner exec /plugins/demo </dev/null >/dev/null && {entries}"
    done = bench.run(read_only, argv=("/bin/sh", "-c", script))
    if wrong := _fine(done, "cached"):
        return wrong, done
    done = bench.run(read_only, "exec", "/plugins/demo", stdin="\n", scratch=False)
    return _fine(done, "12 of 12 as it should be"), done


def _policy(bench: Bench, case: Case) -> tuple[str, Done]:
    """A policy on a read-only volume is trusted no matter whose it is: a ConfigMap with its links, the same
    with an fsGroup, and a file of the operator. Where the volume can be written it is not, and it is said how
    it would be."""
    text = (bench._image.root / "etc/runner/policy.toml").read_bytes()
    for owner, group, mode in ((0, 0, 0o777), (0, 2000, 0o2775), (4711, 4711, 0o755)):
        folder = Path(tempfile.mkdtemp(dir=bench._work))
        (folder / "..1").mkdir()
        (folder / "..1/policy.toml").write_bytes(text)
        (folder / "..data").symlink_to("..1")
        (folder / "policy.toml").symlink_to("..data/policy.toml")
        for path in (folder / "..1/policy.toml", folder / "..1", folder):
            os.chown(path, owner, group)
            path.chmod(mode if path.is_dir() else 0o644)
        for options, code, words in ((("ro",), _OK, "12 of 12"), ((), _REFUSED, "read-only")):
            volume = Mount(str(folder), "/etc/runner", options)
            done = bench.run(case, "exec", "/plugins/demo", "--", "/home", stdin="\n", volumes=(volume,))
            if done.code != code or words not in done.output + done.error:
                return f"of {owner}:{group}, {mode:o}, {options} ended with {done.code}", done
    # The same files a second time, where they can be written.
    volumes = (Mount(str(folder), "/etc/runner", ("ro",)), Mount(str(folder), "/mnt"))
    done = bench.run(case, "exec", "/plugins/demo", stdin="\n", volumes=volumes)
    return "" if done.code == _REFUSED else f"was trusted although it is writable: {done.code}", done


def _core_pattern(bench: Bench, case: Case) -> tuple[str, Done]:
    """The documentation says why not to run as root: this is true. The file is opened, not written."""
    for shared in (True, False):
        row = case.row._replace(user_namespace=not shared)
        script = "if true >> /proc/sys/kernel/core_pattern; then echo open; else echo shut; fi"
        done = bench.run(case._replace(row=row), argv=("/bin/sh", "-c", script))
        expected = "open" if case.user == 0 and shared else "shut"
        if wrong := _fine(done, expected):
            break
    return wrong, done


_ONCE: dict[str, Check] = {
    "core_pattern": _core_pattern,
    "memory": _oom,
    "SIGTERM": _terminated,
    "state": _state,
    "another uid": _another_uid,
    "cache": _cached,
    "policy": _policy,
}

_GREEDY = """#!/usr/bin/python3
held = []
while True:
    held.append(b"x" * (8 << 20))
"""
_WAITING = """#!/usr/bin/python3
import time
print("here", flush=True)
time.sleep(300)
"""


@contextmanager
def _plugin(bench: Bench, program: str) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(dir=bench._work))
    folder.chmod(0o755)
    try:
        for name in ("greedy", "waiting"):
            home = folder / name
            home.mkdir()
            (home / "nexo-plugin.toml").write_text(
                f'[plugin]\nid = "{name}"\nversion = "1.0.0"\nname = "{name}"\ndescription = "d"\n'
                'min_nexo_version = ">=0.1"\n[plugin.entrypoint]\ncommand = "./plugin.py"\n'
            )
            (home / "plugin.py").write_text(program)
            (home / "plugin.py").chmod(0o755)
        yield folder
    finally:
        shutil.rmtree(folder)


# --- the two processes --------------------------------------------------------------------------------------


def inner(work: Path, cgroup: str, kept: Path | None, only: list[str]) -> int:
    runc = Runc(work, cgroup)
    image = _image(work, kept, runc)
    if (image.user, image.entrypoint) != ("1000:1000", ("runner",)):
        print(f"the image runs {image.entrypoint} as {image.user}")
        return 1
    bench = Bench(image, work, runc)
    cases = [Case(row, user) for row in _rows() for user in row.users]
    once = [Case(Row("the shipped filter", seccomp=_rows()[1].seccomp), user) for user in (0, 1000)]
    failures: list[str] = []
    for checks, chosen in ((_CHECKS, cases), (_ONCE, once)):
        chosen = [case for case in chosen if not only or any(word in case.title for word in only)]
        if chosen:
            _table(bench, checks, chosen, failures)
    print()
    for failure in failures:
        print(failure)
    print(f"{len(failures)} not as it should be" if failures else "all as it should be")
    return 1 if failures else 0


def _table(bench: Bench, checks: dict[str, Check], cases: list[Case], failures: list[str]) -> None:
    width = max(len(case.title) for case in cases) + 2
    print(f"\n{'':{width}}" + "".join(f"{name:21}" for name in checks))
    for case in cases:
        print(f"{case.title:{width}}", end="", flush=True)
        for name, check in checks.items():
            wrong, done = check(bench, case)
            good = "refused with reason" if case.row.says else f"ok {done.seconds * 1000:.0f} ms"
            print(f"{'FAILED' if wrong else good:21}", end="", flush=True)
            if wrong:
                tail = (done.output[-1500:] + done.error[-1500:]).replace("\n", "\n    ")
                failures.append(f"{case.title}: {name} {wrong}\n    {tail}")
        print(flush=True)


def _image(work: Path, kept: Path | None, runc: Runc) -> Image:
    noted = kept / "image.json" if kept else None
    if kept and noted and noted.exists():
        saved = json.loads(noted.read_text())
        return Image(kept / "root", saved["environment"], saved["user"], tuple(saved["entrypoint"]))
    print("building the image of the Dockerfile:", flush=True)
    began = time.monotonic()
    image = build(ROOT / "Dockerfile", _context(work), work, runc)
    print(f"  built in {time.monotonic() - began:.0f} s", flush=True)
    if kept and noted:
        kept.mkdir(parents=True, exist_ok=True)
        subprocess.run(["cp", "-a", str(image.root), str(kept / "root")], check=True)
        noted.write_text(json.dumps({**image._asdict(), "root": "root"}))
    return image


def _context(work: Path) -> Path:
    """A copy of what the Dockerfile takes, as umask 002 makes it. The image must not keep group-writable
    modes."""
    context = work / "context"
    context.mkdir()
    sources = sorted(set(copied(read_dockerfile((ROOT / "Dockerfile").read_text()))))
    subprocess.run(["cp", "-r", "--parents", *sources, str(context)], cwd=ROOT, check=True)
    subprocess.run(["chmod", "-R", "g+w", str(context)], check=True)
    return context


def outer(arguments: argparse.Namespace) -> int:
    for number in _ENDING:
        signal.signal(number, _leave)
    work = Path(tempfile.mkdtemp(prefix="test-container-", dir="/var/tmp"))
    work.chmod(0o711)
    argv = [
        "unshare",
        "--mount",
        "--propagation",
        "private",
        "--pid",
        "--fork",
        "--kill-child",
        "--mount-proc",
    ]
    argv += [sys.executable, "-m", "scripts.container.matrix", "--inside", str(work)]
    argv += ["--image", str(arguments.image.resolve())] if arguments.image else []
    argv += [word for each in arguments.only for word in ("--only", each)]
    # In a session of its own: ^C ends this process, and this process ends that one.
    child = subprocess.Popen(argv, start_new_session=True, stdin=subprocess.DEVNULL)
    try:
        return child.wait()
    finally:
        for number in _ENDING:  # a second ^C does not prevent the cleanup
            signal.signal(number, signal.SIG_IGN)
        child.kill()
        child.wait()
        _clean(work)


def _leave(number: int, _: object) -> NoReturn:
    sys.exit(128 + number)


def _clean(work: Path) -> None:
    """The kernel has ended everything in the pid namespace, or is about to."""
    until = time.monotonic() + _CGROUP_SECONDS
    while left := [path for path in Path("/sys/fs/cgroup").glob(f"**/{work.name}") if not _removed(path)]:
        if time.monotonic() > until:
            print(f"test-container: could not remove {', '.join(map(str, left))}", file=sys.stderr)
            break
        time.sleep(0.05)
    shutil.rmtree(work)


def _removed(group: Path) -> bool:
    try:
        for below in group.iterdir():
            if below.is_dir() and not below.is_symlink():
                _removed(below)
        group.rmdir()
    except OSError:
        return not group.exists()
    return True


def _lacking() -> list[str]:
    lacking = []
    if os.geteuid() != 0:
        lacking.append("root is needed to make containers: sudo scripts/test-container")
    if missing := [name for name in _NEEDED if shutil.which(name) is None]:
        names = " ".join(_NEEDED[name] for name in missing)
        lacking.append(f"missing: {', '.join(missing)}; as root: apt-get install {names}")
    return lacking


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/test-container", description=__doc__)
    parser.add_argument(
        "--image", type=Path, metavar="DIRECTORY", help="keep the built image there, and use it the next time"
    )
    parser.add_argument(
        "--only", action="append", default=[], metavar="WORD", help="rows with this in their name"
    )
    parser.add_argument("--list", action="store_true", help="print the rows and end")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.list:
        print("\n".join(Case(row, user).title for row in _rows() for user in row.users))
        return 0
    if lacking := _lacking():
        print("\n".join(f"test-container: {each}" for each in lacking), file=sys.stderr)
        return CANNOT_RUN
    if arguments.inside is None:
        return outer(arguments)
    try:
        return inner(arguments.inside, arguments.inside.name, arguments.image, arguments.only)
    except (BuildError, OSError, subprocess.SubprocessError) as error:
        print(f"test-container: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
