"""`runner serve` with real plugins: a daemon is asked everything that its door offers."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from runner.build import build_version
from runner.contracts.registry import all_contracts
from runner.extras import install_command
from runner.ledger.rows import UNKNOWN
from runner.serve.client import Client, NoDaemon
from tests.conftest import ROOT, Caller, descendants, vanished
from tests.runner.serve.served import SECONDS, Served, activated, put_plugins, serving
from tests.tables import check_rows, wait_for

pytestmark = pytest.mark.launches
DEVKIT = "/plugins/acme.devkit/calls"


@pytest.fixture
def shelf(plugin_dir: Path, nothing_left: None) -> Path:
    (plugin_dir / "plugins").mkdir()
    put_plugins(plugin_dir / "plugins")
    return plugin_dir


def events(
    served: Served, tool: str, given: Any, key: str | None = None
) -> Generator[tuple[str, Any], None, None]:
    """A call of the devkit, as a stream."""
    headers = {"Accept": "text/event-stream", **({} if key is None else {"Idempotency-Key": key})}
    with Client(served.socket, SECONDS) as client:
        yield from client.request("POST", DEVKIT, {"tool": tool, "input": given}, headers).events()


def event(summary: dict[str, Any]) -> dict[str, Any]:
    subject = {"kind": "run", "id": "run_1"}
    when = "2026-01-01T00:00:00Z"
    return {"type": "run.completed", "occurred_at": when, "subject": subject, "summary": summary}


HOOK = {"plugin": "acme.devkit", "hook": "notify", "event": event({})}


# --- one daemon, many questions -----------------------------------------------------------------------------


def test_what_the_door_and_the_verbs_offer(runner_as: Caller, shelf: Path) -> None:
    with serving(runner_as, shelf) as served:
        check_calls(served)
        check_keys(served)
        check_cancellation(served)
        check_refusals(served)
        check_plugins(served)
        check_verbs(runner_as, served)
        check_imports(runner_as, served)
        check_records(served, runner_as)
        said = served.end()
    assert f"ready at {served.socket}, with 2 plugins; version {build_version()}\n" in said
    assert "draining" in said
    assert not os.path.exists(served.socket)


def check_calls(served: Served) -> None:
    status, found = served.call("greeter", "greet", {"name": "you"})
    assert (status, found["value"]["content"][0]["text"]) == (200, "Hello, you!")
    status, found = served.call("acme.devkit", "reader", {"do": "fail"})
    assert (status, found["error"]["code"], found["error"]["cause"]) == (422, "plugin_error", "devkit.asked")
    assert found["invocation"]["status"] == "failed"
    status, found = served.call("acme.devkit", "reader", {"do": "exit"})
    assert (status, found["error"]["code"], found["error"]["cause"]) == (502, "crashed", "exit:3")
    status, found = served.call("acme.devkit", "reader", {"do": "wait"}, Runner_Deadline="0.2")
    assert (status, found["error"]["code"]) == (504, "timeout")
    told = list(events(served, "reader", {"do": "progress", "count": 3}))
    assert [name for name, _ in told] == ["accepted", "progress", "progress", "progress", "result"]
    assert [data["message"] for name, data in told if name == "progress"] == ["step 0", "step 1", "step 2"]
    assert told[-1][1]["id"] == told[0][1]["id"] and told[-1][1]["status"] == 200


def check_keys(served: Served) -> None:
    first = served.call("greeter", "greet", {"name": "you"}, Idempotency_Key="k1")
    again = served.call("greeter", "greet", {"name": "you"}, Idempotency_Key="k1")
    assert first[0] == 200 and again == first  # the same id: it ran once
    status, found = served.call("greeter", "greet", {"name": "other"}, Idempotency_Key="k1")
    assert (status, found["error"]["code"]) == (409, "key_reused")
    # A failure is an answer, too.
    wrong = served.call("acme.devkit", "reader", {"do": "fail"}, Idempotency_Key="k2")
    assert wrong[0] == 422
    assert served.call("acme.devkit", "reader", {"do": "fail"}, Idempotency_Key="k2") == wrong
    # While it runs, the same key gets no second call.
    running = events(served, "reader", {"do": "wait"}, "k3")
    _, accepted = next(running)
    status, found = served.call("acme.devkit", "reader", {"do": "wait"}, Idempotency_Key="k3")
    assert (status, found["error"]["code"], found["id"]) == (409, "in_flight", accepted["id"])
    assert served.ask("DELETE", f"/calls/{accepted['id']}")[0] == 202
    assert [(name, data["error"]["code"]) for name, data in running] == [("error", "cancelled")]


def check_cancellation(served: Served) -> None:
    # By closing the connection, also with bytes of a further request on the way.
    for more in (b"", b"G", b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"):
        body = json.dumps({"tool": "reader", "input": {"do": "wait", "count": 1}}).encode()
        head = f"POST {DEVKIT} HTTP/1.1\r\nHost: x\r\nAccept: text/event-stream\r\n"
        with socket.socket(socket.AF_UNIX) as raw:
            raw.settimeout(SECONDS)
            raw.connect(served.socket)
            raw.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body + more)
            told = b""
            while b"event: progress" not in told:
                told += raw.recv(4096)
        name = json.loads(told.partition(b"event: accepted\ndata: ")[2].partition(b"\n")[0])["id"]
        gone = f"/calls/{name}"
        assert wait_for(lambda path=gone: served.ask("GET", path)[1]["code"] is not None)  # type: ignore[misc]
        assert served.ask("GET", gone)[1]["record"]["outcome"]["cause"] == "given_up"
    # By closing the connection.
    running = events(served, "reader", {"do": "wait", "count": 1})
    _, accepted = next(running)
    assert next(running)[0] == "progress"
    running.close()
    path = f"/calls/{accepted['id']}"
    assert wait_for(lambda: served.ask("GET", path)[1]["code"] is not None)
    record = served.ask("GET", path)[1]
    assert (record["code"], record["record"]["outcome"]["cause"]) == ("cancelled", "given_up")
    # By a client that waits for one document, too.
    with Client(served.socket, SECONDS) as client:
        body = json.dumps({"tool": "reader", "input": {"do": "wait"}}).encode()
        head = f"POST {DEVKIT} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        client._connection.sendall(head.encode() + body)
        assert wait_for(lambda: served.plugin("acme.devkit")["in_flight"] == 1)
    assert wait_for(lambda: served.plugin("acme.devkit")["in_flight"] == 0)
    assert served.ask("DELETE", path)[0] == 404


def check_refusals(served: Served) -> None:
    call = "/plugins/greeter/calls"
    rows: list[tuple[tuple[str, str, Any], tuple[int, str]]] = [
        (("GET", "/nowhere", None), (404, "no_route")),
        (("PUT", "/plugins", None), (404, "no_route")),
        (("GET", "/plugins/nobody", None), (404, "unknown_plugin")),
        (("GET", "/plugins/nobody/logs", None), (404, "unknown_plugin")),
        (("POST", "/plugins/nobody/calls", {"tool": "x"}), (404, "unknown_plugin")),
        (("POST", "/plugins/nobody/start", None), (404, "unknown_plugin")),
        (("POST", call, None), (400, "invalid_json")),
        (("POST", call, ["tool"]), (400, "invalid_body")),
        (("POST", call, {"input": 1}), (400, "invalid_body")),
        (("POST", call, {"tool": "greet", "policy": "open"}), (400, "invalid_body")),
        (("POST", call, {"tool": "greet", "context": 5}), (400, "invalid_body")),
        (("POST", call, {"tool": "nothing"}), (422, "plugin_error")),
        (("POST", call, {"tool": "greet", "kind": "hook"}), (400, "invalid_call")),
        (("GET", "/calls?most=x", None), (400, "invalid_query")),
        (("GET", "/calls?since=yesterday", None), (400, "invalid_query")),
        (("GET", "/calls?until=-1", None), (400, "invalid_query")),
        (("GET", "/calls?plugins=greeter", None), (400, "invalid_query")),
        (("GET", "/calls?most=1&most=2", None), (400, "invalid_query")),
        (("GET", "/calls?after=none", None), (400, "invalid_query")),
        (("GET", "/deliveries?after=none", None), (400, "invalid_query")),
        (("GET", "/plugins?state=ready", None), (400, "invalid_query")),
        (("GET", "/calls/none", None), (404, "no_such_call")),
        (("GET", "/deliveries?state=lost", None), (400, "invalid_query")),
        (("GET", "/deliveries/none", None), (404, "no_such_delivery")),
        (("POST", "/deliveries/none/repeat", None), (404, "no_such_delivery")),
        (("DELETE", "/deliveries/none", None), (404, "no_such_delivery")),
        (("DELETE", "/deliveries/none?state=lost", None), (404, "no_such_delivery")),
        (("POST", "/deliveries", {"plugin": "greeter"}), (400, "invalid_delivery")),
        (("POST", "/deliveries", {"plugin": "x", "hook": "y", "event": {}}), (404, "unknown_plugin")),
        # What no attempt could deliver: there is no such hook, no hooks at all, the event or its context is
        # wrong.
        (("POST", "/deliveries", {**HOOK, "hook": "nothing"}), (404, "tool_not_exposed")),
        (("POST", "/deliveries", {**HOOK, "hook": "reader"}), (404, "tool_not_exposed")),
        (("POST", "/deliveries", {**HOOK, "plugin": "greeter"}), (400, "invalid_call")),
        (("POST", "/deliveries", {**HOOK, "event": {"a": 1}}), (400, "invalid_call")),
        (("POST", "/deliveries", {**HOOK, "context": {"colour": 1}}), (400, "invalid_call")),
        (("POST", "/deliveries", {"event": {"type": "run.completed"}}), (400, "invalid_call")),
    ]

    def check(asked: str, wanted: tuple[int, str]) -> None:
        status, found = served.ask(*json.loads(asked))
        assert (status, found["error"]["code"]) == wanted, found
        assert found["error"]["message"]

    check_rows([(json.dumps(asked), wanted) for asked, wanted in rows], check)
    for deadline in ("soon", "-1", "nan"):
        assert served.call("greeter", "greet", {"name": "x"}, Runner_Deadline=deadline)[0] == 400
    assert served.call("greeter", "greet", {"name": "x"}, Idempotency_Key="x" * 256)[0] == 400
    assert served.ask("GET", "/deliveries")[1]["deliveries"] == []  # nothing of these is stored
    assert served.ask("GET", "/health?from=balancer")[1]["version"] == build_version()
    assert served.ask("GET", "/live?from=balancer") == (200, {"status": "live"})


def check_plugins(served: Served) -> None:
    found = {each["name"]: each for each in served.ask("GET", "/plugins")[1]["plugins"]}
    assert (found["greeter"]["state"], found["greeter"]["contract"]) == ("ready", "mcp")
    assert found["acme.devkit"]["contract"] == "vai"
    tools = served.ask("GET", "/plugins/greeter/tools")[1]["tools"]
    assert [each["name"] for each in tools] == ["greet", "count"]
    explained = served.ask("GET", "/plugins/greeter/explain")[1]
    assert explained["outcome"]["code"] == "ok" and "grant" in explained
    with Client(served.socket, SECONDS) as client:
        news = client.request("GET", "/events").events()
        assert served.ask("POST", "/plugins/greeter/stop")[1]["state"] == "stopped"
        assert any((data["name"], data["state"]) == ("greeter", "stopped") for _, data in news)
    told = served.call("greeter", "greet", {"name": "x"})[1]
    assert told["error"]["cause"] == "stopped" and "start it" in told["error"]["hint"]
    assert served.ask("POST", "/plugins/greeter/start")[1]["state"] == "ready"
    assert served.ask("POST", "/plugins/greeter/reset")[0] == 200
    assert served.plugin("greeter")["pids"] not in (found["greeter"]["pids"], [])


def check_verbs(caller: Caller, served: Served) -> None:
    via, at = ("call", "--via", served.socket), ("--socket", served.socket)
    reader = (*via, "acme.devkit", "reader", "--input")
    rows: list[tuple[tuple[str, ...], tuple[int, str]]] = [
        (("ps", *at), (0, "greeter")),
        (("ps", "--json", *at), (0, '"contract": "vai"')),
        ((*via, "greeter", "greet", "--input", '{"name": "you"}'), (0, "Hello, you!")),
        ((*reader, '{"do": "fail"}'), (1, "plugin_error in call")),
        ((*reader, '{"do": "wait"}', "--timeout", "100ms"), (12, "timeout")),
        ((*reader, '{"do": "exit"}', "--json"), (13, '"code": "crashed"')),
        ((*via, "greeter", "nothing"), (1, "Unknown tool: nothing")),
        ((*via, "nobody", "greet"), (2, "there is no plugin 'nobody' here")),
        ((*via, "greeter"), (2, "runner call --via SOCKET PLUGIN NAME")),
        ((*via, "--policy", "open", "greeter", "greet"), (2, "--policy does not go with --via")),
        (("call", "--via", "/nowhere", "greeter", "greet"), (10, "no daemon answers at /nowhere")),
        ((*via, "/srv/plugins/greeter", "greet"), (2, "knows its plugins by their names; runner ps lists")),
        (("logs", *at, "./greeter"), (2, "'./greeter' is a path")),
        (("ctl", *at, "stop", "/srv/greeter"), (2, "'/srv/greeter' is a path")),
        (("ctl", "stop", *at, "greeter"), (0, "greeter: stopped")),
        (
            ("ctl", "start", "--end", *at, "greeter"),
            (2, "--end goes with runner ctl open (use runner ctl start "),
        ),
        (("ctl", "start", "--most", "3", *at, "greeter"), (2, "--most goes with runner ctl calls")),
        (("ctl", "stop", "--worker", "w", *at, "greeter"), (2, "--worker goes with runner ctl reset")),
        (("ctl", "close", "--reason", "done", *at, "x"), (2, "--reason goes with --fleet")),
        (("ctl", "reload", "--replicas", "3", *at), (2, "--replicas goes with runner ctl init")),
        (("ctl", "reset", "--most", "3", "--fleet", "nats://127.0.0.1:1", "x"), (2, "--most goes with")),
        (("ctl", "reset", "--worker", "w", *at, "greeter"), (2, "--worker goes with --fleet")),
        (("ctl", "calls", "--most", "0", *at), (2, "--most 0: write a number")),
        (("ctl", "calls", "--since", "soon", *at), (2, "--since soon: it is not a time")),
        (("ctl", "calls", "--since", "0T", *at), (2, "since is not a time")),
        (("ctl", "calls", "--after", "none", *at), (2, "begin again without")),
        (("ctl", *at, "start", "greeter"), (0, "greeter: ready")),
        (("ctl", *at, "reload"), (0, "")),
        (("ctl", *at, "start"), (2, "runner ps lists them; use runner ctl start [--socket PATH] NAME")),
        (("ctl", *at, "drain", "greeter"), (2, "leave NAME out")),
        (("logs", *at, "nobody"), (2, "there is no plugin")),
        (("logs", *at, "acme.devkit"), (0, "")),
    ]

    def check(words: tuple[str, ...], wanted: tuple[int, str]) -> None:
        done = caller(*words)
        assert done.returncode == wanted[0] and wanted[1] in done.stdout + done.stderr, done
        assert "Traceback" not in done.stderr

    check_rows(rows, check)
    check_list_of_calls(caller, served)
    hook = HOOK
    assert served.ask("POST", "/plugins/acme.devkit/stop")[0] == 200
    assert served.ask("POST", "/deliveries", {**hook, "id": "it waits"})[0] == 202
    check(("ctl", *at, "close", "it waits"), (2, "is queued, and not dead"))
    removed = "it waits: removed, for notify of acme.devkit"
    check(("ctl", *at, "remove", "it waits"), (0, removed))
    check(("ctl", *at, "remove", "it waits"), (2, "there is no delivery"))
    check(("ctl", *at, "remove"), (2, "GET /deliveries lists them"))
    assert served.ask("POST", "/plugins/acme.devkit/start")[0] == 200
    hook_fails = {**hook, "id": "it failed", "event": event({"do": "fail"})}
    assert served.ask("POST", "/deliveries", hook_fails)[0] == 202

    def dead(attempt: int) -> bool:
        row = served.ask("GET", "/deliveries/it%20failed")[1]
        return (row["state"], row["attempt"]) == ("dead", attempt)

    assert wait_for(lambda: dead(1))
    check(("ctl", *at, "dead"), (0, "it failed  acme.devkit notify: "))
    shown = json.loads(caller("ctl", *at, "show", "it failed").stdout)
    assert (shown["letter"], shown["tool"], shown["code"]) == ("it failed", "notify", "plugin_error")
    assert shown["call"]["input"] == hook_fails["event"]
    check(("ctl", *at, "repeat", "it failed"), (0, "it failed\n"))
    assert wait_for(lambda: dead(2))
    check(("ctl", *at, "close", "it failed"), (0, ""))
    assert caller("ctl", *at, "dead").stdout == ""
    check(("ctl", *at, "close", "it failed"), (2, "there is no delivery"))
    check(("ctl", *at, "show"), (2, "runner ctl dead lists them"))
    check(("ctl", *at, "dead", "it failed"), (2, "unrecognized arguments: it failed (use runner ctl dead "))
    following = caller.start("logs", "--follow", "--socket", served.socket, "acme.devkit")
    with following, bounded(following):
        assert following.stdout is not None
        assert served.ask("POST", "/deliveries", hook)[0] == 202
        told = next(line for line in following.stdout if b'"delivery_id"' in line)
        assert re.match(rb"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z {", told)
        # Python acts on a signal between two instructions. One that comes just before a read that waits is
        # seen when the read has ended, so people press Ctrl-C again.
        while following.poll() is None:
            following.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                following.wait(1)
    assert following.returncode == 130
    # On a terminal: lines are lines, and what a terminal would obey is not.
    ours, terminal = os.openpty()
    with open(ours, "rb", buffering=0) as screen:
        done = caller.start("logs", "--socket", served.socket, "acme.devkit", stdout=terminal)
        os.close(terminal)
        told = b""
        with done, contextlib.suppress(OSError):  # of a terminal that nobody has open any more
            while part := screen.read(4096):
                told += part
    assert done.returncode == 0 and told.count(b"\r\n") > 0 and b"\\n" not in told, told


def check_list_of_calls(caller: Caller, served: Served) -> None:
    """`GET /calls` and `runner ctl calls`: in pages, by plugin, outcome and time."""
    every = served.ask("GET", "/calls?most=1000")[1]["calls"]
    times = [each["accepted"] for each in every]
    # A time between two calls, where most lies between them.
    at = max(range(1, len(times)), key=lambda number: times[number - 1] - times[number])
    border = f"{(times[at - 1] + times[at]) / 2:.6f}"

    def ids(query: str) -> list[str]:
        return [each["id"] for each in served.ask("GET", f"/calls?most=1000&{query}")[1]["calls"]]

    assert (ids(f"since={border}"), ids(f"until={border}")) == (ids("")[:at], ids("")[at:])
    assert ids("since=2100-01-01T00:00:00Z") == ids("until=1970-01-02T00:00:00Z") == []
    words = ("ctl", "calls", "--json", "--socket", served.socket)
    pages: list[str] = []
    for _ in range(3):
        after = ("--after", pages[-1]) if pages else ()
        done = caller(*words, "--most", "2", *after)
        pages += [json.loads(line)["id"] for line in done.stdout.splitlines()]
        assert done.returncode == 0 and f"--after {pages[-1]}" in done.stderr, done
    assert pages == [each["id"] for each in every][:6]
    done = caller(
        "ctl", "calls", "--code", "crashed", "--since", "1h", "--socket", served.socket, "acme.devkit"
    )
    titles, *rows = done.stdout.splitlines()
    assert titles.split()[:5] == ["ACCEPTED", "ID", "PLUGIN", "CALLED", "OUTCOME"] and not done.stderr
    assert rows and all(" acme.devkit  reader  crashed  " in row for row in rows), rows
    assert caller(*words, "--until", "1h").stdout == ""


@contextlib.contextmanager
def bounded(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Who reads a line of a process that never writes one is freed by its end."""
    timer = threading.Timer(SECONDS, process.kill)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def check_imports(caller: Caller, served: Served) -> None:
    """A warm call from the shell imports no HTTP library, no trio, and nothing that reads manifests."""
    words = ("call", "--via", served.socket, "greeter", "greet", "--input", '{"name": "you"}')
    program = "import sys; from runner.cli import main; main(sys.argv[1:]); print(*sys.modules)"
    argv = [*caller.prefix, *caller.python, "-S", "-c", program, *words]
    done = subprocess.run(argv, env=dict(caller.environ), capture_output=True, text=True, cwd="/")
    assert "Hello, you!" in done.stdout, done.stderr
    loaded = set(done.stdout.split())
    assert "runner.serve.client" in loaded
    slow = {"trio", "http", "http.client", "asyncio", "ssl", "email", "urllib", "argparse", "pydantic"}
    assert loaded & (slow | {"starlette", "h11", "runner.contracts.registry"}) == set()


