"""Files that the plugin was not granted: reading them, writing them, reaching them by another name."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.conftest import USER_UID
from tests.escape.cage import AttackResult, ProbeCage, sandbox_table
from tests.escape.conftest import SECRET
from tests.tables import one_case

REFUSED = 126


# --- Reading -----------------------------------------------------------------------------------------------


def test_plugins_do_not_see_each_others_tmp_and_shm(cage: ProbeCage) -> None:
    for place in ("/tmp", "/dev/shm"):
        with cage.running("write_and_linger", f"{place}/mine"):
            assert "mine" not in cage.attack("listing", place).done
            assert not os.path.exists(f"{place}/mine")
        written, listed = cage.attacks(("write", f"{place}/mine"), ("listing", place))
        assert written.done is True and listed.done.count("mine") == 1


# --- Writing -----------------------------------------------------------------------------------------------


def test_the_plugins_own_folder_is_read_only(cage: ProbeCage) -> None:
    folder, path = str(cage.folder), f"{cage.folder}/open/x"
    assert cage.attack("write", path).refused == "EROFS"
    replace = {f"--ro-bind {folder} {folder}": f"--bind {folder} {folder}"}
    assert cage.without("write", path, replace=replace).done is True


def test_usr_is_read_only_and_no_mount_lets_privileges_or_devices_through(cage: ProbeCage) -> None:
    usr, tmp, shm, seen = cage.attacks(
        ("write", "/usr/planted"), ("write", "/tmp/x"), ("write", "/dev/shm/x"), ("mounts",)
    )
    # No control really writes to /usr. The mount option shows what stops the write.
    assert usr.refused == "EROFS"
    assert "ro" in dict(seen.done)["/usr"]
    assert tmp.done is True and shm.done is True
    for point, options in seen.done:
        if point.startswith("/dev/") and point not in ("/dev/shm", "/dev/pts"):
            continue  # the device nodes themselves
        assert "nosuid" in options, point
        if point not in ("/dev/pts",):
            assert "nodev" in options or point.startswith("/dev"), point


def test_empty_files_are_bounded(cage: ProbeCage) -> None:
    """Empty files use kernel memory but no bytes of the tmpfs's size."""
    tables = '[plugin.limits]\ntmp = "8M"\nshm = "4M"\n'
    tmp, shm = cage.attacks(
        ["empty_files", "/tmp", "4000"], ["empty_files", "/dev/shm", "4000"], tables=tables
    )
    # Two inodes are the folder itself and the one the kernel keeps for the root's parent.
    assert 2000 < tmp.done[0] <= 2048 and tmp.done[1] == "ENOSPC"
    assert 1000 < shm.done[0] <= 1024 and shm.done[1] == "ENOSPC"
    # The control: with the default size all of them fit.
    more, _ = cage.attacks(["empty_files", "/tmp", "4000"], ["words"])
    assert more.done == [4000, ""]


def test_no_pseudo_terminals(cage: ProbeCage) -> None:
    """The kernel limits their number for the whole machine."""
    assert cage.attack("terminals", "3").done == 0
    policy = 'version = 1\n[seccomp]\ndefault = "compat"\nceiling = "compat"\n'
    path = cage.folder / "compat.toml"
    path.write_text(policy)
    path.chmod(0o644)
    # The control: the "compat" profile, for debuggers and terminals, allows them.
    assert cage.attack("terminals", "3", options=["--policy", str(path)]).done == 3


def test_scratch_space_has_a_size(cage: ProbeCage) -> None:
    small, wanted = 1 << 20, 3 << 20
    floods = [("flood", f"{place}/x", str(wanted)) for place in ("/tmp", "/dev/shm")]
    for full in cage.attacks(*floods, tables='[plugin.limits]\ntmp = "1M"\nshm = "1M"\n'):
        written, error = full.done
        assert (written <= small, error) == (True, "ENOSPC")
    roomy = cage.attacks(*floods, tables='[plugin.limits]\ntmp = "4M"\nshm = "4M"\n')
    assert [result.done for result in roomy] == [[wanted, ""]] * 2


# --- Set-user-id programs ----------------------------------------------------------------------------------


