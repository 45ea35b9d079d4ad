"""Where the servers of a test are installed, and the files of the person who uses them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.conftest import SYSTEM_PATH, USER_UID, Caller
from tests.internet import Internet
from tests.published.install import ENVIRONMENTS
from tests.published.servers import Published

# Configurations of hosts: the file below the person's home, and the key that its servers are under.
HOSTS: Mapping[str, str] = {
    ".config/Claude/claude_desktop_config.json": "mcpServers",
    ".cursor/mcp.json": "mcpServers",
    ".config/Code/User/mcp.json": "servers",
}


class Desk(NamedTuple):
    """A person's machine: programs, files, and the configurations of hosts."""

    caller: Caller
    programs: Path | None  # installed; None: entries keep their launchers
    work: Path
    authority: Path | None = None  # the certificate of the test internet's services

    def fill(self, word: str) -> str:
        return word.replace("{work}", str(self.work))

    def filled(self, value: Any) -> Any:
        """The input of a call, with the paths of this machine."""
        return json.loads(json.dumps(value).replace("{work}", str(self.work)))

    def program(self, server: Published) -> str:
        assert self.programs is not None
        folder = "npm/node_modules/.bin" if server.where == "npm" else f"{server.where}/bin"
        return str(self.programs / folder / server.program)

    def entry(self, server: Published) -> dict[str, Any]:
        """The README's entry. Its example paths are replaced, and its launcher if there are programs."""
        readme = server.entry
        words = [*(self.fill(server.told.get(word, word)) for word in readme.args), *server.more]
        entry: dict[str, Any] = {"command": readme.command, "args": words}
        if self.programs is not None:
            entry = {"command": self.program(server), "args": words[readme.launcher :]}
        env = {name: self.fill(server.told.get(value, value)) for name, value in readme.env.items()}
        env |= {**server.adds, **self.trust(server)}
        return {**entry, "env": env} if env else entry

    def trust(self, server: Published) -> dict[str, str]:
        """Variables by which it trusts the services of the test internet."""
        if self.authority is None or "--net" not in server.allowed or server.is_read:
            return {}
        names = ("NODE_EXTRA_CA_CERTS",) if server.where == "npm" else ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE")
        return dict.fromkeys(names, str(self.authority))

    def allowed(self, server: Published) -> list[str]:
        """Options of `runner allow`."""
        trusted = ["--read", str(self.authority)] if self.trust(server) else []
        return [*map(self.fill, server.allowed), *trusted]

    def entry_text(self, server: Published) -> str:
        return json.dumps(self.entry(server))

    def configure(self, servers: Sequence[Published]) -> dict[str, Path]:
        """Spread the servers over the configurations of three hosts: name -> file."""
        found: dict[str, Path] = {}
        for number, (where, key) in enumerate(HOSTS.items()):
            path = self.caller.home / where
            path.parent.mkdir(parents=True, exist_ok=True)
            mine = servers[number :: len(HOSTS)]
            path.write_text(json.dumps({key: {each.name: self.entry(each) for each in mine}}, indent=2))
            found |= dict.fromkeys((each.name for each in mine), path)
        self.caller.give(self.caller.home / ".config")
        self.caller.give(self.caller.home / ".cursor")
        return found

    def wrapped(self, file: Path, name: str) -> dict[str, Any]:
        """What a host reads there now."""
        [servers] = json.loads(file.read_text()).values()
        return dict(servers[name])


def make_desk(caller: Caller, shared: Path, public: Path, services: Internet) -> Desk:
    """A user has programs and files in the home. No plugin may have anything of root's home, so root's
    programs are where root would install them for everybody, and root's servers work on a user's files."""
    is_root = caller.name == "root"
    programs = shared if is_root else caller.home / ".local/share/servers"
    if not is_root:
        _install_again(shared, programs)
        for path in (caller.home / ".local/share", *(each for each in programs.rglob("*") if each.is_dir())):
            os.chown(path, caller.uid, caller.uid)
    work = make_work(caller, public)
    return Desk(services.on_machine(caller), programs, work, trust_services(services, work))


def trust_services(services: Internet, work: Path) -> Path:
    """A copy of their certificate, where a plugin may have it."""
    shutil.copy(services.authority, work / "authority.pem")
    return work / "authority.pem"


def make_work(caller: Caller, public: Path) -> Path:
    """A folder with files of the person."""
    work = (public if caller.name == "root" else caller.home) / "work"
    (work / "other").mkdir(parents=True)
    (work / "hello.txt").write_text("hello from the host\n")
    environ = {"PATH": SYSTEM_PATH, "HOME": "/nonexistent", "GIT_CONFIG_GLOBAL": "/dev/null"}
    who = ("-c", "user.name=Ada", "-c", "user.email=ada@example.com")
    commit = (*who, "commit", "--quiet", "--allow-empty", "--message=the first commit")
    for argv in (("init", "--quiet", "--initial-branch=main"), commit):
        subprocess.run(["git", *argv], cwd=work, check=True, env=environ, timeout=60)
    owner = USER_UID if os.geteuid() == 0 else caller.uid
    for path in (work, *work.rglob("*")):
        os.chown(path, owner, owner)
    return work


def copy_programs(installed: Path, target: Path) -> None:
    """Where every user can read them: a checkout may be below /root. Takes seconds."""
    for name in ("npm", *ENVIRONMENTS):
        subprocess.run(["cp", "-a", "--reflink=auto", str(installed / name), str(target / name)], check=True)
    subprocess.run(["chmod", "-R", "go+rX,go-w", str(target)], check=True)
    _point_scripts(installed, target)


def _install_again(shared: Path, target: Path) -> None:
    """The same files by hard links, in folders of their own."""
    target.mkdir(parents=True)
    for name in ("npm", *ENVIRONMENTS):
        subprocess.run(["cp", "-al", str(shared / name), str(target / name)], check=True)
    _point_scripts(shared, target)


def _point_scripts(old: Path, new: Path) -> None:
    """pip writes the path of the interpreter into the first line of each script."""
    for name in ENVIRONMENTS:
        for script in (new / name / "bin").iterdir():
            if script.is_symlink() or script.is_dir():
                continue
            content = script.read_bytes()
            changed = content.replace(os.fsencode(old / name), os.fsencode(new / name))
            if changed != content:
                script.unlink()  # a hard link: the other name keeps its content
                script.write_bytes(changed)
                script.chmod(0o755)