def check_records(served: Served, caller: Caller) -> None:
    calls = served.ask("GET", "/calls?plugin=greeter&most=1000")[1]["calls"]
    assert {each["caller"] for each in calls} <= {f"uid:{os.geteuid()}", f"uid:{caller.uid}"}
    assert all(each["ended"] >= (each["started"] or each["accepted"]) >= each["accepted"] for each in calls)
    assert all("answer" not in each and len(each["input_digest"]) == 64 for each in calls)
    codes = [each["code"] for each in served.ask("GET", "/calls?most=1000")[1]["calls"]]
    assert {"ok", "plugin_error", "timeout", "cancelled", "crashed"} <= set(codes)
    for what in ("grant", "connection"):
        rows = served.ask("GET", f"/audit?what={what}")[1]["audit"]
        assert {each["what"] for each in rows} == {what}
    status, text = served.ask("GET", "/metrics")
    crashed = f'runner_calls_total{{code="crashed",plugin="acme.devkit"}} {codes.count("crashed")}.0'
    assert status == 200 and crashed in text
    memory = [line for line in text.splitlines() if line.startswith('runner_memory_bytes{plugin="greeter"}')]
    assert float(memory[0].split()[1]) > 1e6
    if served.plugin("acme.devkit")["sessions"]:  # its calls have processes of their own: nothing is known
        assert 'runner_memory_bytes{plugin="acme.devkit"}' not in text
    assert served.ask("GET", "/health")[1]["status"] == "ok"


