"""Every example in docs/ is true: a program is run, and what stands below it is what it prints."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from runner.outcome import EXIT
from runner.protocol.host_services import Services
from tests.conftest import ROOT, Caller
from tests.tables import one_case
from tests.test_readme import pattern

PAGES = {name: (ROOT / f"docs/{name}.md").read_text() for name in ("library", "kaged")}
PROGRAM = re.compile(r"^## (.+?)$|^```python\n(.*?)^```\n\n```text\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Program(NamedTuple):
    page: str
    section: str
    text: str
    output: str


def _programs(page: str) -> list[Program]:
    section, found = "", []
    for match in PROGRAM.finditer(PAGES[page]):
        if match[1]:
            section = match[1]
        else:
            found.append(Program(page, section, match[2], match[3]))
    return found


@pytest.mark.parametrize(("page", "least"), [("library", 5), ("kaged", 2)])
def test_every_program_says_what_it_prints(page: str, least: int) -> None:
    text = PAGES[page]
    assert len(_programs(page)) == text.count("```python\n") == text.count("```text\n") >= least


def test_the_page_names_every_service_and_the_gate_before_it() -> None:
    rows = re.findall(
        r"^\| `(\w+)` \|(.+)\|([^|]*)\|$", PAGES["library"].partition("\n## Services\n")[2], re.MULTILINE
    )
    gates = {name: gate.strip() for name, _, gate in rows if name in Services._fields}
    assert list(gates) == list(Services._fields)
    assert [name for name, gate in gates.items() if not gate] == ["log_level"]


@pytest.mark.usefixtures("nothing_left")
@one_case(
    "program", [program for page in PAGES for program in _programs(page)], ids=lambda program: program.section
)
def test_the_library_is_as_described(
    runner_as: Caller, plugin_dir: Path, write_file: Callable[..., Path], program: Program
) -> None:
    bare = "kaged_bare" if program.page == "kaged" else "nexo_bare"
    for name, folder in ((bare, plugin_dir / "bare"), ("mcp_bare", plugin_dir)):
        shutil.copytree(ROOT / "tests/plugins" / name, folder, dirs_exist_ok=True)
    for policy in re.findall(r"^```toml\n(.*?)^```$", PAGES[program.page], re.MULTILINE | re.DOTALL):
        write_file(plugin_dir / "storage.toml", policy)
    for path in (plugin_dir, *plugin_dir.rglob("*")):
        path.chmod(0o755)
    # In a folder of its own: no plugin may write to where a program of the host is.
    write_file(plugin_dir / "host/example.py", program.text)
    runner_as.give(plugin_dir)
    done = subprocess.run(
        [*runner_as.prefix, *runner_as.python, "host/example.py"],
        cwd=plugin_dir,
        env=dict(runner_as.environ),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert re.fullmatch(pattern(program.output), done.stdout), done.stdout


def test_every_exit_code_is_on_the_page() -> None:
    page = (ROOT / "docs/call.md").read_text()
    rows = {code: int(status) for status, code in re.findall(r"^\| (\d+) \| `(\w+)` \|", page, re.MULTILINE)}
    assert rows == EXIT


# --- the pages about the code -------------------------------------------------------------------------------

ARCHITECTURE = (ROOT / "docs/architecture.md").read_text()
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()
TOUR = (ROOT / "docs/tour.md").read_text()
DIAGRAMS = re.findall(r"^```mermaid\n(.*?)^```$", ARCHITECTURE, re.MULTILINE | re.DOTALL)


def test_diagrams_are_of_kinds_that_code_hosts_render() -> None:
    """Mermaid itself is not installed here. Unquoted labels are what breaks most often."""
    assert len(DIAGRAMS) >= 5
    for diagram in DIAGRAMS:
        assert re.match(r"flowchart (TD|LR)\n|sequenceDiagram\n", diagram), diagram
        assert diagram.count('"') % 2 == 0, diagram
        if diagram.startswith("flowchart"):
            labels = re.findall(r"\w\[(.)|\|(.)[^|]*\|", diagram)
            assert {one or other for one, other in labels} == {'"'}, diagram
        else:
            assert ";" not in diagram, diagram  # ends a statement there


def test_the_layout_is_that_of_the_tree() -> None:
    [layout] = re.findall(r"## Layout\n.*?^```\n(.*?)^```$", CONTRIBUTING, re.MULTILINE | re.DOTALL)
    top, named = "", set()
    for line in layout.splitlines():
        words = re.match(r"(?: {0,3})([\w./]+(?: [\w./]+)*)(?:  |$)", line)
        if words is None:
            continue
        if not line.startswith(" "):
            top = words[1].strip()
            named.add(top)
            continue
        named |= {top + word.removesuffix("NAME/") for word in words[1].split()}
    assert [name for name in named if not (ROOT / name).exists()] == []
    folders = {
        f"{path.relative_to(ROOT)}/"
        for package in ("runner", "sandbox")
        for path in (ROOT / package).iterdir()
        if path.is_dir() and path.name != "__pycache__"
    }
    assert folders <= named


# --- words --------------------------------------------------------------------------------------------------

[_GLOSSARY] = re.findall(r"^## Glossary\n(.*?)^## ", ARCHITECTURE, re.MULTILINE | re.DOTALL)
GLOSSARY = {
    word: [synonym.strip() for synonym in synonyms.split(",") if synonym.strip()]
    for word, synonyms in re.findall(r"^\| ([\w' -]+?) \| .+ \|([^|]*)\|$", _GLOSSARY, re.MULTILINE)
    if word != "word"
}
# Words that had second meanings: where a module, a class or a function may be named after each.
ROOMS = {
    "worker": ("runner/fleet/", "runner/cli/serving/"),
    "observer": ("sandbox/cell/observer.py", "sandbox/spawn/"),
    "gateway": (
        *("runner/gateway/", "runner/cli/serving/", "runner/contracts/mcp/"),
        "runner/contracts/configurations.py",  # what people should know about an entry that starts one
        "runner/protocol/host_services.py",  # `Services.gateway`, which programs use
    ),
    "question": (
        *("runner/gateway/", "runner/contracts/mcp/", "runner/serve/mounted.py"),
        *("runner/protocol/rpc_reader.py", "sandbox/gate/dns.py"),
    ),
    "stand in": ("sandbox/paths/stand_in.py",),
}
# Words that make a sentence a riddle. Name the person, the program or the result instead.
RIDDLES = ("whoever", 'answered "no"')
# Synonyms that docstrings and messages still have. A word leaves this list when the last module is renamed.
STILL_IN_CODE: set[str] = set()
PROSE = (
    *(ROOT / f"{name}.md" for name in ("README", "SECURITY", "CONTRIBUTING")),
    *(ROOT / "docs").glob("*.md"),
)


def _uses(text: str, words: Iterable[str]) -> list[str]:
    """Those of the words that occur, in singular or plural, also across the end of a line."""
    flat = " ".join(text.split())
    folded = flat.casefold()  # searching it takes a tenth of the time
    return [
        word
        for word in words
        if word.casefold() in folded and re.search(rf"(?<!\w){re.escape(word)}s?(?!\w)", flat, re.IGNORECASE)
    ]


def _strings(path: Path) -> str:
    """Docstrings and messages of a module."""
    nodes = ast.walk(ast.parse(path.read_text()))
    return "\n".join(
        node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )


def test_the_glossary_has_each_word_once_and_for_one_thing() -> None:
    assert {"cage", "cell", "monitor", "fork server", "plan", "stored plan", "gate", "approval"} <= set(
        GLOSSARY
    )
    synonyms = [synonym for each in GLOSSARY.values() for synonym in each]
    assert len({*synonyms, *GLOSSARY}) == len(synonyms) + len(GLOSSARY)
    assert set(synonyms) >= STILL_IN_CODE


def test_synonyms_are_found_however_they_are_written() -> None:
    assert _uses("Kept\n  plans are", ["kept plan", "keeper"]) == ["kept plan"]
    assert _uses("the bookkeeper", ["keeper"]) == []


def test_pages_use_the_words_of_the_glossary() -> None:
    words = [*(synonym for each in GLOSSARY.values() for synonym in each), *RIDDLES]
    texts = {path: path.read_text().replace(_GLOSSARY, "") for path in PROSE}
    assert {path.name: found for path, text in texts.items() if (found := _uses(text, words))} == {}


def test_docstrings_and_messages_use_the_words_of_the_glossary() -> None:
    words = [synonym for each in GLOSSARY.values() for synonym in each if synonym not in STILL_IN_CODE]
    modules = [path for package in ("runner", "sandbox") for path in (ROOT / package).rglob("*.py")]
    assert {
        str(path.relative_to(ROOT)): found for path in modules if (found := _uses(_strings(path), words))
    } == {}


def _named(path: Path) -> Iterator[str]:
    """The names of a module, of its classes and of its functions, as words."""
    nodes = ast.walk(ast.parse(path.read_text()))
    kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for name in (path.stem, *(node.name for node in nodes if isinstance(node, kinds))):
        yield re.sub(r"(?<=[a-z])(?=[A-Z])|_+", " ", name).strip().lower()


def _strangers(path: Path, name: str) -> list[str]:
    """Names in this module that use a word of ROOMS in another room."""
    return [
        f"{name}: {said}"
        for word, rooms in ROOMS.items()
        if not name.startswith(rooms)
        for said in _named(path)
        if _uses(said.replace("api gateway", ""), [word])
    ]


def test_no_second_meaning_has_a_name(tmp_path: Path) -> None:
    modules = [path for package in ("runner", "sandbox") for path in (ROOT / package).rglob("*.py")]
    assert [each for path in modules for each in _strangers(path, str(path.relative_to(ROOT)))] == []
    control = tmp_path / "pool.py"
    control.write_text(
        "class PoolWorker:\n    def make_stand_in(self): ...\n    def api_gateway(self): ...\n"
    )
    assert _strangers(control, "runner/session/pool.py") == [
        *("runner/session/pool.py: pool worker", "runner/session/pool.py: make stand in")
    ]
    assert _strangers(control, "runner/fleet/pool.py") == ["runner/fleet/pool.py: make stand in"]


def test_the_tour_has_twelve_files_that_exist_and_two_sentences_about_each() -> None:
    stops = re.findall(
        r"^(\d+)\. \*\*\[(.+?)\]\(\.\./(.+?)\)\*\* (.+?)(?=^\d+\. |\Z)", TOUR, re.MULTILINE | re.DOTALL
    )
    assert [int(number) for number, *_ in stops] == list(range(1, 13))
    for _, name, target, text in stops:
        assert name == target and (ROOT / target).is_file(), f"{target} has moved: mend docs/tour.md"
        assert len(re.findall(r"\.(?:\s|$)", text)) == 2, name