@pytest.mark.needs("root")
def test_a_setuid_program_gives_no_privileges(cage: ProbeCage) -> None:
    """Either a nosuid mount or no_new_privs would be enough. The cage has both."""
    other = USER_UID if cage.caller.uid == 0 else 0
    program = cage.folder / "id"
    shutil.copyfile("/usr/bin/id", program)
    os.chown(program, other, other)
    program.chmod(0o6755)
    assert cage.outside("run", str(program), "-u").done.strip() == str(other)
    ran, status, mounts = cage.attacks(("run", str(program), "-u"), ("status", "NoNewPrivs"), ("mounts",))
    assert ran.done.strip() == "65534"
    assert status.done == {"NoNewPrivs": "1"}
    assert "nosuid" in dict(mounts.done)[str(cage.folder)]


def test_no_setuid_program_is_left_on_the_host(cage: ProbeCage) -> None:
    """The state directory is on the host: a setuid file there would run as its owner's uid."""
    state = Path(f"{cage.folder}.state")
    tables, options = sandbox_table(write=["${state_dir}"]), ["--state-dir", str(state)]
    state.mkdir()
    state.chmod(0o777)
    cage.caller.give(state)
    try:
        assert cage.attack("set_user_id", f"{state}/x", tables=tables, options=options).done == []
        assert [path for path in state.iterdir() if path.stat().st_mode & 0o6000] == []
        shutil.rmtree(state)
        state.mkdir()
        state.chmod(0o777)
        control = cage.under_plain_bwrap("set_user_id", f"{state}/x")
        assert len(control.done) == 4
    finally:
        shutil.rmtree(state)


# --- Root's files: the uid is really dropped ---------------------------------------------------------------


@pytest.mark.needs("root")
def test_a_plugin_cannot_read_a_file_that_only_root_may_read(cage: ProbeCage) -> None:
    """A 0600 file in the plugin's own folder is visible, but a leased uid cannot read it."""
    path = cage.folder / "open/key"
    path.write_text(SECRET)
    path.chmod(0o600)
    os.chown(path, 0, 0)
    assert cage.attack("read", str(path)).refused == "EACCES"
    if cage.caller.uid == 0:
        assert cage.without("read", str(path), drop=False).done == SECRET  # --uid alone drops nothing
    else:
        os.chown(path, cage.caller.uid, cage.caller.uid)
        assert cage.attack("read", str(path)).done == SECRET


# --- Mount destinations below what a plugin can write (CVE-2026-87766) -------------------------------------


@pytest.fixture
def data(cage: ProbeCage) -> Iterator[Path]:
    """A folder that the plugin may write to, with another folder in it."""
    path = Path(f"{cage.folder}.data")
    (path / "inner").mkdir(parents=True)
    path.chmod(0o777)
    yield path
    shutil.rmtree(path)


def test_a_link_planted_by_one_run_does_not_redirect_a_later_mount(cage: ProbeCage, data: Path) -> None:
    target = Path(f"{cage.folder}.target")
    target.mkdir()
    target.chmod(0o777)
    options = ["--policy", _policy(cage, write=[str(data)], read=[str(data)])]
    links = {"x": f"/oldroot{target}", "z": f"../../../../../..{target}"}
    try:
        planted = cage.attacks(
            *(("symlink", link, f"{data}/{name}") for name, link in links.items()),
            tables=sandbox_table(write=[str(data)]),
            options=options,
        )
        assert [result.done for result in planted] == [True, True]
        for below in ("x", "x/y", "z", "z/y"):
            tables = sandbox_table(write=[str(data)], read=[f"{data}/{below}"])
            asked = cage.attack("words", tables=tables, options=options)
            # The path is missing or refused. It is never created.
            assert asked.code == REFUSED or asked.done == []
        assert os.listdir(target) == []
        _control_of_mounts_below(cage, data, target)
    finally:
        shutil.rmtree(target)


def _control_of_mounts_below(cage: ProbeCage, data: Path, target: Path) -> None:
    version = subprocess.run(
        ["bwrap", "--version"], capture_output=True, text=True, check=True
    ).stdout.split()[1]
    done = cage.under_plain_bwrap(
        "words", bwrap=["--dev-bind", "/", "/", "--bind", str(data), "/mnt", "--dir", "/mnt/x/made"]
    )
    if tuple(int(part) for part in version.split(".")[:2]) < (0, 12):
        assert os.listdir(target) == ["made"], done
    else:
        assert done.code != 0


def test_a_mount_below_a_writable_one_is_refused(cage: ProbeCage, data: Path) -> None:
    options = ["--policy", _policy(cage, write=[str(data)], read=[str(data)])]
    tables = sandbox_table(write=[str(data)], read=[str(data / "inner")])
    refused = cage.attack("words", tables=tables, options=options)
    assert refused.code == REFUSED
    assert "below_writable" in refused.err
    assert str(data / "inner") in refused.err
    granted = cage.attack("write", f"{data}/x", tables=sandbox_table(write=[str(data)]), options=options)
    assert granted.done is True


