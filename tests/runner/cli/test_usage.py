"""The command line itself: help, versions, wrong words, completion."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import shlex
import signal
import subprocess
from argparse import SUPPRESS
from pathlib import Path

import pytest

from runner.build import build_version
from runner.cli import VERBS, WITH_ACTIONS, verb_groups, verb_help, verb_module, verb_parser
from runner.cli.shared.actions import action_help, actions_of, parse_action
from runner.contracts.registry import contract_names
from sandbox.policy.policy import LIMIT_NAMES
from tests.conftest import Caller
from tests.manifests import nexo
from tests.tables import one_case


def test_version(runner_as_user: Caller) -> None:
    said = runner_as_user("--version")
    assert (said.returncode, said.stdout, said.stderr) == (0, f"runner {build_version()}\n", "")


def test_the_overview_has_every_verb_in_its_group(runner_as_user: Caller) -> None:
    said = runner_as_user("--help")
    assert said.returncode == 0 and said.stderr == ""
    parts = dict(part.split(":\n", 1) for part in said.stdout.split("\n\n") if ":\n" in part)
    for group, verbs in verb_groups().items():
        assert parts[group].split("\n") == [f"  {verb:<12} {verb_help(verb)}" for verb in verbs]
    assert {"render", "wrap"} < {verb for verbs in verb_groups().values() for verb in verbs}


@pytest.mark.fresh
@one_case("verb", VERBS)
def test_help_has_an_example(runner_as_user: Caller, verb: str) -> None:
    said = runner_as_user(verb, "--help")
    assert said.returncode == 0 and said.stderr == ""
    assert f"usage: runner {verb}" in said.stdout
    assert verb_module(verb).EXAMPLE.removeprefix("runner") in said.stdout


def test_each_action_has_a_help_of_its_own() -> None:
    assert {verb for verb in VERBS if hasattr(verb_module(verb), "ACTIONS")} == set(WITH_ACTIONS)
    for verb in WITH_ACTIONS:
        parser = verb_parser(verb)
        overview = parser.format_help()
        every = {flag for each in actions_of(parser).values() for flag in each._option_string_actions}
        assert re.findall(r"^  (-\S+)", overview, re.MULTILINE) == ["-h,"]
        # An option takes a value in every action or in none: it may stand in front of the action.
        options = [each._option_string_actions.items() for each in actions_of(parser).values()]
        takes = {(flag, option.nargs == 0) for each in options for flag, option in each}
        assert len(takes) == len(every)
        for action, (line, _) in vars(verb_module(verb))["ACTIONS"].items():
            assert f"\n  {action:<12} {line}\n" in overview
            said = action_help(parser, action)
            assert f"usage: runner {verb} {action} " in said and f"\n\n{line}\n" in " ".join(said.split(" "))
            own = set(actions_of(parser)[action]._option_string_actions)
            assert set(re.findall(r"^  (--[a-z-]+)", said, re.MULTILINE)) <= own < every


def test_options_may_stand_anywhere_around_an_action() -> None:
    for words in (
        "--limit 3 records --org list",
        "records --org=list --limit 3",
        "--org list --limit 3 records",
    ):
        args = parse_action(verb_parser("binding"), words.split())
        assert (args.action, args.org, args.limit) == ("records", "list", 3)
    args = parse_action(verb_parser("package"), ["pull", "oci://x.example/y", "--trust", "keys", "folder"])
    assert (args.folder, args.other, args.trust) == ("oci://x.example/y", "folder", "keys")


def test_help_that_cannot_be_written(runner_as_user: Caller) -> None:
    for verb in ("exec", "ctl"):
        with open("/dev/full", "wb") as full:
            process = runner_as_user.start(verb, "--help", stdin=subprocess.DEVNULL, stdout=full)
        assert process.stderr is not None
        with process.stderr:
            assert b"cannot be written to stdout" in process.stderr.read()
        assert process.wait(60) == 1


def test_help_has_the_options_of_a_command_too() -> None:
    both = [verb for verb in VERBS if hasattr(verb_module(verb), "add_command_arguments")]
    assert {"call", "conformance", "explain"} <= set(both)
    for verb in both:
        words = set(verb_parser(verb).format_help().split())
        shown = [each for each in verb_parser(verb, of_command=True)._actions if each.help != SUPPRESS]
        assert {each.option_strings[-1] for each in shown if each.option_strings} <= words


@pytest.mark.parametrize("verb", [verb for verb in VERBS if verb != "completion"])
def test_the_example_is_right(verb: str) -> None:
    words = verb_module(verb).EXAMPLE.split(" -- ")[0].split(" > ")[0]
    verb_parser(verb).parse_args(shlex.split(words)[2:])


@one_case(
    ("words", "said"),
    [
        ((), "usage: runner VERB"),
        (("exce", "x"), "did you mean exec?"),
        (("frobnicate",), "the verbs are exec"),
        (("exec",), "required: MANIFEST"),
        (("exec", "--bogus", "x"), "--bogus"),
        (("exec", "--deadline", "soon", "x"), "'soon' is not a duration"),
        (("exec", "--deadline", "0", "x"), "--deadline 0"),
        (("exec", "--deadline", "-1", "x"), "--deadline"),
        (("exec", "--memory", "256", "x"), "did you mean 256M?"),
        (("exec", "--cpu", "none", "x"), "--cpu none"),
        (("explain", "--limit", "memroy=1G", "x"), "did you mean 'memory'?"),
        (("exec", "--pids", "5", "--limit", "pids=6", "x"), "pids is given twice"),
        (("exec", "--limit", "x"), "required: MANIFEST"),
        (("exec", "--memory"), "expected one argument"),
        (("exec", "--env", "1A=2", "x"), "'1A' is not the name of a variable"),
        (("exec", "--env", "=2", "x"), "is not the name of a variable"),
        (("exec", "--report", "/nonexistent/r.json", "x"), "/nonexistent does not exist"),
        (("exec", "--report", "/tmp", "x"), "is a directory"),
        (("exec", "--report", "99", "x"), "descriptor 99 is not open"),
        (("exec", "--report", "1", "x"), "the plugin has descriptors 0 and 1"),
        (("explain", "--format", "yaml", "x"), "--format"),
        (("plan", "--emit", "yaml", "x"), "--emit"),
        (("plan", "--emit", "sh", "--facts", "x"), "--facts"),
        (("check",), "required: MANIFEST"),
        (("schema", "cobol"), "cobol"),
        (("completion", "csh"), "csh"),
        (("contracts", "--format", "yaml"), "--format"),
        (("contracts", "nexo"), "unrecognized arguments: nexo"),
        (("exec", "python3", "server.py"), "a command without a manifest: runner run -- COMMAND"),
        (("call", "x", "y", "name=z"), "the input goes behind --input, as JSON"),
        (("new",), "required: CONTRACT, DIR"),
        (("new", "nexo"), "required: DIR"),
        (("new", "nexoo", "x"), "did you mean 'nexo'?"),
        (("new", "cobol", "x"), f"there are {', '.join(contract_names())}"),
        (("doctor", "--format", "x"), "--format"),
        (("ctl",), "required: ACTION"),
        (("ctl", "--socket", "/x"), "required: ACTION"),
        (("ctl", "frob", "--help"), "invalid choice: 'frob'"),
        (("binding", "--bogus", "list"), "unrecognized arguments: --bogus (use runner binding list "),
    ],
)
def test_wrong_usage_is_one_line(runner_as_user: Caller, words: tuple[str, ...], said: str) -> None:
    end = runner_as_user(*words)
    assert end.returncode == 2 and end.stdout == ""
    assert said in end.stderr and "Traceback" not in end.stderr
    if words:
        assert len(end.stderr.splitlines()) == 1


def test_a_reader_that_has_seen_enough_is_no_accident(runner_as_user: Caller) -> None:
    process = runner_as_user.start("schema", "nexo", stdin=subprocess.DEVNULL)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.read(1)
    process.stdout.close()
    assert b"Traceback" not in process.stderr.read()
    process.stderr.close()
    process.wait(30)


# --- completion --------------------------------------------------------------------------------------------


def completed(script: str, *words: str) -> set[str]:
    """What bash offers after `words`."""
    line = " ".join(f"'{word}'" for word in words)
    asked = f"{script}\nCOMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; _runner; "
    asked += "printf '%s\\n' \"${COMPREPLY[@]}\""
    done = subprocess.run(["bash", "-c", asked], capture_output=True, text=True, check=True, cwd="/")
    return set(done.stdout.split())


def test_bash_completion(runner_as_user: Caller, tmp_path: Path) -> None:
    script = runner_as_user("completion", "bash").stdout
    assert set(VERBS) <= completed(script, "runner", "")
    assert completed(script, "runner", "ex") == {"exec", "explain"}
    assert {"--policy", "--report", "--deadline"} <= completed(script, "runner", "exec", "--")
    limits = {"--memory", "--pids", "--cpu", "--cpu-time", "--deadline", "--limit"}
    for verb in ("exec", "explain"):
        assert limits <= completed(script, "runner", verb, "--")
        assert completed(script, "runner", verb, "--limit", "") == {f"{name}=" for name in LIMIT_NAMES}
        assert completed(script, "runner", verb, "--limit", "out") == {"output=", "output_lines="}
    assert completed(script, "runner", "explain", "--format", "") == {"text", "json", "argv"}
    assert completed(script, "runner", "plan", "--emit", "") == {"sh", "argv", "json"}
    assert completed(script, "runner", "exec", "--") < completed(script, "runner", "plan", "--")
    assert {"nexo", "rune", "mcp"} <= completed(script, "runner", "schema", "")
    assert {"list", "remove", "--json", "--orphaned"} <= completed(script, "runner", "state", "")
    assert completed(script, "runner", "ctl", "") == {"--help", *actions_of(verb_parser("ctl"))}
    assert completed(script, "runner", "ctl", "dead", "--") == {"--help", "--fleet", "--socket"}
    assert completed(script, "runner", "package", "lint", "x", "--format", "") == {"text", "json"}
    file = tmp_path / "one.toml"
    file.touch()
    assert completed(script, "runner", "exec", f"{tmp_path}/o") == {str(file)}


def test_a_limits_name_is_completed_without_a_space_and_without_a_backslash(
    runner_as_user: Caller, tmp_path: Path
) -> None:
    """In a bash that really completes: its own spacing and quoting come after the script's answer."""
    script = tmp_path / "completion"
    told = "runner() { printf '<%s>' \"$@\"; echo OVER; }\nPS1=READY:\n"
    script.write_text(runner_as_user("completion", "bash").stdout + told)
    shown = _in_a_terminal(
        (f". {script}\n", "READY:"), ("runner exec --limit mem\t5M --pol\tstr\t\n", "OVER")
    )
    assert "<exec><--limit><memory=5M><--policy><strict>" in shown  # the control: other words get a space
    assert "--limit memory=5M --policy strict" in shown