def test_plugins_of_every_contract_are_served(
    runner_as: Caller, plugin_dir: Path, nothing_left: None
) -> None:
    (plugin_dir / "plugins").mkdir(mode=0o755)
    runner_as.give(plugin_dir / "plugins")
    rows: list[tuple[str, dict[str, Any]]] = []
    for contract in all_contracts():
        name = f"my{contract.name}"
        done = runner_as("new", contract.name, name, cwd=plugin_dir / "plugins")
        assert done.returncode == 0, done.stderr
        call = contract.example.call.replace("greeter", name)
        called = contract.example.namespace.replace("/", ".") + name
        rows.append((called, {"tool": call, "input": json.loads(contract.example.input)}))
    with serving(runner_as, plugin_dir) as served:

        def check(name: str, call: dict[str, Any]) -> None:
            status, found = served.ask("POST", f"/plugins/{name}/calls", call)
            assert status == 200 and "world" in json.dumps(found["value"]), found

        check_rows(rows, check)
        assert set(served.states().values()) == {"ready"} and len(rows) >= 6
        served.end()


# --- the end of a daemon ------------------------------------------------------------------------------------


def test_a_killed_daemon_leaves_no_process_and_no_call_without_an_outcome(
    runner_as: Caller, shelf: Path
) -> None:
    others = descendants()
    with serving(runner_as, shelf) as served:
        assert served.call("greeter", "greet", {"name": "x"})[0] == 200
        running = {tool: events(served, tool, {"do": "wait"}, tool) for tool in ("reader", "peek")}
        ids = {tool: next(told)[1]["id"] for tool, told in running.items()}
        hook = {"id": "d1", "plugin": "acme.devkit", "hook": "notify", "event": event({"do": "wait"})}
        assert served.ask("POST", "/deliveries", hook)[0] == 202
        assert wait_for(lambda: served.plugin("acme.devkit")["in_flight"] == 3)
        assert wait_for(lambda: all(row["started"] for row in served.ask("GET", "/calls")[1]["calls"]))
        below = descendants() - others
        served.process.kill()
        for told in running.values():
            with pytest.raises(NoDaemon):
                list(told)
        served.process.wait()
        assert len(below) > 5 and vanished(below)
    with serving(runner_as, shelf) as served:
        delivery = served.ask("GET", "/deliveries/d1")[1]  # first: it is tried again after some seconds
        assert (delivery["state"], delivery["attempt"], delivery["code"]) == ("queued", 1, UNKNOWN)
        assert delivery["due"] > delivery["created"]
        for tool, name in ids.items():
            record = served.ask("GET", f"/calls/{name}")[1]
            effect = "read_only" if tool == "peek" else "unknown"
            assert (record["code"], record["effect"]) == (UNKNOWN, effect)
        # The same key: the one whose effect is harmless runs again, the other never does.
        status, found = served.call("acme.devkit", "reader", {"do": "wait"}, Idempotency_Key="reader")
        assert (status, found["error"]["code"]) == (409, UNKNOWN)
        again = events(served, "peek", {"do": "wait"}, "peek")
        name, accepted = next(again)
        assert name == "accepted" and accepted["id"] != ids["peek"]
        served.ask("DELETE", f"/calls/{accepted['id']}")
        list(again)
        served.end()


