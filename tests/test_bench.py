"""scripts/bench measures what it says, or says that it could not."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.benches.caller import Caller, Unable
from scripts.benches.figures import median, percentile, tail
from scripts.benches.kill import end, marked
from scripts.benches.launch import Command, measure, without_shell
from tests.conftest import ROOT

installed = pytest.mark.skipif(
    not Path(sys.executable).with_name("runner").exists(), reason="needs the installed command: scripts/test"
)


def test_percentiles_are_samples() -> None:
    hundred = [float(number) for number in range(100, 0, -1)]
    assert (median(hundred), percentile(hundred, 90), percentile(hundred, 99)) == (50.0, 90.0, 99.0)
    assert percentile([3.0, 1.0], 99) == 3.0
    assert median([7.0]) == 7.0


def test_a_tail_of_few_is_called_what_it_is() -> None:
    assert tail([1.0] * 99 + [5.0]) == "p99      1.0"
    assert tail([1.0] * 98 + [5.0]) == "max      5.0"


@pytest.fixture
def caller(plugin_dir: Path) -> Caller:
    return Caller("ourselves", os.geteuid(), str(plugin_dir), str(plugin_dir))


def test_the_line_for_a_shell_becomes_what_the_shell_would_start(caller: Caller) -> None:
    line = "/usr/bin/cat /proc/self/fd/207 /proc/self/fd/208 207< <(printf %s 'two words') 208</dev/null\n"
    command = without_shell(line, caller)
    assert command.argv == ["/usr/bin/cat", "/proc/self/fd/207", "/proc/self/fd/208"]
    assert (sorted(command.files), command.files[208]) == ([207, 208], "/dev/null")
    assert Path(command.files[207]).read_text() == "two words"
    assert measure(caller, command).wall > 0


@pytest.mark.parametrize("script", ["exit 3", "echo a complaint >&2"])
def test_what_fails_or_complains_is_no_measurement(caller: Caller, script: str) -> None:
    with pytest.raises(Unable, match=re.escape(script)):
        measure(caller, Command(["/bin/sh", "-c", script], {}))


def test_a_process_that_is_left_is_found() -> None:
    mark = f"60.{os.getpid():020}"
    assert marked(mark) == []
    with subprocess.Popen(["/usr/bin/sleep", mark]) as process:
        assert marked(mark) == [process.pid]
        process.kill()
    assert marked(mark) == []


@installed
@pytest.mark.needs("user")
@pytest.mark.parametrize("command", ["/usr/bin/true", "/does/not/exist"])
def test_what_ends_by_itself_was_not_killed(caller: Caller, command: str) -> None:
    manifest = caller.write(
        "short/nexo-plugin.toml",
        '[plugin]\nid = "short"\nversion = "1.0.0"\nname = "Short"\ndescription = "Ends at once."\n'
        f'min_nexo_version = ">=0.1"\n[plugin.entrypoint]\ncommand = "{command}"\n',
    )
    with pytest.raises(Unable):
        end(caller, manifest)


@installed
@pytest.mark.needs("user")
@pytest.mark.usefixtures("nothing_left")
def test_every_figure_is_there() -> None:
    """The whole of it, with as few of each as there can be: the figures mean nothing then, but all come."""
    argv = [sys.executable, "-m", "scripts.bench", "--launches", "2", "--kills", "2", "--bombs", "2"]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stderr) == (0, "")
    parts = re.split(r"\n\n", done.stdout.strip())
    who = ["root", "ordinary user"] if os.geteuid() == 0 else ["ordinary user"]
    if "only root is measured" in done.stdout:  # a checkout others cannot reach
        who.remove("ordinary user")
    assert [re.match(r"(launch|kill), as ([a-z ]+)", part).groups() for part in parts[1:]] == [  # type: ignore[union-attr]
        (what, name) for name in who for what in ("launch", "kill")
    ]
    for part in parts[1:]:
        if part.startswith("launch"):
            for name in ("no budgets", "default policy", "full budgets", "full, and of stderr", "raw bwrap"):
                assert re.search(rf"^  {name} +\d+\.\d +\d+\.\d +\d+\.\d +\d+\.\d$", part, re.MULTILINE), name
            assert re.search(r"full budgets over no budgets: p50 [+-]\d+\.\d .*ratio \d\.\d\d$", part, re.M)
        else:
            for name in ("an idle plugin", "a fork bomb of 400 tasks"):
                figures = rf"^  {name} +p50 +\d+\.\d +max +\d+\.\d +min +\d+\.\d +\(2 times\)$"
                assert re.search(figures, part, re.MULTILINE), name
