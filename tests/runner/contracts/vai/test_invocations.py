"""Invocations of a real package in its cage: processes, deadlines, cancellation, secrets and records."""

from __future__ import annotations

import json
import shutil
import signal
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trio

from runner.launch.remote import forkserver
from runner.library import (
    Delegation,
    DelegationRequest,
    HostError,
    InvalidCall,
    Notice,
    OpenPlugin,
    PluginError,
    PluginFailure,
    Progress,
    Services,
    open_plugin,
    run,
)
from tests.conftest import ROOT, SYSTEM_PATH, Caller
from tests.tables import one_case

ENVIRON = {"PATH": SYSTEM_PATH, "HOME": "/", "RUNNER_CACHE": "off"}
SECONDS = 120.0
SECRET = "correct-horse-battery"
EVENT = {"type": "run.completed", "subject": {"kind": "run", "id": "run_1"}, "summary": {}}


@pytest.fixture
def devkit(plugin_dir: Path, nothing_left: None) -> Iterator[Path]:
    shutil.copytree(ROOT / "tests/plugins/vai_devkit", plugin_dir / "devkit")
    for path in (plugin_dir / "devkit", *(plugin_dir / "devkit").rglob("*")):
        path.chmod(0o755)
    yield plugin_dir / "devkit"
    forkserver.close()


def opened(path: Path, **more: Any) -> Any:
    return open_plugin(path, environ=ENVIRON, **more)


async def seen(plugin: OpenPlugin, name: str, given: Any, **more: Any) -> dict[str, Any]:
    """What the plugin says that it was given."""
    found: dict[str, Any] = (await plugin.call(name, given, **more))["structured_output"]
    return found


def recorded(holder: Any) -> dict[str, Any]:
    assert holder.invocation is not None
    found: dict[str, Any] = holder.invocation
    return found


# --- processes ----------------------------------------------------------------------------------------------


@pytest.mark.launches
@pytest.mark.trio
async def test_a_worker_serves_one_call_after_the_other(devkit: Path) -> None:
    with trio.fail_after(SECONDS):
        async with opened(devkit) as plugin:
            ids = set()
            for number in (1, 2, 3):
                told = await seen(plugin, "reader", {"n": number})
                assert told["served"] == number and told["body"]["input"] == {"n": number}
                assert recorded(plugin)["status"] == "succeeded" and plugin.report is None
                ids.add(recorded(plugin)["invocation_id"])
                assert recorded(plugin)["invocation_id"] == told["body"]["context"]["invocation_id"]
            assert len(ids) == 3
            # A failure is not served by the same process again.
            with pytest.raises(PluginError) as caught:
                await plugin.call("reader", {"do": "fail"})
            assert recorded(caught.value)["code"] == "devkit.asked"
            assert (await seen(plugin, "reader", {}))["served"] == 1
        assert plugin.report is not None and plugin.report["invocation"]["status"] == "succeeded"


@pytest.mark.launches
@pytest.mark.trio
async def test_processes_at_once(devkit: Path) -> None:
    """max_concurrency is 2."""
    codes: list[str] = []

    async def wait(plugin: OpenPlugin) -> None:
        try:
            await plugin.call("reader", {"do": "wait"}, seconds=4.0)
        except PluginFailure as failure:
            codes.append(recorded(failure)["code"])

    with trio.fail_after(SECONDS):
        async with opened(devkit) as plugin, trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(wait, plugin)
    assert sorted(codes) == ["runner.deadline_exceeded", "runner.deadline_exceeded", "runner.overloaded"]


