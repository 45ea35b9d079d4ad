"""Words of a manifest never become options of bwrap (CVE-2024-32462) and never widen the cage."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.escape.cage import ProbeCage, parse_result
from tests.escape.conftest import SECRET
from tests.manifests import rune
from tests.tables import check_rows, one_case

REFUSED, NOT_FOUND = 126, 127

OPTIONS = [
    "--dev-bind",
    "/",
    "/",
    "--share-net",
    "--args",
    "3",
    "--",
    "--uid",
    "0",
    "-h",
    "",
    "--unshare-all",
]


def test_arguments_that_look_like_options_are_arguments(cage: ProbeCage) -> None:
    cage.manifest(args=["words", *OPTIONS])
    done = parse_result(cage.caller("exec", cage.folder, "--", *OPTIONS, "--policy", "dev"))
    assert done.done == [*OPTIONS, *OPTIONS, "--policy", "dev"]
    assert cage.attack("interfaces").done == ["lo"]


@one_case("command", ["--dev-bind", "-h", "--", "--share-net", "--help"])
def test_a_command_that_looks_like_an_option_is_a_command(cage: ProbeCage, command: str) -> None:
    """The command is reported as not found. A program that really has that name runs."""
    cage.manifest(command=command, args=["/", "/", "sh", "-c", "echo out"])
    done = cage.caller("exec", cage.folder)
    assert (done.returncode, done.stdout) == (NOT_FOUND, "")

    program = cage.folder / command
    shutil.copyfile(cage.folder / "probe.py", program)
    program.chmod(0o755)
    cage.manifest(command=f"./{command}", args=["words", "ran"])
    assert parse_result(cage.caller("exec", cage.folder)).done == ["ran"]


def test_a_folder_that_looks_like_an_option(cage: ProbeCage) -> None:
    folder = cage.folder / "--share-net"
    folder.mkdir()
    shutil.copyfile(cage.folder / "probe.py", folder / "probe.py")
    (folder / "probe.py").chmod(0o755)
    shutil.copyfile(cage.folder / "nexo-plugin.toml", folder / "nexo-plugin.toml")
    assert parse_result(cage.caller("exec", folder, "--", "working_directory")).done == str(folder)
    assert parse_result(cage.caller("exec", folder, "--", "interfaces")).done == ["lo"]


def test_a_nul_in_the_manifest_is_refused(cage: ProbeCage) -> None:
    """bubblewrap's options are separated by NUL: a NUL inside a word would split it in two."""
    injected = "x\0--dev-bind\0/\0/host"
    bundle = rune("nul", "x", "./probe.py", args=["listing", "/"])
    (cage.folder / "nexo-plugin.toml").unlink()
    manifest = cage.folder / "rterm-plugin.json"
    manifest.write_text(json.dumps(bundle))
    plain = parse_result(cage.caller("exec", cage.folder))
    assert "host" not in plain.done

    def check(place: str, value: object) -> None:
        manifest.write_text(json.dumps({**bundle, "process": {**bundle["process"], place: value}}))
        done = cage.caller("exec", cage.folder)
        assert (done.returncode, done.stdout) == (REFUSED, "")
        assert "NUL" in done.stderr

    listing, variable = ["listing", "/", injected], [f"A={injected}"]
    check_rows({"command": injected, "args": listing, "dir": injected, "env": variable}, check)


def test_odd_values_arrive_unchanged(cage: ProbeCage) -> None:
    values = ["a=b", "", "x y", "${HOME}", "@@u", "é\n\t'\"\\", "-" * 3]
    odd = {f"ODD_{number}": value for number, value in enumerate(values)}
    lines = "".join(f"{name} = {json.dumps(value)}\n" for name, value in odd.items())
    found = cage.attack("environment", tables=f"[plugin.entrypoint.env]\n{lines}").done
    assert {name: found.get(name) for name in odd} == odd
    assert cage.attack("words", *values).done == values


# --- Words that would widen the cage -----------------------------------------------------------------------


@pytest.fixture
def private(cage: ProbeCage, write_file: Callable[..., Path]) -> Path:
    """A world-readable folder that is not granted, with a program in it."""
    folder = Path(f"{cage.folder}.private")
    write_file(folder / "bin/tool", f"#!/bin/sh\necho {SECRET}\n", 0o755)
    write_file(folder / "secret", SECRET)
    return folder


def test_an_interpreter_does_not_grant_its_folder(cage: ProbeCage, private: Path) -> None:
    script = cage.folder / "script"
    script.write_text(f"#!{private}/bin/tool\n")
    script.chmod(0o755)
    cage.manifest(command="./script")
    try:
        done = cage.caller("exec", cage.folder)
        assert done.returncode == REFUSED
        assert SECRET not in done.stdout
        assert str(private) in done.stderr
        granted = cage.caller("exec", "--policy", "dev", cage.folder)
        assert granted.stdout == f"{SECRET}\n"
    finally:
        shutil.rmtree(private)


def test_a_command_does_not_grant_its_folder(cage: ProbeCage, private: Path) -> None:
    cage.manifest(command=f"{private}/bin/tool")
    try:
        done = cage.caller("exec", cage.folder)
        assert (done.returncode, SECRET in done.stdout) == (REFUSED, False)
        assert cage.caller("exec", "--policy", "dev", cage.folder).stdout == f"{SECRET}\n"
    finally:
        shutil.rmtree(private)


def test_a_virtual_environment_does_not_grant_the_folders_it_names(cage: ProbeCage, private: Path) -> None:
    (cage.folder / "pyvenv.cfg").write_text(f"home = {private}/bin\n")
    try:
        answer = cage.attack("read", f"{private}/secret")
        assert SECRET not in answer.out
        assert answer.code == REFUSED or answer.refused == "ENOENT"
        (cage.folder / "pyvenv.cfg").write_text("home = /usr/bin\n")
        assert cage.attack("words", "fine").done == ["fine"]
    finally:
        shutil.rmtree(private)


def test_a_link_in_the_plugins_folder_does_not_reach_its_target(cage: ProbeCage, secret: Path) -> None:
    os.symlink(secret, cage.folder / "open/link")
    assert cage.attack("read", f"{cage.folder}/open/link").refused == "ENOENT"
    assert cage.outside("read", f"{cage.folder}/open/link").done == SECRET


def test_a_manifest_cannot_switch_the_cage_off(cage: ProbeCage) -> None:
    tables = "[plugin.sandbox]\nenabled = false\n"
    assert cage.attack("status", "Seccomp", tables=tables).done == {"Seccomp": "2"}
    policy = cage.caller.home / "policy.toml"
    policy.write_text('version = 1\nunsandboxed = "allow"\n')
    policy.chmod(0o600)
    cage.caller.give(policy)
    answer = cage.attack("status", "Seccomp", tables=tables, options=["--policy", str(policy)])
    assert answer.done == {"Seccomp": "0"}
    assert "UNSANDBOXED" in answer.err
