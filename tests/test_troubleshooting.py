"""docs/troubleshooting.md: every command is run, and says what stands below it. A command without output
below it is a remedy, and succeeds."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.conftest import ROOT, Caller
from tests.tables import one_case, without_limits_note

PAGE = (ROOT / "docs/troubleshooting.md").read_text()
_PART = re.compile(r"^## (.+?)$|^```sh\n(.*?)\n```\n(?:\n```text\n(.*?)\n```)?", re.MULTILINE | re.DOTALL)
_YOU = "/home/you"
# A machine may be unable to give some layers; what it says is tested in tests/runner/cli/test_doctor.py.
_NOT_RUN = ("runner doctor",)


class Example(NamedTuple):
    section: str
    command: str
    output: str


def examples() -> list[Example]:
    section, found = "", []
    for match in _PART.finditer(PAGE):
        if match[1]:
            section = match[1]
        else:
            found.append(Example(section, match[2], match[3] or ""))
    return found


def sections() -> list[str]:
    return re.findall(r"^## (.+?)$", PAGE, re.MULTILINE)


def test_every_symptom_has_a_command() -> None:
    assert len(sections()) == 11
    assert {example.section for example in examples()} == set(sections())
    assert len(examples()) == PAGE.count("```sh\n")
    assert sum(bool(example.output) for example in examples()) == PAGE.count("```text\n")


@one_case(
    "example",
    [example for example in examples() if example.command not in _NOT_RUN],
    ids=lambda example: example.command,
)
def test_every_command_says_what_is_written(
    runner_as: Caller, plugin_dir: Path, write_file: Callable[..., Path], example: Example
) -> None:
    write_file(plugin_dir / "notes/today.md", "buy gears\n")
    (plugin_dir / "notes").chmod(0o777)
    runner_as.give(plugin_dir / "notes")
    shim = '#!/usr/bin/env bash\nexec "/home/you/.pyenv/libexec/pyenv" exec "$program" "$@"\n'
    write_file(plugin_dir / ".pyenv/shims/python3", shim, 0o755)
    words = shlex.split(example.command.replace(_YOU, str(plugin_dir)))
    env = {}
    while "=" in words[0]:
        name, _, value = words.pop(0).partition("=")
        env[name] = value
    assert words.pop(0) == "runner"
    done = runner_as(*words, env=env)
    if example.output:
        assert done.returncode != 0
        if "MemoryError" in done.stderr:  # without cgroups the program notices by itself, as the page says
            assert "MemoryError" in PAGE and runner_as.name == "user"
            return
        for line in example.output.replace(_YOU, str(plugin_dir)).splitlines():
            assert line in done.stderr.splitlines()
    else:
        said = without_limits_note(done.stderr) if runner_as.name == "user" else done.stderr
        assert (done.returncode, [line for line in said.splitlines() if "runner" in line]) == (0, [])


@pytest.mark.parametrize(
    ("sentence", "file"),
    [
        (
            "kernel.unprivileged_userns_clone = 0 forbids user namespaces to ordinary users",
            "sandbox/doctor/user_namespaces.py",
        ),
        ("sandbox_unavailable", "runner/outcome.py"),
        ("no option grants it", "runner/launch/advice/advice.py"),
        ("HOST:443", "runner/launch/advice/advice.py"),
    ],
)
def test_what_cannot_be_provoked_is_quoted_from_the_code(sentence: str, file: str) -> None:
    assert sentence in PAGE and sentence in (ROOT / file).read_text()


def test_every_link_leads_somewhere() -> None:
    for file, _ in re.findall(r"\]\(([a-z]+\.md)(#[a-z-]+)?\)", PAGE):
        assert (ROOT / "docs" / file).exists()
