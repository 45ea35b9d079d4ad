"""What exec and explain are told: limits on the command line."""

from __future__ import annotations

import argparse
import json
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.cli import verb_parser
from runner.cli.shared import options
from runner.cli.shared.options import invocation_of
from runner.contracts.contract import ContractOption
from sandbox.files import write_all
from sandbox.policy.policy import LIMIT_NAMES
from sandbox.spec import Limits
from sandbox.units import parse_limit
from tests.conftest import Caller
from tests.manifests import nexo
from tests.tables import one_case

Write = Callable[..., Path]

OWN_OPTIONS = {"memory": "256M", "pids": "64", "cpu": "50%", "cpu_time": "1m", "deadline": "1h30m"}


def limits_of(*words: str, verb: str = "exec") -> Limits:
    return invocation_of(verb_parser(verb).parse_args([*words, "MANIFEST"])).overrides.limits


def option(name: str) -> str:
    return "--" + name.replace("_", "-")


@pytest.mark.parametrize("verb", ["exec", "explain"])
@pytest.mark.parametrize(
    ("words", "limits"),
    [
        ((), Limits()),
        (("--memory", "256M"), Limits(memory=256 << 20)),
        (("--memory=1.5GiB",), Limits(memory=3 << 29)),
        (("--pids", "64"), Limits(pids=64)),
        (("--cpu", "0.5"), Limits(cpu=0.5)),
        (("--cpu", "50%"), Limits(cpu=0.5)),
        (("--cpu-time", "2m"), Limits(cpu_time=120.0)),
        (("--deadline", "30"), Limits(deadline=30.0)),
        (("--limit", "io=10M"), Limits(io=10 << 20)),
        (("--limit=call=1m30s",), Limits(call=90.0)),
        (
            ("--memory", "1G", "--limit", "tmp=1M", "--pids=5", "--limit", "output_lines=9"),
            Limits(memory=1 << 30, pids=5, tmp=1 << 20, output_lines=9),
        ),
    ],
)
def test_limits(verb: str, words: tuple[str, ...], limits: Limits) -> None:
    assert limits_of(*words, verb=verb) == limits


@pytest.mark.parametrize("name", LIMIT_NAMES)
def test_every_limit_can_be_given_by_its_name(name: str) -> None:
    found = limits_of("--limit", f"{name}={OWN_OPTIONS.get(name, '5000')}")
    assert found == Limits(**{name: parse_limit(name, OWN_OPTIONS.get(name, "5000"))})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", OWN_OPTIONS)
def test_an_option_of_its_own_is_the_same_as_the_name(name: str) -> None:
    value = OWN_OPTIONS[name]
    assert limits_of(option(name), value) == limits_of("--limit", f"{name}={value}") != Limits()


TWICE = [
    (first, second)
    for name, value in OWN_OPTIONS.items()
    for first in ((option(name), value), ("--limit", f"{name}={value}"))
    for second in ((option(name), value), ("--limit", f"{name}={value}"))
]


@pytest.mark.parametrize(("first", "second"), TWICE)
def test_a_limit_given_twice_is_an_error_also_if_both_say_the_same(
    first: tuple[str, str], second: tuple[str, str]
) -> None:
    limits_of(*first)  # the control
    with pytest.raises(ValueError, match="is given twice") as caught:
        limits_of(*first, *second)
    assert str(caught.value).startswith(f"{' '.join(second)}: ")


@pytest.mark.parametrize("verb", ["exec", "explain"])
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--memory", "256"), "--memory 256: '256' is less than 1 MiB, and no program starts with less;"),
        (("--memory", "256"), "did you mean 256M?"),
        (("--memory", "lots"), "--memory lots: 'lots' is not a size"),
        (("--memory", ""), "--memory : '' is not a size"),
        (("--memory", "0"), "--memory 0: it has to be more than 0"),
        (("--memory", "-1"), "--memory -1: '-1' is not a size"),
        (("--pids", "many"), "--pids many: 'many' is not a whole number"),
        (("--pids", "0"), "--pids 0: it has to be more than 0"),
        (("--pids", "1.5"), "--pids 1.5: '1.5' is not a whole number"),
        (("--cpu", "all"), "--cpu all: 'all' is not a number of cores"),
        (("--cpu", "0.001"), "--cpu 0.001: '0.001' is less than 0.01"),
        (("--cpu-time", "soon"), "--cpu-time soon: 'soon' is not a duration"),
        (("--deadline", "0"), "--deadline 0: it has to be more than 0"),
        (("--limit", "memroy=1G"), "--limit memroy=1G: no limit is called 'memroy'; did you mean 'memory'?"),
        (("--limit", "cpu-time=1m"), "did you mean 'cpu_time'?"),
        (("--limit", "zzz=1"), f"no limit is called 'zzz'; there are {', '.join(LIMIT_NAMES)}"),
        (("--limit", "=1"), "--limit =1: no limit is called ''"),
        (("--limit", ""), "--limit : write NAME=VALUE, as in memory=256M"),
        (("--limit", "memory"), "--limit memory: write NAME=VALUE, as in memory=256M"),
        (("--limit", "memory="), "--limit memory=: '' is not a size"),
        (("--limit", "io=1=2"), "--limit io=1=2: '1=2' is not a size"),
    ],
)
def test_wrong_limits_are_refused(verb: str, words: tuple[str, ...], said: str) -> None:
    with pytest.raises(ValueError, match=r"^--") as caught:
        limits_of(*words, verb=verb)
    assert said in str(caught.value)


