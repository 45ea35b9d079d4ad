"""From a command to the paths that must be shown. Values first; each kind of program also runs for real."""

from __future__ import annotations

import os
import struct
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from sandbox.paths import denied_paths
from sandbox.paths.executable import ProgramFault, follow
from sandbox.paths.installation import is_runtime, package_of
from sandbox.paths.program import Program, ShowRules, locate, program_fault, resolve
from sandbox.paths.walk import Link
from tests.conftest import ROOT, SYSTEM_PATH, Caller
from tests.sandbox import cages

Write = Callable[..., Path]

OTHER_MACHINE = {"x86_64": ("aarch64", 183), "aarch64": ("x86_64", 62)}


def found(
    command: str,
    *args: str,
    directory: Path | str = "/",
    roots: Sequence[Path | str] = ("/usr",),
    denied: Path | None = None,
    allowed: Path | None = None,
    trusted: bool = False,
    path: str = SYSTEM_PATH,
) -> Program:
    def within(place: Path | None, asked: str) -> bool:
        return place is not None and (asked == str(place) or asked.startswith(f"{place}/"))

    return resolve(
        command,
        args,
        directory=str(directory),
        search_path=path,
        roots=[str(root) for root in roots],
        rules=ShowRules(
            lambda asked: "it is denied" if within(denied, asked) else None,
            lambda asked: within(allowed, asked),
        ),
        trusted=trusted,
    )


def fault(command: str, *args: str, **where: object) -> ProgramFault:
    with pytest.raises(ProgramFault) as caught:
        found(command, *args, **where)  # type: ignore[arg-type]
    assert caught.value.hint
    return caught.value


@pytest.fixture
def plugin(plugin_dir: Path) -> Path:
    """The plugin's own folder; other folders can be made beside it."""
    path = plugin_dir / "plugin"
    path.mkdir()
    path.chmod(0o755)
    return path


def in_folder(plugin: Path, command: str, *args: str, **where: object) -> Program:
    return found(command, *args, directory=plugin, roots=("/usr", plugin), **where)  # type: ignore[arg-type]


def fault_in_folder(plugin: Path, command: str, *args: str, **where: object) -> ProgramFault:
    return fault(command, *args, directory=plugin, roots=("/usr", plugin), **where)


def attempt(plugin: Path, command: str, **where: object) -> tuple[ProgramFault | None, tuple[str, ...]]:
    """The refusal, if any, and the paths that would be shown."""
    try:
        return None, in_folder(plugin, command, **where).trees
    except ProgramFault as refused:
        return refused, ()


def compile_c(target: Path, *flags: str) -> Path:
    source = target.with_suffix(".c")
    source.write_text(
        '#include <stdio.h>\nint main(int n, char **v) { printf("%d %s\\n", n, v[1]); return 7; }\n'
    )
    subprocess.run(["gcc", "-o", target, source, *flags], check=True)
    target.chmod(0o755)
    return target


def virtual_environment(target: Path) -> Path:
    subprocess.run(["/usr/bin/python3", "-m", "venv", "--without-pip", target], check=True)
    for path in target.rglob("*"):
        if not path.is_symlink():
            path.chmod(path.stat().st_mode | (0o755 if path.is_dir() else 0o444))
    target.chmod(0o755)
    return target


# --- scripts -----------------------------------------------------------------------------------------------


def test_a_script(runner_as: Caller, plugin: Path, write_file: Write) -> None:
    write_file(plugin / "run", '#!/bin/sh\necho "$0 $1"; exit 7\n', 0o755)
    program = in_folder(plugin, "./run", "one")
    assert program.argv == (f"{plugin}/run", "one")
    assert program.trees == () and program.path_dirs == () and program.notes == ()
    assert program.links[0] == Link("/bin", "usr/bin")
    assert program.files[0] == f"{plugin}/run"
    end = cages.run(runner_as, cages.request("./run", "one", directory=str(plugin)))
    assert (end["code"], end["output"]) == (7, f"{plugin}/run one\n")


def test_a_script_through_env(runner_as: Caller, plugin: Path, write_file: Write) -> None:
    write_file(
        plugin / "run", "#!/usr/bin/env python3\nimport sys; print(sys.executable); sys.exit(7)\n", 0o755
    )
    program = in_folder(plugin, "./run")
    assert os.path.realpath("/usr/bin/python3") in program.files
    end = cages.run(runner_as, cages.request("./run", directory=str(plugin)))
    assert (end["code"], end["output"]) == (7, "/usr/bin/python3\n")


@pytest.mark.parametrize(
    "line",
    [
        "#! /usr/bin/env python3",
        "#!/usr/bin/env -S python3 -u",
        "#!/usr/bin/env -S VAR=1 python3",
    ],
)
def test_words_of_env(plugin: Path, write_file: Write, line: str) -> None:
    write_file(plugin / "run", f"{line}\n", 0o755)
    assert os.path.realpath("/usr/bin/python3") in in_folder(plugin, "./run").files


def test_env_finds_an_interpreter_off_the_system_path(
    runner_as: Caller, plugin: Path, plugin_dir: Path, write_file: Write
) -> None:
    write_file(plugin_dir / "tools/shout", "#!/bin/sh\necho LOUD\n", 0o755)
    write_file(plugin / "run", "#!/usr/bin/env shout\n", 0o755)
    program = in_folder(plugin, "./run", path=f"{SYSTEM_PATH}:{plugin_dir}/tools")
    assert program.trees == (f"{plugin_dir}/tools/shout",)
    assert program.path_dirs == (f"{plugin_dir}/tools",)


def test_a_script_that_is_missing(plugin: Path) -> None:
    missing = fault_in_folder(plugin, "./run")
    assert str(missing) == f"./run does not exist in {plugin}" and not missing.found
    assert str(fault("/opt/no/such")) == "/opt/no/such does not exist"