@pytest.mark.launches
@pytest.mark.trio
async def test_a_binding_narrows(devkit: Path) -> None:
    binding = {
        "binding_id": "bind_1",
        "package_id": "acme/devkit",
        "package_version": "0.1.0",
        "export_id": "reader",
        "scope": {"org_id": "org_1"},
        "status": "active",
        "policy": {"max_concurrency": 1, "filesystem": "none"},
    }
    codes: list[str] = []

    async def wait(plugin: OpenPlugin) -> None:
        try:
            await plugin.call("reader", {"do": "wait"}, seconds=4.0)
        except PluginFailure as failure:
            codes.append(recorded(failure)["code"])

    with trio.fail_after(SECONDS):
        async with opened(devkit, options={"binding": json.dumps(binding)}) as plugin:
            told = await seen(plugin, "reader", {})
            assert "assets" not in told["package"]
            found = recorded(plugin)
            assert (found["binding_id"], found["org_id"]) == ("bind_1", "org_1")
            assert found["permissions"]["declared"]["filesystem"] == "assets_ro"
            assert found["permissions"]["effective"]["filesystem"] == "none"
            async with trio.open_nursery() as nursery:
                nursery.start_soon(wait, plugin)
                nursery.start_soon(wait, plugin)
    assert sorted(codes) == ["runner.deadline_exceeded", "runner.overloaded"]


@pytest.mark.launches
@pytest.mark.trio
async def test_of_several_bindings_the_projects_and_a_lower_frame_limit(devkit: Path) -> None:
    def record(name: str, policy: dict[str, str], **scope: str) -> dict[str, Any]:
        known = {"package_id": "acme/devkit", "package_version": "0.1.0", "export_id": "reader"}
        return {"binding_id": name, **known, "scope": scope, "status": "active", "policy": policy}

    narrower = record("of_project", {"filesystem": "none"}, org_id="org_1", project_id="proj_1")
    several = {"bindings": [record("of_org", {}, org_id="org_1"), narrower]}
    options = {"binding": json.dumps(several), "frame_limit": "8K"}
    with trio.fail_after(SECONDS):
        async with opened(devkit, options=options) as plugin:
            for project, name in (("proj_1", "of_project"), ("proj_2", "of_org")):
                told = await seen(plugin, "reader", {}, context={"org_id": "org_1", "project_id": project})
                assert ("assets" in told["package"]) == (name == "of_org")
                found = recorded(plugin)
                assert (found["binding_id"], found["project_id"]) == (name, project)
            with pytest.raises(PluginFailure) as caught:  # the plugin sends back what it got, and more
                await plugin.call("reader", {"pad": "x" * 7600}, context={"project_id": "proj_1"})
            assert recorded(caught.value)["code"] == "protocol.frame_too_large"
            with pytest.raises(PluginError) as refused:
                await plugin.call("reader", {"pad": "x" * 9000}, context={"project_id": "proj_1"})
            assert refused.value.code == "asset.payload_too_large"


@pytest.mark.launches
@pytest.mark.trio
async def test_an_isolated_export_and_its_secret(devkit: Path) -> None:
    with trio.fail_after(SECONDS):
        async with opened(devkit, secrets={"api_key": SECRET}) as plugin:
            for _ in range(2):
                told = await seen(plugin, "search", {"q": 1})
                assert told["served"] == 1 and told["secrets"] == ["api_key"]
                assert told["env"]["VAI_SECRETS_DIR"] == "/sandbox/secrets" and SECRET not in str(told)
                assert plugin.report is not None and SECRET not in json.dumps(plugin.report)
                assert plugin.report["invocation"] == plugin.invocation
            with pytest.raises(PluginError) as caught:
                await plugin.call("search", {"do": "fail", "status": "retryable_failure"})
            assert caught.value.report is not None
            assert caught.value.report["invocation"] == recorded(caught.value) == plugin.invocation
            assert recorded(plugin)["retryable"] and recorded(plugin)["code"] == "devkit.asked"


