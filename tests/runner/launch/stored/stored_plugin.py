"""A plugin whose plan is stored, and everything that may be changed under it."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

from tests.conftest import Caller
from tests.manifests import SANDBOX, nexo

Write = Callable[..., Path]

MANIFEST = nexo("stored", "./plugin") + SANDBOX + 'fs_read_paths = ["{place}/read"]\n'
PROGRAM = """\
#!{place}/plugin/shell
echo "with $WORD and $*"
cat {place}/read/file
exit 3
"""
POLICY = """\
version = 1
[read]
ceiling = ["{place}"]
[env]
ceiling = ["WORD"]
pass = ["WORD"]
"""
USED = "runner: a stored plan is used"
ENDED = (3, "with s3cret-word and \ntext\n")


def unless_others_change(
    place: Path, launch: Callable[[], subprocess.CompletedProcess[str]]
) -> subprocess.CompletedProcess[str]:
    """Root's plans rest on folders that other tests make and remove. If one did so meanwhile, outside of this
    place, the plan did not hold and was made anew: then it is launched once more."""
    for _ in range(9):
        ended = launch()
        why = [line for line in ended.stderr.splitlines() if "does not hold" in line]
        if not why or any(str(place) in line for line in why):
            break
    return ended


class StoredPlugin:
    def __init__(self, caller: Caller, place: Path, write_file: Write) -> None:
        self.caller = caller
        self.place = place
        self.folder = place / "plugin"
        self.read = place / "read"
        self.manifest = write_file(self.folder / "nexo-plugin.toml", MANIFEST.format(place=place))
        self.program = write_file(self.folder / "plugin", PROGRAM.format(place=place), 0o755)
        self.shell = self.folder / "shell"
        shutil.copyfile("/bin/sh", self.shell)
        self.shell.chmod(0o755)
        self.file = write_file(self.read / "file", "text\n")
        self.policy = write_file(place / "policy.toml", POLICY.format(place=place))
        caller.give(place)

    def run(
        self, *args: str, env: Mapping[str, str] | None = None, cwd: str = "/"
    ) -> subprocess.CompletedProcess[str]:
        words = ("exec", "--policy", str(self.policy), str(self.folder))
        given = {"RUNNER_DEBUG": "1", "WORD": "s3cret-word", **(env or {})}
        return self.caller(*words, *(("--", *args) if args else ()), env=given, cwd=cwd)

    def run_again(
        self, *args: str, env: Mapping[str, str] | None = None, cwd: str = "/"
    ) -> subprocess.CompletedProcess[str]:
        """A launch whose plan is stored."""
        return unless_others_change(self.place, lambda: self.run(*args, env=env, cwd=cwd))

    def use(self) -> None:
        """Launch until a stored plan is used: the control of what follows."""
        first = self.run()
        used = first if USED in first.stderr else self.run_again()
        assert USED in used.stderr, used.stderr
        assert (first.returncode, first.stdout) == (used.returncode, used.stdout) == ENDED


def _socket(plugin: StoredPlugin) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(plugin.read / "socket"))


def swap(plugin: StoredPlugin) -> None:
    """Another folder in its place, with the same names, times and contents."""
    held = plugin.read.stat()
    plugin.read.rename(plugin.place / "old")
    shutil.copytree(plugin.place / "old", plugin.read)
    plugin.caller.give(plugin.read)
    os.utime(plugin.read, ns=(held.st_atime_ns, held.st_mtime_ns))


def _link(plugin: StoredPlugin) -> None:
    plugin.read.rename(plugin.place / "old")
    plugin.read.symlink_to(plugin.place / "old")


def _replace(path: Path, text: bytes | None = None) -> None:
    copy = path.with_name("copy")
    shutil.copy2(path, copy)
    if text is not None:
        copy.write_bytes(text)
    copy.rename(path)


def append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


REFUSED: dict[str, tuple[Callable[[StoredPlugin], object], str]] = {
    "a socket in a source": (_socket, "special_file"),
    "a pipe in a source": (lambda plugin: os.mkfifo(plugin.read / "pipe"), "special_file"),
    "a link in place of a source": (_link, "symlink"),
    "the policy allows less": (
        lambda plugin: plugin.policy.write_text(POLICY.format(place="/srv/elsewhere")),
        "read_ceiling",
    ),
    "the manifest asks for more": (
        lambda plugin: plugin.manifest.write_text(MANIFEST.format(place="/root/.ssh")),
        "denylist",
    ),
    "the program is gone": (lambda plugin: plugin.program.unlink(), "not_found"),
    "the interpreter is gone": (lambda plugin: plugin.shell.unlink(), "not_found"),
}
CHANGED: dict[str, Callable[[StoredPlugin], object]] = {
    "manifest": lambda plugin: append(plugin.manifest, "# more\n"),
    "manifest, another file": lambda plugin: _replace(plugin.manifest),
    "policy": lambda plugin: append(plugin.policy, "# more\n"),
    "program": lambda plugin: _replace(plugin.program),
    "interpreter": lambda plugin: _replace(plugin.shell),
    "source swapped": swap,
    "a file in a source": lambda plugin: (plugin.read / "new").write_text(""),
    "the plugin's folder": lambda plugin: (plugin.folder / "new").write_text(""),
    "a folder on the way": lambda plugin: plugin.place.chmod(0o711),
}


def entries(plugin: StoredPlugin) -> list[Path]:
    folder = Path("/var/cache/runner") if plugin.caller.uid == 0 else plugin.caller.home / ".cache/runner"
    mine = str(plugin.manifest).encode()  # others may be beside it
    found = [path for path, raw in plans_in(folder).items() if mine in raw]
    assert found
    return found


def plans_in(folder: Path) -> dict[Path, bytes]:
    """All stored plans. Root's are in one folder, also those of other tests, which come and go."""
    found = {}
    for path in folder.glob("plan-*"):
        with contextlib.suppress(OSError):
            if path.is_file():
                found[path] = path.read_bytes()
    return found


def _flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)


def _by_link(path: Path) -> None:
    path.rename(path.with_name("aside"))
    path.symlink_to("aside")


def _by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _by_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "truncated": lambda path: os.truncate(path, path.stat().st_size // 2),
    "empty": lambda path: os.truncate(path, 0),
    "flipped": _flip,
    "writable by others": lambda path: path.chmod(0o622),
    "a link": _by_link,
    "a folder": _by_folder,
    "a pipe": _by_pipe,
}