# --- The denylist, by every name a denied folder has -------------------------------------------------------


def _policy(cage: ProbeCage, *, read: list[str], write: list[str] = []) -> str:  # noqa: B006 -- never changed
    path = cage.caller.home / "policy.toml"
    path.write_text(f"version = 1\n[read]\nceiling = {read}\n[write]\nceiling = {write}\n")
    cage.caller.give(path)
    path.chmod(0o600)
    return str(path)


@pytest.fixture
def denied(cage: ProbeCage, write_file: Callable[..., Path]) -> Path:
    """~/.ssh with a file in it, and links that lead to it."""
    home = cage.caller.home
    home.chmod(0o755)
    write_file(home / ".ssh/id", SECRET)
    write_file(home / "notes/text", "harmless")
    (home / "link").symlink_to(home / ".ssh")
    (home / "up").symlink_to(home)
    cage.caller.give(home)
    return home / ".ssh"


ALIASES = {
    "itself": "{home}/.ssh",
    "a file below": "{home}/.ssh/id",
    "what contains it": "{home}",
    "through ..": "{home}/notes/../.ssh",
    "double slashes": "{home}//.ssh",
    "a trailing slash": "{home}/.ssh/",
    "a dot": "{home}/./.ssh/.",
    "a link": "{home}/link",
    "below a link": "{home}/link/id",
    "a linked parent": "{home}/up/.ssh",
    "the root's magic link": "/proc/self/root{home}/.ssh",
    "the working directory's": "/proc/self/cwd{home}/.ssh",
    "a thread's root": "/proc/thread-self/root{home}/.ssh",
}


@one_case("name", ALIASES)
def test_a_denied_folder_is_denied_by_every_name(cage: ProbeCage, denied: Path, name: str) -> None:
    asked = ALIASES[name].format(home=cage.caller.home)
    answer = cage.attack(
        "read", f"{denied}/id", tables=sandbox_table(read=[asked]), options=["--policy", "dev"]
    )
    assert answer.code == REFUSED, answer
    assert answer.out == ""
    assert "nexo-plugin.toml" in answer.err


def test_a_folder_beside_a_denied_one_is_granted(cage: ProbeCage, denied: Path) -> None:
    notes = denied.parent / "notes"
    answer = cage.attack(
        "read", f"{notes}/text", tables=sandbox_table(read=[str(notes)]), options=["--policy", "dev"]
    )
    assert answer.done == "harmless"
    # The default policy does not grant it.
    refused = cage.attack("read", f"{notes}/text", tables=sandbox_table(read=[str(notes)]))
    assert refused.code == REFUSED


def test_tokens_of_assistants_and_backups_of_configurations_are_denied(
    cage: ProbeCage, write_file: Callable[..., Path]
) -> None:
    """The control is a folder beside the tokens, which a contract gives."""
    home = cage.caller.home
    home.chmod(0o755)
    backups = Path(cage.caller.environ["XDG_STATE_HOME"]) / "runner/backups"
    tokens = (
        write_file(home / ".claude/.credentials.json", SECRET),
        write_file(home / ".claude.json", SECRET),
        write_file(home / ".codex/auth.json", SECRET),
        write_file(home / ".gemini/oauth_creds.json", SECRET),
        write_file(home / ".cursor/mcp.json", SECRET),
        write_file(backups / "mcp.json-1", SECRET),
        write_file(home / ".local/state/runner/backups/mcp.json-1", SECRET),
    )
    log = write_file(home / ".claude/projects/log", "harmless")
    cage.caller.give(home)

    def read(path: Path, asked: Path) -> AttackResult:
        tables = sandbox_table(read=[str(asked)])
        return cage.attack("read", str(path), tables=tables, options=["--policy", "dev"])

    assert read(log, log.parent).done == "harmless"
    for path in tokens:
        for asked in (path, path.parent):
            answer = read(path, asked)
            assert (answer.code, answer.out) == (REFUSED, ""), asked
            assert "denylist" in answer.err, answer.err


