"""nexo's conversation with a real process that uses no SDK: every method, once there and back."""

from __future__ import annotations

import select
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from runner.contracts.nexo import manifest
from runner.contracts.nexo.dialect import make
from runner.contracts.nexo.hooks import CONTINUE
from runner.protocol.dialect import (
    Answer,
    Call,
    Event,
    Events,
    HostCall,
    Kind,
    Notice,
    Progress,
    Ready,
    Refusal,
    Reply,
    Send,
    Setting,
    ShutdownAnswered,
)
from sandbox.document.read import parse
from tests.conftest import ROOT

FOLDER = ROOT / "tests/plugins/nexo_bare"
PATIENCE = 60.0


class Host:
    """The least a session can be: it writes what the dialect says and hands it what comes."""

    def __init__(self, folder: Path, config: Any = None) -> None:
        path = folder / "nexo-plugin.toml"
        plugin, diagnostics = manifest.read(parse(str(path), path.read_bytes(), "toml"))
        assert plugin is not None and plugin.entrypoint is not None, diagnostics
        self.dialect = make(Setting(plugin, config=config))
        self.framer = self.dialect.framer()
        self.seen: list[Event] = []
        self.answers: dict[str, Answer] = {}
        self.tokens = 0
        self.process = subprocess.Popen(
            ["/usr/bin/python3", str(folder / "plugin.py")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self.do(self.dialect.opening())

    def do(self, events: Events) -> None:
        assert self.process.stdin is not None
        for event in events:
            self.seen.append(event)
            if isinstance(event, Send):
                self.process.stdin.write(event.frame)
                self.process.stdin.flush()
            elif isinstance(event, HostCall) and event.expects_answer:
                self.do(list(self.dialect.emit(event.ticket, "piece")))
                self.do(self.dialect.answer(event.ticket, self.answers[event.method]))
            elif isinstance(event, HostCall):
                self.do(self.dialect.answer(event.ticket, Answer()))

    def until(self, *kinds: type) -> Any:
        """The first event of one of these kinds that is still to come, or has come and was not asked for."""
        assert self.process.stdout is not None
        end = time.monotonic() + PATIENCE
        while True:
            for place, event in enumerate(self.seen):
                if isinstance(event, kinds):
                    del self.seen[place]
                    return event
            assert select.select([self.process.stdout], [], [], max(0.0, end - time.monotonic()))[0], (
                self.seen
            )
            data = self.process.stdout.read1()  # type: ignore[attr-defined]
            assert data, self.seen
            for raw in self.framer.feed(data):
                self.do(self.dialect.feed(self.dialect.read(raw)))

    def call(self, kind: Kind, name: str, given: Any = None) -> Any:
        self.tokens += 1
        self.do(self.dialect.call(self.tokens, Call(kind, name, given)))
        event = self.until(Reply, Refusal)
        assert event.call == self.tokens
        return event.value if isinstance(event, Reply) else event

    def notice(self, kind: str) -> Any:
        while (notice := self.until(Notice)).kind != kind:
            pass
        return notice.value


@pytest.fixture
def host() -> Iterator[Host]:
    found = Host(FOLDER, config={"greeting": "hi"})
    try:
        found.until(Ready)
        yield found
    finally:
        found.process.kill()
        found.process.communicate()


def test_tools(host: Host) -> None:
    said = host.call("tool", "bare_echo", {"text": "häh"})
    assert said["content"][0]["text"] == "häh"
    assert said["params"]["agent_id"] == "runner" and said["params"]["plugin_id"] == "bare"
    assert host.call("tool", "bare_outbound", {"text": "x"}) == {"outbound": "x"}
    seen = host.call("tool", "bare_seen")
    assert seen["config"] == {"greeting": "hi"} and seen["nexo_version"] == "0.2.0"
    refusal = host.call("tool", "bare_fail", {"code": -33404, "data": {"retry_after_ms": 5}})
    assert (refusal.kind, refusal.data) == ("unavailable", {"retry_after_ms": 5})
    assert host.call("method", "no.such").code == "-32601"


def test_hooks(host: Host) -> None:
    assert host.call("hook", "bare_hook", {"body": "a secret"})["decision"] == "block"
    assert host.call("hook", "bare_hook", {"body": "hello"}) == {}
    for given in ({"fail": True}, {"nonsense": True}):
        assert host.call("hook", "bare_hook", given) == CONTINUE
        assert host.notice("hook_failed")["hook"] == "bare_hook"


def test_channels(host: Host) -> None:
    assert host.call("channel", "start", {"instance": "one"}) == {"ok": True}
    assert host.call("channel", "stop") == {"ok": True}
    assert host.call("tool", "bare_seen")["channels"] == [
        {"kind": "bare", "instance": "one"},
        {"kind": "bare"},
    ]
    assert host.call("channel", "send_outbound", {"msg": {"to": "you"}})["message_id"] == "m-1"
    refusal = host.call("channel", "send_outbound", {"msg": {"to": "nobody"}})
    assert (refusal.kind, refusal.data) == ("recipient", {"recipient": "nobody", "reason": "not known"})


def test_models(host: Host) -> None:
    chat = {"model": "m", "messages": [{"role": "user", "content": "so it is"}]}
    assert host.call("llm", "bare_llm", chat)["content"]["text"] == "so it is"
    assert host.call("llm", "bare_llm", {**chat, "stream": True})["content"]["text"] == ""
    assert [host.until(Progress).value["delta"] for _ in range(3)] == ["so", "it", "is"]


def test_memory(host: Host) -> None:
    records = [{"id": str(n), "content": str(n), "embedding": [float(n), 1.0]} for n in range(3)]
    assert host.call("memory", "vector_upsert", {"collection": "kb", "records": records}) == {"count": 3}
    query = {"embedding": [1.0, 0.0], "limit": 2}
    found = host.call("memory", "vector_search", {"collection": "kb", "query": query})
    assert [match["id"] for match in found["matches"]] == ["2", "1"]
    missing = host.call("memory", "vector_search", {"collection": "x", "query": query})
    assert (missing.kind, missing.data) == ("collection_not_found", {"collection": "x"})
    short = host.call("memory", "vector_search", {"collection": "kb", "query": {"embedding": [1.0]}})
    assert (short.kind, short.data) == ("dimension_mismatch", {"expected": 2, "got": 1})
    assert host.call("memory", "vector_delete", {"collection": "kb", "ids": ["0", "9"]}) == {"count": 1}


def test_events(host: Host) -> None:
    host.do(host.dialect.notify("broker.event", {"topic": "plugin.outbound.bare", "payload": {"n": 1}}))
    event = host.notice("published")
    assert (event["topic"], event["source"]) == ("plugin.inbound.bare", "bare")
    assert event["payload"] == {"echo": {"n": 1}}
    forged = {"source": "agent", "topic": "agent.route.x", "payload": 1}
    host.call("tool", "bare_publish", {"topic": "shout.loud", "event": forged})
    event = host.notice("published")
    assert (event["topic"], event["source"]) == ("shout.loud", "bare")
    host.call("tool", "bare_publish", {"topic": "agent.route.x", "event": forged})
    assert host.notice("dropped")["reason"] == "not_allowed"


def test_its_questions_are_answered(host: Host) -> None:
    host.answers["memory.recall"] = Answer({"entries": []})
    host.answers["llm.complete"] = Answer(error=(-32603, "llm not configured", None))
    assert host.call("tool", "bare_recall", {"agent_id": "a"})["result"] == {"entries": []}
    said = host.call("tool", "bare_complete", {"stream": True})
    assert said["error"] == {"code": -32603, "message": "llm not configured"} and said["deltas"] == ["piece"]


def test_a_line_that_is_not_the_protocol(host: Host) -> None:
    assert host.call("tool", "bare_print", {"text": "just a word"}) == {"printed": True}
    assert host.notice("stdout") == "just a word"


def test_the_end(host: Host) -> None:
    assert host.call("tool", "bare_slow", {"seconds": 0}) == {"slept": 0}
    host.do(host.dialect.shutdown_steps().frames)
    assert host.until(ShutdownAnswered) == ShutdownAnswered()
    assert host.process.wait(PATIENCE) == 0
