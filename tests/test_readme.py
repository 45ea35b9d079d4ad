"""README.md and the pages with examples are true: what stands below a `$ command` is what it prints."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, get_args

import pytest

from runner.cli import verb_groups
from runner.outcome import Code
from tests.conftest import ROOT, Caller
from tests.tables import without_limits_note

pytestmark = pytest.mark.fresh

README = (ROOT / "README.md").read_text()
WITH_EXAMPLES = ("README.md", *(f"docs/{page}.md" for page in ("verbs", "manifests", "policy", "limits")))
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# A file of an example is named in the sentence before it.
NAMED_FILE = re.compile(r"`([\w-]+\.(?:toml|json))`[^`]*$")


class Example(NamedTuple):
    command: str
    output: str


def _examples() -> list[Example]:
    """Of all pages. What stands on two of them is run once."""
    found = []
    for page in WITH_EXAMPLES:
        for language, body in BLOCK.findall((ROOT / page).read_text()):
            if language == "console":
                for part in re.split(r"^\$ ", body, flags=re.MULTILINE)[1:]:
                    command, _, output = part.partition("\n")
                    found.append(Example(command, output))
    return list(dict.fromkeys(found))


def _files() -> dict[str, str]:
    found: dict[str, str] = {}
    for page in WITH_EXAMPLES:
        text = (ROOT / page).read_text()
        for block in BLOCK.finditer(text):
            name = NAMED_FILE.search(text, 0, block.start())
            if block[1] in ("toml", "json") and name:
                assert found.setdefault(name[1], block[2]) == block[2], f"{name[1]} differs between pages"
    return found


def pattern(output: str) -> str:
    """A line "…" is any number of lines, "…" within one is any text."""
    lines = [
        r"(?:.*\n)*" if line == "…" else ".*".join(map(re.escape, line.split("…"))) + r"\n"
        for line in output.splitlines()
    ]
    return "".join(lines)


def test_there_are_examples() -> None:
    assert {example.command.split("runner ")[1].split()[0] for example in _examples()} >= {
        "exec",
        "run",
        "allow",
        "wrap",
        "call",
        "tools",
        "check",
        "explain",
        "plan",
        "doctor",
        "new",
        "contracts",
    }
    assert set(_files()) == {"greedy.toml", "mcp.json", "fetch.json", "slow.toml"}


@pytest.mark.parametrize(
    ("output", "said", "matches"),
    [
        ("a\n…\nz\n", "a\nb\nc\nz\n", True),
        ("a\n…\nz\n", "a\nz\n", True),
        ("run number …\n", "run number 7\n", True),
        ("a\n", "a\nb\n", False),
        ("a.c\n", "abc\n", False),
    ],
)
def test_outputs_are_compared(output: str, said: str, matches: bool) -> None:
    assert bool(re.fullmatch(pattern(output), said)) == matches


@pytest.fixture
def forget_state(runner_as: Caller, plugin_dir: Path) -> Iterator[None]:
    """The examples leave the plugin's state where it belongs, which for root is the machine's own place."""
    yield
    said = runner_as("explain", "--format", "json", plugin_dir / "demo").stdout
    for path in json.loads(said)["grant"]["paths"]:
        if path["origin"] == "state":
            shutil.rmtree(path["path"], ignore_errors=True)


def _copy_plugins(folder: Path) -> None:
    for plugin, name in (("demo", "demo"), ("nexo_bare", "bare")):
        shutil.copytree(ROOT / "tests/plugins" / plugin, folder / name)
        for path in (folder / name, *(folder / name).iterdir()):
            path.chmod(0o755)


def test_the_program_on_the_page_runs(
    runner_as: Caller, plugin_dir: Path, write_file: Callable[..., Path]
) -> None:
    page = (ROOT / "docs/verbs.md").read_text()
    [program] = [body for language, body in BLOCK.findall(page) if language == "python"]
    _copy_plugins(plugin_dir)
    write_file(plugin_dir / "example.py", program)
    runner_as.give(plugin_dir)
    done = subprocess.run(
        [*runner_as.prefix, *runner_as.python, "example.py"],
        cwd=plugin_dir,
        env=dict(runner_as.environ),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.stdout, done.stderr) == ("[{'type': 'text', 'text': 'hello'}]\n", "")


@pytest.mark.parametrize("example", _examples(), ids=lambda example: example.command)
def test_the_example_is_true(
    example: Example,
    runner_as: Caller,
    plugin_dir: Path,
    write_file: Callable[..., Path],
    forget_state: None,
) -> None:
    _copy_plugins(plugin_dir)
    for name, text in _files().items():
        write_file(plugin_dir / name, text)
    runner_as.give(plugin_dir)
    # A function named like the command, so that the line itself stays as it is printed.
    words = " ".join(f"'{word}'" for word in runner_as.command()[len(runner_as.prefix) :])
    script = f'runner() {{ {words} "$@"; }}\n{example.command}\n'
    done = subprocess.run(
        [*runner_as.prefix, "/bin/bash", "-c", script],
        cwd=plugin_dir,
        env=dict(runner_as.environ),
        capture_output=True,
        text=True,
        timeout=120,
    )
    said = done.stdout + without_limits_note(done.stderr)
    assert re.fullmatch(pattern(example.output), said), said


def test_the_readme_fits_its_purpose() -> None:
    assert len(README.splitlines()) <= 220
    rows = re.findall(r"^\| (?:\*\*(\w+)\*\*)? ?\| `(\w+)` \|", README, re.MULTILINE)
    groups: dict[str, list[str]] = {}
    for group, verb in rows:
        groups.setdefault(group or list(groups)[-1], []).append(verb)
    assert groups == verb_groups()


def test_every_page_can_be_reached_from_the_readme() -> None:
    assert {page for page in PAGES if page.startswith("docs/")} <= set(re.findall(r"\(([^)#]+)", README))


def test_the_readme_begins_with_two_commands() -> None:
    """The second is what runs this test. The first is run below."""
    [first] = [body for language, body in BLOCK.findall(README)[:1] if language == "sh"]
    commands = [line.split()[0] for line in first.splitlines()]
    assert commands == ["./scripts/demo", "./scripts/test"]
    assert all(os.access(ROOT / command, os.X_OK) for command in commands)


@pytest.mark.skipif(not (ROOT / ".venv/.installed-test").exists(), reason="scripts/setup has to have run")
@pytest.mark.launches
@pytest.mark.usefixtures("nothing_left")
def test_the_first_command_shows_a_plugin_in_the_cage() -> None:
    done = subprocess.run(
        [ROOT / "scripts/demo"],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "TERM": "dumb"},
    )
    assert done.returncode == 0, done.stderr
    assert "12 of 12 as it should be" in done.stdout and "report   ok, exit 0" in done.stdout
    assert "/root/.ssh" in done.stderr and "   exit 126\n" in done.stdout


def test_the_demo_needs_no_arguments(runner_as: Caller, plugin_dir: Path, forget_state: None) -> None:
    shutil.copytree(ROOT / "tests/plugins/demo", plugin_dir / "demo")
    said = runner_as("exec", plugin_dir / "demo")
    assert "refused  look into the caller's home      was told none, and finds none\n" in said.stdout
    assert "12 of 12 as it should be" in said.stdout and said.returncode == 0


@pytest.mark.needs("user")
def test_the_report_is_documented_key_by_key(runner_as_user: Caller, plugin_dir: Path) -> None:
    shutil.copytree(ROOT / "tests/plugins/demo", plugin_dir / "demo")
    where = runner_as_user.home / "report.json"
    runner_as_user("exec", "--limit", "output=1M", "--report", where, plugin_dir / "demo", "--", "/home")
    report = json.loads(where.read_text())
    page = (ROOT / "docs/report.md").read_text()
    sections = re.split(r"^## `(\w+)`$", page, flags=re.MULTILINE)
    tables = {"": sections[0], **dict(zip(sections[1::2], sections[2::2], strict=True))}
    documented = {name: re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE) for name, text in tables.items()}
    assert sorted(documented[""]) == sorted([*report, "session", "invocation", "observed"])  # for other verbs
    for part in ("exit", "grant", "stderr", "usage"):
        assert sorted(documented[part]) == sorted(report[part])
    assert sorted(documented["limits"]) == sorted(report["limits"][0])
    assert set(documented["outcome"]) < set(get_args(Code))


PAGES = (
    "README.md",
    "SECURITY.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    *(f"docs/{page.name}" for page in sorted((ROOT / "docs").glob("*.md"))),
)


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    text = (ROOT / page).read_text()
    targets = [target for target in re.findall(r"\]\(([^)#]+)[^)]*\)", text) if "://" not in target]
    missing = [target for target in targets if not (ROOT / page).parent.joinpath(target).exists()]
    assert missing == []


@pytest.mark.parametrize("page", PAGES)
def test_anchors_of_links_are_headings(page: str) -> None:
    text = (ROOT / page).read_text()
    wrong = []
    for target, anchor in re.findall(r"\]\(([^)#]*)#([^)]+)\)", text):
        if "://" not in target:
            there = (ROOT / page).parent / target if target else ROOT / page
            headings = re.findall(r"^#+ (.+)$", there.read_text(), re.MULTILINE)
            # As a code host makes them: lower case, no punctuation, a hyphen for each blank.
            if anchor not in {re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in headings}:
                wrong.append(f"{target}#{anchor}")
    assert wrong == []