BASH = ("/bin/bash", "--norc", "--noprofile", "-i")


def _in_a_terminal(*steps: tuple[str, str], shell: tuple[str, ...] = BASH) -> str:
    """What a shell shows: each text is typed, then what it leads to is waited for."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.execve(
            shell[0], shell, {"TERM": "dumb", "PS1": "", "PATH": "/usr/bin:/bin", "HOME": "/nonexistent"}
        )
    shown = ""
    try:
        for typed, awaited in steps:
            os.write(terminal, typed.encode())
            since = len(shown)
            while awaited not in shown[since:] and select.select([terminal], [], [], 30)[0]:
                shown += os.read(terminal, 65536).decode()
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(terminal)
    return shown


@one_case("verb", ["exec", "explain", "doctor"])
def test_a_policy_is_completed_by_name_and_as_a_file(
    runner_as_user: Caller, tmp_path: Path, verb: str
) -> None:
    script = runner_as_user("completion", "bash").stdout
    assert {"default", "dev", "strict"} <= completed(script, "runner", verb, "--policy", "")
    assert completed(script, "runner", verb, "--policy", "de") == {"default", "dev"}
    (tmp_path / "own.toml").touch()
    assert completed(script, "runner", verb, "--policy", f"{tmp_path}/o") == {str(tmp_path / "own.toml")}


def test_only_what_fits_is_offered(runner_as_user: Caller) -> None:
    script = runner_as_user("completion", "bash").stdout
    assert "etc" in completed(script, "runner", "exec", "")  # the control: files of / are offered
    assert completed(script, "runner", "exec", "--contract", "") == set(contract_names())
    assert completed(script, "runner", "schema", "") == {"--help", *contract_names()}
    assert completed(script, "runner", "contracts", "") == {"--help", "--format"}
    assert completed(script, "runner", "contracts", "--format", "") == {"text", "json"}
    assert {"--help", "--name", "etc", *contract_names()} <= completed(script, "runner", "new", "")
    assert completed(script, "runner", "new", "--name", "") == set()
    assert completed(script, "runner", "completion", "") == {"--help", "bash", "zsh", "fish"}
    assert completed(script, "runner", "doctor", "") == {
        *("--help", "--format", "--policy", "--attack", "--against")
    }
    assert completed(script, "runner", "exec", "--deadline", "") == set()
    assert completed(script, "runner", "exec", "--memory", "") == set()


@one_case("shell", ["zsh", "fish"])
def test_other_shells(runner_as_user: Caller, shell: str) -> None:
    script = runner_as_user("completion", shell).stdout
    for verb in VERBS:
        assert verb in script
    assert "--report" in script or "-l report" in script


def test_fish_offers_only_what_fits(runner_as_user: Caller) -> None:
    text = runner_as_user("completion", "fish").stdout
    lines = text.splitlines()
    start = "complete -c runner -n '__fish_seen_subcommand_from"
    assert f"{start} exec' -l policy -r -a 'default dev strict' -d " in text
    assert f"{start} exec' -l contract -x -a '{' '.join(contract_names())}' -d " in text
    assert f"{start} exec' -l limit -x -a '{' '.join(f'{name}=' for name in LIMIT_NAMES)}' -d " in text
    assert f"{start} explain' -l cpu-time -x -d " in text
    without_files = [verb for verb in VERBS if f"{start} {verb}' -f" in lines]
    assert set(without_files) >= {"contracts", "schema", "completion"} and not {"exec", "new"} & set(
        without_files
    )
    assert {f"{start} new' -a {name}" for name in contract_names()} <= set(lines)


# --- the names of servers, and descriptions, in the shells themselves ---------------------------------------


DECLARING = (
    nexo("demo", "/bin/true")
    + """\
