"""What a container takes from the runner, taken away here: the numbers in its /proc, and capabilities."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from sandbox.cell import cell
from tests import elsewhere
from tests.conftest import ROOT, Caller
from tests.manifests import nexo

pytestmark = pytest.mark.both_callers

# What Docker, Podman and containerd leave to a container's root.
DOCKER_CAPABILITIES = (
    *("chown", "dac_override", "fowner", "fsetid", "kill", "setgid", "setuid", "setpcap"),
    *("net_bind_service", "net_raw", "sys_chroot", "mknod", "audit_write", "setfcap"),
)

# In a pid namespace of its own, with a /proc of its own, the runner is process 1. The processes it starts
# have numbers that no process has inside the cage.
_ALONE = (
    *("/usr/bin/unshare", "--pid", "--fork", "--kill-child", "--mount-proc"),
    *("/bin/sh", "-c", 'for each in 1 2 3 4 5 6 7 8; do /bin/true; done; exec "$@"', "sh"),
)


def behind(caller: Caller, *words: str) -> Caller:
    """The same caller, whose every command goes by way of these words, as who runs the tests."""
    return dataclasses.replace(caller, prefix=(*words, *caller.prefix))


def without(*capabilities: str) -> tuple[str, ...]:
    """Root with no capability but Docker's, and of these without some."""
    kept = ",".join(f"+{name}" for name in DOCKER_CAPABILITIES if name not in capabilities)
    return "/usr/bin/setpriv", f"--bounding-set=-all,{kept}", "--inh-caps=-all", "--"


@pytest.fixture
def bare(plugin_dir: Path) -> Path:
    return Path(shutil.copytree(ROOT / "tests/plugins/nexo_bare", plugin_dir / "bare"))


@pytest.fixture
def echo(plugin_dir: Path) -> Path:
    path = plugin_dir / "mcp.json"
    path.write_text(json.dumps({"mcpServers": {"echo": {"command": "/usr/bin/cat"}}}))
    path.chmod(0o644)
    return path


def answers(caller: Caller, echo: Path, bare: Path) -> None:
    done = caller("exec", echo, input="hello\n")
    assert (done.returncode, done.stdout, done.stderr) == (0, "hello\n", "")
    done = caller("call", bare, "bare_echo", "--input", '{"text": "hello"}')
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["content"][0]["text"] == "hello"


@pytest.mark.needs("root", "user")
def test_a_proc_without_the_numbers_of_the_cage(runner_as: Caller, echo: Path, bare: Path) -> None:
    """bwrap looks its child up in /proc by the number it has in the pid namespace around the cage. On a host
    there is by chance always somebody with that number; in a container there is nobody."""
    answers(behind(runner_as, *_ALONE), echo, bare)


@pytest.mark.needs("root", "user")
def test_a_proc_that_hides_the_processes_of_others(runner_as: Caller, echo: Path, bare: Path) -> None:
    script = 'mount -t proc -o hidepid=2 proc /proc && exec "$@"'
    hidden = ("/usr/bin/unshare", "--mount", "/bin/sh", "-c", script, "sh")
    answers(behind(runner_as, *hidden), echo, bare)
    if runner_as.uid == 0:  # a container's root has no capability to see them with
        answers(behind(runner_as, *hidden, *without()), echo, bare)


@pytest.mark.needs("root")
def test_root_with_a_containers_capabilities(runner_as_root: Caller, echo: Path, bare: Path) -> None:
    caller = behind(runner_as_root, *without())
    answers(caller, echo, bare)
    # The uid was dropped all the same: real, effective, saved, and that of the file system.
    with caller.start("exec", echo) as running:
        assert running.stdin is not None and running.stdout is not None
        running.stdin.write(b"hello\n")
        running.stdin.flush()
        assert elsewhere.line(running) == b"hello\n"
        ids = {uid for pid in cell.descendants(running.pid) for uid in uids(pid)}
        running.stdin.close()
    assert len(ids) == 1 and int(ids.pop()) in range(2147418112, 1 << 31)


def uids(pid: int) -> tuple[str, ...]:
    """As the kernel sees them from here."""
    status = Path(f"/proc/{pid}/status").read_text()
    return next(tuple(line.split()[1:]) for line in status.splitlines() if line.startswith("Uid:"))


@pytest.mark.needs("root")
@pytest.mark.parametrize("capability", ["setuid", "kill"])
def test_root_that_cannot_drop_its_uid_or_end_what_has_another(
    runner_as_root: Caller, echo: Path, bare: Path, capability: str
) -> None:
    """Without CAP_KILL nothing would end a plugin: not a signal of the runner, nor its death."""
    lacking = behind(runner_as_root, *without(capability))
    done = lacking("exec", echo, input="hello\n")
    assert (done.returncode, done.stdout) == (125, "")
    assert f"CAP_{capability.upper()}" in done.stderr and f"--cap-add {capability.upper()}" in done.stderr
    done = lacking("call", bare, "bare_echo", "--input", '{"text": "hello"}')
    assert (done.returncode, done.stdout) == (22, "")
    assert f"CAP_{capability.upper()}" in done.stderr


@pytest.mark.needs("root")
@pytest.mark.launches
def test_an_unsandboxed_plugin_is_ended_where_others_processes_are_hidden(
    runner_as_user: Caller, plugin_dir: Path, write_file: Callable[..., Path]
) -> None:
    """With hidepid=1 the stat of every process of another user is unreadable."""
    hidden = behind(
        runner_as_user,
        *("/usr/bin/unshare", "--mount", "--propagation", "private", "/bin/sh", "-c"),
        *('mount -t proc -o hidepid=1 proc /proc && exec "$@"', "sh"),
    )
    policy = (ROOT / "policies/default.toml").read_text()
    rules = write_file(
        plugin_dir / "policy.toml", re.sub("unsandboxed = .*", 'unsandboxed = "allow"', policy)
    )
    write_file(plugin_dir / "p/run.sh", "#!/bin/sh\nsleep 1000 &\necho $!\nexit 5\n", 0o755)
    text = nexo("hidden", "./run.sh") + "[plugin.sandbox]\nenabled = false\n"
    manifest = write_file(plugin_dir / "p/nexo-plugin.toml", text)
    done = hidden("exec", "--policy", rules, manifest)
    assert done.returncode == 5, done.stderr
    assert not Path(f"/proc/{int(done.stdout)}").exists()
