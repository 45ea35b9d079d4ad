"""A session takes a plan that was kept, and never one that something has changed under.

The host and its fork server live on while things change: what one of them remembers must not count.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from runner.launch.command import Command
from runner.launch.remote.kept import told_of
from runner.launch.remote.messages import LaunchOrder
from runner.launch.stages import Invocation
from runner.launch.stored.code import OwnCode
from sandbox.spec import Limits, Overrides
from tests import elsewhere
from tests.conftest import ROOT, Caller
from tests.runner.launch.stored.kept_plugin import (
    CHANGED,
    DAMAGE,
    REFUSED,
    SETTLED,
    USED,
    KeptPlugin,
    Write,
    append,
    entries,
    swap,
)
from tests.tables import wait_for

HELD = "#!/bin/sh\necho runs\nexec cat\n"


# --- in the host -------------------------------------------------------------------------------------------


def hosting() -> None:
    """Open a session for each line, and tell how it went."""
    import json
    import os
    import sys

    import trio

    from runner.launch.remote.remote_cell import aclose_forkserver, open_cage
    from runner.launch.stages import Invocation
    from sandbox.codec import as_plain
    from sandbox.spec import Limits, Overrides

    log = os.memfd_create("log")  # of this process, its fork server and its monitors
    os.dup2(log, 2)

    async def text(stream: trio.abc.ReceiveStream, line: bool = False) -> str:
        said = b""
        while (data := await stream.receive_some(1 if line else None)) and not (line and data == b"\n"):
            said += data
        return said.decode()

    def cage(given: dict[str, Any]) -> Any:
        overrides = Overrides(limits=Limits(**given["limits"]))
        asked = Invocation(
            given["manifest"], policy=given["policy"], args=tuple(given["args"]), overrides=overrides
        )
        environ = {**os.environ, **given["environ"]}
        return open_cage(asked, environ=environ, cwd=given["cwd"])

    async def once(given: dict[str, Any]) -> dict[str, Any]:
        begin = os.fstat(log).st_size
        terms = None
        async with cage(given) as cell:
            try:
                terms = as_plain(await cell.prepared())
            except Exception:  # noqa: BLE001 -- it is refused: the ending tells
                pass
            said = await text(cell.stdout)
            ended = await cell.ended()
        return {
            "said": said,
            "terms": terms,
            "outcome": [ended.outcome.code, ended.outcome.cause, ended.status],
            "explanation": list(ended.explanation),
            "report": ended.report,
            "log": os.pread(log, 1 << 20, begin).decode(),
            "passed": cell._passed is not None,
        }

    async def hold(given: dict[str, Any], task_status: Any) -> None:
        async with cage(given) as cell:
            await text(cell.stdout, line=True)
            task_status.started()
            await trio.sleep_forever()

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            while words := await trio.to_thread.run_sync(sys.stdin.readline):
                given = json.loads(words)
                if given["hold"]:
                    await nursery.start(lambda task_status, given=given: hold(given, task_status))
                    answer: dict[str, Any] = {}
                else:
                    answer = await once(given)
                os.write(1, json.dumps(answer).encode() + b"\n")
            nursery.cancel_scope.cancel()
        await aclose_forkserver()

    trio.run(main)


# --- the host, as a test sees it ---------------------------------------------------------------------------


class Host:
    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    def __call__(
        self,
        manifest: Path,
        policy: Path | None,
        *args: str,
        env: Mapping[str, str] | None = None,
        cwd: str = "/",
        limits: Mapping[str, object] | None = None,
        hold: bool = False,
    ) -> dict[str, Any]:
        told = {
            "manifest": str(manifest),
            "policy": None if policy is None else str(policy),
            "args": args,
            "environ": {"RUNNER_DEBUG": "1", "WORD": "s3cret-word", **(env or {})},
            "cwd": cwd,
            "limits": dict(limits or {}),
            "hold": hold,
        }
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(told).encode() + b"\n")
        answer: dict[str, Any] = json.loads(elsewhere.line(self._process, 60))
        return answer


@contextmanager
def host_of(caller: Caller) -> Iterator[Host]:
    with elsewhere.start(caller, hosting, env={"RUNNER_DEBUG": "1"}, stdin=subprocess.PIPE) as process:
        try:
            yield Host(process)
            process.stdin.close()  # type: ignore[union-attr]  # it is a pipe
            process.wait(60)
        finally:
            process.kill()


class Plugin(KeptPlugin):
    """Opened by one host again and again."""

    def __init__(self, caller: Caller, place: Path, write_file: Write, host: Host) -> None:
        super().__init__(caller, place, write_file)
        self.host = host

    def open(self, *args: str, **more: Any) -> dict[str, Any]:
        return self.host(self.folder, self.policy, *args, **more)

    def keep(self, *args: str, passed: bool | None = None) -> dict[str, Any]:
        """Open it until its plan is kept. Who keeps it may do so after the plugin has ended. `passed`: and
        until it is handed over, or not: a busy process takes none."""
        first = self.open(*args)
        assert USED not in first["log"], first
        for _ in range(20):
            second = self.open(*args)
            if USED in second["log"] and passed in (None, second["passed"]):
                break
        assert USED in second["log"], (first["log"], second["log"])
        assert without_times(second) == without_times(first)
        return second


def without_times(answer: dict[str, Any]) -> dict[str, Any]:
    """What two launches of the same plan share."""
    report = dict(answer["report"])
    for differs in ("timings", "usage"):
        report.pop(differs)
    report["limits"] = [{**limit, "peak": None} for limit in report["limits"]]
    report["layers"] = [  # the uid that was leased
        {**layer, "detail": layer["detail"].rstrip("0123456789")} for layer in report["layers"]
    ]
    same = ("said", "terms", "outcome", "explanation")
    return {"report": report, **{key: answer[key] for key in same}}


@pytest.fixture(params=["alone", "beside"])
def plugin(
    request: pytest.FixtureRequest,
    runner_as: Caller,
    plugin_dir: Path,
    write_file: Write,
    nothing_left: None,
) -> Iterator[Plugin]:
    """Its plan is kept, and used: by a process of its own, or by one that serves another session too."""
    with host_of(runner_as) as host:
        made = Plugin(runner_as, plugin_dir, write_file, host)
        if request.param == "beside":
            hold(host, plugin_dir, write_file, runner_as)
        time.sleep(SETTLED)
        kept = made.keep(passed=request.param == "beside")
        assert kept["said"] == "with s3cret-word and \ntext\n" and kept["outcome"][2] == 3
        assert kept["passed"] is (request.param == "beside")
        yield made


def hold(host: Host, place: Path, write_file: Write, caller: Caller) -> None:
    folder = place / "held"
    text = "[plugin]\nid = 'held'\nversion = '1.0.0'\nname = 'Held'\ndescription = 'Waits.'\n"
    text += "min_nexo_version = '>=0.1'\n[plugin.entrypoint]\ncommand = './plugin'\n"
    write_file(folder / "nexo-plugin.toml", text)
    write_file(folder / "plugin", HELD, 0o755)
    caller.give(folder)
    host(folder, None, hold=True)


# --- what changed ------------------------------------------------------------------------------------------


@pytest.mark.launches
@pytest.mark.parametrize("change", REFUSED)
def test_a_change_that_is_not_allowed_is_refused(plugin: Plugin, change: str) -> None:
    make, rule = REFUSED[change]
    make(plugin)
    ended = plugin.open()
    assert USED not in ended["log"] and "does not hold" in ended["log"]
    assert ended["outcome"][2] in (126, 127) and "text" not in ended["said"], ended
    explained = " ".join((ended["outcome"][1], *ended["explanation"]))
    assert rule.replace("_", " ") in explained.replace("_", " ") or ended["outcome"][2] == 127


@pytest.mark.launches
@pytest.mark.parametrize("change", CHANGED)
def test_a_change_makes_the_plan_anew(plugin: Plugin, change: str) -> None:
    CHANGED[change](plugin)
    ended = plugin.open()
    assert USED not in ended["log"] and "does not hold" in ended["log"]
    assert (ended["outcome"][2], ended["said"]) == (3, "with s3cret-word and \ntext\n")


@pytest.mark.launches
def test_everything_that_an_order_says_names_the_plan(plugin: Plugin) -> None:
    ended = plugin.keep("an argument")
    assert ended["said"] == "with s3cret-word and an argument\ntext\n"
    assert USED in plugin.open(env={"SESSION": "17"})["log"]  # the control: nobody looks at it
    others: list[dict[str, Any]] = [
        {"env": {"WORD": "another"}},
        {"env": {"PATH": "/usr/bin"}},
        {"env": {"XDG_RUNTIME_DIR": "/srv/run"}},
        {"env": {"RUNNER_POLICY": "dev"}},
        {"env": {"HOME": "/srv"}},
        {"cwd": "/tmp"},
        {"limits": {"open_files": 64}},
        {"limits": {"deadline": 50.0}},
    ]
    for other in others:
        ended = plugin.open(**other)
        assert USED not in ended["log"] and ended["outcome"][2] == 3, other
    assert plugin.open(env={"WORD": "another"})["said"].startswith("with another and")


@pytest.mark.launches
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_no_plan(plugin: Plugin, damage: str) -> None:
    [entry] = entries(plugin)
    try:
        DAMAGE[damage](entry)
        ended = plugin.open()
    finally:
        shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink(missing_ok=True)
        entry.with_name("aside").unlink(missing_ok=True)
    assert USED not in ended["log"] and ended["outcome"][2] == 3


@pytest.mark.launches
def test_a_file_of_another_owner_is_no_plan(plugin: Plugin) -> None:
    if os.geteuid() != 0 or plugin.caller.uid != 0:
        pytest.skip("only root can give a file away in root's cache")
    [entry] = entries(plugin)
    os.chown(entry, 12345, 12345)
    try:
        assert USED not in plugin.open()["log"]
    finally:
        entry.unlink(missing_ok=True)


@pytest.mark.launches
def test_neither_variables_nor_arguments_are_written(plugin: Plugin) -> None:
    plugin.keep("an-0ther-secret")
    found = entries(plugin)
    assert len(found) == 2
    for entry in found:
        raw = entry.read_bytes()
        assert b"s3cret-word" not in raw and b"an-0ther-secret" not in raw and b"WORD" in raw
        assert entry.stat().st_mode & 0o777 == 0o600


@pytest.mark.launches
def test_the_cache_can_be_switched_off(plugin: Plugin) -> None:
    for _ in range(2):
        assert USED not in plugin.open(env={"RUNNER_CACHE": "off"})["log"]


@pytest.mark.launches
def test_a_plan_that_cannot_be_carried_out_is_made_anew(plugin: Plugin) -> None:
    """Its sources are looked at once more when they are opened. Here the facts are kept from seeing it."""
    facts = "[{k: v for k, v in part.items() if sys.argv[2] not in str(k)} for part in entry.facts]"
    forge(plugin, f"entry = entry._replace(facts=tuple({facts}))")
    assert USED in plugin.open()["log"]  # the control: it is a plan
    swap(plugin)
    ended = plugin.open()
    assert "cannot be carried out" in ended["log"]
    assert (ended["outcome"][2], ended["said"]) == (3, "with s3cret-word and \ntext\n")


def forge(plugin: Plugin, change: str) -> Path:
    [file] = entries(plugin)
    code = (
        "import sys, marshal; from sandbox import cache; from runner.launch.stored.entry import PlanEntry\n"
        "entry = PlanEntry(*marshal.loads(cache.load(sys.argv[1])))\n"
        f"{change}\n"
        "cache.store(sys.argv[1], marshal.dumps(tuple(entry)))\n"
    )
    caller, before = plugin.caller, file.read_bytes()
    argv = [*caller.prefix, *caller.python, "-c", code, file.name, str(plugin.read)]
    subprocess.run(argv, env={**caller.environ}, check=True, cwd="/")
    assert file.read_bytes() != before
    return file


@pytest.mark.launches
def test_a_plan_that_cannot_be_started_is_forgotten(plugin: Plugin) -> None:
    """The host has its terms by then, and nothing is done twice. Who planned the launch learns of it from
    the process that it was handed to."""
    file = forge(plugin, "entry.plan[2] = '/nowhere/bwrap'")
    ended = plugin.open()
    assert USED in ended["log"] and ended["outcome"][0] == "launch_failed", ended
    assert wait_for(lambda: not file.exists())
    ended = plugin.open()
    assert USED not in ended["log"] and ended["outcome"][2] == 3


@pytest.mark.launches
@pytest.mark.parametrize("how", ["unsandboxed", "keyring"])
def test_a_file_that_no_launch_wrote_is_no_plan(plugin: Plugin, how: str) -> None:
    """Nobody else can write it. Should somebody, it is at least none without a cage."""
    change = {
        "unsandboxed": ("entry.plan", "Provision", 1, True),
        "keyring": ("entry.plan[1]", "Layers", 4, False),
    }[how]
    where, kind, field, value = change
    found = f"next(each for each in {where} if isinstance(each, list) and each[0] == {kind!r})"
    forge(plugin, f"found = {found}; assert found[{field}] is not {value}; found[{field}] = {value}")
    ended = plugin.open()
    assert "cannot be carried out" in ended["log"]
    assert (ended["outcome"][2], ended["said"]) == (3, "with s3cret-word and \ntext\n")


# --- whose plan it is --------------------------------------------------------------------------------------


@pytest.mark.launches
def test_a_session_and_exec_have_plans_of_their_own(plugin: Plugin) -> None:
    words = ("exec", "--policy", str(plugin.policy), str(plugin.folder))
    env = {"RUNNER_DEBUG": "1", "WORD": "s3cret-word"}
    first = plugin.caller(*words, env=env)
    assert USED not in first.stderr and first.returncode == 3
    assert USED in plugin.caller(*words, env=env).stderr
    assert len(entries(plugin)) == 2


def order(**changed: Any) -> LaunchOrder:
    given = {"manifest": "/srv/plugin", **changed}
    return LaunchOrder(Invocation(**given), {"HOME": "/root"}, "/", 0.0)


CODE = OwnCode(frozenset(), "1")


def test_other_code_has_other_plans() -> None:
    told = told_of(order(), CODE)
    assert told is not None and told == told_of(order(), CODE)
    other = told_of(order(), CODE._replace(mark="2"))
    assert other is not None and other.name != told.name
    assert told_of(order(), None) is None


@pytest.mark.parametrize(
    "field",
    [
        {"overrides": Overrides(env=(("NAME", "value"),))},
        {"config": "{}"},
        {"options": (("name", "value"),)},
        {"command": Command(("true",), "/")},
    ],
    ids=["env", "config", "options", "command"],
)
def test_what_may_be_secret_or_differs_at_each_call_has_no_plan(field: dict[str, Any]) -> None:
    assert told_of(order(), CODE) is not None
    assert told_of(order(**field), CODE) is None


def test_every_field_of_an_invocation_names_the_plan() -> None:
    """But for those that have none."""
    fields = {
        "manifest": "/srv/other",
        "contract": "nexo",
        "server": "one",
        "policy": "dev",
        "state_dir": "/srv/state",
        "args": ("word",),
        "overrides": Overrides(pass_env=("NAME",)),
    }
    unnamed = {"options", "config", "command"}
    assert {*fields, *unnamed} == set(Invocation._fields)
    names = [told_of(order(**{name: value}), CODE) for name, value in fields.items()]
    names += [told_of(order(overrides=Overrides(limits=Limits(pids=9))), CODE), told_of(order(), CODE)]
    assert len({told.name for told in names if told is not None}) == len(names) == len(fields) + 2


@pytest.mark.launches
def test_another_host_finds_it(plugin: Plugin) -> None:
    with host_of(plugin.caller) as other:
        ended = other(plugin.folder, plugin.policy)
    assert USED in ended["log"] and ended["outcome"][2] == 3


@pytest.mark.launches
def test_what_was_changed_a_moment_ago_is_not_kept(plugin: Plugin) -> None:
    append(plugin.manifest, "# more\n")
    for _ in range(2):
        assert USED not in plugin.open()["log"]


# --- both ways ---------------------------------------------------------------------------------------------

MANIFEST = """\
[plugin]
id = "ends"
version = "1.0.0"
name = "Ends"
description = "Ends in every way."
min_nexo_version = ">=0.1"
[plugin.entrypoint]
command = "./plugin"
[plugin.sandbox]
enabled = true
fs_write_paths = {writes}
[plugin.limits]
{limits}
"""
ENDINGS = {
    "ok": ("", "[]", "echo said"),
    "signal": ("", "[]", "kill -SEGV $$"),
    "deadline": ('deadline = "2s"', "[]", "sleep 60"),
    "processes": ("pids = 8", "[]", "for i in 1 2 3 4 5 6 7 8 9 10 11 12; do sleep 5 & done; wait"),
    "system call": ("", "[]", "unshare --user true"),
    "state": ("", '["${state_dir}"]', "echo said > $RUNNER_STATE_DIR/file; cat $RUNNER_STATE_DIR/file"),
}


@pytest.mark.launches
@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside"])
@pytest.mark.parametrize("ending", ENDINGS)
def test_every_end_is_told_the_same(
    runner_as: Caller, plugin_dir: Path, write_file: Write, ending: str, beside: bool, nothing_left: None
) -> None:
    limits, writes, script = ENDINGS[ending]
    folder = plugin_dir / "plugin"
    write_file(folder / "nexo-plugin.toml", MANIFEST.format(limits=limits, writes=writes))
    write_file(folder / "plugin", f"#!/bin/sh\n{script}\n", 0o755)
    runner_as.give(plugin_dir)
    with host_of(runner_as) as host:
        if beside:
            hold(host, plugin_dir, write_file, runner_as)
        time.sleep(SETTLED)
        seen: dict[bool, dict[str, Any]] = {}
        for _ in range(20):  # the first launch may make the state directory, which is another machine
            ended = host(folder, None)
            if ended["passed"] is beside:  # a busy process takes none
                seen[USED in ended["log"]] = ended
            if len(seen) == 2:
                break
            if "a moment ago" in ended["log"]:
                time.sleep(SETTLED)
    assert len(seen) == 2, seen
    assert without_times(seen[True]) == without_times(seen[False])
    runner_as("state", "remove", "--orphaned")


# --- the command line --------------------------------------------------------------------------------------


@pytest.mark.launches
def test_a_call_takes_a_kept_plan(
    runner_as: Caller, plugin_dir: Path, write_file: Write, nothing_left: None
) -> None:
    server = write_file(
        plugin_dir / "server.py", (ROOT / "runner/contracts/mcp/example/server.py").read_text(), 0o755
    )
    text = '{"mcpServers": {"words": {"command": "./server.py", "args": []}}}'
    manifest = write_file(plugin_dir / "mcp.json", text)
    runner_as.give(plugin_dir)
    time.sleep(SETTLED)
    words = ("call", str(manifest), "greet", "--input", '{"name": "you"}')

    def call() -> subprocess.CompletedProcess[str]:
        ended = runner_as(*words, env={"RUNNER_DEBUG": "1"})
        assert ended.returncode == 0 and "Hello, you!" in ended.stdout, ended.stderr
        return ended

    assert USED not in call().stderr
    assert USED in call().stderr
    append(server, "# more\n")
    assert USED not in call().stderr