@pytest.mark.launches
@pytest.mark.trio
async def test_each_kind_has_a_record(devkit: Path) -> None:
    with trio.fail_after(SECONDS):
        async with opened(devkit, secrets={"api_key": SECRET}, options={"delivery_id": "del_7"}) as plugin:
            assert await plugin.call("notify", EVENT, context={"attempt": 2}) == {"status": "ack"}
            hook = recorded(plugin)
            assert (hook["export"], hook["delivery_id"]) == ({"kind": "hook", "id": "notify"}, "del_7")
            assert (hook["status"], hook["retry_count"]) == ("succeeded", 1)
        async with opened(devkit, secrets={"api_key": SECRET}) as plugin:
            blocks = [{"kind": "input", "content": [{"type": "text", "text": "x" * (5 << 20)}]}]
            given = {"source": {"chain_id": "c_1", "projection": {"blocks": blocks}}}
            answer = await plugin.call("window", given)
            told = json.loads(answer["summary"]["text"])
            assert told["body"]["source"]["projection"]["transport"] == "artifact"
            assert len(told["scratch"]) == 1
            assert recorded(plugin)["export"]["kind"] == "compactor"
            await plugin.call("triage", {"trigger": {"type": "user_request", "input": []}})
            assert recorded(plugin)["permissions"]["declared"]["gateway_api_scopes"] == [
                "chains:read",
                "runs:write",
            ]
            assert [entry["name"] for entry in await plugin.list("tools")] == ["search", "reader"]


# --- before and after ---------------------------------------------------------------------------------------


@pytest.mark.trio
async def test_a_refused_call_has_a_record_and_starts_nothing(devkit: Path) -> None:
    async with opened(devkit) as plugin:
        for name, given, error, code in (
            ("absent", {}, PluginFailure, "tool.not_found"),
            ("search", {}, InvalidCall, "binding.secret_missing"),
        ):
            with pytest.raises((InvalidCall, PluginFailure)) as caught:
                await plugin.call(name, given)
            assert type(caught.value) is error and caught.value.report is not None
            assert (recorded(caught.value)["status"], recorded(caught.value)["code"]) == ("failed", code)
            assert plugin.invocation == caught.value.invocation
            assert caught.value.report["invocation"] == caught.value.invocation
            assert caught.value.report["plugin"] is None  # nothing was launched
            assert (recorded(caught.value)["trace_id"] is None) is (name == "absent")
        for context in ([1], "x", {1: "x"}):
            with pytest.raises(ValueError, match=r"^context: it has to be a mapping"):
                await plugin.call("notify", EVENT, context=context)


@pytest.mark.trio
async def test_a_binding_that_is_nested_too_deeply_is_refused(devkit: Path) -> None:
    async with opened(devkit, options={"binding": "[" * 100_000}) as plugin:
        with pytest.raises(InvalidCall) as caught:
            await plugin.call("notify", EVENT)
        found = recorded(caught.value)
        assert (found["code"], found["binding_id"]) == ("binding.invalid", None)
        assert found["invocation_id"] is not None


@pytest.mark.launches
@pytest.mark.trio
async def test_a_no_and_the_events_of_a_worker(devkit: Path) -> None:
    """What the documentation of the library promises for each contract."""
    with trio.fail_after(SECONDS):
        with pytest.raises(PluginError) as caught:
            await run(devkit, "reader", {"do": "fail"}, environ=ENVIRON)
        assert caught.value.report is not None
        assert caught.value.report["outcome"]["code"] == "plugin_error"
        assert caught.value.report["invocation"] == recorded(caught.value)
        async with opened(devkit) as plugin:
            await plugin.call("reader", {"do": "progress", "count": 2})
            with pytest.raises(PluginFailure):
                await plugin.call("reader", {"do": "exit"})
        told = [event async for event in plugin.events()]
    assert [event.value["message"] for event in told if isinstance(event, Progress)] == ["step 0", "step 1"]
    assert [(e.kind, e.value["code"]) for e in told if isinstance(e, Notice)] == [("ended", "crashed")]