@pytest.mark.needs("root")
def test_a_mount_of_a_denied_folder_is_denied(
    cage: ProbeCage, denied: Path, write_file: Callable[..., Path]
) -> None:
    """A bind mount or an overlay shows a denied folder under a path that does not look denied.

    The mounts are made in a new mount namespace and end with it.
    """
    alias = denied.parent / "alias"
    alias.mkdir()
    write_file(denied / "keys/id", SECRET)
    cage.caller.give(denied.parent)
    cage.manifest(sandbox_table(read=[str(alias)]), args=["read", f"{alias}/id"])
    command = cage.caller.command("exec", "--policy", "dev", cage.folder)

    def ran(mount: str) -> subprocess.CompletedProcess[str]:
        script = f'{mount}; exec "$@"'
        return subprocess.run(
            ["unshare", "--mount", "sh", "-c", script, "sh", *command],
            env=dict(cage.caller.environ),
            capture_output=True,
            text=True,
            timeout=60,
        )

    notes, work = denied.parent / "notes", denied.parent / "work"
    work.mkdir()

    def overlay(options: str) -> str:
        return f"mount -t overlay overlay -o '{options}' '{alias}'"

    for mount in (
        f"mount --bind '{denied}/keys' '{alias}'",
        overlay(f"lowerdir={notes}:{denied}/keys"),
        overlay(f"lowerdir={denied.parent}:/usr/share"),  # the denied folder is below this layer
        overlay(f"lowerdir={notes},upperdir={denied}/keys,workdir={work}"),
        # An overlay of an overlay.
        f"mount -t overlay overlay -o 'lowerdir={denied}/keys:/usr/share/doc' '{work}' && "
        + overlay(f"lowerdir={work}:{notes}"),
    ):
        refused = ran(mount)
        assert refused.returncode == REFUSED, (mount, refused)
        assert "it is a mount of something that" in refused.stderr
    relative = ran(
        f"cd '{denied.parent}' && "
        + overlay("lowerdir=denied/keys:notes").replace("denied/", f"{denied.name}/")
    )
    assert relative.returncode == REFUSED and "a relative path" in relative.stderr, relative
    # The kernel keeps the name that a layer was mounted by: a link that is gone or leads there, a bind mount
    # that is gone, a descriptor of the process that mounted it.
    link, bound = denied.parent / "to-keys", denied.parent / "bound"
    bound.mkdir()
    make_link = f"ln -sfn '{denied}/keys' '{link}'"
    for mount, reason in (
        (f"{make_link}; {overlay(f'lowerdir={link}:{notes}')}", "it is a mount of something that"),
        (f"{make_link}; {overlay(f'lowerdir={link}:{notes}')}; rm '{link}'", "not there under its name"),
        (
            f"mount -B '{denied}/keys' '{bound}'; {overlay(f'lowerdir={bound}:{notes}')}; umount '{bound}'",
            "shows 'id', which none of its layers has",
        ),
        (
            f"exec 9<'{denied}/keys'; {overlay(f'lowerdir=/proc/self/fd/9:{notes}')}; exec 9<'{notes}'",
            "not there under its name",
        ),
    ):
        refused = ran(mount)
        assert refused.returncode == REFUSED and reason in refused.stderr, (mount, refused)
    for mount in (
        f"mount --bind '{notes}' '{alias}'",
        overlay(f"lowerdir={notes}:{work}/work"),
        f"ln -sfn '{notes}' '{link}'; " + overlay(f"lowerdir={link}:{work}/work"),
    ):
        harmless = ran(f"cp '{notes}/text' '{notes}/id'; {mount}")
        assert "harmless" in harmless.stdout, (mount, harmless)


@pytest.mark.needs("root")
def test_a_layer_of_an_overlay_that_is_denied_is_denied(
    cage: ProbeCage, denied: Path, write_file: Callable[..., Path]
) -> None:
    """The denied folder may itself be an overlay of folders elsewhere. Those are denied too."""
    layer = denied.parent / "layer"
    write_file(layer / "keys/id", SECRET)
    cage.caller.give(denied.parent)
    cage.manifest(sandbox_table(read=[str(layer / "keys")]), args=["read", f"{layer}/keys/id"])
    command = cage.caller.command("exec", "--policy", "dev", cage.folder)
    script = f"mount -t overlay overlay -o 'lowerdir={denied.parent}/notes:{layer}' '{denied}'; exec \"$@\""
    words = ["unshare", "--mount", "sh", "-c", script, "sh", *command]
    done = subprocess.run(words, env=dict(cage.caller.environ), capture_output=True, text=True, timeout=60)
    assert done.returncode == REFUSED, done
    control = subprocess.run(
        command, env=dict(cage.caller.environ), capture_output=True, text=True, timeout=60
    )
    assert SECRET.strip() in control.stdout


# --- Hard links --------------------------------------------------------------------------------------------