@pytest.mark.parametrize("line", ["#!/bin/sh\r", "#!/usr/bin/env python3\r"])
def test_a_windows_line_end_in_the_first_line(plugin: Path, write_file: Write, line: str) -> None:
    """The kernel looks for a program called "sh\\r", and its message does not show why."""
    write_file(plugin / "run", f"{line}\n", 0o755)
    assert "ends with a carriage return" in str(fault_in_folder(plugin, "./run"))


def test_an_interpreter_that_is_missing(plugin: Path, write_file: Write) -> None:
    write_file(plugin / "run", "#!/opt/no/such/lisp\n", 0o755)
    missing = fault_in_folder(plugin, "./run")
    assert (
        str(missing) == f"{plugin}/run: its interpreter /opt/no/such/lisp does not exist"
        and not missing.found
    )


def test_an_interpreter_env_cannot_find(plugin: Path, write_file: Write) -> None:
    write_file(plugin / "run", "#!/usr/bin/env no-such-lisp\n", 0o755)
    missing = fault_in_folder(plugin, "./run")
    assert "no-such-lisp is not on PATH" in str(missing) and not missing.found


def test_scripts_that_interpret_each_other(plugin: Path, write_file: Write) -> None:
    write_file(plugin / "a", f"#!{plugin}/b\n", 0o755)
    write_file(plugin / "b", f"#!{plugin}/a\n", 0o755)
    assert "circle" in str(fault_in_folder(plugin, "./a"))


def test_a_chain_of_interpreters_as_long_as_the_kernels(
    runner_as: Caller, plugin: Path, write_file: Write
) -> None:
    names = ["a", "b", "c", "d", "e"]
    for name, interpreter in zip(names, [*(f"{plugin}/{n}" for n in names[1:]), "/bin/sh"], strict=True):
        write_file(plugin / name, f"#!{interpreter}\necho ran\n", 0o755)
    # b runs: four interpreters. a has one more than the kernel follows.
    in_folder(plugin, "./b")
    assert cages.run(runner_as, cages.request("./b", directory=str(plugin)))["code"] == 0
    assert "circle" in str(fault_in_folder(plugin, "./a"))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        pytest.param(b"#!\n", "no absolute path", id="empty"),
        pytest.param(b"#!python3\n", "no absolute path", id="relative"),
        pytest.param(b"#!/usr/bin/py\0thon3\n", "does not exist", id="NUL"),
        pytest.param(b"#!/usr/bin/env py\0thon3\n", "", id="NUL after env"),
        pytest.param(b"#!" + b"/" * 300 + b"bin/sh\n", "", id="longer than the kernel reads"),
        pytest.param(b"#!/usr\n", "directory", id="a directory"),
        pytest.param(b"#!/etc/passwd\n", "", id="not executable"),
        pytest.param(b"#!/dev/null\n", "", id="a device"),
        pytest.param(b"#!/bin/sh\xff\xfe\n", "does not exist", id="not text"),
        pytest.param(b"hello\n", "neither an ELF program nor a script", id="no #! line"),
        pytest.param(b"", "neither an ELF program", id="an empty file"),
        pytest.param(b"\x7fELF", "not a 64-bit program", id="four bytes of a program"),
    ],
)
def test_hostile_first_lines(plugin: Path, write_file: Write, content: bytes, said: str) -> None:
    write_file(plugin / "run", content, 0o755)
    assert said in str(fault_in_folder(plugin, "./run"))


# --- what is not a program ---------------------------------------------------------------------------------


def test_a_file_that_is_not_executable(plugin: Path, write_file: Write) -> None:
    write_file(plugin / "run", "#!/bin/sh\n")
    not_executable = fault_in_folder(plugin, "./run")
    assert str(not_executable) == f"{plugin}/run is not executable" and not_executable.found
    assert not_executable.hint == f"chmod a+x {plugin}/run"


def test_a_directory(plugin: Path) -> None:
    (plugin / "run").mkdir()
    assert str(fault_in_folder(plugin, "./run")) == f"{plugin}/run is a directory"


def test_a_fifo_does_not_block_the_runner(plugin: Path) -> None:
    os.mkfifo(plugin / "run", 0o755)
    assert str(fault_in_folder(plugin, "./run")) == f"{plugin}/run is not a regular file"


@pytest.mark.parametrize("target", ["run", "other", f"{'x/' * 10}run"])
def test_links_that_lead_nowhere(plugin: Path, target: str) -> None:
    (plugin / "run").symlink_to(target)
    (plugin / "other").symlink_to("run")
    hopeless = fault_in_folder(plugin, "./run")
    assert str(plugin) in str(hopeless)


def test_following_links(plugin: Path) -> None:
    (plugin / "real").mkdir()
    (plugin / "real/file").write_text("")
    (plugin / "one").symlink_to("real")
    (plugin / "two").symlink_to(plugin / "one")
    (plugin / "three").symlink_to("../plugin/./two")
    real, links = follow(f"{plugin}/three/file")
    assert real == f"{plugin}/real/file"
    assert [(link.path, link.target) for link in links] == [
        (f"{plugin}/three", "../plugin/./two"),
        (f"{plugin}/two", f"{plugin}/one"),
        (f"{plugin}/one", "real"),
    ]


def test_following_as_many_links_as_the_kernel(plugin: Path) -> None:
    (plugin / "0").write_text("")
    for number in range(1, 42):
        (plugin / f"{number}").symlink_to(f"{number - 1}")
    assert follow(f"{plugin}/40")[0] == os.path.realpath(plugin / "0")
    (plugin / "40").read_text()
    with pytest.raises(ProgramFault, match="more than 40 symbolic links"):
        follow(f"{plugin}/41")
    with pytest.raises(OSError, match="Too many levels"):
        (plugin / "41").read_text()


# --- compiled programs -------------------------------------------------------------------------------------


