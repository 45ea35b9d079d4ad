"""A contract in one folder: a toy contract is dropped into a copy of the tree, and every verb knows it.

The toy's folder is tests/plugins/toy/contract. Its example/ is the plugin of these tests.
"""

from __future__ import annotations

import dataclasses
import filecmp
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import PACKAGES, ROOT, Caller, _public_directory
from tests.tables import one_case

TOY = ROOT / "tests" / "plugins" / "toy"
NAME = "toy"


@pytest.fixture(scope="module")
def tree() -> Iterator[Path]:
    """The runner with the toy's folder, which is all that is added, where an ordinary user can read it."""
    with _public_directory() as copy:
        ignored = shutil.ignore_patterns("__pycache__")
        for package in PACKAGES:
            shutil.copytree(ROOT / package, copy / package, ignore=ignored)
        shutil.copytree(TOY / "contract", copy / "runner" / "contracts" / NAME, ignore=ignored)
        for path in copy.rglob("*"):
            path.chmod(path.stat().st_mode | (0o755 if path.is_dir() else 0o444))
        assert filecmp.dircmp(ROOT / "runner" / "contracts", copy / "runner" / "contracts").right_only == [
            NAME
        ]
        yield copy


@pytest.fixture
def bear(plugin_dir: Path) -> Path:
    shutil.copytree(TOY / "contract" / "example", plugin_dir / "bear")
    for path in (plugin_dir / "bear", *(plugin_dir / "bear").iterdir()):
        path.chmod(0o755)
    return plugin_dir / "bear"


@pytest.fixture
def with_toy(tree: Path) -> Callable[[Caller], Caller]:
    def extend(caller: Caller) -> Caller:
        environ = {**caller.environ, "PYTHONPATH": f"{tree}:{caller.environ['PYTHONPATH']}"}
        return dataclasses.replace(caller, environ=environ)

    return extend


@pytest.fixture
def toy_as_user(runner_as_user: Caller, with_toy: Callable[[Caller], Caller]) -> Caller:
    return with_toy(runner_as_user)


@pytest.fixture
def toy_as(runner_as: Caller, with_toy: Callable[[Caller], Caller]) -> Caller:
    return with_toy(runner_as)


def binding(folder: Path, word: str) -> Path:
    path = folder / f"{word}.json"
    path.write_text(json.dumps({"word": word}))
    path.chmod(0o644)
    return path


# --- without a launch --------------------------------------------------------------------------------------


def test_the_verbs_that_start_nothing_know_it(toy_as_user: Caller, bear: Path) -> None:
    done = toy_as_user("check", bear)
    assert (done.returncode, done.stdout) == (0, f"{bear}: ok: bear 1 (toy)\n")
    (bear / "other.json").write_text('{"toy": ""}')
    (bear / "none.json").write_text("{}")
    found = toy_as_user("check", bear / "other.json", bear / "none.json").stdout
    assert "toy_nameless: the toy has no name" in found and "a toy key (toy)" in found
    assert "tools" in json.loads(toy_as_user("schema", NAME).stdout)["properties"]
    done = toy_as_user("contracts")
    assert done.returncode == 0 and "toy: a toy that says hello, and then what it did\n" in done.stdout
    assert "  lists     tools, tricks\n" in done.stdout and "  calls     tool, trick\n" in done.stdout
    assert "  options   --saying FILE\n  verbs     recite\n" in done.stdout
    done = toy_as_user("recite", "--loud", bear)
    assert (done.returncode, done.stdout) == (0, "SAY HUG\n")


def test_the_help_knows_its_verb_its_option_and_its_kind(toy_as_user: Caller) -> None:
    assert "  recite       print the tools of a toy without starting it" in toy_as_user("--help").stdout
    assert "usage: runner recite" in toy_as_user("recite", "--help").stdout
    assert "did you mean recite?" in toy_as_user("recit").stderr
    helped = toy_as_user("call", "--help").stdout
    assert "--saying FILE" in helped and "trick" in helped
    assert "--saying" not in toy_as_user("state", "--help").stdout


def test_without_its_folder_nobody_knows_it(runner_as_user: Caller, bear: Path) -> None:
    assert "manifest_missing" in runner_as_user("check", bear).stdout
    assert "no verb 'recite'" in runner_as_user("recite", bear).stderr
    assert "unrecognized arguments: --saying" in runner_as_user("check", "--saying", "x", bear).stderr


