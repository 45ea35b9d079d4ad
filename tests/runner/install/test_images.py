"""Programs started in images: what is their root, who they are in it, and what of the host is there."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.conftest import USER_UID, Caller, account_of
from tests.root_store import empty_root_store
from tests.runner.install.packages import PYTHON_SERVER
from tests.runner.oci.images import (
    BuiltImage,
    Member,
    build,
    busybox_members,
    folder,
    layer,
    link,
    python_image,
)
from tests.runner.oci.servers import FakeRegistry, fake_registry
from tests.tables import check_rows
from tests.template import settled

pytestmark = [pytest.mark.needs("busybox"), pytest.mark.launches, pytest.mark.usefixtures("nothing_left")]


class Bench(NamedTuple):
    """A person with a registry, and an image in their store."""

    caller: Caller
    server: FakeRegistry
    folder: Path

    def install(self, image: BuiltImage, name: str = "x") -> str:
        """Returns its reference."""
        self.server.publish_image(image)
        reference = f"{self.server.address}/acme/{name}:1"
        done = self.caller("install", "--yes", f"docker://{reference}")
        assert done.returncode == 0, done.stdout + done.stderr
        return reference

    def run(self, *words: str | Path, status: int = 0) -> str:
        done = self.caller("run", *words)
        assert done.returncode == status, done.stdout + done.stderr
        return done.stdout + done.stderr


@pytest.fixture
def bench(runner_as: Caller, plugin_dir: Path) -> Iterator[Bench]:
    with ExitStack() as stack:
        server = stack.enter_context(fake_registry())
        caller = stack.enter_context(account_of(runner_as))
        if caller.uid == 0:
            caller = stack.enter_context(empty_root_store(caller, plugin_dir))
        yield Bench(caller, server, plugin_dir)


def busybox_image(**config: Any) -> BuiltImage:
    config = {"Env": ["PATH=/bin", "OWN=1"], **config}
    above = [
        folder("usr/share/own"),
        link("opt", "/usr/share"),
        Member("etc/resolv.conf", b"nameserver 192.0.2.1\n"),
    ]
    return build(layer(busybox_members()), layer(above), **config)


_QUESTIONS = """
id -u; id -g; pwd; echo "$HOME $OWN $PATH"
ls / | tr "\\n" " "; echo
ls /usr /usr/share | tr "\\n" " "; echo
cat /etc/resolv.conf | wc -c
echo changed >/etc/passwd && cat /etc/passwd
rm -rf /bin/id /usr/share/own && mkdir /usr/share/own && ls -A /usr/share/own
for name in Cap NoNew Seccomp; do grep "^$name" /proc/self/status | tr "\\n" " "; done; echo
cat /proc/1/environ | wc -c
echo "$@"
"""


@pytest.mark.both_callers
def test_an_image_is_the_root(bench: Bench) -> None:
    shown = bench.folder / "shown"
    shown.mkdir()
    (shown / "file").write_text("of the host")
    bench.caller.give(shown)
    config = {
        "Entrypoint": ["sh", "-c", _QUESTIONS, "own"],
        "Cmd": ["usual"],
        "User": "app",
        "WorkingDir": "/home",
    }
    reference = bench.install(busybox_image(**config))
    lines = bench.run("--image", reference).splitlines()
    assert lines[:4] == ["1000", "1001", "/home", "/home/app 1 /bin"]
    # Nothing of the host's is there.
    assert lines[4].split() == [
        "bin",
        "dev",
        "etc",
        "home",
        "opt",
        "proc",
        "root",
        "run",
        "sys",
        "tmp",
        "usr",
    ]
    assert lines[5].split() == ["/usr:", "share", "/usr/share:", "own"]
    assert lines[6:8] == ["0", "changed"]
    found = lines[8].split()
    assert found[1:10:2] == ["0" * 16] * 5 and found[10:14] == ["NoNewPrivs:", "1", "Seccomp:", "2"]
    assert lines[9:] == ["0", "usual"]
    # The next one sees nothing of what it changed, and gets its own words.
    again = bench.run(
        "--image", reference, "--user", "0:7", "--read", shown, "--", "other", "words"
    ).splitlines()
    assert again[:2] == ["0", "7"] and again[3] == "/root 1 /bin" and again[-1] == "other words"
    assert again[7] == "changed"


@pytest.mark.both_callers
def test_files_of_the_host_in_an_image(bench: Bench) -> None:
    """At their own paths, for reading and writing, below folders that the image has and has not."""
    made = bench.folder / "made"
    made.mkdir()
    if bench.caller.uid == 0:  # what it writes belongs to somebody
        os.chown(made, USER_UID, USER_UID)
    else:
        bench.caller.give(made)
    reference = bench.install(busybox_image(Entrypoint=["sh", "-c"]))
    bench.run("--image", reference, "--write", made, "--", f"echo inside >{made}/new")
    assert (made / "new").read_text() == "inside\n"
    secret = bench.run("--image", reference, "--read", "/etc/shadow", "--", "true", status=126)
    assert "denylist" in secret
    linked = bench.caller("run", "--image", reference, "--read", "/opt", "--", "true")
    assert linked.returncode == 126 and "in the image /opt is a link to /usr/share" in linked.stderr
    own = bench.caller("run", "--image", reference, "--read", "/usr/share", "--", "ls /usr/share")
    assert own.stdout == "own\n"


_MCP = """{"mcpServers": {"x": {"command": "docker", "env": {"TOKEN": "t", "OTHER": "o"}, "args": %s}}}"""


@pytest.mark.both_callers
def test_docker_run_of_an_entry(bench: Bench) -> None:
    """Read-only, which also is what an image is on a machine that mounts no layer."""
    shown = bench.folder / "shown"
    shown.mkdir()
    (shown / "file").write_text("of the host\n")
    bench.caller.give(shown)
    reference = bench.install(busybox_image())
    options = [
        "run",
        "-i",
        "--rm",
        "--read-only",
        "-e",
        "TOKEN",
        "-e",
        "SET=1",
        "--network=none",
        "--pull",
        "never",
    ]
    options += ["-v", f"{shown}:/data/below:ro", "--mount", f"type=bind,src={shown},dst=/home/x,readonly"][:2]
    options += [
        "--tmpfs",
        "/usr/share",
        "-w",
        "/data",
        "-u",
        "app",
        "--cpus",
        "1",
        "-m",
        "512m",
        "--entrypoint",
        "sh",
    ]
    questions = (
        "id -u; pwd; cat below/file; echo $TOKEN $SET $OTHER; ls /usr/share | wc -l; touch /usr/share/x;"
        " touch /bin/x /data/x /data/below/x 2>&1 | wc -l; ls / /data | tr '\\n' ' '; echo; cat /etc/hosts"
    )
    manifest = bench.folder / "mcp.json"
    manifest.write_text(_MCP % json.dumps([*options, reference, "-c", questions]))
    bench.caller.give(manifest)
    refused = bench.caller("exec", manifest)
    assert (
        refused.returncode == 126 and "image_ceiling" in refused.stderr and "read_ceiling" in refused.stderr
    )
    allowed = bench.caller("allow", manifest, "--yes")
    assert allowed.returncode == 0 and reference in allowed.stdout, allowed
    done = bench.caller("exec", manifest)
    lines = done.stdout.splitlines()
    assert lines[:6] == ["1000", "/data", "of the host", "t 1", "0", "3"], done
    assert lines[6].split() == [
        "/:",
        "bin",
        "data",
        "dev",
        "etc",
        "home",
        "opt",
        "proc",
        "root",
        "run",
        "tmp",
        "usr",
        "/data:",
        "below",
    ]
    assert lines[7:] == ["127.0.0.1 localhost", "::1 localhost"]
    explained = bench.caller("explain", manifest).stdout
    assert "is its root, read-only but for /tmp, /usr/share (it is asked for read-only)" in explained
    # The same folder in another place may be other code, and so may another user's.
    written = manifest.read_text()
    for old, new in ((":/data/below:", ":/bin/below:"), ('"app"', '"root"'), ('"/usr/share"', '"/usr"')):
        assert written.count(old) == 1
        manifest.write_text(written.replace(old, new))
        other = bench.caller("exec", manifest)
        assert other.returncode == 126 and "read_ceiling" in other.stderr, other


@pytest.mark.both_callers
def test_a_volume_that_is_written(bench: Bench) -> None:
    """What it writes belongs to the owner of the folder, as ever."""
    made = bench.folder / "made"
    made.mkdir()
    owner = bench.caller.uid or USER_UID
    os.chown(made, owner, owner)
    reference = bench.install(busybox_image())
    line = ("docker", "run", "-v", f"{made}:/data", reference, "sh", "-c", "echo inside >/data/new")
    bench.run("--", *line)
    assert (made / "new").read_text() == "inside\n" and (made / "new").stat().st_uid == owner
    explained = bench.caller("explain", "--", *line).stdout
    shown = next(text for text in explained.splitlines() if text.split()[:2] == ["write", "/data"])
    assert f"on the host {made}" in shown and ("uid" in shown) is (bench.caller.uid == 0)


def test_wrap_makes_a_cage_of_docker_run(bench: Bench) -> None:
    """Its volume is asked of the person, as every folder is."""
    shown = bench.folder / "shown"
    shown.mkdir()
    (shown / "file").write_text("of the host\n")
    bench.server.publish_image(
        busybox_image(Entrypoint=["sh", "-c", "cat /data/file; echo $TOKEN $OTHER $1", "x"])
    )
    reference = f"{bench.server.address}/acme/x:1"
    args = ["run", "-i", "--rm", "-v", f"{shown}:/data:ro", "-e", "TOKEN", reference, "arg"]
    config = bench.caller.home / ".cursor/mcp.json"
    config.parent.mkdir()
    config.write_text(_MCP % json.dumps(args))
    before = config.read_bytes()
    bench.caller.give(config.parent)
    bench.caller.give(shown)
    wrapped = bench.caller("wrap", config, "--install", "--yes")
    assert wrapped.returncode == 0 and f"installed {reference}" in wrapped.stdout, wrapped
    entry = json.loads(config.read_text())["mcpServers"]["x"]
    assert entry["args"][-len(args) :] == args

    def start(cwd: str | Path = "/") -> tuple[int, str]:
        done = bench.caller(*entry["args"], env=entry["env"], cwd=cwd)
        return done.returncode, done.stdout + done.stderr

    status, said = start()
    assert status == 126 and "policy default does not allow reading it" in said and "runner allow" in said, (
        said
    )
    assert bench.caller("allow", config, "--server", "x", "--yes").returncode == 0
    # Its words name nothing of the folder that its host starts it in, whatever is there.
    for name in ("run", "arg"):
        (shown / name).mkdir()
    assert start() == start(shown) == (0, "of the host\nt arg\n")
    assert bench.caller("install", "--verify").stdout == f"{reference}: as it was fetched\n"
    assert bench.caller("install", "--remove", reference).returncode == 0
    status, said = start()
    assert status == 126 and f"runner install docker://{reference}" in said
    assert bench.caller("wrap", config, "--undo", "--yes").returncode == 0 and config.read_bytes() == before


def test_a_manifest_in_an_image(bench: Bench) -> None:
    """By the option and by x-sandbox: its command is a program of the image. A yes is for one image."""
    reference = bench.install(busybox_image(Entrypoint=["not", "this"]))
    manifest = bench.folder / "mcp.json"
    server = {"command": "sh", "args": ["-c", "echo $OWN; ls /usr/share"]}

    def write(**sandbox: str) -> None:
        manifest.write_text(json.dumps({"mcpServers": {"x": {**server, "x-sandbox": sandbox}}}))
        bench.caller.give(manifest)

    write()
    done = bench.caller("exec", "--image", reference, manifest)
    assert done.stdout == "1\nown\n", done
    write(image=reference)
    refused = bench.caller("exec", manifest)
    assert refused.returncode == 126 and f"image_ceiling: {reference}" in refused.stderr
    policy = bench.folder / "policy.toml"
    policy.write_text(f'version = 1\n[images]\nallow = ["{reference.rpartition(":")[0]}"]\n')
    bench.caller.give(policy)
    assert bench.caller("exec", "--policy", policy, manifest).stdout == "1\nown\n"
    assert bench.caller("allow", "--yes", manifest).returncode == 0
    assert bench.caller("exec", manifest).stdout == "1\nown\n"
    # Another image under the same name needs another yes, and the old one stays until it is taken.
    bench.server.publish_image(busybox_image(Env=["PATH=/bin", "OWN=2"]))
    assert bench.caller("exec", manifest).stdout == "1\nown\n"
    updated = bench.caller("install", "--update", "--yes")
    assert updated.returncode == 0 and f"{reference}: sha256:" in updated.stdout, updated
    refused = bench.caller("exec", manifest)
    assert refused.returncode == 126 and "your approval of" in refused.stderr, refused
    write(image="no such image")
    checked = bench.caller("check", manifest)
    assert checked.returncode != 0 and "image_reference" in checked.stdout + checked.stderr


def test_what_cannot_start(bench: Bench) -> None:
    bare = bench.install(build(layer([Member("file", b"1")])), "bare")
    shell = bench.install(busybox_image(Entrypoint=["sh", "-c"], User="nobody-knows"), "shell")

    def is_told(words: tuple[str, ...], said: str) -> None:
        done = bench.caller("run", *words)
        assert done.returncode in (125, 126, 127), done
        assert said in done.stderr

    missing = f"{bench.server.address}/acme/missing:1"
    rows = {
        ("--image", bare): "has no entry point and no command of its own",
        ("--image", bare, "--", "file"): "has no program file",
        ("--image", bare, "--", "/bin/sh"): "has no program /bin/sh",
        ("--image", shell): "the image has no user 'nobody-knows' in its /etc/passwd",
        ("--image", missing): f"fetch it once: runner install docker://{missing}",
        ("--image", bare, "--user", "0:x", "--", "x"): "give another one as a number: --user USER:GID",
        ("--", "docker", "run", "-it", shell): "this one cannot: it has an option that no cage has ('-t')",
        (
            "--image",
            shell,
            "--user",
            "0",
            "--policy",
            "strict",
            "--",
            "true",
        ): "policy strict lets nobody approve it",
    }
    check_rows(rows, is_told)
    assert bench.caller("run", "--user", "0", "--", "true").returncode == 2
    assert bench.caller("run", "--image", "A B").returncode == 2


def test_what_docker_run_and_an_image_say_of_themselves(bench: Bench) -> None:
    """Odd accounts, folders to start in, an entry point that is taken away, and files of variables."""
    passwd = b"root:x:0:0::/x\0--bind\0/\0/host:/bin/sh\n\x0b::::::\nodd:x:-1:0::/:\n"
    odd = [each for each in busybox_members() if each.name != "etc/passwd"]
    image = build(
        layer([*odd, Member("etc/passwd", passwd)]),
        Env=["PATH=/bin", "A=image", "LD_PRELOAD=/of/the/image.so"],
        Entrypoint=["sh", "-c", "echo own entry point"],
    )
    reference = bench.install(image)
    variables = bench.folder / "variables"
    variables.write_text("A=file\nB=file\n")
    bench.caller.give(variables)
    manifest = bench.folder / "mcp.json"

    def starts(words: tuple[str, ...], wanted: str) -> None:
        options, args = words[: words.index("--")], words[words.index("--") + 1 :]
        line = ["run", "-i", *options, reference, *args]
        manifest.write_text(_MCP % json.dumps(line))
        bench.caller.give(manifest)
        bench.caller("allow", manifest, "--yes")
        done = bench.caller("exec", manifest)
        assert wanted in done.stdout + done.stderr and "internal" not in done.stderr, done

    shell = ("--entrypoint", "", "--", "sh", "-c")
    rows: dict[tuple[str, ...], str] = {
        ("--",): "own entry point\n",
        ("--entrypoint", "", "--", "echo", "another"): "another\n",
        ("--entrypoint=", "--"): "has no entry point and no command of its own",
        # A home with a NUL would begin another option of bwrap's.
        (*shell, "echo $HOME; ls /"): "/\nbin\n",
        ("-u", "odd", *shell, "id"): "'-1' cannot be the user or group of an image",
        ("-u", "12:34", *shell, "id"): "uid=12 gid=34",
        ("-w", "/tmp/a/b", *shell, "pwd; touch x && ls"): "/tmp/a/b\nx\n",
        ("-w", "/new/a", *shell, "pwd; touch x && ls"): "/new/a\nx\n",
        ("--read-only", "-w", "/new/a", *shell, "pwd; touch x && ls"): "/new/a\nx\n",
        ("--tmpfs", "/tmp/kept", *shell, "ls /tmp"): "kept\n",
        ("-w", "/bin/sh/x", *shell, "pwd"): "has no folder /bin/sh/x to start in",
        ("--env-file", str(variables), "-e", "B=option", *shell, "echo $A $B"): "file option\n",
        ("--env-file", "/etc/shadow", *shell, "env"): "which no policy can allow",
        (*shell, "echo $A $LD_PRELOAD"): "image /of/the/image.so\n",
    }
    check_rows(rows, starts)
    # The whole line in one word, as some entries have it.
    line = {"command": f"docker run -i {reference}", "x-sandbox": {}}
    manifest.write_text(json.dumps({"mcpServers": {"x": line}}))
    assert bench.caller("allow", manifest, "--yes").returncode == 0
    assert bench.caller("exec", manifest).stdout == "own entry point\n"
    both = bench.caller("exec", "--image", reference, manifest)
    assert both.returncode == 126 and f"of its own, and {reference} is asked for as well" in both.stderr


def test_what_is_changed_is_bounded_and_never_in_the_store(bench: Bench) -> None:
    """Also by a descriptor that was open for reading, and read-only, where the files are bound themselves."""
    reference = bench.install(busybox_image())
    tries = (
        "exec 3</etc/group; echo changed >/proc/self/fd/3; cat /etc/group; rm -f /etc/group; ls /etc/group"
    )
    fill = "cat /dev/zero >/big; ls -s /big; i=0; while echo >/f$i; do i=$((i+1)); done; ls / | grep -c ^f"
    shell = ("--image", reference, "--limit", "tmp=2M", "--", "sh", "-c")
    in_layer = bench.caller("run", *shell, f"{tries}; {fill}")
    lines = in_layer.stdout.splitlines()
    assert lines[0] == "changed" and lines[1].endswith(" /big"), in_layer
    assert "/etc/group: No such file" in in_layer.stderr and "No space left" in in_layer.stderr
    assert int(lines[1].split()[0]) <= 2048 and int(lines[2]) <= 1024
    manifest = bench.folder / "mcp.json"
    manifest.write_text(_MCP % json.dumps(["run", "--read-only", reference, "sh", "-c", tries]))
    bench.caller.give(manifest)
    assert bench.caller("allow", manifest, "--yes").returncode == 0
    bound = bench.caller("exec", manifest)
    assert "app:x:1001" in bound.stdout and bound.stdout.endswith("/etc/group\n"), bound
    assert "Read-only file system" in bound.stderr
    assert bench.caller("install", "--verify").stdout == f"{reference}: as it was fetched\n"


@pytest.mark.needs("user")
def test_a_stored_plan_is_for_the_image_that_it_was_made_with(
    runner_as_user: Caller, plugin_dir: Path
) -> None:
    """The runners are all in one mount namespace: a plan counts for one."""
    with fake_registry() as server:
        _start_from_stored_plans(Bench(runner_as_user, server, plugin_dir))


def _start_from_stored_plans(bench: Bench) -> None:
    own = "cat /etc/own"
    images = [
        build(layer([*busybox_members(), Member("etc/own", text)]), Env=["PATH=/bin"])
        for text in (b"1\n", b"2\n")
    ]
    reference = bench.install(images[0])
    manifest = bench.folder / "mcp.json"
    entry = {"command": "sh", "args": ["-c", own], "x-sandbox": {"image": reference}}
    manifest.write_text(json.dumps({"mcpServers": {"x": entry}}))
    bench.caller.give(manifest)
    assert bench.caller("allow", manifest, "--yes").returncode == 0
    caller = settled(bench.caller)

    def start() -> tuple[str, str]:
        done = caller("exec", manifest, env={"RUNNER_DEBUG": "1"})
        return done.stdout, done.stderr

    assert start()[0] == "1\n"
    assert start() == ("1\n", "runner: a stored plan is used\n")
    assert bench.caller("install", "--remove", reference).returncode == 0
    out, told = start()
    assert out == "" and "the stored plan does not hold" in told and "is not installed" in told
    bench.install(images[1])
    out, told = start()
    assert out == "" and "image_ceiling" in told and "does not count: it is for" in told
    assert bench.caller("allow", manifest, "--yes").returncode == 0
    assert start()[0] == "2\n"


def test_what_the_entry_says_of_the_network_and_its_folders(bench: Bench) -> None:
    reference = bench.install(busybox_image())
    manifest = bench.folder / "mcp.json"
    shown = bench.folder / "shown"
    shown.mkdir()
    bench.caller.give(shown)
    for options, wanted in (([], "example.com:443"), (["--network", "none"], "")):
        line = [
            "run",
            *options,
            "-v",
            f"{shown}:/usr/share/own/in:ro",
            reference,
            "ls",
            "/usr/share/own",
            "/bin/ls",
        ]
        entry = {"command": "docker", "args": line, "x-sandbox": {"network": ["example.com:443"]}}
        manifest.write_text(json.dumps({"mcpServers": {"x": entry}}))
        bench.caller.give(manifest)
        told = bench.caller("allow", manifest, "--yes").stdout
        assert ("example.com:443" in told) is bool(wanted), told
        # A person sees where it will be. What its arguments name is the image's, and not the host's.
        assert f"In the image {shown} is /usr/share/own/in" in told and "Its arguments name" not in told
        done = bench.caller("exec", manifest)
        assert (done.stdout, done.stderr) == ("/bin/ls\n\n/usr/share/own:\nin\n", ""), done


_LINGERS = (
    """
