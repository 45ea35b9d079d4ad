"""A person's ssh agent with keys, a known_hosts, and sshd on loopback: the real programs."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

from tests.conftest import SYSTEM_PATH, TEMP_PREFIX, Caller, sshd
from tests.tables import wait_for

ENVIRON = {"PATH": SYSTEM_PATH, "LANG": "C.UTF-8"}


def command(*words: str | Path, **environ: str) -> str:
    """Run a program. Returns its output."""
    done = subprocess.run(
        [*map(str, words)],
        env={**ENVIRON, **environ},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, (words, done.stdout, done.stderr)
    return done.stdout


def make_key(file: Path, kind: str = "ed25519") -> str:
    """Make a key pair without a passphrase. Returns the fingerprint."""
    command("ssh-keygen", "-q", "-t", kind, "-N", "", "-C", "a comment of the person", "-f", file)
    return command("ssh-keygen", "-l", "-f", file).split()[1]


class SshServer:
    """sshd behind a socket on loopback: one process for each connection, in an account named git."""

    def __init__(self, folder: Path, kind: str) -> None:
        folder.mkdir()
        self.folder = folder
        self.authorized = folder / "authorized_keys"
        self.authorized.touch()
        self.log = folder / "log"
        make_key(folder / "host", kind)
        self.key = (folder / "host.pub").read_text().rsplit(" ", 5)[0]
        (folder / "passwd").write_text(f"git:x:1000:1000::{folder}:/bin/sh\n")
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._socket.getsockname()[1]
        self._processes: list[subprocess.Popen[bytes]] = []
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    @property
    def line(self) -> str:
        """Of known_hosts."""
        return f"[localhost]:{self.port} {self.key}\n"

    def _serve(self) -> None:
        given = (
            *("UsePAM=no", "StrictModes=no", "PidFile=none", "LogLevel=VERBOSE", "AllowAgentForwarding=yes"),
            *(f"HostKey={self.folder}/host", f"AuthorizedKeysFile={self.authorized}"),
        )
        cage = ("bwrap", "--unshare-user", "--uid", "1000", "--gid", "1000", "--dev-bind", "/", "/")
        passwd = ("--ro-bind", f"{self.folder}/passwd", "/etc/passwd")
        argv = [*cage, *passwd, sshd(), "-i", "-e", "-f", "/dev/null"]
        argv += [word for each in given for word in ("-o", each)]
        with self.log.open("ab") as log:
            while True:
                try:
                    connection, _ = self._socket.accept()
                except OSError:
                    return
                with connection:
                    self._processes.append(
                        subprocess.Popen(
                            argv,
                            stdin=connection.fileno(),
                            stdout=connection.fileno(),
                            stderr=log,
                            env=ENVIRON,
                        )
                    )

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._socket.close()
        for process in self._processes:
            process.kill()
            process.wait()


class SshMachine:
    """What a person has who uses ssh."""

    def __init__(self, caller: Caller, folder: Path, stack: contextlib.ExitStack) -> None:
        self.caller = caller
        self.folder = folder
        self._stack = stack
        self.socket = caller.home / "agent"
        self.known_hosts = caller.home / ".ssh/known_hosts"
        self.known_hosts.parent.mkdir(mode=0o700)
        agent = subprocess.Popen(
            [*caller.prefix, "ssh-agent", "-D", "-a", str(self.socket)],
            env=ENVIRON,
            stdout=subprocess.DEVNULL,
        )
        stack.callback(agent.wait)
        stack.callback(agent.kill)
        self.agent = agent
        wait_for(self.socket.exists)

    @property
    def environ(self) -> dict[str, str]:
        return {"SSH_AUTH_SOCK": str(self.socket), "HOME": str(self.caller.home)}

    def add_key(self, name: str, kind: str = "ed25519", *options: str) -> str:
        """Give the agent a new key. Returns the fingerprint."""
        fingerprint = make_key(self.folder / name, kind)
        command("ssh-add", "-q", *options, self.folder / name, SSH_AUTH_SOCK=str(self.socket))
        return fingerprint

    def public(self, name: str) -> str:
        return (self.folder / f"{name}.pub").read_text()

    def serve(self, name: str, kind: str = "ed25519") -> SshServer:
        server = SshServer(self.folder / name, kind)
        self._stack.callback(server.close)
        return server

    def know(self, *lines: str) -> None:
        self.known_hosts.write_text("".join(lines))
        self.caller.give(self.known_hosts.parent)


@contextlib.contextmanager
def ssh_machine(caller: Caller) -> Iterator[SshMachine]:
    folder = Path(tempfile.mkdtemp(prefix=TEMP_PREFIX, dir="/tmp"))
    folder.chmod(0o755)
    try:
        with contextlib.ExitStack() as stack:
            yield SshMachine(caller, folder, stack)
    finally:
        shutil.rmtree(folder)


def make_repository(folder: Path) -> Path:
    """A repository with one commit, to be cloned."""
    who = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull, "HOME": str(folder)}
    for name in ("AUTHOR", "COMMITTER"):
        who |= {f"GIT_{name}_NAME": "A", f"GIT_{name}_EMAIL": "a@example.com"}
    command("git", "init", "-q", "-b", "main", folder / "repository", **who)
    (folder / "repository/file").write_text("from the repository\n")
    command("git", "-C", folder / "repository", "add", "file", **who)
    command("git", "-C", folder / "repository", "commit", "-q", "-m", "one", **who)
    return folder / "repository"