@given(st.text(), st.sampled_from(["--limit", "--memory", "--cpu", "--deadline"]))
def test_any_word_is_a_limit_or_refused_with_a_sentence(word: str, name: str) -> None:
    try:
        found = limits_of(f"{name}={word}")
    except ValueError as error:
        assert str(error).startswith(name)  # noqa: PT017 (either is right, and neither may be silent)
    else:
        assert found != Limits()


# --- with manifest and policy ------------------------------------------------------------------------------

MANIFEST = nexo("demo", "/bin/true") + '[plugin.limits]\ntmp = "8M"\n'
POLICY = """\
version = 1
[limits.tmp]
default = "2M"
ceiling = "16M"
[limits.shm]
default = "2M"
ceiling = "16M"
"""


@one_case(
    ("words", "name", "value", "who"),
    [
        ((), "tmp", 8, "manifest"),
        (("--limit", "tmp=4M"), "tmp", 4, "command line"),
        (("--limit", "tmp=12M"), "tmp", 8, "manifest"),  # lowered, never raised
        ((), "shm", 2, "policy"),
        (("--limit", "shm=1M"), "shm", 1, "command line"),
        (("--limit", "shm=12M"), "shm", 12, "command line"),  # a default is for silence
        (("--limit", "shm=1G"), "shm", 16, "policy"),
    ],
)
def test_the_lowest_of_the_three_wins(
    runner_as_user: Caller,
    plugin_dir: Path,
    write_file: Write,
    words: tuple[str, ...],
    name: str,
    value: int,
    who: str,
) -> None:
    manifest = write_file(plugin_dir / "plugin.toml", MANIFEST)
    policy = write_file(plugin_dir / "policy.toml", POLICY)
    said = runner_as_user("explain", "--format", "json", "--policy", policy, *words, manifest)
    granted = json.loads(said.stdout)["grant"]
    assert (granted["limits"][name], granted["decided_by"][name]) == (value << 20, who)


def test_help_names_every_limit_and_stays_short(runner_as_user: Caller) -> None:
    for verb, most in (("exec", 61), ("explain", 69)):  # explain knows commands, too
        said = runner_as_user(verb, "--help").stdout
        limits = said.partition("\nlimits:\n")[2]
        words = set(limits.replace(",", " ").split())
        assert {option(name) for name in OWN_OPTIONS} <= words
        assert set(LIMIT_NAMES) - set(OWN_OPTIONS) <= words
        assert len(said.splitlines()) <= most


# --- options of contracts that name files and secrets -------------------------------------------------------


class _Boxed:
    name = "boxed"
    takes = ("secret_files",)
    options = (
        ContractOption("--record", "FILE", "a file", reads_file=True),
        ContractOption("--token", "@FILE|env:NAME", "a token", secret=True),
        ContractOption("--plain", "WORD", "a word"),
    )


class _Other:
    name = "other"
    takes = ()
    options = (ContractOption("--record", "FILE", "a name"),)


@pytest.fixture
def boxed(monkeypatch: pytest.MonkeyPatch) -> None:
    contracts: Any = {"boxed": _Boxed(), "other": _Other()}
    monkeypatch.setattr(options, "all_contracts", lambda: tuple(contracts.values()))
    monkeypatch.setattr(options, "find_contract", contracts.__getitem__)
    monkeypatch.setattr(
        options,
        "option_owners",
        lambda name: [c.name for c in contracts.values() if any(o.name == name for o in c.options)],
    )
    monkeypatch.setattr(options, "contract_at_args", lambda args: args.contract)


def given_options(contract: str = "boxed", secret: Sequence[str] = (), **values: Any) -> argparse.Namespace:
    given = {f"contract_option_{name}": value for name, value in values.items()}
    return argparse.Namespace(manifest="x", contract=contract, secret=list(secret), **given)


@pytest.mark.usefixtures("boxed")
def test_an_option_that_reads_a_file(tmp_path: Path) -> None:
    record = tmp_path / "record"
    record.write_text("né\n")
    args = given_options(record=str(record), token="@nowhere", plain="word")
    assert options.contract_options_of(args) == (
        ("record", "né\n"),
        ("record_file", str(record)),
        ("plain", "word"),
    )
    # Another contract means something else by the same flag.
    assert options.contract_options_of(given_options("other", record="none")) == (("record", "none"),)