@pytest.mark.needs("gcc")
@pytest.mark.parametrize("flags", [(), ("-static",)], ids=["dynamic", "static"])
def test_a_compiled_program(runner_as: Caller, plugin: Path, flags: tuple[str, ...]) -> None:
    compile_c(plugin / "run", *flags)
    program = in_folder(plugin, "./run", "one")
    assert program.trees == ()
    assert len(program.files) == (1 if flags else 2)  # itself, and the loader
    end = cages.run(runner_as, cages.request("./run", "one", directory=str(plugin)))
    assert (end["code"], end["output"]) == (7, "2 one\n")


@pytest.mark.needs("gcc")
def test_a_program_without_its_loader(plugin: Path) -> None:
    compile_c(plugin / "run", "-Wl,--dynamic-linker=/opt/no/such/ld.so")
    lost = fault_in_folder(plugin, "./run")
    assert str(lost) == f"{plugin}/run needs the loader /opt/no/such/ld.so, which does not exist here"
    assert not lost.found


def elf(
    machine: int, *, offset: int = 64, size: int = 56, count: int = 1, start: int = 0, length: int = 0
) -> bytes:
    """A 64-bit program with one entry in its table: the name of the loader, at any place."""
    header = b"\x7fELF\x02\x01\x01" + bytes(9)
    header += struct.pack("<HHIQQQIHHHHHH", 2, machine, 1, 0, offset, 0, 0, 64, size, count, 0, 0, 0)
    return header + struct.pack("<IIQQQQQQ", 3, 4, start, 0, 0, length, length, 1)


def test_a_program_of_another_machine(plugin: Path, write_file: Write) -> None:
    name, number = OTHER_MACHINE[os.uname().machine]
    write_file(plugin / "run", elf(number), 0o755)
    foreign = fault_in_folder(plugin, "./run")
    assert str(foreign) == f"{plugin}/run is a program for {name}, this is {os.uname().machine}"
    write_file(plugin / "run", elf(243), 0o755)
    assert "another machine (ELF 243)" in str(fault_in_folder(plugin, "./run"))


def test_a_program_of_32_bits(plugin: Path, write_file: Write) -> None:
    write_file(plugin / "run", b"\x7fELF\x01\x01\x01" + bytes(60), 0o755)
    assert "not a 64-bit program" in str(fault_in_folder(plugin, "./run"))


OWN_MACHINE = {"x86_64": 62, "aarch64": 183}[os.uname().machine]
HUGE = 2**64 - 1


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(elf(OWN_MACHINE, offset=HUGE), id="a table beyond everything"),
        pytest.param(elf(OWN_MACHINE, start=HUGE, length=16), id="a loader beyond everything"),
        pytest.param(elf(OWN_MACHINE, start=0, length=HUGE), id="an endless loader"),
        pytest.param(elf(OWN_MACHINE, start=64, length=8), id="a loader of zeros"),
        pytest.param(elf(OWN_MACHINE, size=1, count=65535), id="entries of one byte"),
        pytest.param(elf(OWN_MACHINE, size=0, count=65535), id="entries of no bytes"),
        pytest.param(elf(OWN_MACHINE)[:64], id="no table"),
        pytest.param(elf(OWN_MACHINE, start=120, length=11) + b"/etc/shadow", id="a loader that is a secret"),
    ],
)
def test_hostile_programs(plugin: Path, write_file: Write, content: bytes) -> None:
    """Refused, or accepted as what it is, but never a traceback, and never more than the plugin's
    folder."""
    write_file(plugin / "run", content, 0o755)
    assert attempt(plugin, "./run")[1] == ()


# --- where a command is looked for -------------------------------------------------------------------------


def test_a_command_on_the_path(runner_as: Caller) -> None:
    program = found("python3", "-c", "x")
    assert program.argv == ("/usr/bin/python3", "-c", "x")
    assert program.trees == () and program.path_dirs == ()
    end = cages.run(runner_as, cages.request("python3", "-c", "import sys; print(sys.prefix)"))
    assert (end["code"], end["output"]) == (0, "/usr\n")


def test_a_command_on_a_path_of_the_operators(runner_as: Caller, plugin_dir: Path, write_file: Write) -> None:
    tool = write_file(plugin_dir / "tools/own-tool", '#!/bin/sh\necho "$PATH"\n', 0o755)
    # The file only: what else lies in that folder is nobody's business.
    write_file(plugin_dir / "tools/neighbour", "#!/bin/sh\n", 0o755)
    program = found("own-tool", path=f"{SYSTEM_PATH}:{plugin_dir}/tools")
    assert (program.argv, program.trees, program.path_dirs) == (
        (str(tool),),
        (str(tool),),
        (str(tool.parent),),
    )
    end = cages.run(runner_as, cages.request("own-tool"), search_path=f"{SYSTEM_PATH}:{plugin_dir}/tools")
    assert end["code"] == 0 and end["output"].startswith(f"{tool.parent}:/usr/local/sbin:")


def test_a_command_that_is_nowhere() -> None:
    nowhere = fault("no-such-command")
    assert str(nowhere) == f"no-such-command is not on PATH ({SYSTEM_PATH})" and not nowhere.found