def test_a_drain_cancels_calls_that_take_too_long_and_answers_them(runner_as: Caller, shelf: Path) -> None:
    with serving(runner_as, shelf, "--drain", "1s") as served:
        running = events(served, "reader", {"do": "wait", "count": 1})
        _, accepted = next(running)
        next(running)
        served.process.terminate()
        served.wait_for("STOPPING=1")
        name, data = list(running)[-1]
        assert (name, data["invocation"]["status"]) == ("error", "cancelled")
        _, err = served.process.communicate(timeout=60)
        assert served.process.returncode == 0, err
    with activated(runner_as, shelf) as served:  # by a service manager, which also watches it
        served.wait_for("WATCHDOG=1")
        record = served.ask("GET", f"/calls/{accepted['id']}")[1]
        assert record["record"]["invocation"]["status"] == "cancelled"
        assert served.ask("POST", "/drain")[0] == 202
        served.process.communicate(timeout=60)
        assert served.process.returncode == 0


# --- the configuration --------------------------------------------------------------------------------------

GREEDY = """
[plugin]
id = "greedy"
version = "1.0.0"
name = "Greedy"
description = "asks for too much"
min_nexo_version = ">=0.1"
[plugin.entrypoint]
command = "/bin/true"
[plugin.sandbox]
enabled = true
fs_read_paths = ["DATA"]
"""