@pytest.mark.usefixtures("boxed")
@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (None, "--record FILE: No such file or directory"),
        (b"ab\xff", "--record FILE: byte 2 of it is not UTF-8"),
        (b"x" * ((1 << 20) + 1), "--record FILE: it has more than 1 MiB"),
    ],
)
def test_a_file_that_cannot_be_read(tmp_path: Path, content: bytes | None, complaint: str) -> None:
    record = tmp_path / "record"
    if content is not None:
        record.write_bytes(content)
    with pytest.raises(ValueError, match=complaint.replace("FILE", str(record))):
        options.contract_options_of(given_options(record=str(record)))
    record.write_bytes(b"x" * (1 << 20))
    assert len(options.contract_options_of(given_options(record=str(record)))[0][1]) == 1 << 20
    with pytest.raises(ValueError, match="its value is empty"):
        options.contract_options_of(given_options(record=""))


@pytest.mark.usefixtures("boxed")
def test_secrets_from_files_and_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "key").write_bytes(b"key\xff\n")
    monkeypatch.setenv("A_TOKEN", "of=a variable")
    args = given_options(
        secret=[f"key=@{tmp_path}/key", "var=env:A_TOKEN"], token=f"@{tmp_path}/key", plain="x"
    )
    # A file is delivered as it is; a token in an option has no line end.
    assert options.secrets_of(args) == {"key": b"key\xff\n", "var": b"of=a variable", "--token": b"key\xff"}


SPELLED = "spelled-out-secret"


@pytest.mark.usefixtures("boxed")
@pytest.mark.parametrize(
    ("secret", "complaint"),
    [
        (["key"], "write NAME=@FILE"),
        (["=@x"], "write NAME=@FILE"),
        (["--token=@x"], "write NAME=@FILE"),
        ([f"key={SPELLED}"], "--secret key: write @FILE, or env:NAME"),
        (["key="], "--secret key: write @FILE"),
        (["key=@/nonexistent/key"], "--secret key=@/nonexistent/key: No such file"),
        (["key=@/dev/null"], "--secret key=@/dev/null: the file is empty"),
        (["key=@/dev/zero"], "it has more than 1 MiB"),
        (["key=env:NO_SUCH"], "--secret key=env:NO_SUCH: there is no such variable"),
        (["key=env:"], "there is no such variable"),
        (["key=env:HOME", "key=env:HOME"], "--secret key: it is given twice"),
    ],
)
def test_faults_of_secrets(secret: list[str], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint) as refused:
        options.secrets_of(given_options(secret=secret))
    assert SPELLED not in str(refused.value)


@pytest.mark.usefixtures("boxed")
def test_a_fifo_to_which_nobody_writes_is_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Opening it as a file would wait for ever."""
    monkeypatch.setattr(options, "_WRITER_SECONDS", 0.0)
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(ValueError, match="it is a FIFO, and nobody has opened it") as refused:
        options.secrets_of(given_options(secret=[f"key=@{tmp_path}/fifo"]))
    assert "start the program that writes to it first" in str(refused.value)


@pytest.mark.usefixtures("boxed")
@pytest.mark.parametrize("pieces", [[b"key"], [b"", b"ke", b"y"], [b""], [b"x" * (1 << 20), b"x"]])
@pytest.mark.parametrize("named", [True, False])
def test_secrets_from_a_pipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: bool, pieces: list[bytes]
) -> None:
    """As `--secret key=@<(command)` in a shell, and as a FIFO whose writer comes at any moment."""
    monkeypatch.setattr(options, "_WRITER_SECONDS", 60.0)
    path = f"{tmp_path}/fifo"
    read = write = -1
    if named:
        os.mkfifo(path)
    else:
        read, write = os.pipe()
        path = f"/dev/fd/{read}"

    def write_pieces() -> None:
        with open(path if named else write, "wb", buffering=0) as file, suppress(BrokenPipeError):
            for piece in pieces:
                write_all(file.fileno(), piece)

    writer = threading.Thread(target=write_pieces)
    writer.start()
    args = given_options(secret=[f"key=@{path}"])
    content = b"".join(pieces)
    try:
        if content == b"key":
            assert options.secrets_of(args) == {"key": b"key"}
        else:
            with pytest.raises(ValueError, match="is empty" if not content else "more than 1 MiB"):
                options.secrets_of(args)
    finally:
        if not named:
            os.close(read)
        writer.join()


@pytest.mark.usefixtures("boxed")
def test_a_contract_without_them() -> None:
    with pytest.raises(ValueError, match="other has no secrets in files; pass it as a variable: --env NAME"):
        options.secrets_of(given_options("other", secret=["key=env:HOME"]))
    with pytest.raises(ValueError, match="--token belongs to boxed, and this is a manifest of other"):
        options.secrets_of(given_options("other", token="env:HOME"))
    with pytest.raises(ValueError, match="--token: write @FILE") as refused:
        options.secrets_of(given_options(token=SPELLED))
    assert SPELLED not in str(refused.value)
