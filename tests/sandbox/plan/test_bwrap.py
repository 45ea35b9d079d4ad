"""A plan as bubblewrap's arguments: tables, and the two command lines run for real."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sandbox.cell.launch import _nul_separated
from sandbox.network.egress import EgressPlan
from sandbox.paths.file_identity import FileIdentity
from sandbox.plan import bwrap
from sandbox.plan.bare import bare_command, command_line
from sandbox.plan.layers import Layers
from sandbox.plan.plan import Bind, Dev, LaunchPlan, Mask, Operation, Proc, ReadOnly, Symlink, Text, Tmpfs
from sandbox.seccomp import filter as seccomp_filter
from sandbox.spec import Limits
from tests.conftest import SYSTEM_PATH, Caller
from tests.sandbox import cages
from tests.tables import one_case

pytestmark = pytest.mark.both_callers

Write = Callable[..., Path]

LAYERS = Layers(b"filter", True, True, True, None)
WHO = FileIdentity(1, 2, 0o40755, 3)
LAYERS = Layers(b"filter", True, True, True, None)
SLOTS = bwrap.Slots(
    sources={"/data": 20, "/ro": 21},
    texts={"/etc/x": 22},
    folders={"/many": "/f/0"},
    filters=(23,),
    status=24,
)


def plan(*operations: Operation, **changes: Any) -> LaunchPlan:
    return LaunchPlan(
        **{
            "argv": ("/bin/true",),
            "directory": "/work",
            "env": (),
            "operations": operations,
            "share_network": False,
            "layers": LAYERS,
            "seccomp": "default",
            "limits": Limits(),
            "shown": (),
            "notes": (),
            "program_files": (),
            "scripts": (),
            **changes,
        }
    )


def words(*operations: Operation) -> list[str]:
    """The arguments that `operations` add to a plan without any."""
    bare = bwrap.options(plan(), SLOTS)
    full = bwrap.options(plan(*operations), SLOTS)
    head = bwrap.head(plan(), inherits_network=False)
    start = len(head) + len(("--json-status-fd", "24", "--add-seccomp-fd", "23"))
    return list(full[start : start + len(full) - len(bare)])


def shown(compiled: LaunchPlan, program: str, seccomp_file: str) -> str:
    return command_line(bare_command(compiled, program, seccomp_file))


@pytest.mark.parametrize(
    ("operation", "expected"),
    [
        (Bind("/ro", "/host/ro", False, WHO), ["--ro-bind-fd", "21", "/ro"]),
        (Bind("/data", "/host/data", True, WHO), ["--bind-fd", "20", "/data"]),
        (Text("/etc/x", b"words"), ["--perms", "0444", "--file", "22", "/etc/x"]),
        (Tmpfs("/tmp", 4096, 0o1777), ["--perms", "1777", "--size", "4096", "--tmpfs", "/tmp"]),
        (Tmpfs("/many", 4096, 0o1777, 1024), ["--bind", "/f/0", "/many"]),
        (Tmpfs("/t", 1, 0o7), ["--perms", "0007", "--size", "1", "--tmpfs", "/t"]),
        (Symlink("/bin", "usr/bin"), ["--symlink", "usr/bin", "/bin"]),
        (Mask("/proc/keys"), ["--ro-bind", "/dev/null", "/proc/keys"]),
        (Proc(), ["--proc", "/proc"]),
        (Dev(), ["--dev", "/dev"]),
        (ReadOnly("/"), ["--remount-ro", "/"]),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, list) else "",
)
def test_each_operation(operation: Operation, expected: list[str]) -> None:
    assert words(operation) == expected


def test_operations_keep_their_order() -> None:
    assert words(Proc(), Tmpfs("/tmp", 1, 0), Mask("/x"), ReadOnly("/")) == [
        *("--proc", "/proc"),
        *("--perms", "0000", "--size", "1", "--tmpfs", "/tmp"),
        *("--ro-bind", "/dev/null", "/x"),
        *("--remount-ro", "/"),
    ]


ALWAYS = [
    "--unshare-user",
    "--unshare-pid",
    "--unshare-ipc",
    "--unshare-uts",
    "--unshare-net",
    "--unshare-cgroup",
    "--disable-userns",
    "--assert-userns-disabled",
    "--uid",
    "65534",
    "--gid",
    "65534",
    "--hostname",
    "plugin",
    "--cap-drop",
    "ALL",
    "--new-session",
    "--die-with-parent",
    "--clearenv",
]


@pytest.mark.parametrize(
    ("changes", "missing"),
    [
        ({}, set()),
        ({"share_network": True}, {"--unshare-net"}),
        ({"own_network": True}, {"--unshare-net"}),
        ({"egress": EgressPlan(("example.com:443",))}, set()),  # if nobody has made its network
        ({"layers": LAYERS._replace(cgroup_namespace=False)}, {"--unshare-cgroup"}),
        (
            {"layers": LAYERS._replace(user_namespace_lock=False)},
            {"--disable-userns", "--assert-userns-disabled"},
        ),
    ],
)
def test_the_walls(changes: dict[str, Any], missing: set[str]) -> None:
    slots = SLOTS._replace(own_network=changes.pop("own_network", False))
    options = bwrap.options(plan(**changes), slots)
    expected = [word for word in ALWAYS if word not in missing]
    assert list(options[: len(expected)]) == expected
    # Before the mounts: the walls are not what a list cut short would lose.
    rest = list(options[len(expected) :])
    assert rest[:5] == ["--json-status-fd", "24", "--add-seccomp-fd", "23", "--chdir"]


def test_a_line_for_people_has_no_gate_and_no_network() -> None:
    """Without the namespace that the runner makes, the option that is left out would share the host's."""
    behind = plan(egress=EgressPlan(("example.com:443",)))
    assert "--unshare-net" in shown(behind, "bwrap", "/filter").split()
    assert "--unshare-net" not in shown(plan(share_network=True), "bwrap", "/filter").split()