def test_a_hard_link_to_a_denied_file_is_refused(cage: ProbeCage, denied: Path) -> None:
    assert cage.attack("words").done == []
    os.link(denied / "id", cage.folder / "innocent")
    answer = cage.attack("read", f"{cage.folder}/innocent")
    assert answer.code == REFUSED
    assert "hard_link" in answer.err and "innocent" in answer.err


def test_a_hard_link_cannot_make_a_read_only_file_writable(cage: ProbeCage) -> None:
    state = cage.caller.home / "state"
    answer = (
        cage.attack(
            "hard_link",
            f"{cage.folder}/probe.py",
            f"{state}/x",
            tables=sandbox_table(write=["${state_dir}"]),
            options=["--state-dir", str(state)],
        )
        if cage.caller.uid
        else cage.attack("hard_link", f"{cage.folder}/probe.py", "/tmp/x")
    )
    assert answer.refused == "EXDEV"
    assert cage.outside("hard_link", f"{cage.folder}/probe.py", f"{cage.folder}/open/x").done is True


# --- Sockets, FIFOs, devices -------------------------------------------------------------------------------


def test_a_folder_with_a_socket_is_refused(cage: ProbeCage) -> None:
    """A read-only bind mount does not stop connect(), as the control shows."""
    path = str(cage.folder / "s")
    with closing(socket.socket(socket.AF_UNIX)) as server:
        server.bind(path)
        os.chmod(path, 0o777)
        server.listen()
        answer = cage.attack("connect_unix", path)
        assert answer.code == REFUSED
        assert "special_file" in answer.err and path in answer.err

        folder = str(cage.folder)
        words = [*cage.caller.prefix, "bwrap", "--dev-bind", "/", "/", "--ro-bind", folder, folder, "--"]
        process = subprocess.Popen(
            [*words, f"{folder}/probe.py", "connect_unix", path],
            stdout=subprocess.PIPE,
        )
        with process:
            server.settimeout(60)
            link, _ = server.accept()
            with link:
                link.send(b"through")
            out, _ = process.communicate(timeout=60)
        assert b"through" in out


@pytest.mark.parametrize("kind", ["fifo", pytest.param("device", marks=pytest.mark.needs("root"))])
def test_a_folder_with_a_fifo_or_device_is_refused(cage: ProbeCage, kind: str) -> None:
    assert cage.attack("words").code == 0
    path = cage.folder / "open/special"
    if kind == "fifo":
        os.mkfifo(path)
    else:
        os.mknod(path, 0o666 | 0o020000, os.makedev(1, 3))
    answer = cage.attack("read", str(path))
    assert answer.code == REFUSED
    assert "special_file" in answer.err and str(path) in answer.err


# --- Sources behind links ----------------------------------------------------------------------------------


def test_a_source_that_is_a_link_is_refused_and_its_target_named(cage: ProbeCage, denied: Path) -> None:
    home = denied.parent
    (home / "shortcut").symlink_to(home / "notes")
    if cage.caller.uid == 0:
        os.chown(home / "shortcut", USER_UID, USER_UID, follow_symlinks=False)
    tables = sandbox_table(read=[str(home / "shortcut")])
    answer = cage.attack("read", f"{home}/shortcut/text", tables=tables, options=["--policy", "dev"])
    assert answer.code == REFUSED
    assert "symlink" in answer.err and str(home / "notes") in answer.err


# --- Core dumps --------------------------------------------------------------------------------------------


def test_a_crash_leaves_no_core(cage: ProbeCage) -> None:
    """The working directory is writable, so a core could be written there."""
    state = Path(f"{cage.folder}.state")
    report = cage.caller.home / "report.json"
    options = ["--state-dir", str(state), "--report", str(report)]
    try:
        answer = cage.attack(
            "crash", str(state), tables=sandbox_table(write=["${state_dir}"]), options=options
        )
        assert answer.code == 128 + 11
        assert '"signal:11"' in report.read_text()
        assert os.listdir(state) == []
        assert cage.attack("limits").done["CORE"] == [0, 0]
    finally:
        shutil.rmtree(state)
    if Path("/proc/sys/kernel/core_pattern").read_text().strip() == "core":
        words = [*cage.caller.prefix, "sh", "-c", 'ulimit -c unlimited; exec "$@"', "sh"]
        subprocess.run(
            [*words, str(cage.folder / "probe.py"), "crash", str(cage.folder / "open")], check=False
        )
        assert any(name.startswith("core") for name in os.listdir(cage.folder / "open"))
