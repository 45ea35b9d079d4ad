"""A bare command as a script: every word arrives as it was, whatever is in it, in each shell."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from sandbox.plan.bare import (
    FIRST_NUMBER,
    BareCommand,
    CommandFile,
    Ulimit,
    VariableValue,
    command_line,
    script,
    split_hidden,
    vector,
)
from tests.conftest import Caller

Write = Callable[..., Path]

# Stands for bwrap: prints what it is told, and what it can read.
TELL = """\
#!/bin/bash
printf '<%s>' "$@"
printf '|'
cat <&3
printf '|'
cat <&4
{ cat <&12; } 2>/dev/null
env
exit 7
"""
HARD = (
    *("", "two words", "it's", '"$HOME"', "$(touch /tmp/owned)", "`id`", "\\", "\\012", "%s%d", "*", "-n"),
    *("new\nline", "ends\n\n", "\n", "\x1b[2J", "\x7f\u202e", "\udcff", "\u00e9", "a'\n'b\\\n%", "~"),
)


@pytest.fixture
def tell(plugin_dir: Path, write_file: Write) -> str:
    return str(write_file(plugin_dir / "tell it's", TELL, 0o755))


def run(text: str, shell: str, *args: str, **env: str) -> tuple[int, bytes]:
    done = subprocess.run(
        [shell, "-c", text, "script", *args], env=env, cwd="/", capture_output=True, timeout=60, check=False
    )
    assert done.stderr == b""
    return done.returncode, done.stdout


@pytest.mark.parametrize("shell", ["/bin/sh", "/bin/bash"])
def test_words_arrive_as_they_were(tell: str, shell: str) -> None:
    files = (CommandFile(FIRST_NUMBER, content="".join(HARD).encode("utf-8", "surrogateescape") + b"\n"),)
    env = (("A", "x\ny"), ("B", None))
    command = BareCommand(tell, ("--option", *HARD), env, ("program", *HARD), files)
    text = script(command, ["a remark\x1b\nexit 3"], [Ulimit("c", 0, 0)], {})
    assert all(c.isprintable() or c == "\n" for c in text)
    status, said = run(text, shell, "more", B="$(id) b")
    told, options, content = said.split(b"|")
    expected = ("--args", "3", "--", "program", *HARD, "more")
    assert told == b"".join(b"<%s>" % os.fsencode(word) for word in expected)
    sent = ("--option", *HARD, "--setenv", "A", "x\ny", "--setenv", "B", "$(id) b")
    assert options == b"".join(os.fsencode(word) + b"\0" for word in sent)
    assert files[0].content is not None and content.startswith(files[0].content)
    # The environment of bwrap is empty: the plugin could read it in /proc/1/environ.
    assert b"$(id) b" not in content and status == 7


def test_a_variable_that_is_not_set_is_left_out(tell: str) -> None:
    command = BareCommand(tell, ("--option",), (("B", None),), ("program",), (CommandFile(4, "/dev/null"),))
    for env, sent in (({}, b"--option\0"), ({"B": ""}, b"--option\0--setenv\0B\0\0")):
        assert run(script(command, [], [], {}), "/bin/sh", **env)[1].split(b"|")[1] == sent


def test_more_descriptors_than_sh_can_open(tell: str) -> None:
    files = tuple(CommandFile(number, content=b"text %d\n" % number) for number in range(4, 13))
    words = ("1", "2", "3", "4", "5", "6", "7", "8", "9")
    text = script(BareCommand(tell, ("--o",), (), words, files), [], [], {})
    assert text.startswith("#!/bin/bash\n")
    assert b"text 4\ntext 12\n" in run(text, "/bin/bash")[1]
    few = script(BareCommand(tell, ("--o",), (), words, files[:6]), [], [], {})
    assert few.startswith("#!/bin/sh\n")


def test_values_are_named(tell: str) -> None:
    hidden = {"TOKEN": "abcd", "LONG": "abcdefg"}
    assert split_hidden("xabcdefgyabcd", hidden) == ["x", VariableValue("LONG"), "y", VariableValue("TOKEN")]
    assert split_hidden("nothing", hidden) == ["nothing"] and split_hidden("", hidden) == [""]
    command = BareCommand(tell, ("--option", "1abcd2"), (), ("p", "abcd"), (CommandFile(4, "/dev/null"),))
    text = script(command, [], [], hidden)
    assert "abcd" not in text
    told, options, _ = run(text, "/bin/sh", TOKEN="* *", LONG="")[1].split(b"|")
    assert told.endswith(b"<p><* *>") and options == b"--option\x001* *2\0"


@pytest.mark.needs("user")
def test_limits_are_set_and_lower_ones_stay(runner_as_user: Caller) -> None:
    command = BareCommand("/bin/sh", ("--o",), (), ("-c", "ulimit -Sn; ulimit -Hn; ulimit -f"), ())
    text = script(command, [], [Ulimit("n", 100, 200), Ulimit("f", 8, 8)], {}).replace("--args 3 --", "")
    for before, after in (("", "100 200 8"), ("ulimit -n 50; ulimit -f 4\n", "50 50 4")):
        words = [*runner_as_user.prefix, "/bin/sh", "-c", before + text]
        done = subprocess.run(words, env={}, cwd="/", capture_output=True, text=True, timeout=60)
        assert (done.stdout.split(), done.stderr) == (after.split(), "")


def test_a_line_and_a_vector() -> None:
    command = BareCommand("bwrap", ("--proc", "/proc"), (("A", "1 2"), ("B", None)), ("p", "x"), ())
    assert command_line(command) == "bwrap --proc /proc --setenv A '1 2' --setenv B \"$B\" -- p x"
    assert vector(command) == ["bwrap", "--proc", "/proc", "--setenv", "A", "1 2", "--", "p", "x"]