def test_the_end_of_the_options() -> None:
    ending = ["--chdir", "/work", "--setenv", "A", "1", "--setenv", "B", "two words"]
    env = (("A", "1"), ("B", "two words"))
    options = bwrap.options(plan(env=env), SLOTS)
    assert list(options[-len(ending) :]) == ending


def test_a_cage_without_a_filter() -> None:
    bare = LAYERS._replace(seccomp_filter=b"")
    assert "--add-seccomp-fd" not in bwrap.options(plan(layers=bare), SLOTS._replace(filters=()))
    two = bwrap.options(plan(), SLOTS._replace(filters=(23, 25)))
    at = two.index("--add-seccomp-fd")
    assert two[at : at + 4] == ("--add-seccomp-fd", "23", "--add-seccomp-fd", "25")
    assert "--seccomp" not in shown(plan(layers=bare), "bwrap", "/filter")
    line = shown(plan(), "bwrap", "/filter")
    assert " --clearenv --seccomp 10 " in line and line.endswith(" -- /bin/true 10</filter")


def test_content_that_is_not_utf8() -> None:
    assert "\ufffd" in shown(plan(Text("/etc/x", b"\xff\n")), "bwrap", "/filter")


def test_the_program_is_not_among_the_options() -> None:
    options = bwrap.options(plan(argv=("/opt/--bind", "--share-net", "--", "-x")), SLOTS)
    assert "--share-net" not in options and "--" not in options and "/opt/--bind" not in options


def test_a_nul_would_start_another_option() -> None:
    assert _nul_separated(["--setenv", "A", "b c", ""]) == b"--setenv\0A\0b c\0\0"
    with pytest.raises(ValueError, match="NUL"):
        _nul_separated(["--setenv", "A", "x\0--share-net"])


# --- for real ----------------------------------------------------------------------------------------------

TELL = '#!/bin/sh\nfor word; do printf "<%s>" "$word"; done; ls /sys/class/net 2>&1; ls /srv; exit 7\n'