def test_the_callers_directory_is_not_searched_for_programs(
    plugin: Path, write_file: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_file(plugin / "python3", "#!/bin/sh\n", 0o755)
    monkeypatch.chdir(plugin)
    for path in (f":{SYSTEM_PATH}", f".:{SYSTEM_PATH}", f"../plugin:{SYSTEM_PATH}"):
        assert found("python3", path=path).argv == ("/usr/bin/python3",)


def test_a_file_that_cannot_run_is_skipped(plugin: Path, write_file: Write) -> None:
    write_file(plugin / "python3", "not executable")
    (plugin / "sh").mkdir()
    assert found("python3", path=f"{plugin}:{SYSTEM_PATH}").argv == ("/usr/bin/python3",)
    assert found("sh", path=f"{plugin}:{SYSTEM_PATH}").argv == ("/usr/bin/sh",)


def test_a_program_below_a_denied_path_is_skipped(plugin_dir: Path, write_file: Write) -> None:
    shim = write_file(plugin_dir / "shims/python3", "#!/bin/sh\n", 0o755)
    program = found("python3", path=f"{shim.parent}:{SYSTEM_PATH}", denied=shim.parent)
    assert program.argv == ("/usr/bin/python3",)
    assert program.notes == (f"{shim} is skipped (it is denied); /usr/bin/python3 is used instead",)


def test_a_program_that_exists_only_below_a_denied_path(plugin_dir: Path, write_file: Write) -> None:
    shim = write_file(plugin_dir / "shims/own-tool", "#!/bin/sh\n", 0o755)
    refused = fault("own-tool", path=f"{shim.parent}:{SYSTEM_PATH}", denied=shim.parent)
    assert refused.denied and refused.found
    assert (
        str(refused) == f"own-tool is {shim} on this machine, which cannot be shown to a plugin: it is denied"
    )


@pytest.mark.parametrize("command", ["./bin/run", "bin/run", "bin/../bin//run"])
def test_a_command_relative_to_the_manifest(plugin: Path, write_file: Write, command: str) -> None:
    write_file(plugin / "bin/run", "#!/bin/sh\n", 0o755)
    assert in_folder(plugin, command).argv == (f"{plugin}/bin/run",)


def test_a_plugin_behind_a_link_of_the_operators(runner_as: Caller, plugin: Path, write_file: Write) -> None:
    write_file(plugin / "run", "#!/bin/sh\necho ran\n", 0o755)
    (plugin.parent / "current").symlink_to("plugin")
    program = found("./run", directory=plugin.parent / "current", roots=("/usr", plugin))
    assert program.argv == (f"{plugin}/run",)


def test_a_command_that_is_a_link(runner_as: Caller, plugin_dir: Path) -> None:
    # Named by its own name: some programs behave by it. Its folder is not shown for that.
    (plugin_dir / "public").mkdir()
    (plugin_dir / "public").chmod(0o755)
    (plugin_dir / "public/secret").write_text("x")
    link = plugin_dir / "public/shell"
    link.symlink_to("/bin/sh")
    program = found(str(link))
    assert program.argv == (str(link),)
    assert program.trees == () and program.links[0] == Link(str(link), "/bin/sh")
    end = cages.run(runner_as, cages.request(str(link), "-c", f'echo "$0"; ls {link.parent}'))
    assert (end["code"], end["output"]) == (0, f"{link}\nshell\n")


# --- virtual environments ----------------------------------------------------------------------------------


def test_a_virtual_environment(runner_as: Caller, plugin: Path, write_file: Write) -> None:
    virtual_environment(plugin / ".venv")
    (site,) = (plugin / ".venv/lib").glob("python3*/site-packages")
    write_file(site / "only_here.py", "WORD = 'found'\n")
    code = "import sys, only_here; print(only_here.WORD, sys.prefix)"
    program = in_folder(plugin, ".venv/bin/python", "-c", code)
    assert program.argv[0] == f"{plugin}/.venv/bin/python"  # the link: by its name Python finds its home
    assert program.trees == ()
    end = cages.run(runner_as, cages.request(".venv/bin/python", "-c", code, directory=str(plugin)))
    assert (end["code"], end["output"]) == (0, f"found {plugin}/.venv\n")


def test_a_script_of_a_virtual_environment_elsewhere(
    runner_as: Caller, plugin: Path, plugin_dir: Path, write_file: Write
) -> None:
    """The operator's own command line (an MCP configuration) names a program in a virtual environment."""
    venv = virtual_environment(plugin_dir / "venv")
    (site,) = (venv / "lib").glob("python3*/site-packages")
    write_file(site / "only_here.py", "WORD = 'found'\n")
    script = write_file(
        venv / "bin/server", f"#!{venv}/bin/python\nimport only_here; print(only_here.WORD)\n", 0o755
    )
    program = found(str(script), trusted=True)
    expected = {venv / "bin", venv / "lib", venv / "include", venv / "pyvenv.cfg"}
    assert {Path(tree) for tree in program.trees} == {path for path in expected if path.exists()}
    end = cages.run(runner_as, cages.request(str(script), trusted_command=True))
    assert (end["code"], end["output"]) == (0, "found\n")
    # The same words in a stranger's manifest are refused.
    refused = fault(str(script))
    assert refused.denied and f"{venv}" in str(refused) and f"add {venv}" in refused.hint
    # Unless the policy lets plugins read there.
    assert found(str(script), allowed=venv).trees == program.trees


def fake_python(prefix: Path, write_file: Write) -> Path:
    """A folder that looks like a Python installation."""
    write_file(prefix / "lib/python3.11/os.py", "")
    return write_file(prefix / "bin/python3", Path("/bin/true").read_bytes(), 0o755)


def test_the_base_of_a_virtual_environment_is_shown(
    plugin: Path, plugin_dir: Path, write_file: Write
) -> None:
    base = plugin_dir / "opt/python"
    (plugin / "venv/bin").mkdir(parents=True)
    (plugin / "venv/bin/python").symlink_to(fake_python(base, write_file))
    write_file(
        plugin / "venv/pyvenv.cfg",
        f"include-system-site-packages = false\nHome={base}/bin\nhome = {base}/bin\n",
    )
    program = in_folder(plugin, "venv/bin/python")
    assert program.trees == (f"{base}/bin", f"{base}/lib")
    assert program.files[0] == f"{base}/bin/python3"


@pytest.mark.parametrize("how", ["pyvenv.cfg", "shebang", "the operator's command"])
def test_only_the_parts_of_a_prefix_that_programs_need_are_shown(
    plugin: Path, plugin_dir: Path, write_file: Write, how: str
) -> None:
    """A conda prefix holds projects beside its bin, a Linuxbrew prefix the data of services."""
    base = plugin_dir / "opt/conda"
    python = fake_python(base, write_file)
    (base / "lib64").symlink_to("lib")
    (base / "libexec").symlink_to(plugin_dir)  # out of the prefix: not a part of it
    for secret in ("projects/key", "etc/npmrc", "var/db", "pkgs/x", ".condarc", "share/man/x"):
        write_file(base / secret, "secret")
    if how == "pyvenv.cfg":
        write_file(plugin / "pyvenv.cfg", f"home = {base}/bin\n")
        write_file(plugin / "run", "#!/bin/sh\n", 0o755)
        program = in_folder(plugin, "./run")
    elif how == "shebang":
        write_file(plugin / "run", f"#!{python}\n", 0o755)
        program = in_folder(plugin, "./run")
    else:
        program = found(str(python), trusted=True)
    assert program.trees == (f"{base}/bin", f"{base}/lib", f"{base}/share")
    assert [link for link in program.links if link.path.startswith(str(base))] == [
        Link(f"{base}/lib64", "lib")
    ]


def test_only_the_parts_of_a_node_prefix_that_node_needs_are_shown(
    plugin: Path, plugin_dir: Path, write_file: Write
) -> None:
    """nvm keeps one folder for each version, with the registry's token in etc/npmrc."""
    base = plugin_dir / "nvm/v22"
    node = write_file(base / "bin/node", Path("/bin/true").read_bytes(), 0o755)
    for path in ("lib/node_modules/npm/x", "lib/other", "etc/npmrc", "share/doc/x", "include/node/x"):
        write_file(base / path, "")
    write_file(plugin / "run", f"#!{node}\n", 0o755)
    assert in_folder(plugin, "./run").trees == (f"{base}/bin", f"{base}/lib/node_modules")


def test_a_part_of_a_prefix_that_is_denied(plugin: Path, plugin_dir: Path, write_file: Write) -> None:
    base = plugin_dir / "opt/python"
    write_file(plugin / "run", f"#!{fake_python(base, write_file)}\n", 0o755)
    write_file(base / "share/keyrings/x", "")
    program = in_folder(plugin, "./run", denied=base / "share")
    assert program.trees == (f"{base}/bin", f"{base}/lib")
    assert program.notes == (f"{base}/share is not shown: it is denied",)
    # What it cannot do without is a reason to refuse.
    assert str(base) in str(fault_in_folder(plugin, "./run", denied=base / "lib"))


def test_the_rest_of_a_prefix_is_not_in_the_cage(
    runner_as: Caller, plugin: Path, plugin_dir: Path, write_file: Write
) -> None:
    """A real Python runs from such a prefix and lists what it sees."""
    base = plugin_dir / "opt/prefix"
    system = Path("/usr/bin/python3").resolve()
    write_file(base / "bin/python3", system.read_bytes(), 0o755)
    (base / "lib").mkdir()
    (base / "lib").chmod(0o755)
    (base / "lib" / system.name).symlink_to(Path("/usr/lib", system.name))
    write_file(base / "projects/key", "secret")
    look = f"import os; print(sorted(os.listdir({str(base)!r})))"
    script = write_file(plugin / "run", f"#!{base}/bin/python3\n{look}\n", 0o755)
    end = cages.run(runner_as, cages.request(str(script), directory=str(plugin)))
    assert (end["code"], end["output"]) == (0, "['bin', 'lib']\n")
    assert sorted(os.listdir(base)) == ["bin", "lib", "projects"]  # the control: there is more


def test_a_virtual_environment_whose_base_is_denied(
    plugin: Path, plugin_dir: Path, write_file: Write
) -> None:
    base = plugin_dir / "home/.pyenv/versions/3.12"
    (plugin / "venv/bin").mkdir(parents=True)
    (plugin / "venv/bin/python").symlink_to(fake_python(base, write_file))
    write_file(plugin / "venv/pyvenv.cfg", f"home = {base}/bin\n")
    refused = fault_in_folder(plugin, "venv/bin/python", denied=plugin_dir / "home")
    assert refused.denied and refused.found
    assert (
        str(refused)
        == f"{plugin}/venv/bin/python needs {base}, which cannot be shown to the plugin: it is denied"
    )
    # Named by its environment, when the environment is what a #! line finds.
    write_file(plugin / "pyvenv.cfg", f"home = {base}/bin\n")
    write_file(plugin / "run", "#!/bin/sh\n", 0o755)
    refused = fault_in_folder(plugin, "./run", denied=plugin_dir / "home")
    assert f"the virtual environment {plugin} needs {base}" in str(refused)


@pytest.mark.parametrize(
    "home",
    [
        "/home/victim/bin",
        "/home/victim",
        "/",
        "",
        "../../..",
        "/etc",
        "\0",
        "/usr/\0bin",
        "x" * 70000,
        "\udcff",
    ],
)
def test_a_hostile_virtual_environment(plugin: Path, write_file: Write, home: str) -> None:
    """Its pyvenv.cfg cannot choose a folder outside the plugin's."""
    write_file(plugin / "pyvenv.cfg", f"home = {home}\n".encode("utf-8", "surrogateescape"))
    write_file(plugin / "run", "#!/bin/sh\n", 0o755)
    refused, trees = attempt(plugin, "./run", denied=Path("/"))
    assert trees == ()
    assert refused is None or refused.denied


def test_a_pyvenv_cfg_that_is_a_fifo_does_not_block_the_runner(plugin: Path, write_file: Write) -> None:
    os.mkfifo(plugin / "pyvenv.cfg")
    write_file(plugin / "run", "#!/bin/sh\n", 0o755)
    # In a process of its own: a hang here would be one of the tests.
    program = (
        "import sys; from sandbox.paths.program import ShowRules, resolve\n"
        "resolve('./run', (), directory=sys.argv[1], search_path='/usr/bin', roots=['/usr', sys.argv[1]],"
        " rules=ShowRules(lambda _: None, lambda _: False), trusted=False)"
    )
    subprocess.run(["/usr/bin/python3", "-c", program, plugin], timeout=60, check=True, cwd=ROOT)


@pytest.mark.parametrize("how", ["command", "shebang", "env", "loader", "venv"])
def test_an_untrusted_plugin_cannot_name_a_foreign_folder(
    plugin: Path, plugin_dir: Path, write_file: Write, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """All texts of an untrusted manifest and its files, aimed at a folder that is not the plugin's."""
    victim = write_file(plugin_dir / "victim/bin/tool", "#!/bin/sh\n", 0o755)
    write_file(plugin_dir / "victim/pyvenv.cfg", "home = /usr/bin\n")
    command = "./run"
    if how == "command":
        command = str(victim)
    elif how == "shebang":
        write_file(plugin / "run", f"#!{victim}\n", 0o755)
    elif how == "env":
        write_file(plugin / "run", f"#!/usr/bin/env {victim}\n", 0o755)
    elif how == "loader":
        name = os.fsencode(victim)
        write_file(plugin / "run", elf(OWN_MACHINE, start=120, length=len(name)) + name, 0o755)
    else:
        write_file(plugin / "pyvenv.cfg", f"home = {victim.parent}\n")
        write_file(plugin / "run", "#!/bin/sh\n", 0o755)
    refused, trees = attempt(plugin, command)
    assert trees == ()
    if how == "env":
        assert refused is None  # a path after env is looked up inside, where it is not
    else:
        assert refused is not None and refused.denied
        assert str(plugin_dir / "victim") in str(refused)
    # The control: a command line of the operator's own is followed, what stands in the file it names is not.
    refused, trees = attempt(plugin, command, trusted=True)
    victims = tuple(str(plugin_dir / "victim" / part) for part in ("bin", "pyvenv.cfg"))
    assert (trees == victims) is (how == "command")
    assert (refused is None) is (how in ("command", "env"))


# --- node --------------------------------------------------------------------------------------------------


@pytest.mark.needs("node")
def test_node_with_its_modules(runner_as: Caller, plugin: Path, write_file: Write) -> None:
    write_file(plugin / "node_modules/word/index.js", "module.exports = 'found'\n")
    write_file(
        plugin / "index.js", "#!/usr/bin/env node\nconsole.log(require('word')); process.exit(7)\n", 0o755
    )
    for request in (
        cages.request("./index.js", directory=str(plugin)),
        cages.request("node", "index.js", directory=str(plugin)),
    ):
        end = cages.run(runner_as, request)
        assert (end["code"], end["output"]) == (7, "found\n")


@pytest.mark.needs("node")
def test_an_installed_node_package(runner_as: Caller, plugin_dir: Path, write_file: Write) -> None:
    """`node /opt/server/node_modules/tool/dist/index.js`, as in many MCP configurations."""
    modules = plugin_dir / "server/node_modules"
    write_file(modules / "word/index.js", "module.exports = 'found'\n")
    script = write_file(modules / "tool/dist/index.js", "console.log(require('word'))\n")
    program = found("node", str(script), trusted=True)
    assert program.trees == (str(modules),)
    end = cages.run(runner_as, cages.request("node", str(script), trusted_command=True))
    assert (end["code"], end["output"]) == (0, "found\n")
    # A stranger's argument shows nothing.
    assert found("node", str(script)).trees == ()


@pytest.mark.needs("node")
def test_a_link_in_node_modules_bin(runner_as: Caller, plugin: Path, write_file: Write) -> None:
    write_file(plugin / "node_modules/tool/cli.js", "#!/usr/bin/env node\nconsole.log('ran')\n", 0o755)
    (plugin / "node_modules/.bin").mkdir()
    (plugin / "node_modules/.bin").chmod(0o755)
    (plugin / "node_modules/.bin/tool").symlink_to("../tool/cli.js")
    end = cages.run(runner_as, cages.request("node_modules/.bin/tool", directory=str(plugin)))
    assert (end["code"], end["output"]) == (0, "ran\n")


# --- packages and runtimes ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("script", "marks", "expected"),
    [
        ("dist/index.js", ["package.json"], "."),
        ("dist/index.js", ["dist/package.json", "package.json"], "dist"),
        ("src/deep/er/main.py", ["pyproject.toml"], "."),
        ("venv/lib/x/main.py", ["venv/pyvenv.cfg"], "venv"),
        ("lonely/main.py", [], "lonely"),
        ("main.py", [], "."),
        ("node_modules/a/dist/index.js", ["node_modules/a/package.json"], "node_modules"),
        ("node_modules/@scope/a/esm/index.js", ["node_modules/@scope/a/package.json"], "node_modules"),
        ("node_modules/a/esm/index.js", ["node_modules/a/esm/package.json"], "node_modules"),
        ("node_modules/a/node_modules/b/index.js", [], "node_modules"),
    ],
)
def test_the_package_of_a_script(
    plugin: Path, write_file: Write, script: str, marks: list[str], expected: str
) -> None:
    for mark in (*marks, script):
        write_file(plugin / mark, "")
    assert package_of(str(plugin / script)) == os.path.normpath(plugin / expected)


def test_a_script_in_a_shared_folder_adds_only_itself(plugin_dir: Path, write_file: Write) -> None:
    script = write_file(plugin_dir / "main.py", "print('ran')\n")
    write_file(plugin_dir / "package.json", "{}")
    program = found("python3", str(script), trusted=True, denied=None)
    assert program.trees == (str(plugin_dir),)
    refused = resolve(
        "python3",
        (str(script),),
        directory="/",
        search_path=SYSTEM_PATH,
        roots=["/usr"],
        rules=ShowRules(lambda asked: "it is a home" if asked == str(plugin_dir) else None, lambda _: False),
        trusted=True,
    )
    assert refused.trees == (str(script),)


def test_only_the_outermost_trees_are_shown(plugin_dir: Path, write_file: Write) -> None:
    venv = virtual_environment(plugin_dir / "app/venv")
    write_file(plugin_dir / "app/package.json", "{}")
    script = write_file(plugin_dir / "app/main.py", "")
    program = found(str(venv / "bin/python"), str(script), trusted=True)
    assert program.trees == (str(plugin_dir / "app"),)


def node_package(folder: Path, write_file: Write) -> Path:
    """A package as npm installs it: it needs another package, and has a link to its program. Returns the
    link."""
    modules = folder / "node_modules"
    main = "#!/usr/bin/env node\nconsole.log(require('needed'), process.argv.slice(2).join())\n"
    write_file(modules / "server/dist/index.js", main, 0o755)
    write_file(modules / "server/package.json", '{"name": "server", "bin": "dist/index.js"}')
    write_file(modules / "needed/index.js", "module.exports = 'needs met'\n")
    (modules / ".bin").mkdir()
    link = modules / ".bin/server"
    link.symlink_to("../server/dist/index.js")
    return link


@pytest.mark.needs("node")
def test_an_npm_link_gets_the_same_paths_as_node_with_its_target(plugin_dir: Path, write_file: Write) -> None:
    link = node_package(plugin_dir, write_file)
    direct = found("node", str(link.resolve()), trusted=True)
    linked = found(str(link), trusted=True)
    assert linked.trees == direct.trees == (str(plugin_dir / "node_modules"),)
    # It is in the folder that is shown.
    assert not any(link.path.startswith(str(plugin_dir)) for link in linked.links)
    # The same by PATH, and by the script that pnpm writes in its place.
    by_name = f"{link.parent}:{SYSTEM_PATH}"
    assert found("server", path=by_name, trusted=True).trees == direct.trees
    # Not for a stranger's manifest, which may name any program of the operator's.
    assert direct.trees[0] not in found("server", path=by_name).trees
    link.unlink()
    write_file(link, "#!/bin/sh\nexec node ../server/dist/index.js\n", 0o755)
    assert found(str(link), trusted=True).trees == direct.trees
    # A stranger's command gets neither, and a denied folder is not shown for it.
    assert "cannot be shown" in str(fault(str(link)))
    assert found(str(link), trusted=True, denied=plugin_dir / "node_modules/needed").trees == direct.trees
    with pytest.raises(ProgramFault):
        found(str(link), trusted=True, denied=plugin_dir)


@pytest.mark.needs("node")
def test_a_linked_package_of_a_workspace(plugin_dir: Path, write_file: Write) -> None:
    package = plugin_dir / "packages/ws"
    write_file(package / "cli.js", "#!/usr/bin/env node\nrequire('./own.js')\n", 0o755)
    write_file(package / "package.json", "{}")
    (plugin_dir / "node_modules/.bin").mkdir(parents=True)
    (plugin_dir / "node_modules/ws").symlink_to("../packages/ws")
    link = plugin_dir / "node_modules/.bin/ws"
    link.symlink_to("../ws/cli.js")
    direct = found("node", str(plugin_dir / "node_modules/ws/cli.js"), trusted=True)
    # Its dependencies are in node_modules above it.
    assert found(str(link), trusted=True).trees == direct.trees
    assert set(direct.trees) == {str(package), str(plugin_dir / "node_modules")}


def test_a_relative_script_is_named_in_full_where_its_folder_is_not_shown(
    plugin_dir: Path, write_file: Write
) -> None:
    script = write_file(plugin_dir / "src/server.py", "")
    elsewhere = found("python3", "-u", "src/server.py", "src/x", directory=plugin_dir, trusted=True)
    assert elsewhere.argv == ("/usr/bin/python3", "-u", str(script), "src/x")
    write_file(plugin_dir / "pyproject.toml", "")  # now the whole folder is its package
    there = found("python3", "-u", "src/server.py", directory=plugin_dir, trusted=True)
    assert there.argv == ("/usr/bin/python3", "-u", "src/server.py")


SHIMS = {
    "pyenv": '#!/usr/bin/env bash\nprogram="${0##*/}"\nexec "/opt/x/libexec/pyenv" exec "$program" "$@"\n',
    "asdf": '#!/usr/bin/env bash\n# asdf-plugin: python 3.12.1\nexec asdf exec "python3" "$@"\n',
    "mise": None,  # a link to the manager itself
    "volta": None,
}


@pytest.mark.parametrize("manager", SHIMS)
def test_a_shim_of_a_version_manager_is_skipped(plugin_dir: Path, write_file: Write, manager: str) -> None:
    shim = plugin_dir / "shims/python3"
    script = SHIMS[manager]
    if script is None:
        target = write_file(plugin_dir / f"bin/{manager}{'-shim' * (manager == 'volta')}", b"\x7fELF", 0o755)
        shim.parent.mkdir()
        shim.symlink_to(target)
    else:
        write_file(shim, script, 0o755)
    program = found("python3", path=f"{shim.parent}:{SYSTEM_PATH}")
    assert program.argv == ("/usr/bin/python3",)
    reason = f"it is a shim of {manager}, whose files are not in the cage"
    assert program.notes == (f"{shim} is skipped ({reason}); /usr/bin/python3 is used instead",)
    # Where there is no other, and where somebody names it.
    for refused in (fault("python3", path=str(shim.parent)), fault(str(shim), trusted=True)):
        assert f"a shim of {manager}, whose files are not in the cage" in str(refused)
        assert refused.hint == (f"name the program by its own path; '{manager} which python3' prints it")


def test_programs_that_only_look_like_a_shim(plugin_dir: Path, write_file: Write) -> None:
    for number, text in enumerate(
        (
            "#!/bin/sh\nexec python3 exec\n",
            "#!/bin/sh\n# exec pyenv exec\nexec true\n",
            "#!/bin/sh\nexec pyenv\n",
        )
    ):
        tool = write_file(plugin_dir / f"shims/tool{number}", text, 0o755)
        assert found(tool.name, path=f"{tool.parent}:{SYSTEM_PATH}").argv == (str(tool),)


def test_folders_that_are_runtimes(plugin_dir: Path, write_file: Write) -> None:
    fake_python(plugin_dir / "python", write_file)
    write_file(plugin_dir / "node/bin/node", "", 0o755)
    (plugin_dir / "node/lib/node_modules/npm").mkdir(parents=True)
    assert is_runtime(str(plugin_dir / "python")) and is_runtime(str(plugin_dir / "node"))
    # Names alone are nothing.
    (plugin_dir / "home/lib/python3.11").mkdir(parents=True)
    write_file(plugin_dir / "home/bin/python3", "", 0o755)
    write_file(plugin_dir / "named/bin/node", "", 0o755)
    assert not is_runtime(str(plugin_dir / "home")) and not is_runtime(str(plugin_dir / "named"))
    assert not is_runtime(str(plugin_dir / "nothing"))


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        ((), True),
        (("-u",), True),
        (("-I", "-B"), True),
        (("-c", "import os"), False),
        (("-cimport os",), False),
        (("-m", "http.server"), False),
        (("-X", "dev"), False),
        (("evil.py",), False),
    ],
)
def test_only_the_script_that_runs_adds_its_folder(
    plugin_dir: Path, write_file: Write, options: tuple[str, ...], shown: bool
) -> None:
    """A configuration that came with a project must not get a folder shown to its own code."""
    script = write_file(plugin_dir / "theirs/app.py", "")
    write_file(plugin_dir / "theirs/pyproject.toml", "")
    program = found("python3", *options, str(script), trusted=True)
    assert (str(plugin_dir / "theirs") in program.trees) is shown