@pytest.mark.launches
@pytest.mark.trio
async def test_a_deadline_and_a_late_answer(devkit: Path) -> None:
    with trio.fail_after(SECONDS):
        given = {"trigger": {"do": "wait"}}
        with pytest.raises(PluginFailure) as caught:
            await run(devkit, "triage", given, seconds=8.0, secrets={"api_key": SECRET}, environ=ENVIRON)
        failure = caught.value
        assert (failure.outcome.code, failure.outcome.phase) == ("timeout", "call")
        found = recorded(failure)
        assert (found["status"], found["code"]) == ("failed", "runner.deadline_exceeded")
        assert (found["execution_outcome"], found["retryable"]) == ("unknown", False)
        assert failure.report is not None and failure.report["invocation"] == found
        # It answered in its grace, so it got shutdown and its seconds, as after any other call.
        assert (failure.report["exit"]["code"], failure.report["exit"]["ended_by"]) == (0, None)
        assert "goodbye" in failure.stderr


@pytest.mark.trio
async def test_a_deadline_before_anything_runs(devkit: Path) -> None:
    with trio.fail_after(SECONDS):
        with pytest.raises(PluginFailure) as caught:
            await run(devkit, "reader", {}, seconds=0.001, environ=ENVIRON)
        assert caught.value.outcome.code == "timeout" and caught.value.outcome.phase in (
            "launch",
            "handshake",
        )
        found = recorded(caught.value)
        assert (found["status"], found["code"]) == ("retryable_failure", "runner.deadline_exceeded")


@pytest.mark.launches
@pytest.mark.trio
async def test_a_cancelled_call(devkit: Path) -> None:
    with trio.fail_after(SECONDS):
        async with opened(devkit) as plugin, trio.open_nursery() as nursery:
            asked = trio.Event()
            given = {"do": "progress", "count": 1}
            assert await plugin.call("reader", given, on_progress=lambda value: asked.set())
            await asked.wait()

            async def wait() -> None:
                await plugin.call("reader", {"do": "wait"})

            nursery.start_soon(wait)
            while not _is_serving(plugin):
                await trio.lowlevel.checkpoint()
            nursery.cancel_scope.cancel()
        found = recorded(plugin)
        assert (found["status"], found["code"]) == ("cancelled", "devkit.cancelled")
        assert plugin.report is not None and plugin.report["exit"]["code"] == 0


def _is_serving(plugin: OpenPlugin) -> bool:
    """Whether a request was written."""
    workers = plugin._pool._processes if plugin._pool is not None else []
    waiters = [w for worker in workers if worker.session for w in worker.session.state.waiters.values()]
    return any(frame.written for waiter in waiters for frame in waiter.queued)


# --- delegated credentials ----------------------------------------------------------------------------------


class Tokens:
    def __init__(self, error: Exception | None = None, seconds: float = 0.0) -> None:
        self.asked: list[DelegationRequest] = []
        self._error, self._seconds = error, seconds

    async def delegate(self, request: DelegationRequest) -> Delegation:
        self.asked.append(request)
        await trio.sleep(self._seconds)
        if self._error is not None:
            raise self._error
        return Delegation("https://gateway.example.com", "delegated-token-1", request.scopes[:1])


@pytest.mark.trio
@pytest.mark.parametrize(
    ("tokens", "seconds", "kind", "code"),
    [
        (Tokens(HostError(1, "not today")), None, InvalidCall, "auth.delegation_failed"),
        (Tokens(ZeroDivisionError()), None, InvalidCall, "auth.delegation_failed"),
        (Tokens(seconds=1000.0), 0.5, PluginFailure, "runner.deadline_exceeded"),
    ],
)
async def test_credentials_that_are_not_given(
    devkit: Path, tokens: Tokens, seconds: float | None, kind: Any, code: str
) -> None:
    async with opened(devkit, secrets={"api_key": SECRET}, services=Services(gateway=tokens)) as plugin:
        with pytest.raises(kind) as caught:
            await plugin.call("triage", {}, seconds=seconds)
    assert recorded(caught.value)["code"] == code and len(tokens.asked) == 1
    assert tokens.asked[0].scopes == ("chains:read", "runs:write")