def test_completion_knows_it(toy_as_user: Caller, bear: Path) -> None:
    script = toy_as_user("completion", "bash").stdout

    def complete(*words: str) -> set[str]:
        line = " ".join(f"'{word}'" for word in words)
        asked = f"COMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; _runner"
        text = f'{script}\n{asked}; printf "%s\\n" "${{COMPREPLY[@]}}"'
        done = subprocess.run(["bash", "-c", text], capture_output=True, text=True, cwd=bear, check=True)
        return set(done.stdout.split())

    assert complete("runner", "reci") == {"recite"}
    assert complete("runner", "recite", "--l") == {"--loud"}
    assert complete("runner", "exec", "--say") == {"--saying"}
    assert complete("runner", "exec", "--saying", "toy.j") == {"toy.json"}
    assert complete("runner", "exec", "--contract", "t") == {"toy"}
    assert complete("runner", "call", "--kind", "tr") == {"trick"}


OTHER = """\
[plugin]
id = "other"
version = "1.0.0"
name = "Other"
description = "of another contract"
min_nexo_version = ">=0.1"
[plugin.entrypoint]
command = "/bin/true"
"""


def test_its_option_is_refused_for_another_contract(
    toy_as_user: Caller, bear: Path, write_file: Callable[..., Path]
) -> None:
    manifest, word = write_file(bear / "nexo" / "plugin.toml", OTHER), binding(bear, "hi")
    for verb, *words in (("check",), ("call", "x")):
        done = toy_as_user(verb, "--saying", word, manifest, *words)
        assert done.returncode != 0
        assert "--saying belongs to toy, and this is a manifest of nexo" in done.stdout + done.stderr
        assert "leave --saying out" in done.stdout + done.stderr
    # A wrong value is the contract's to refuse, and an empty one never reaches it.
    assert "toy_binding" in toy_as_user("check", "--saying", bear / "missing", bear).stdout
    assert "--saying: its value is empty" in toy_as_user("check", "--saying", "", bear).stderr


# --- launched ----------------------------------------------------------------------------------------------
# As a user alone: nothing here depends on the caller. test_toy_box.py has what does.


@pytest.mark.launches
@pytest.mark.usefixtures("nothing_left")
def test_exec_and_explain_know_it(toy_as_user: Caller, bear: Path) -> None:
    word, asked = binding(bear, "hi"), json.dumps({"id": 1, "do": "say"}) + "\n"
    done = toy_as_user("exec", "--saying", word, bear, input=asked)
    assert (done.returncode, done.stderr) == (0, "")
    hello, answer = map(json.loads, done.stdout.splitlines())
    assert hello == {"hello": "bear"} and answer["did"]["word"] == "hi"
    assert "bear 1 (toy)" in toy_as_user("explain", "--saying", word, bear).stdout
    fine = toy_as_user("exec", "--inspect", "--saying", word, bear)
    assert (fine.returncode, fine.stdout) == (0, '{"hello": "bear"}\n'), fine.stderr
    rude = toy_as_user("exec", "--inspect", "--saying", binding(bear, "rude"), bear)
    assert rude.returncode != 0 and rude.stdout == "" and "its first line is no hello" in rude.stderr


@pytest.mark.launches
@pytest.mark.usefixtures("nothing_left")
def test_call_and_tools_ask_it(toy_as_user: Caller, bear: Path) -> None:
    word = os.path.relpath(binding(bear, "hi"), bear)
    done = toy_as_user("call", "--json", "--saying", word, bear, "say", "--input", "[1]", cwd=bear)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"tool": "say", "word": "hi", "with": [1], "binding": "hi.json"}
    unknown = toy_as_user("call", bear, "sing")
    assert unknown.returncode != 0 and "the toy cannot sing" in unknown.stderr
    wrong = toy_as_user("call", "--kind", "prompt", bear, "say")
    assert wrong.returncode == 2 and "the contract toy has tool, trick" in wrong.stderr
    found = json.loads(toy_as_user("tools", "--json", bear).stdout)
    assert found["plugin"] == {"id": "bear", "version": "1", "protocol": "toy", "contract": "toy"}
    assert [tool["name"] for tool in found["tools"]] == ["say", "hug"]
    assert found["tricks"] == [{"name": "roll"}]