import signal, sys
def note(number, frame):
    with open("/data/told", "a") as file:
        file.write(f"{number} ")
    if number == signal.SIGUSR1:
        sys.exit()
signal.signal(signal.SIGTERM, note)
signal.signal(signal.SIGUSR1, note)
"""
    + PYTHON_SERVER
    + "\nmain()\nwhile True: signal.pause()\n"
)


def test_a_session_ends_an_image_by_its_own_signal(bench: Bench) -> None:
    shown = bench.folder / "shown"
    shown.mkdir()
    if bench.caller.uid == 0:
        os.chown(shown, USER_UID, USER_UID)
    else:
        bench.caller.give(shown)
    reference = bench.install(python_image(StopSignal="SIGUSR1", Cmd=["python3", "-c", _LINGERS]))
    manifest = bench.folder / "mcp.json"
    manifest.write_text(_MCP % json.dumps(["run", "-i", "--rm", "-v", f"{shown}:/data", reference]))
    bench.caller.give(manifest)
    assert bench.caller("allow", manifest, "--yes").returncode == 0
    called = bench.caller("call", manifest, "who")
    assert called.returncode == 0 and json.loads(called.stdout)["content"][0]["text"] == "wheel ", called
    assert (shown / "told").read_text() == f"{signal.SIGUSR1.value} "


def test_an_entry_point_that_changes_its_user(bench: Bench) -> None:
    """As those of databases do: they are told how to start, and then it works."""
    steps = {"chown": "chown app /home || exit 1", "su": 'exec su app -c "id -u"'}
    for name, step in steps.items():
        script = f'if test "$(id -u)" = 0; then {step}; fi; id -u'
        reference = bench.install(busybox_image(Entrypoint=["sh", "-c", script]), name)
        done = bench.caller("run", "--image", reference)
        assert done.returncode == 1 and "has one uid" in done.stderr and "--user USER" in done.stderr, done
        assert bench.run("--image", reference, "--user", "app") == "1000\n"


def test_the_images_of_a_configuration_are_fetched_with_it(bench: Bench) -> None:
    """Those that `x-sandbox` names: by install, and by wrap, whose entry then starts in its image, once a
    person has allowed that."""
    bench.server.publish_image(busybox_image())
    reference = f"{bench.server.address}/acme/x:1"
    config = bench.caller.home / ".cursor/mcp.json"
    config.parent.mkdir()
    server = {"command": "sh", "args": ["-c", "echo $OWN; ls /usr/share"]}
    entries = {
        "x": {**server, "x-sandbox": {"image": reference}},
        "same": {**server, "x-sandbox": {"image": reference}},
        "plain": server,
        "odd": {**server, "x-sandbox": {"image": "No Image"}},
        "two": {"command": "docker", "args": ["run", "y"], "x-sandbox": {"image": reference}},
    }
    config.write_text(json.dumps({"mcpServers": entries}))
    bench.caller.give(config.parent)

    def install(*options: str) -> tuple[int, str]:
        done = bench.caller("install", *options, config)
        return done.returncode, " ".join((done.stdout + done.stderr).split())

    # The person is asked; without a terminal nothing is fetched.
    status, told = install()
    assert status == 2 and f" ({reference}) will be fetched from {bench.server.address}" in told
    assert "odd: is left out: it names the image 'No Image', which is no reference" in told
    assert "two: is left out: it starts in an image of its own, and x-sandbox names" in told
    assert bench.caller("install", "--list").stdout == "Nothing is installed.\n"
    status, told = install("--server", "plain")
    assert status == 2 and "plain is started by no launcher that fetches packages, and names no image" in told
    status, told = install("--yes")
    assert status == 0 and told.count(f"installed {reference}") == 1 and "pinned to sha256:" in told
    assert reference in bench.caller("install", "--list").stdout
    assert f"{reference}: as it was fetched" in bench.caller("install", "--verify").stdout
    status, told = install("--yes", "--server", "x")
    assert status == 0 and f"x ({reference}) is installed already" in told
    assert bench.caller("install", "--remove", reference).returncode == 0

    wrapped = bench.caller("wrap", config, "--install", "--yes", "--server", "x")
    assert wrapped.returncode == 0 and f"installed {reference}" in wrapped.stdout, wrapped
    assert "an image, which it gets only with your yes" in " ".join(wrapped.stdout.split())
    entry = json.loads(config.read_text())["mcpServers"]["x"]

    def start() -> tuple[int, str]:
        done = bench.caller(*entry["args"], env=entry.get("env", {}), cwd="/")
        return done.returncode, done.stdout + done.stderr

    status, told = start()
    assert status == 126 and f"image_ceiling: {reference}" in told and "runner allow " in told, told
    assert bench.caller("allow", "--yes", config, "--server", "x").returncode == 0
    assert start() == (0, "1\nown\n")
    # Another image in the entry is another question.
    config.write_text(config.read_text().replace(f'"{reference}"', f'"{reference}-other"', 1))
    assert start()[0] == 126