def test_a_trusted_command_does_not_make_its_virtual_environment_trusted(
    plugin_dir: Path, write_file: Write
) -> None:
    private = plugin_dir / "private"
    write_file(private / "bin/python3", "")
    environment = plugin_dir / "project/venv"
    write_file(environment / "pyvenv.cfg", f"home = {private}/bin\n")
    write_file(environment / "bin/run", "#!/bin/sh\n", 0o755)
    assert str(private) in str(fault(str(environment / "bin/run"), trusted=True))
    fake_python(private, write_file)  # the control: a real installation may be shown
    assert str(private / "lib") in found(str(environment / "bin/run"), trusted=True).trees


@pytest.mark.parametrize("command", ["/usr/bin/cat", "./python3", "./evil.sh"])
def test_only_an_interpreter_adds_the_folder_of_its_script(
    plugin: Path, plugin_dir: Path, write_file: Write, command: str
) -> None:
    script = write_file(plugin_dir / "theirs/app.py", "")
    for name in ("python3", "evil.sh"):
        write_file(plugin / name, "#!/bin/sh\n", 0o755)
    assert str(plugin_dir / "theirs") in str(in_folder(plugin, "python3", str(script), trusted=True).trees)
    assert in_folder(plugin, command, str(script), trusted=True).trees == ()


