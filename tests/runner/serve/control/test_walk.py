"""The way of a package in docs/packages.md: every command of it is executed, with a real registry."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from tests.conftest import ROOT, Caller
from tests.runner.oci.servers import docker_registry

SECTION = "## From a folder to two orgs"
SECONDS = 280.0
# Printed between the blocks.
MARK = "@@@"


def blocks() -> list[str]:
    text = (ROOT / "docs/packages.md").read_text().partition(SECTION)[2].partition("\n## ")[0]
    return re.findall(r"```sh\n(.*?)```", text, re.DOTALL)


@pytest.mark.needs("root")
@pytest.mark.launches
@pytest.mark.usefixtures("nothing_left")
def test_every_command_of_the_way_of_a_package_works(
    runner_as_root: Caller, plugin_dir: Path, tmp_path: Path
) -> None:
    folder = plugin_dir / "walk"
    folder.mkdir(mode=0o755)
    (tmp_path / "registry").mkdir()
    with docker_registry(tmp_path / "registry") as registry:
        script = "set -euo pipefail\ntrap 'kill $(jobs -p) 2> /dev/null || true' EXIT\n"
        script += f"echo {MARK}\n".join(blocks()).replace("localhost:5000", registry) + "wait\n"
        environ = {
            **runner_as_root.environ,
            "PATH": f"{ROOT}/.venv/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME": str(folder),
        }
        done = subprocess.run(
            ["bash", "-c", script], cwd=folder, env=environ, capture_output=True, text=True, timeout=SECONDS
        )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    _, _, _, imported, bound, called, observed, rotated, withdrawn, rolled = done.stdout.split(f"{MARK}\n")
    assert imported.startswith("example~kit@0.1.0: available\n")
    assert re.search(rf"available +trusted +none +Example +oci://{registry}/example/kit@sha256:", imported)
    rows = [row for line in bound.splitlines() if (row := line.split())[2:3] == ["example~kit@0.1.0"]]
    of_south = ("south", "greet", "100")
    everything = {("north", "greet", "25"), ("north", "notice", "100"), of_south}
    assert {(row[1], row[3], row[5]) for row in rows[:3]} == everything, bound
    assert [(row[1], row[3], row[5]) for row in rows[3:]] == [of_south], bound
    check_calls(called, observed, done.stderr)
    assert rotated.rstrip().endswith("example~kit@0.1.0: installed"), rotated
    assert "imported:" not in rotated  # there was no gap
    assert "example~kit@0.1.0: withdrawn: the package was withdrawn" in withdrawn
    assert re.search(r"inactive +the package was withdrawn", withdrawn)
    assert withdrawn.rstrip().endswith("example~kit@0.1.0: installed")
    assert re.search(r"^2 .* changed .*0\.2\.0", rolled, re.MULTILINE), rolled
    assert re.search(r"package_version +0\.1\.0", rolled) and "north-greet: ok" in rolled


def check_calls(called: str, observed: str, refusals: str) -> None:
    count, north, south = called.splitlines()
    assert 230 <= int(count) <= 270 and f"{count} of 1000 sessions are included" in refusals
    assert [json.loads(each)["structured_output"]["greeting"] for each in (north, south)] == [
        "Hello, north!",
        "Hello, south!",
    ]
    assert "(binding.inactive)" in refusals and "25 percent leaves this call out" in refusals
    assert "takes no calls: the package was withdrawn" in refusals
    lines = observed.splitlines()
    assert re.search(r"evt_\w+~\w+ +north-notice +notice +queued", lines[1]), observed
    assert [line.split()[4] for line in lines if line.startswith("call_")] == ["succeeded", "succeeded"]
    (record,) = (json.loads(line) for line in lines if line.startswith("{"))
    found = (record["binding_id"], record["session_id"], record["code"], record["org_id"])
    assert found == ("north-greet", "session-0", "binding.inactive", "north")
    assert "a secret of" not in called + observed + refusals