@pytest.mark.launches
@pytest.mark.usefixtures("nothing_left")
def test_new_writes_its_example(toy_as_user: Caller, plugin_dir: Path) -> None:
    toy_as_user.give(plugin_dir)
    done = toy_as_user("new", NAME, "wolf", cwd=plugin_dir)
    assert done.returncode == 0 and "runner call wolf say --input '\"boo\"'\n" in done.stdout, done.stderr
    called = toy_as_user("call", "--json", "wolf", "say", "--input", '"boo"', cwd=plugin_dir)
    assert called.returncode == 0 and json.loads(called.stdout)["with"] == "boo", called.stderr
    assert toy_as_user("check", "wolf", cwd=plugin_dir).stdout == "wolf: ok: wolf 1 (toy)\n"


# --- a contract with a bug ---------------------------------------------------------------------------------


@pytest.fixture
def spoiled(tree: Path) -> Iterator[Callable[[str, str], None]]:
    """Appends to a file of the toy's contract, for one test."""
    before: dict[Path, str] = {}

    def spoil(file: str, text: str) -> None:
        path = tree / "runner" / "contracts" / NAME / file
        before.setdefault(path, path.read_text())
        path.write_text(before[path] + text)
        path.chmod(0o644)

    yield spoil
    for path, text in before.items():
        path.write_text(text)


@pytest.mark.launches
def test_a_bug_in_a_dialect_is_named_and_reported(
    toy_as_user: Caller, bear: Path, spoiled: Callable[[str, str], None], plugin_dir: Path
) -> None:
    spoiled("dialect.py", "\n\ndef make(setting):\n    raise ZeroDivisionError('in the toy')\n")
    report = plugin_dir / "report.json"
    plugin_dir.chmod(0o777)
    done = toy_as_user("call", "--report", report, bear, "say", "--input", "{}")
    assert (done.returncode, done.stdout) == (70, "")
    assert "ZeroDivisionError: in the toy" in done.stderr and "Traceback" not in done.stderr
    outcome = json.loads(report.read_text())["outcome"]
    assert outcome["code"] == "internal" and "in the toy" in outcome["message"]


@one_case(
    ("text", "complaint"),
    [
        ("\nx = (\n", "SyntaxError"),
        ("\nraise RuntimeError('boom')\n", "RuntimeError: boom"),
        ("\nToyContract.name = 'bear'\n", "its CONTRACT calls itself 'bear'"),
    ],
)
def test_a_contract_that_cannot_be_loaded_is_named(
    toy_as_user: Caller, bear: Path, spoiled: Callable[[str, str], None], text: str, complaint: str
) -> None:
    spoiled("__init__.py", text)
    done = toy_as_user("check", bear)
    assert done.returncode == 70 and "Traceback" not in done.stderr
    assert f"the contract in runner/contracts/{NAME}/ cannot be loaded: {complaint}" in done.stderr
    assert toy_as_user("--version").returncode == 0


def test_a_contract_that_cannot_be_loaded_is_listed_with_the_others(
    toy_as_user: Caller, spoiled: Callable[[str, str], None], plugin_dir: Path
) -> None:
    spoiled("__init__.py", "\nraise RuntimeError('boom')\n")
    reason = f"the contract in runner/contracts/{NAME}/ cannot be loaded: RuntimeError: boom"
    done = toy_as_user("contracts")
    assert done.returncode == 70 and done.stderr == f"runner contracts: {reason}\n"
    assert "nexo: " in done.stdout and "toy: " not in done.stdout
    document = json.loads(toy_as_user("contracts", "--format", "json").stdout)
    assert document["broken"] == [{"name": NAME, "reason": reason}] and len(document["contracts"]) >= 3
    toy_as_user.give(plugin_dir)
    refused = toy_as_user("new", NAME, "wolf", cwd=plugin_dir)
    assert refused.returncode == 70 and reason in refused.stderr and not (plugin_dir / "wolf").exists()


def test_help_with_a_percent_sign(toy_as_user: Caller, spoiled: Callable[[str, str], None]) -> None:
    spoiled(
        "__init__.py", "\nToyContract.options = (ContractOption('--loud', 'N', '50% louder', ('exec',)),)\n"
    )
    done = toy_as_user("exec", "--help")
    assert done.returncode == 0 and f"{NAME}: 50% louder" in done.stdout