def test_a_changed_configuration_is_followed_and_a_bad_file_keeps_its_plugins(
    runner_as: Caller, shelf: Path
) -> None:
    config = shelf / "plugins/words/mcp.json"
    with serving(runner_as, shelf) as served:
        assert served.call("greeter", "greet", {"name": "x"})[0] == 200
        before = served.plugin("greeter")["pids"]
        # Another server beside it: the one that runs is left alone.
        servers = json.loads(config.read_text())
        servers["mcpServers"]["second"] = servers["mcpServers"]["greeter"]
        config.write_text(json.dumps(servers))
        assert wait_for(lambda: set(served.states()) == {"greeter", "second", "acme.devkit"})
        assert served.plugin("greeter")["pids"] == before
        # A file with a fault.
        config.write_text("{")
        assert wait_for(lambda: served.ask("GET", "/health")[1]["configuration"])
        (fault,) = served.ask("GET", "/health")[1]["configuration"]
        assert fault["path"] == str(shelf / "plugins/words") and fault["message"]
        assert set(served.states()) == {"greeter", "second", "acme.devkit"}
        assert served.call("greeter", "greet", {"name": "x"})[0] == 200
        # Also where it has to be started again, and where each call has a process of its own.
        assert served.ask("POST", "/plugins/greeter/stop")[0] == 200
        assert served.ask("POST", "/plugins/greeter/start")[1]["state"] == "ready"
        manifest = shelf / "plugins/devkit/vai-plugin.toml"
        whole = manifest.read_text()
        manifest.write_text("[[")
        assert wait_for(lambda: len(served.ask("GET", "/health")[1]["configuration"]) == 2)
        assert served.call("acme.devkit", "peek", {})[0] == 200
        assert served.ask("POST", "/deliveries", HOOK)[0] == 202
        manifest.write_text(whole.replace('id = "peek"', 'id = "look"'))
        assert wait_for(lambda: len(served.ask("GET", "/health")[1]["configuration"]) == 1)
        assert served.call("acme.devkit", "peek", {})[0] == 404
        assert served.call("acme.devkit", "look", {})[0] == 200
        # What no approval covers is known and does not start.
        (shelf / "data").mkdir()
        (shelf / "plugins/greedy").mkdir()
        (shelf / "plugins/greedy/nexo-plugin.toml").write_text(GREEDY.replace("DATA", str(shelf / "data")))
        served.process.send_signal(signal.SIGHUP)
        assert wait_for(lambda: served.states().get("greedy") == "pending")
        status, found = served.call("greedy", "anything")
        assert (status, found["error"]["code"]) == (403, "policy_denied")
        # A person allows it.
        allowed = runner_as("allow", "--yes", shelf / "plugins/greedy")
        assert allowed.returncode == 0, allowed.stderr
        assert runner_as("ctl", "--socket", served.socket, "reload").returncode == 1  # the file with a fault
        assert served.states()["greedy"] != "pending"
        # A changed entry reloads its server, and a removed one ends it.
        del servers["mcpServers"]["second"]
        servers["mcpServers"]["greeter"]["args"] = ["--changed"]
        config.write_text(json.dumps(servers))
        assert wait_for(lambda: "second" not in served.states())
        assert wait_for(lambda: served.plugin("greeter")["pids"] not in (before, []))
        said = served.end()
    assert f"{shelf / 'plugins/words'}: " in said and "greedy is pending" in said