@one_case(
    ("name", "args"),
    [
        ("--bind", ("/", "/srv")),
        ("--share-net", ("--share-net",)),
        ("-", ("--", "--bind", "/", "/srv")),
        ("--", ("--ro-bind", "/", "/srv", "--")),
        ("--args", ("0", "--share-net")),
        ("with space", ("", "two words", "new\nline", "$(id)", "@text:/etc/passwd")),
    ],
)
def test_arguments_of_a_plugin_are_never_options(
    runner_as: Caller, plugin_dir: Path, write_file: Write, name: str, args: tuple[str, ...]
) -> None:
    folder = plugin_dir / "-plugin"
    write_file(folder / name, TELL, 0o755)
    end = cages.run(
        runner_as, cages.request(f"./{name}", *args, directory=str(folder)), env={"--share-net": "--bind"}
    )
    said = "".join(f"<{arg}>" for arg in args)
    assert end["code"] == 7
    assert end["output"] == (
        f"{said}ls: cannot access '/sys/class/net': No such file or directory\n"
        "ls: cannot access '/srv': No such file or directory\n"
    )


def test_a_command_on_the_path_that_looks_like_an_option(
    runner_as: Caller, plugin_dir: Path, write_file: Write
) -> None:
    write_file(plugin_dir / "tools/--share-net", "#!/bin/sh\necho ran; exit 7\n", 0o755)
    end = cages.run(runner_as, cages.request("--share-net"), search_path=f"{plugin_dir}/tools")
    assert (end["code"], end["output"]) == (7, "ran\n")


def shown_line(asked: Any, given: Any = None) -> str:
    compiled = cages.compiled(asked, given)
    path = seccomp_filter.filter_path(compiled.seccomp, seccomp_filter.machine_arch())
    found = next(f"{place}/bwrap" for place in SYSTEM_PATH.split(":") if os.path.exists(f"{place}/bwrap"))
    return shown(compiled, found, path)


def test_the_printed_command_line_runs_in_bash(
    runner_as: Caller, plugin_dir: Path, write_file: Write
) -> None:
    folder = plugin_dir / "it's a plugin"
    write_file(
        folder / "run",
        '#!/bin/sh\nprintf "<%s>" "$@"; printf "%s\\n" "$HARD"; id -un; cat /etc/hosts\n'
        "grep -E 'NoNewPrivs|Seccomp:' /proc/self/status; touch /usr/x; touch /tmp/x; exit 7\n",
        0o755,
    )
    args = ("$(touch /tmp/owned)", "`id`", "a'b\"c", "@text:/etc/hosts", "new\nline", "--share-net")
    hard = "$HOME 'quoted' \"twice\" \\ ! *"
    line = shown_line(cages.request("./run", *args, directory=str(folder)), cages.grant(env={"HARD": hard}))
    done = subprocess.run(
        [*runner_as.prefix, "/bin/bash", "-c", line],
        env={"CANARY": "sings"},
        cwd="/",
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 7, done.stderr
    assert done.stdout == (
        "".join(f"<{arg}>" for arg in args)
        + f"{hard}\nnobody\n127.0.0.1 localhost\n::1 localhost\nNoNewPrivs:\t1\nSeccomp:\t2\n"
    )
    assert done.stderr == "touch: cannot touch '/usr/x': Read-only file system\n"


def test_the_printed_command_line_makes_the_same_cage(runner_as: Caller) -> None:
    """The two launches differ only in values that are unique to each cage."""
    tell = (
        "cut -d' ' -f5- /proc/self/mountinfo | grep -v ^/proc/ | sed 's/ - .*//' | sort;"
        " env | sort; find / -xdev 2>/dev/null | grep -v ^/proc | sort; pwd"
    )
    asked = cages.request("/bin/sh", "-c", tell)
    end = cages.run(runner_as, asked)
    assert end["code"] == 0
    done = subprocess.run(
        [*runner_as.prefix, "/bin/bash", "-c", shown_line(asked)],
        env={},
        cwd="/",
        capture_output=True,
        text=True,
    )
    assert done.stdout == end["output"]