def test_only_the_first_loader_counts(plugin: Path, plugin_dir: Path, write_file: Write) -> None:
    """The kernel uses the first loader only. A second one could name any folder."""
    loader = os.fsencode(os.path.realpath("/bin/true"))
    secret = os.fsencode(write_file(plugin_dir / "secret", "s"))
    one = elf(OWN_MACHINE, start=64 + 112, length=len(loader))
    header = bytearray(one[:64])
    header[56:58] = (2).to_bytes(2, "little")
    first = bytearray(one[64:120])
    second = bytearray(first)
    second[8:16] = (64 + 112 + len(loader)).to_bytes(8, "little")
    second[32:40] = len(secret).to_bytes(8, "little")
    write_file(plugin / "run", bytes(header + first + second) + loader + secret, 0o755)
    assert str(plugin_dir / "secret") not in str(in_folder(plugin, "./run", trusted=True))


def test_a_table_the_kernel_would_not_read_is_not_read(plugin: Path, write_file: Write) -> None:
    damaged = bytearray(elf(OWN_MACHINE, start=120, length=4) + b"/bin")
    damaged[54:56] = (4).to_bytes(2, "little")  # entries of four bytes: a table of thousands
    write_file(plugin / "run", bytes(damaged), 0o755)
    assert "damaged" in str(fault_in_folder(plugin, "./run"))


def test_a_program_in_roots_home_is_skipped_as_at_the_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An approval names the program that `locate` found. The launch would refuse another one."""
    for name in ("denied", "shown"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "tool").write_text("#!/bin/sh\n")
        (tmp_path / name / "tool").chmod(0o755)
    shown, both = str(tmp_path / "shown"), f"{tmp_path}/denied:{tmp_path}/shown"

    def located(search_path: str) -> str:
        return locate("tool", directory="/", search_path=search_path, trusted=True, environ={}).program

    assert located(both) == f"{tmp_path}/denied/tool"  # control
    monkeypatch.setattr(denied_paths, "HOST_PATHS", (str(tmp_path / "denied"),))
    assert located(both) == f"{shown}/tool"
    fault = program_fault("tool", directory="/", search_path=str(tmp_path / "denied"))
    assert fault is not None and "which no policy can allow" in str(fault)
    assert program_fault("tool", directory="/", search_path=both) is None