@pytest.mark.trio
async def test_a_call_that_is_cancelled_while_the_gateway_works_has_its_own_record(devkit: Path) -> None:
    tokens = Tokens(seconds=1000.0)
    async with opened(devkit, secrets={"api_key": SECRET}, services=Services(gateway=tokens)) as plugin:
        with pytest.raises(PluginFailure):
            await plugin.call("absent", {})
        async with trio.open_nursery() as nursery:
            nursery.start_soon(plugin.call, "triage", {})
            while not tokens.asked:
                await trio.lowlevel.checkpoint()
            nursery.cancel_scope.cancel()
        found = recorded(plugin)
    assert (found["export"]["id"], found["status"]) == ("triage", "cancelled")


# --- the command line ---------------------------------------------------------------------------------------


def test_runner_call(runner_as: Caller, devkit: Path) -> None:
    done = runner_as("call", "--json", devkit, "reader", "--input", '{"n": 1}', "--report", "2")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["structured_output"]["body"]["input"] == {"n": 1}
    *told, report = map(json.loads, done.stderr.splitlines())
    assert report["invocation"]["status"] == "succeeded"
    assert {"event": "invocation", "value": report["invocation"]} in told


def test_a_tar_of_the_package(runner_as: Caller, devkit: Path) -> None:
    path = devkit.parent / "devkit.tgz"
    with tarfile.open(path, "w:gz") as tar:
        tar.add(devkit, ".")
    path.chmod(0o644)
    done = runner_as("call", "--json", path, "reader", "--input", '{"n": 1}', "--report", "2")
    manifest = Path(json.loads(done.stderr.splitlines()[-1])["plugin"]["manifest"])
    shutil.rmtree(manifest.parent)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["structured_output"]["body"]["input"] == {"n": 1}
    assert manifest.parent.parent.name == "unpacked"


def test_the_program_may_not_be_a_link_out_of_the_package(runner_as: Caller, devkit: Path) -> None:
    """By check and at the launch alike."""
    (devkit / "bin/plugin").rename(devkit.parent / "outside")
    (devkit / "bin/plugin").symlink_to(devkit.parent / "outside")
    for words in (
        ("check", devkit),
        ("call", devkit, "reader", "--input", "{}"),
        ("exec", devkit, "--export", "reader"),
    ):
        done = runner_as(*words)
        assert done.returncode != 0 and "'bin/plugin' leads out of the package" in done.stdout + done.stderr
    (devkit / "bin/plugin").unlink()
    (devkit.parent / "outside").rename(devkit / "bin/real")
    (devkit / "bin/plugin").symlink_to("real")  # the control: inside it is fine
    assert runner_as("call", devkit, "reader", "--input", "{}").returncode == 0


def test_a_frame_before_the_request_ends_the_plugin(runner_as: Caller, devkit: Path) -> None:
    program = devkit / "bin/plugin"
    text = program.read_text()
    hello, flush = '"version": "0.1.0"}})\n', "    sys.stdout.buffer.flush()\n"
    # Both in one write. The id is of no request, whenever it is read.
    early = '        send({"type": "response", "id": "req_9", "ok": True, "body": {"status": "succeeded"}})\n'
    assert (text.count(hello), text.count(flush)) == (1, 1)
    late = f'    if message["type"] != "hello":\n    {flush}'
    program.write_text(text.replace(flush, late).replace(hello, hello + early))
    done = runner_as("call", "--json", devkit, "reader", "--input", "{}", "--report", "2")
    outcome = json.loads(done.stderr.splitlines()[-1])["outcome"]
    assert (outcome["code"], outcome["cause"]) == ("malformed_response", "unexpected_frame"), done.stderr


def test_a_secret_stays_in_the_cage(runner_as: Caller, devkit: Path) -> None:
    words = ("call", "--json", "--events", "2", devkit, "search", "--input", "{}", "--report", "2")
    done = runner_as(*words, "--secret", "api_key=env:KEY", env={"KEY": SECRET})
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["structured_output"]["secrets"] == ["api_key"]  # the plugin has it
    assert SECRET not in done.stdout + done.stderr