[plugin.capabilities]
provides = ["tools"]
[plugin.extends]
tools = ["demo_one", "demo_two"]
"""
)


@pytest.fixture
def typed(runner_as_user: Caller) -> Path:
    """A folder with a program `runner`, and a manifest with three servers."""
    folder = runner_as_user.home / "typed"
    (folder / "bin").mkdir(parents=True)
    program = folder / "bin/runner"
    environ = " ".join(f"{name}={shlex.quote(value)}" for name, value in runner_as_user.environ.items())
    program.write_text(f'#!/bin/sh\nexec env {environ} {shlex.join(runner_as_user.command())} "$@"\n')
    program.chmod(0o755)
    servers = {name: {"command": "true"} for name in ("alpha", "alpine", "be ta")}
    (folder / "mcp.json").write_text(json.dumps({"mcpServers": servers}))
    (folder / "plugin.toml").write_text(DECLARING)
    runner_as_user.give(folder)
    return folder


def test_the_servers_of_a_manifest(runner_as_user: Caller) -> None:
    manifest = runner_as_user.home / "mcp.json"
    manifest.write_text('{"mcpServers": {"one": {}, "t\\u001bwo": {}, "three": {"command": "x"}}}')
    broken = runner_as_user.home / "broken.json"
    broken.write_text("{")
    for path in (manifest, broken):
        runner_as_user.give(path)
    asked = ("completion", "--servers")
    said = runner_as_user(*asked, "--policy", "dev", "/nowhere", "/etc", broken, manifest, "--server", "")
    assert (said.returncode, said.stdout, said.stderr) == (0, "one\nthree\n", "")
    said = runner_as_user(*asked, broken)
    assert (said.returncode, said.stdout, said.stderr) == (0, "", "")


def test_bash_completes_servers(runner_as_user: Caller, typed: Path) -> None:
    script = runner_as_user("completion", "bash").stdout
    program, manifest = str(typed / "bin/runner"), str(typed / "mcp.json")
    for verb in ("exec", "call", "tools", "explain", "check"):
        assert completed(script, program, verb, manifest, "--server", "al") == {"alpha", "alpine"}
    assert completed(script, program, "exec", manifest, "--server", "=", "al") == {"alpha", "alpine"}
    assert {"alpha", "alpine"} < completed(script, program, "exec", manifest, "--server", "=")
    asked = f"COMP_WORDS=({program} exec {manifest} --server be); COMP_CWORD=4; _runner; "
    done = subprocess.run(
        ["bash", "-c", f'{script}\n{asked}printf "<%s>" "${{COMPREPLY[@]}}"'], capture_output=True, text=True
    )
    assert done.stdout == "<be\\ ta>"


def test_tools_are_completed_without_a_start(runner_as_user: Caller, typed: Path) -> None:
    script = runner_as_user("completion", "bash").stdout
    program, declaring = str(typed / "bin/runner"), str(typed / "plugin.toml")
    assert completed(script, program, "call", declaring, "") == {"demo_one", "demo_two"}
    assert completed(script, program, "call", declaring, "demo_t") == {"demo_two"}
    assert declaring in completed(script, program, "call", declaring[:-2])  # there is no manifest yet
    # Of a server that tells its tools only while it runs, those that `runner tools` saw last.
    assert completed(script, program, "call", str(typed / "mcp.json"), "--server", "alpha", "--in") == {
        "--input"
    }
    assert runner_as_user("completion", "--tools", typed / "mcp.json", "--server", "alpha").stdout == ""


def test_bash_quotes_the_names_of_servers(runner_as_user: Caller, typed: Path) -> None:
    """A cloned project names its servers: what stands there must not be run by the next Enter."""
    script = runner_as_user("completion", "bash").stdout
    hostile = typed / "hostile.json"
    hostile.write_text(json.dumps({"mcpServers": {name: {"command": "x"} for name in ("`id`", "$(id)")}}))
    hostile.chmod(0o644)
    program = str(typed / "bin/runner")
    assert completed(script, program, "exec", str(hostile), "--server", "") == {"\\`id\\`", "\\$\\(id\\)"}


def test_bash_completes_a_command_behind_two_dashes(runner_as_user: Caller) -> None:
    script = runner_as_user("completion", "bash").stdout
    assert {"python3"} <= completed(script, "runner", "run", "--", "python")
    assert completed(script, "runner", "run", "--", "ls", "/et") == {"/etc"}
    assert {"--read", "--write", "--net", "--name"} <= completed(script, "runner", "run", "--")
    assert "--wrapped" not in completed(script, "runner", "run", "--")
    assert completed(script, "runner", "run", "--read", "/et") == {"/etc"}


@pytest.mark.needs("fish")
def test_fish_completes_servers_and_describes(runner_as_user: Caller, typed: Path) -> None:
    (typed / "script").write_text(runner_as_user("completion", "fish").stdout)

    def offered(line: str) -> dict[str, str]:
        code = (
            f"source {typed}/script; set -gx PATH {typed}/bin /usr/bin /bin; complete -C {shlex.quote(line)}"
        )
        home = {"HOME": str(typed), "PATH": "/usr/bin:/bin"}
        done = subprocess.run(["fish", "--no-config", "-c", code], capture_output=True, text=True, env=home)
        return dict(each.partition("\t")[::2] for each in done.stdout.splitlines())

    assert offered("runner expl") == {"explain": verb_help("explain")}
    assert set(offered(f"runner exec {typed}/mcp.json --server al")) == {"alpha", "alpine"}
    assert set(offered(f"runner call {typed}/plugin.toml demo_")) == {"demo_one", "demo_two"}
    assert set(offered("runner ctl dead --")) == {"--help", "--fleet", "--socket"}
    assert offered("runner ctl dea") == {"dead": "list dead letters"}
    assert offered("runner run --rea") == {"--read": "show it a file or folder, read-only"}
    assert all(offered(f"runner {verb} --").get("--help") for verb in VERBS)


@pytest.mark.needs("zsh")
def test_zsh_completes_servers_and_describes(runner_as_user: Caller, typed: Path) -> None:
    (typed / "script").write_text(runner_as_user("completion", "zsh").stdout)
    start = (
        f"PATH={typed}/bin:/usr/bin:/bin; ZDOTDIR={typed}; autoload -Uz compinit; compinit -u -D; "
        f"LISTMAX=1000; source {typed}/script; PS1=READY:; cd /\n"
    )
    shown = _in_a_terminal(
        (start, "READY:"),
        (f"runner exec {typed}/mcp.json --server al\t\t", "alpine"),
        (f"\x15runner call {typed}/plugin.toml demo_\t\t", "demo_two"),
        ("\x15runner run --rea\t /etc\x01echo \x05\n", "run --read /etc"),
        ("\x15runner run --re\t\t", "show it a file or folder"),
        ("\x15runner ex\t\t", verb_help("explain")[:30]),
        shell=("/usr/bin/zsh", "-f", "-i"),
    )
    assert "alpha" in shown and "alpine" in shown
    assert "show it a file or folder, read-only" in shown
    assert verb_help("exec")[:30] in shown and verb_help("explain")[:30] in shown