def test_command_lines_that_are_refused(runner_as: Caller, shelf: Path, write_file: Any) -> None:
    token = write_file(shelf / "token", "t" * 40, 0o644)
    open_folder = shelf / "open"
    open_folder.mkdir()
    open_folder.chmod(0o777)
    runner_as.give(open_folder)
    (shelf / "run").mkdir(mode=0o700)
    runner_as.give(shelf / "run")
    start = ("serve", "--config", str(shelf / "plugins"))
    at = (*start, "--socket", str(shelf / "run/serve.sock"))
    ledger = ("--ledger", str(shelf / "run/ledger.db"))
    control = shelf / "run/control.toml"
    control.write_text("trusted = 'x'\n")
    named = write_file(shelf / "run/gateway.toml", '[plugins.mail]\nfolder = "x"\n', 0o600)
    for path in (control, named):
        runner_as.give(path)
    rows: list[tuple[tuple[str, ...], tuple[int, str]]] = [
        (("serve",), (2, "--config DIR|FILE, --control FILE, or both")),
        ((*at, "--control", str(shelf / "none")), (2, "none: there is no such file")),
        ((*at, *ledger, "--control", str(control)), (2, "control.toml:1:1: settings_key")),
        (
            (*start, "--socket", str(open_folder / "s.sock")),
            (2, "can be written by its group or by everybody"),
        ),
        ((*start, "--socket", str(token)), (2, "")),
        ((*at, "--http", "127.0.0.1:0"), (2, "need a token or a certificate; give --token-file FILE")),
        ((*at, "--http", "127.0.0.1:0", "--token-file", str(token)), (2, "is not used")),
        ((*at, "--http", "0.0.0.0:0"), (2, "--http-anywhere")),
        ((*at, "--http", "example.com"), (2, "write an address and a port")),
        ((*at, "--drain", "soon"), (2, "--drain")),
        ((*at, "--policy", ""), (2, "--policy: its value is empty")),
        ((*at, "--settings", str(shelf / "none")), (2, "none: there is no such file")),
        ((*at, "--gateway-settings", str(named)), (2, "[plugins.mail] is for runner gateway")),
        ((*at, "--ledger", str(open_folder / "ledger.db")), (10, "is not used")),
        ((*at, *ledger, "--ledger-size", "1M"), (2, "from 64M to 1T")),
        ((*at, *ledger, "--ledger-size", "much"), (2, "is not a size")),
    ]

    def check(words: tuple[str, ...], wanted: tuple[int, str]) -> None:
        done = runner_as(*words)
        assert (done.returncode, done.stdout) == (wanted[0], "") and wanted[1] in done.stderr, done
        assert "Traceback" not in done.stderr

    check_rows(rows, check)
    assert not (shelf / "run/serve.sock").exists()


def test_the_extra_is_named_where_it_is_missing() -> None:
    program = (
        "import sys; sys.path[:0] = [sys.argv[1]]; sys.modules['starlette'] = None\n"
        "from runner.cli import main; sys.exit(main(['serve', '--config', '/']))"
    )
    done = subprocess.run([sys.executable, "-c", program, str(ROOT)], capture_output=True, text=True)
    assert done.returncode == 10 and done.stderr == (
        f"runner serve: starlette is missing; install it with {install_command('serve')}\n"
    )
