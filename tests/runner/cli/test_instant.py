"""Looking is instant: what the verbs that only look import. Names are compared, and no time is taken."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

from runner.cli import VERBS, WITH_ACTIONS, all_verbs
from runner.contracts.registry import contract_names
from tests.conftest import Caller
from tests.test_layers import TOO_SLOW_TO_START_WITH

pytestmark = pytest.mark.fresh

# Runs `runner` for each line of argv[1] in one process, and tells what was imported for that. Sources that
# were changed a moment ago count as settled.
_RUNS = """
import sys
before = set(sys.modules)
import sandbox.look
sandbox.look.SETTLED_SECONDS = -3600.0
from runner.cli import main
for line in sys.argv[1].split("\\n"):
    assert main(line.split()) == 0, line
sys.stdout.flush()
print(*(name for name in sys.modules if name not in before), file=sys.stderr)
"""

# What every look does without. The manifests of some contracts are YAML, or have schemas.
SLOW = (
    *("trio", "pydantic", "argparse", "gettext", "asyncio", "inspect", "psutil", "pyroute2", "cryptography"),
    *("h11", "ssl", "xml", "subprocess", "sqlite3", "tempfile", "dataclasses"),
)
# What a manifest in TOML or JSON needs none of either, to be explained.
SLOWER = ("urllib", "email", "pathlib", "socket", "shlex", "fnmatch", "contextlib", "ipaddress")
# What speaks to plugins, or starts something.
LIVE = (
    *("runner.session", "runner.serve", "runner.fleet", "runner.gateway", "runner.launch.carry_out"),
    *("runner.protocol.service_guard", "sandbox.cell"),
)


def run(
    caller: Caller, lines: Iterable[Sequence[str]], *, others: bool = False, **env: str
) -> tuple[str, set[str]]:
    """The output of all command lines, and the imported modules. `others`: packages of others are found."""
    options = () if others else ("-S",)
    words = "\n".join(" ".join(line) for line in lines)
    argv = [*caller.prefix, *caller.python, *options, "-c", _RUNS, words]
    done = subprocess.run(argv, env={**caller.environ, **env}, cwd="/", capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout, set(done.stderr.splitlines()[-1].split())


def of(packages: Iterable[str], imported: set[str]) -> set[str]:
    """Those modules that are, or are in, one of these."""
    found = set(packages)
    return {name for name in imported if any(name == each or name.startswith(f"{each}.") for each in found)}


def test_the_overview_is_a_table(runner_as_user: Caller) -> None:
    told, imported = run(runner_as_user, [["--help"]])
    assert all(f"\n  {verb} " in told for verb in VERBS)
    assert of((*TOO_SLOW_TO_START_WITH, *LIVE, "runner.launch"), imported) == set()
    assert of(["runner.cli"], imported) == {"runner.cli", "runner.cli.shared", "runner.cli.shared.text"}


def test_the_help_of_each_verb_is_stored(runner_as: Caller) -> None:
    actions = [("ctl", "dead"), ("binding", "set"), ("package", "pull")]
    assert tuple(verb for verb, _ in actions) == WITH_ACTIONS
    lines = [[*words, "--help"] for words in (*((verb,) for verb in all_verbs()), *actions)]
    told, imported = run(runner_as, lines, others=True)
    assert {"argparse", "psutil", "runner.cli.serving.serve"} <= imported  # the control: it was made
    assert told.count("usage: runner ") >= len(lines)
    again, imported = run(runner_as, lines)
    assert again == told
    assert of((*TOO_SLOW_TO_START_WITH, *LIVE), imported) == set()
    stored = {"runner.cli", "runner.cli.shared", "runner.cli.shared.stored_help"}
    assert of(["runner.cli"], imported) == stored


def test_known_manifests_are_explained_and_checked_without_slow_packages(
    runner_as: Caller, plugin_dir: Path
) -> None:
    made = {contract: str(plugin_dir / contract / "looker") for contract in contract_names()}
    for contract, folder in made.items():
        Path(folder).parent.mkdir()
        runner_as.give(plugin_dir)
        told = runner_as("new", contract, folder)
        assert told.returncode == 0, told.stderr
    every = list(made.values())
    _, imported = run(runner_as, [["check", each] for each in every], others=True, RUNNER_CACHE="off")
    assert "pydantic" in imported  # the control
    run(runner_as, [["check", each] for each in every], others=True)  # then they are known
    for verb in ("explain", "check"):
        for _ in range(5):  # what changed a moment ago, by another test too, is not stored
            output, imported = run(runner_as, [[verb, each] for each in every], others=True)
            assert output.count("looker") >= len(every)
            if not of((*SLOW, *LIVE), imported):
                break
        assert of((*SLOW, *LIVE), imported) == set()
    _, imported = run(runner_as, [["explain", made["nexo"]], ["explain", made["rune"]]])
    assert of((*TOO_SLOW_TO_START_WITH, *SLOW, *SLOWER, *LIVE), imported) == set()
    assert "runner.launch.rehearse" in imported


def test_contracts_are_listed_without_trio(runner_as_user: Caller) -> None:
    told, imported = run(runner_as_user, [["contracts"]], others=True)
    assert "may ask   memory.recall" in told
    assert of(("trio", "pydantic", "psutil", "asyncio", *LIVE), imported) == set()
