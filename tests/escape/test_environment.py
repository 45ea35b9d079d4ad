"""Secrets: in variables, command lines, reports and messages."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.escape.cage import ProbeCage, parse_result, sandbox_table, toml
from tests.escape.conftest import SECRET
from tests.tables import one_case

REFUSED = 126


def test_the_callers_variables_cannot_be_read_inside(cage: ProbeCage) -> None:
    env = {"API_TOKEN": SECRET, "LD_LIBRARY_PATH": f"/{SECRET}"}
    inside, everybodys, first = cage.attacks(
        ("environment",), ("environments",), ("read", "/proc/1/environ"), env=env
    )
    assert SECRET not in json.dumps(inside.done)
    assert SECRET not in everybodys.done
    assert SECRET in cage.outside("environments", env=env).done
    # bubblewrap's own copy is the one --clearenv does not reach.
    assert first.answer in ({"done": ""}, {"refused": "EACCES"})
    leak = cage.under_plain_bwrap("read", "/proc/1/environ", bwrap=_CLEARED, env=env)
    assert SECRET in leak.done


_CLEARED = ["--unshare-pid", "--dev-bind", "/", "/", "--proc", "/proc", "--clearenv"]


def test_only_granted_variables_are_set(cage: ProbeCage) -> None:
    found = cage.attack("environment", env={"EDITOR": "ed", "LANG": "C.UTF-8"}).done
    assert set(found) <= {
        "PATH",
        "HOME",
        "TMPDIR",
        "LANG",
        "TERM",
        "TZ",
        "LC_ALL",
        "LC_CTYPE",
        "NO_COLOR",
        "PWD",
    }
    assert found["HOME"] == "/tmp"


def test_the_plugin_cannot_read_the_options_of_bwrap(
    cage: ProbeCage, write_file: Callable[..., Path]
) -> None:
    """The command line that the plugin can read has no host paths and no variables."""
    granted = write_file(cage.caller.home / "notes/x", "")
    cage.caller.give(granted.parent)
    cage.caller.home.chmod(0o755)
    lines = cage.attack(
        "command_lines",
        tables=sandbox_table(read=[str(granted.parent)]),
        options=["--policy", "dev", "--env", f"TOKEN={SECRET}"],
    ).done
    probe = str(cage.folder / "probe.py")
    assert lines["1"][0] == "bwrap" and lines["1"][1] == "--args"
    launcher = lines["1"][4]
    assert launcher.startswith("/proc/self/fd/")  # closed by now: test_only_three_descriptors_are_open
    assert lines["1"][3:] == ["--", launcher, probe, "command_lines"]
    assert SECRET not in json.dumps(lines)
    control = cage.under_plain_bwrap("command_lines", bwrap=[*_CLEARED, "--setenv", "TOKEN", SECRET])
    assert SECRET in json.dumps(control.done)


@pytest.mark.machine
def test_a_secret_of_the_environment_is_in_no_command_line_and_no_report(cage: ProbeCage) -> None:
    report = cage.caller.home / "report.json"
    tables = '[plugin.requires]\nenv = ["API_TOKEN"]\n'
    env = {"API_TOKEN": SECRET}
    options = ["--policy", "dev", "--report", str(report)]
    with cage.running("linger", tables=tables, options=options, env=env) as running:
        assert SECRET in Path(f"/proc/{running.pid}/environ").read_text(errors="replace")  # the plugin has it
        assert [pid for pid, line in _command_lines() if SECRET in line] == []
    text = report.read_text()
    assert "API_TOKEN" in text
    assert SECRET not in text
    for form in ("text", "json", "argv"):
        explained = cage.caller("explain", "--format", form, "--policy", "dev", cage.folder, env=env)
        assert "API_TOKEN" in explained.stdout
        assert SECRET not in explained.stdout + explained.stderr


@pytest.mark.machine
def test_a_secret_of_the_manifest_is_in_no_command_line_and_no_report(cage: ProbeCage) -> None:
    report = cage.caller.home / "report.json"
    tables = f'[plugin.entrypoint.env]\nAPI_TOKEN = "{SECRET}"\n'
    with cage.running("linger", tables=tables, options=["--report", str(report)]):
        assert [pid for pid, line in _command_lines() if SECRET in line] == []
    assert SECRET not in report.read_text()


def _command_lines() -> list[tuple[str, str]]:
    found = []
    for name in os.listdir("/proc"):
        if name.isdecimal():
            try:
                found.append((name, Path(f"/proc/{name}/cmdline").read_bytes().decode(errors="replace")))
            except OSError:
                continue
    return found


STEERING = ["LD_PRELOAD", "LD_LIBRARY_PATH", "LD_AUDIT", "GCONV_PATH", "PYTHONPATH", "PYTHONSTARTUP"]
STEERING += ["NODE_OPTIONS", "JAVA_TOOL_OPTIONS", "BASH_ENV", "PERL5LIB", "RUBYOPT"]


def test_a_manifest_may_not_set_variables_that_load_code(cage: ProbeCage) -> None:
    """The refusal names every variable that was requested."""
    lines = "".join(f'{name} = "/tmp/x"\n' for name in STEERING)
    answer = cage.attack("environment", tables=f"[plugin.entrypoint.env]\n{lines}")
    assert answer.code == REFUSED
    assert [name for name in STEERING if name not in answer.err] == []
    harmless = cage.attack("environment", tables='[plugin.entrypoint.env]\nGREETING = "/tmp/x"\n')
    assert harmless.done["GREETING"] == "/tmp/x"


def test_a_refusal_lists_everything_beyond_the_policy(cage: ProbeCage) -> None:
    tables = sandbox_table(
        read=["/var/log", "/opt/data"], write=["/srv/data"], more='network = "host"\nseccomp = "compat"'
    )
    os_paths = cage.attack("words", tables=tables)
    assert os_paths.code == REFUSED
    for asked in ("/srv/data", "host", "compat"):
        assert asked in os_paths.err


# --- Untrusted text in messages ----------------------------------------------------------------------------

ESCAPE = "\x1b]0;owned\x07\x1b[2J"


@one_case("where", ["argument", "path", "command", "socket"])
def test_names_with_escape_sequences_are_quoted(cage: ProbeCage, where: str) -> None:
    report = cage.caller.home / "report.json"
    options = ["--report", str(report)]
    tables, command = "", "./probe.py"
    if where == "path":
        tables = sandbox_table(write=[f"/tmp/{ESCAPE}"])
    elif where == "command":
        command = f"./{ESCAPE}"
    elif where == "socket":  # the last: it stays there
        os.mkfifo(cage.folder / f"open/{ESCAPE}")
    cage.manifest(tables, command=command)
    args = [ESCAPE] if where == "argument" else []
    done = cage.caller("exec", *options, cage.folder, "--", "words", *args)
    assert "\x1b" not in done.stderr and "\x07" not in done.stderr
    assert report.read_text().isascii()
    assert "\x1b" not in report.read_text()
    assert json.loads(report.read_text())["schema"] == "runner.report.v1"
    if where == "argument":
        assert parse_result(done).done == [ESCAPE]  # the control: the plugin's own arguments arrive unchanged
    else:
        assert done.returncode in (126, 127)
        assert "owned" in done.stderr


def test_a_quoted_newline_does_not_start_a_new_message(cage: ProbeCage) -> None:
    cage.manifest(sandbox_table(write=["/tmp/a\nrunner: ok: all is well"]))
    done = cage.caller("exec", cage.folder)
    assert done.returncode == REFUSED
    assert not any(line.startswith("runner: ok") for line in done.stderr.splitlines())


def test_a_plugin_may_set_its_time_zone_but_not_its_deadline(cage: ProbeCage) -> None:
    tables = f"[plugin.entrypoint.env]\nTZ = {toml('Pacific/Apia')}\n"
    assert cage.attack("environment", tables=tables).done["TZ"] == "Pacific/Apia"
    began = cage.attack("daemon_and_wait", "/tmp/x", tables=tables, options=["--deadline", "0.5"])
    assert began.code == 124