@one_case(
    ("words", "status", "code"),
    [
        (("reader", "--input", '{"do": "fail"}'), 1, "devkit.asked"),
        (("reader", "--input", '{"do": "exit"}'), 13, "runner.crashed"),
        (("reader", "--input", '{"do": "wait"}', "--timeout", "4"), 12, "runner.deadline_exceeded"),
        (("search",), 2, "binding.secret_missing"),
        (("absent",), 15, "tool.not_found"),
        (("reader", "--kind", "hook"), 15, "tool.not_found"),
    ],
)
def test_failures_of_runner_call(
    runner_as_user: Caller, devkit: Path, words: tuple[str, ...], status: int, code: str
) -> None:
    done = runner_as_user("call", "--json", devkit, *words, "--report", "2")
    assert done.returncode == status, done.stderr
    failure, report = map(json.loads, done.stderr.splitlines())
    assert report["invocation"]["code"] == code
    assert report["invocation"] == failure["invocation"]


@one_case(
    ("given", "code", "hits"),
    [
        ({"do": "fill"}, "runner.resource_exhausted", ["disk"]),
        ({"do": "fill", "remove": True}, "runner.crashed", []),
    ],
)
def test_a_scratch_folder_that_is_full(
    runner_as: Caller, devkit: Path, given: dict[str, Any], code: str, hits: list[str]
) -> None:
    whole = json.dumps({"source": {"chain_id": "c", "projection": {"blocks": []}}, "policy": given})
    words = ("call", "--json", devkit, "window", "--input", whole, "--limit", "disk=256K")
    done = runner_as(*words, "--report", "2")
    assert done.returncode == 13, done.stderr
    report = json.loads(done.stderr.splitlines()[-1])
    assert (report["invocation"]["code"], report["limits_hit"]) == (code, hits)
    assert report["outcome"]["cause"] == ("disk" if hits else "exit:1")


@one_case("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_cancels_the_call(runner_as: Caller, devkit: Path, number: int) -> None:
    given = '{"do": "wait", "count": 1}'
    words = ("call", "--events", "2", "--json", devkit, "reader", "--input", given, "--report", "2")
    with runner_as.start(*words) as process:
        assert process.stderr is not None
        assert json.loads(process.stderr.readline())["event"] == "progress"  # it works on the request
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 24, err
    report = json.loads(err.splitlines()[-1])
    record = report["invocation"]
    assert (record["status"], record["code"]) == ("cancelled", "devkit.cancelled")  # it was told
    assert record["events"] == 1
    assert report["exit"]["code"] == 0 and not report["session"]["forced"]  # and was shut down


def test_a_success_after_a_signal_is_not_lost(runner_as_user: Caller, devkit: Path) -> None:
    given = '{"do": "wait", "count": 1, "then": "succeed", "n": 5}'
    words = ("call", "--events", "2", "--json", devkit, "reader", "--input", given, "--report", "2")
    with runner_as_user.start(*words) as process:
        assert process.stderr is not None
        assert json.loads(process.stderr.readline())["event"] == "progress"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (24, b""), err
    report = json.loads(err.splitlines()[-1])
    assert report["outcome"]["code"] == "cancelled"
    record = report["invocation"]
    assert (record["status"], record["code"]) == ("cancelled", "runner.cancelled")
    assert record["late"]["structured_output"]["body"]["input"]["n"] == 5


def test_a_signal_after_the_deadline_changes_nothing(runner_as_user: Caller, devkit: Path) -> None:
    given = '{"do": "wait", "then": "stay"}'
    words = ("call", "--events", "2", "--json", devkit, "reader", "--input", given, "--timeout", "8")
    with runner_as_user.start(*words, "--report", "2") as process:
        assert process.stderr is not None
        said = json.loads(process.stderr.readline())
        assert said["value"]["message"] == "cancelled"  # its grace has begun
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 12, err
    report = json.loads(err.splitlines()[-1])
    assert (report["outcome"]["code"], report["outcome"]["cause"]) == ("timeout", "deadline_exceeded")
    assert report["invocation"]["code"] == "runner.deadline_exceeded"
