"""The commands in the section about registries of docs/packages.md, run one after the other as printed."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.conftest import ROOT, Caller
from tests.tables import without_limits_note
from tests.test_readme import BLOCK, pattern

pytestmark = [pytest.mark.needs("docker-registry", "user"), pytest.mark.launches]


@pytest.mark.usefixtures("nothing_left")
def test_the_commands_print_what_the_page_says(
    registry: str, runner_as_user: Caller, plugin_dir: Path
) -> None:
    [section] = re.findall(
        r"^## Registries\n(.*?)^## ", (ROOT / "docs/packages.md").read_text(), re.MULTILINE | re.DOTALL
    )
    blocks = [body for language, body in BLOCK.findall(section) if language == "console"]
    commands = [part for body in blocks for part in re.split(r"^\$ ", body, flags=re.MULTILINE)[1:]]
    assert len(commands) >= 10
    runner_as_user.give(plugin_dir)
    words = " ".join(f"'{word}'" for word in runner_as_user.command()[len(runner_as_user.prefix) :])
    for part in commands:
        command, _, output = part.replace("localhost:5000", registry).partition("\n")
        done = subprocess.run(
            [*runner_as_user.prefix, "/bin/bash", "-c", f'runner() {{ {words} "$@"; }}\n{command}\n'],
            cwd=plugin_dir,
            env=dict(runner_as_user.environ),
            capture_output=True,
            text=True,
            timeout=300,
        )
        said = done.stdout + without_limits_note(done.stderr)
        assert re.fullmatch(pattern(output), said) and done.returncode == 0, f"$ {command}\n{said}"
