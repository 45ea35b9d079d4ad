"""The table of what is fuzzed: for each parser a function of bytes, the refusals it may raise, and examples.

A function returns what the input meant, in a few words: an input that means something new becomes an example
too. It asserts what holds for every input. Any other exception than the target's refusals is a fault, and so
is an input that takes longer than `scripts/fuzz` allows.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import itertools
import json
import os
import re
import tomllib
from base64 import b64encode
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import h11

from runner import __version__
from runner.contracts.mcp.hosts.fill import parse_dotenv
from runner.contracts.mcp.hosts.table import HOSTS
from runner.contracts.mcp.wrap.changes import apply_steps
from runner.contracts.mcp.wrap.configuration import Configuration, configuration
from runner.contracts.mcp.wrap.steps import undo_step, wrap_step
from runner.contracts.registry import contract_names, find_contract, make_inspector
from runner.gateway.callback import Callback
from runner.gateway.hub import HubRefusal, read_hello
from runner.gateway.remote_call import RemoteCall
from runner.gateway.via import ThinClient, places
from runner.install.content import BadContent
from runner.install.images import read_config
from runner.launch.remote.messages import MESSAGES, ORDER_CLASSES, LaunchOrder
from runner.launch.stages import Invocation, decode_planned, planned_classes
from runner.manifest.cache import PLUGIN_CLASSES
from runner.manifest.load import FoundManifest, _read, _recognise
from runner.manifest.semver import admits, is_version
from runner.manifest.unpack import UNREADABLE
from runner.oci import artifact
from runner.oci.archive import list_archive
from runner.oci.client import _NEXT_PAGE, _parse_challenges
from runner.oci.image import choose_manifest, read_image
from runner.oci.image_tree import ImageFolder, ImageTree
from runner.oci.layer import MOST_DEPTH, read_layer
from runner.oci.reference import parse_reference
from runner.package.fault import PackageFault
from runner.package.image_signature import parse_image_signature
from runner.package.keys import parse_keys
from runner.package.signature import parse_signature
from runner.protocol.dialect import Answer, HostCall, Setting
from runner.protocol.frames import Cutter
from runner.protocol.framing import Framing, HeaderFraming, LineFraming
from runner.protocol.header_frames import header_frame
from runner.protocol.https.failure import FetchFailed
from runner.protocol.https.request import parse_url
from runner.protocol.trace import read_trace
from runner.protocol.wire import WireFault, decode, encode, message
from sandbox.broker.agent.filter import AgentConversation, AgentRules, HostKey
from sandbox.broker.agent.host_key import load_verifier, read_kind
from sandbox.broker.agent.known_hosts import KnownHosts
from sandbox.broker.agent.messages import (
    Fields,
    Malformed,
    read_identities,
    read_log_in,
    read_sign_request,
    read_signature,
    string,
)
from sandbox.document.diagnostic import Diagnostic, DocumentError
from sandbox.document.edit.change import Change, DropFirst, Prepend, RenameKeys, SetWord, same
from sandbox.document.edit.edit import edit_text, read_spans
from sandbox.document.edit.span import EditRefused, EditSyntax
from sandbox.document.read import Document, parse
from sandbox.gate import dns
from sandbox.gate.peek import MOST_FIRST_BYTES, read_clear_name
from sandbox.gate.upstream import parse_hosts, parse_resolv_conf
from sandbox.network.hosts import parse_host
from sandbox.network.rules import parse_authority, parse_ports, parse_rule
from sandbox.policy.load import _CLASSES as POLICY_CLASSES
from sandbox.policy.parse import parse_policy
from sandbox.policy.policy import LIMIT_NAMES
from sandbox.spec import DURATIONS
from sandbox.speed import codec
from sandbox.units import parse_limit
from tests.runner.contracts.test_call_and_inspect import TABLES, Stream, Talk, _plugin, body
from tests.runner.oci.images import Member, build, hard_link, index, layer, link
from tests.runner.oci.servers import tar_of
from tests.sandbox.broker.agent.keys import ed25519_key, log_in, session_bind, sign_request
from tests.sandbox.network.test_http_connection import ANSWERS as HTTP_ANSWERS
from tests.sandbox.network.test_http_connection import ROWS as HTTP_REQUESTS
from tests.sandbox.network.test_http_connection import make as make_http
from tests.sandbox.network.test_http_connection import read as read_http

ROOT = Path(__file__).parents[2]
HOME = "/home/me"
INPUTS = Path(__file__).parent / "inputs"


class Target(NamedTuple):
    run: Callable[[bytes], object]  # returns what the input meant
    refusals: tuple[type[Exception], ...]
    examples: Callable[[], Iterable[bytes]]


def inputs(name: str) -> dict[str, bytes]:
    """The committed inputs of a target by their file names: each was a fault once."""
    folder = INPUTS / name
    return {each.name: each.read_bytes() for each in sorted(folder.iterdir())} if folder.is_dir() else {}


def examples(name: str) -> list[bytes]:
    return [*dict.fromkeys((*TARGETS[name].examples(), *inputs(name).values(), b""))]


def meaning(target: Target, data: bytes) -> str:
    """What an input meant to a target: the refusal, without the words and numbers of the input."""
    try:
        result = target.run(data)
        if isinstance(result, str):
            return result
        found = repr(result)
    except target.refusals as refusal:
        found = f"{type(refusal).__name__} {refusal}"
    return re.sub(r"'[^']*'|\"[^\"]*\"|\d+|\S*/\S*", "", found)[:100]


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")


def _files(*patterns: str) -> list[bytes]:
    found = sorted(path for pattern in patterns for path in ROOT.glob(pattern) if path.is_file())
    return [path.read_bytes() for path in found]


def _pieces(data: bytes) -> Iterator[list[bytes]]:
    """The data in pieces, in some ways that depend on the data alone."""
    mixed = hashlib.sha256(data).digest()
    for step in (1, 7) if len(data) <= 2048 else ():
        yield [data[at : at + step] for at in range(0, len(data), step)]
    cuts = sorted(int.from_bytes(mixed[at : at + 4], "big") % (len(data) + 1) for at in range(0, 32, 4))
    yield [data[start:end] for start, end in itertools.pairwise([0, *cuts, len(data)])]


# --- frames and conversations -------------------------------------------------------------------------------


def _framing(*framings: Framing) -> Callable[[bytes], object]:
    def run(data: bytes) -> object:
        return [_cut(framing, data) for framing in framings]

    return run


def _cut(framing: Framing, data: bytes) -> object:
    def cut(pieces: Iterable[bytes], by: Cutter) -> tuple[list[Any], object]:
        found = [each for piece in pieces for each in by.cut(piece)] + by.finish_cut()
        assert by.pending <= 1024
        return found, by.fault

    whole, fault = cut([data], framing.cutter())
    skimmed = [frame for frame, _ in framing.skimmer(64).feed(data) if frame is not None]
    for pieces in _pieces(data):
        assert cut(pieces, framing.cutter()) == (whole, fault)
        skimmer = framing.skimmer(64)
        assert [frame for piece in pieces for frame, _ in skimmer.feed(piece) if frame is not None] == skimmed
    if isinstance(framing, LineFraming):
        assert data.startswith(b"".join(each.before + each.frame + each.after for each in whole))
    again = b"".join(each.before + each.frame + each.after for each in whole)
    assert cut([again], framing.cutter())[0] == whole
    return bool(whole), bool(skimmed), fault


def _header_framings() -> Iterator[Framing]:
    for name in contract_names():
        framing = make_inspector(find_contract(name), Setting(_plugin(name))).framing
        if isinstance(framing, HeaderFraming):
            yield HeaderFraming(framing.rules._replace(header_limit=300, body_limit=200))


class Conversation(Talk):
    """The host answers whatever the plugin asks for."""

    def _hear(self, events: Any) -> None:
        super()._hear(events)
        for event in events:
            if isinstance(event, HostCall) and event.expects_answer:
                self._hear(self.dialect.answer(event.ticket, Answer({"ok": True})))


_OF_THE_CALL = (("tool_not_exposed", "exposed_tools"),)
# Each costs about 40 µs, however short it is: 64 KiB of newlines would take longer than an input may.
_MOST_MESSAGES = 4096


def _dialect(contract: str) -> Target:
    """What `call` refuses, `--inspect` refuses too.

    The first byte says how far the conversation has come. Then lines, each a message without its frame; or
    with a high first byte, the stream as it is. "$ID" is the id of the last request.
    """

    def run(data: bytes) -> object:
        first, rest = data[:1], data[1:]
        talk = Conversation(contract, sum(first) % 3)
        rest = rest.replace(b'"$ID"', json.dumps(talk.id).encode())
        for raw in [Stream(rest)] if first >= b"\x80" else rest.split(b"\n")[:_MOST_MESSAGES]:
            if talk.called is None and talk.inspected is None:
                talk.say(raw)
        # Who reads along does not know the call before it is made.
        judged = None if talk.called in _OF_THE_CALL else talk.called
        assert judged in (None, talk.inspected)
        assert all(count >= 0 for count in talk.dialect.counters.values())
        assert talk.dialect.shutdown_steps()
        counted = {**talk.dialect.counters, **talk.inspector.strays}
        return f"{talk.called} {sorted(name for name, count in counted.items() if count)}"

    def make() -> Iterator[bytes]:
        for stage, messages, _ in TABLES[contract].values():
            talk = Talk(contract, stage)
            raws = [body(each) for each in messages(talk)]
            if sum(map(len, raws)) < 4096:
                mark = json.dumps(talk.id).encode() if isinstance(talk.id, str) else b'"$ID"'
                stream = any(isinstance(raw, Stream) for raw in raws)
                yield bytes([stage + 129 * stream]) + b"\n".join(raws).replace(mark, b'"$ID"')

    return Target(run, (), make)


def _json(data: bytes) -> object:
    try:
        value = decode(data)
    finally:
        read = message(data, identity=frozenset(("id", "method")))
        assert (read.cause is None) or (read.value is None and read.detail)
    assert same(decode(encode(value)), value)
    if data.isascii() and b"\\u" not in data:
        assert same(json.loads(data), value)
    return type(value)


# --- documents ----------------------------------------------------------------------------------------------


def _check_places(found: Iterable[Diagnostic], text: bytes) -> None:
    lines = text.decode("utf-8", "replace").split("\n")
    for each in found:
        assert each.text().isprintable() and each.message
        if each.line:
            assert 1 <= each.line <= len(lines) and 1 <= each.column <= len(lines[each.line - 1]) + 1, each


def _placed(act: Callable[[], Any], data: bytes) -> Any:
    """What `act` returns. If it refuses the text, each fault has its place."""
    try:
        return act()
    except DocumentError as error:
        refused = error
    assert all(each.line for each in refused.diagnostics if each.rule != "too_many_faults"), refused
    _check_places(refused.diagnostics, data)
    raise refused


def _document(syntax: EditSyntax) -> Target:
    def run(data: bytes) -> object:
        document: Document = _placed(lambda: parse("x", data, syntax), data)
        lines = data.decode().split("\n")
        for keys in document._offsets:
            line, column = document.where(keys)
            assert 1 <= line <= len(lines) and 1 <= column <= len(lines[line - 1]) + 1
        if syntax == "toml":
            assert same(tomllib.loads(data.decode()), document.data)
        with contextlib.suppress(ValueError):
            value = json.loads(data)  # of equal keys it takes the last; ours are refused
            assert syntax == "toml" or same(document.data, value), "JSON means something else"
        return sorted({type(value).__name__ for value in document.data.values()})

    return Target(run, (DocumentError,), lambda: _of_syntax(syntax))


def _of_syntax(syntax: str) -> list[bytes]:
    ending = {"jsonc": "json*"}.get(syntax, syntax)
    folders = ("policies", "runner/contracts/*/example", "tests/plugins/*", "tests/runner/contracts/mcp/*/*")
    found = _files(*(f"{folder}/*.{ending}" for folder in folders))
    return [*(each for each in found if len(each) < 20_000), *_SYNTAX.get(syntax, ())]


_SYNTAX: dict[str, tuple[bytes, ...]] = {
    "yaml": (
        b"a: &x\n  - 'it''s'\n  - *x\nb: |-\n  text\n\n  more\nc: >2+\n   folded\n",
        b"? [k]\n: !!str v\n<<: {d: 1}\n",
        b'%YAML 1.2\n---\n"a\\u00e9\\n": {b: [1, 0x1F, 1.5e3, .inf, ~, yes], c: }\n...\n',
        b"- a: 1\n  b:\n  - - x\n    - y # c\n- {}\n",
    ),
    "toml": (
        b'a.b."c d" = [1, 2.5e-3, 0xff, 1979-05-27T07:32:00Z]\n[[t]]\nx = {y = {z=1}}\n',
        b"a = [\"\"\"x\\\n  y\"\"\", '''z''']\n",
        b"[a]\r\nb = true # c\r\n[a.b-c]\r\nd = '''\r\nx'''\r\n[[a.e]]\r\n[[a.e]]\r\nf = inf\r\n",
    ),
    "jsonc": (b'{// c\n"a": [1, /* x */ 2,], "b": "\\u00e9\\ud83d\\ude00", "c": -1.5E+3,\n}\n',),
}


def _edit(syntax: EditSyntax) -> Callable[[bytes], object]:
    """Change a value, and change it back: the text is as it was."""
    odd = " é#'\"\\:\t"

    def run(data: bytes) -> object:
        text = data.decode()
        found, spans = read_spans(text.removeprefix("\ufeff"), syntax)
        start = len(text) - len(text.removeprefix("\ufeff"))
        kinds = set()
        for keys, span in itertools.islice(spans.items(), sum(data) % 17, 200, 29):
            value: Any = found
            for key in keys:
                value = value[key]
            there: list[Change]
            back: list[Change]
            if isinstance(value, str):
                there, back = (
                    [SetWord(keys, odd)],
                    [SetWord(keys, value, text[start + span.start : start + span.end])],
                )
            elif isinstance(value, list):
                there, back = [Prepend(keys, (odd, ""))], [DropFirst(keys, 2)]
            elif isinstance(value, dict) and value and all(isinstance(key, str) for key in value):
                first = next(iter(value))
                there, back = (
                    [RenameKeys(keys, ((first, "Z_" + first),))],
                    [RenameKeys(keys, (("Z_" + first, first),))],
                )
            else:
                continue
            with contextlib.suppress(EditRefused):
                changed = edit_text(text, syntax, there)
                kinds.add(type(there[0]).__name__)
                assert changed != text
                assert edit_text(changed, syntax, back) == text, (there, changed)
        return syntax, sorted(kinds)

    return run


def _edits(data: bytes) -> object:
    syntaxes: tuple[EditSyntax, ...] = ("json", "jsonc", "toml", "yaml")
    return _edit(syntaxes[sum(data[:1]) % 4])(data[1:])


_PLACES = ["/x/mcp.json", "/x/config.toml", "/x/config.yaml"]
_PLACES += sorted({place.replace("~", HOME).replace("*", "x") for host in HOSTS for place in host.files})


def _configuration(data: bytes) -> Configuration:
    return configuration(_PLACES[sum(data[:1]) % len(_PLACES)], data[1:], HOME, {})


def _wrap(data: bytes) -> object:
    """Wrap and undo: the bytes are as they were. The first byte chooses the place of the file."""
    before = _configuration(data)
    steps = [
        step
        for each in before.servers[:20]
        if (step := wrap_step(before, each, "/opt/runner")).does == "wrap"
    ]
    wrapped, done = apply_steps(before, steps, "/opt/runner")
    changed = {step.server.keys for step in done if step.does == "wrap"}
    after = configuration(before.path, wrapped, HOME, {})
    ours = [each for each in after.servers if each.keys in changed]
    assert len(ours) == len(changed)
    undone, again = apply_steps(after, [undo_step(each) for each in ours], "")
    assert all(step.does == "undo" for step in again), again
    assert undone == data[1:]
    return before.syntax, len(steps), sorted({step.does + step.reason for step in done})


def _hosts_files() -> Iterator[bytes]:
    for each in sorted((ROOT / "tests/runner/contracts/mcp").glob("*/*/*.*")):
        raw = each.read_bytes()
        fitting = [at for at, place in enumerate(_PLACES) if place.endswith(each.suffix[:5])]
        found = (bytes([at]) + raw for at in fitting)
        with contextlib.suppress(DocumentError, UnicodeDecodeError):
            yield from itertools.islice((one for one in found if _configuration(one).servers), 2)


def _manifest(name: str) -> Target:
    contract = find_contract(name)
    path = f"/opt/plugin/{contract.file_names[0]}"

    def run(data: bytes) -> object:
        _, document = _recognise(FoundManifest(path, name), data)
        servers: tuple[str | None, ...] = (None,)
        if (hosts := contract.configurations) is not None:
            servers = (None, *hosts.servers(document)[:3], "x")
            _check_places(hosts.remarks(document), data)
        rules: set[str] = set()
        for server in servers:
            read = _read(name, document, server, HOME, {}, "")
            plugin, found = read.plugin, read.diagnostics
            assert (plugin is None) == any(each.severity == "error" for each in found)
            more = contract.check_files(document, plugin)
            _check_places((*found, *more), data)
            rules.update(each.rule for each in (*found, *more))
            if plugin is not None:
                assert codec.unpack(codec.pack(plugin), PLUGIN_CLASSES) == plugin
        return sorted(rules)

    endings = {Path(each).suffix for each in contract.file_names}
    own = [f"runner/contracts/{name}/example/*{ending}" for ending in endings]
    return Target(
        run, (DocumentError,), lambda: _files(*own, *(f"tests/plugins/*/*{ending}" for ending in endings))
    )


def _policy(data: bytes) -> object:
    policy = _placed(lambda: parse_policy("/etc/runner/policy.toml", data, name="x"), data)
    assert codec.unpack(codec.pack(policy), POLICY_CLASSES) == policy
    return policy.unsandboxed, len(policy.deny)


# --- networks -----------------------------------------------------------------------------------------------


def _dns(data: bytes) -> object:
    """A question, and the same bytes as the answer to one."""
    kind = dns.AAAA if data[-1:] == b"\1" else dns.A
    with contextlib.suppress(dns.MalformedMessage):
        reply = dns.read_reply(data, int.from_bytes(data[:2], "big"), "a.example.com", kind)
        assert len(reply.addresses) <= dns.MOST_ADDRESSES and 0 <= reply.seconds < 1 << 31
        assert {len(each) for each in reply.addresses} <= {4 if kind == dns.A else 16}
    question = dns.read_question(data)
    if isinstance(question, dns.RefusedQuestion):
        assert 12 <= len(question.reply) <= len(data) + 12 and question.reply[2] & 0x80
        return question.reason
    assert question.shown.isascii() and len(question.section) <= 255 + 4
    name = question.name
    if name and question.kind == dns.A and not any(b"." in label for label in question.labels):
        answer = dns.write_reply(question, dns.NOERROR, b"\1\2\3\4", 60)
        if question.section.endswith(b"\0\1"):
            assert dns.read_reply(answer, question.id, name, dns.A).addresses == (b"\1\2\3\4",)
    return question.kind, name is None, question.extended


def _dns_examples() -> Iterator[bytes]:
    asked = dns.write_question(7, "a.example.com", dns.A)
    yield from (asked, dns.write_question(7, "xn--4ca.example.com", dns.AAAA))
    yield asked[:10] + b"\0\1" + asked[12:] + b"\0\0\x29\x10\0\0\0\0\0\0\0"  # with EDNS
    head = asked[:2] + b"\x81\x80\0\1\0\3\0\0\0\0" + asked[12:]
    alias = b"\xc0\x0c\0\5\0\1\0\0\0\5\0\4\1b\xc0\x0e"
    yield head + alias + b"\xc0\x2b\0\1\0\1\0\0\0\5\0\4\1\2\3\4" * 2
    yield head[:6] + b"\0\1" + head[8:-4] + b"\0\x1c\0\1\xc0\x0c\0\x1c\0\1\0\0\0\5\0\x10" + bytes(15) + b"\1"


def _peek(data: bytes) -> object:
    data = data[:MOST_FIRST_BYTES]
    found = read_clear_name(data)
    assert sum((found.host is not None, bool(found.refused), bool(found.needed))) == 1
    assert found.needed <= MOST_FIRST_BYTES and (not found.needed or found.needed > len(data))
    if found.host is not None:
        assert parse_host(str(found.host)) == found.host
        for cut in range(0, len(data), len(data) // 16 + 1):
            early = read_clear_name(data[:cut])
            assert early.needed or early.host == found.host, (cut, early)
    return found.refused or f"{found.host is None} {found.needed > 0}"


def _http(data: bytes) -> object:
    """Requests to the door, and answers to what was asked."""
    found = []
    for role in (h11.SERVER, h11.CLIENT):
        found.append(read_http(dict.fromkeys((data, b"")), make_http(role)))
        for pieces in _pieces(data):
            assert read_http([*filter(None, pieces), b""], make_http(role)) == found[-1]
    return [[event.split(" ")[0] for event in events] for events in found]


def _peek_examples() -> Iterator[bytes]:
    from tests.sandbox.gate import test_peek as told

    yield from (told.real_hello("api.example.com"), told.records(told.hello(told.GREASE, told.GOOD), 60))
    yield told.records(told.hello(told.ECH, told.EARLY, told.GOOD)) + told.CCS + told.SEALED
    yield told.POST + b"Transfer-Encoding: chunked\r\n\r\n5;x=y\r\nhello\r\n0\r\nA: b\r\n\r\n"
    yield told.POST + b"Content-Length: 5\r\nX: \t y\r\n\r\nhello"
    yield b"GET http://a.example.com:80/x?y HTTP/1.0\r\nhost: a.example.com\r\nUpgrade: websocket\r\n\r\n"


def _words(data: bytes) -> object:
    """Short texts that options, manifests and files of the system have."""
    text = _text(data)
    acts: Sequence[Callable[[], object]] = (
        *(lambda name=name: _limit(name, text) for name in LIMIT_NAMES),
        lambda: parse_host(text),
        lambda: parse_rule(text, default_ports=(443,), ranges=True),
        lambda: parse_authority(text, 443),
        lambda: _ports(text),
        lambda: admits(text, (1, 2, 3)),
        lambda: is_version(text),
        lambda: parse_dotenv(text),
        lambda: parse_resolv_conf(text),
        lambda: parse_hosts(text, lambda name: True),
        lambda: parse_url(text),
        lambda: parse_reference(text),
        lambda: _parse_challenges([text]),
        lambda: _NEXT_PAGE.search(text),
    )
    found = []
    for act in acts:
        try:
            act()
            found.append("1")
        except (ValueError, FetchFailed, PackageFault):
            found.append("0")
    with contextlib.suppress(ValueError):
        host = parse_host(text)
        assert parse_host(str(host)) == host
        rule = parse_rule(text, default_ports=(443,), ranges=True)
        assert parse_rule(str(rule), default_ports=(443,), ranges=True) == rule
    with contextlib.suppress(PackageFault):
        reference = parse_reference(text)
        assert parse_reference(str(reference)) == reference
    return "".join(found)


def _limit(name: str, text: str) -> None:
    amount = parse_limit(name, text)
    assert 0 < amount < float("inf") and (name in (*DURATIONS, "cpu") or type(amount) is int)


def _ports(text: str) -> None:
    pairs = [(0, 0), *parse_ports(text)]
    assert all(last < first <= end <= 65535 for (_, last), (first, end) in itertools.pairwise(pairs))


_WORDS = (
    *(b"512MiB", b"1.5 GB", b"2h30m", b"1 day", b"0.5", b"api.example.com:443,8000-9000", b"*.example.com"),
    *(
        b"[2001:db8::1]:443",
        b"10.0.0.0/8:22",
        "bücher.example".encode(),
        b"xn--bcher-kva.example",
        b"1.2.3.4",
    ),
    *(b"^1.2, <2.0.0-rc.1", b"~1.2", b"1.*", b"1.2.3-a.1+b", b"https://u@a.example.com:8443/x?y#z"),
    *(b"A=1\nexport B=\"x\\n\" # c\nC='y'\n", b"nameserver ::1%lo\noptions timeout:3 attempts:9\n"),
    *(b"127.0.0.1 localhost a.b # c\n", b"oci://localhost:5000/a/b-c:1.0", b"oci://h/a@sha256:" + b"a" * 64),
    *(b'Bearer realm="https://a/b",service="c d",scope="e", Basic realm=x', b'<https://a/b>; rel="next"'),
)


# --- servers elsewhere --------------------------------------------------------------------------------------

_CALLBACKS = (
    b"GET /callback?code=a%20b&state=s HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    b"GET /callback?error=access_denied&state=s&iss=https%3A%2F%2Fx HTTP/1.0\r\n\r\n",
    b"GET /callback?code=a&state=s&state=s HTTP/1.1\r\n\r\n",
)
_EVENTS = (
    b'event: message\ndata: {"method": "notifications/progress", "params": {"progress": 1}}\n\n',
    b'data: {"method": "elicitation/create",\r\ndata: "id": 1}\r\n\r\n: comment\r\rdata:{"method":"x"}\r\r',
    b'data: {"result": {}, "id": 1}\n\n\n\n',
)


def _sign_in(data: bytes) -> object:
    callback = Callback(1)
    callback.state = "s"
    status, _ = callback._take(data)
    if status.startswith("200"):
        assert callback._found["state"] == "s"
        assert callback._take(data)[0].startswith("404")  # once
    return status


class _Hearing(RemoteCall):
    def __init__(self) -> None:
        super().__init__(None, None, None)  # type: ignore[arg-type]  # nothing is answered here
        self.heard: list[bytes] = []

    def hear(self, event: bytes) -> None:
        super().hear(event)
        self.heard.append(event)


def _remote_events(data: bytes) -> object:
    """The same in one piece and in many."""
    headers, found = (("Content-Type", "text/event-stream"),), []
    for size in (len(data) + 1, 1 + len(data) // 7):
        call = _Hearing()
        take, came = call.reader(), bytearray()
        for begin in range(0, len(data), size):
            came += data[begin : begin + size]
            take(headers, came)
        found.append(call.heard)
    assert found[0] == found[1]
    return f"events: {len(found[0])}"


# --- the hub ------------------------------------------------------------------------------------------------

_HELLO = {"version": __version__, "words": ["--config", "x"], "environ": {"PATH": "/bin"}, "folder": "/x"}
_HELLO["environ"] = {**places(os.environ), "PATH": "/bin"}
_HELLOS = (
    json.dumps(_HELLO).encode(),
    json.dumps({**_HELLO, "version": "0"}).encode(),
    json.dumps({**_HELLO, "folder": "x"}).encode(),
    json.dumps({**_HELLO, "environ": {"HOME": "/other"}}).encode(),
    b'{"words": 1, "environ": []}',
)
_LINES = (  # of a host and of its hub by turns
    b"\n".join(
        (
            b'{"id": 1, "method": "initialize", "params": {}}',
            b'{"jsonrpc":"2.0","id":1,"result":{}}',
            b'{"method": "notifications/initialized"}',
            b'{"id": 0, "method": "elicitation/create", "params": {}}',
            b'{"id": "runner-1", "result": {"action": "accept"}}',
            b"#runner gateway: a word",
            b"",
        )
    ),
    b"\n".join(
        (
            b'{"id": 2, "method": "resources/subscribe", "params": {"uri": "a"}}',
            b"[]",
            b'[{"id": 3, "method": "x"}, 1]',
            b'{"jsonrpc":"2.0","id":"a","error":{}}',
            b'{"method": "notifications/cancelled", "params": {"requestId": 2}}',
            b'{"method": 7, "id": [1]}',
            b"",
        )
    ),
)


def _hello(data: bytes) -> object:
    hello = read_hello(_text(data))
    assert hello.folder.startswith("/") and all(isinstance(each, str) for each in hello.words)
    assert all(isinstance(each, str) for pair in hello.environ.items() for each in pair)
    return f"a hello of {len(hello.words)} words"


def _thin_client(data: bytes) -> object:
    """What is an answer or a question reaches the other side once; nothing ends the client."""
    client = ThinClient("/nowhere/hub.sock", (), (), {})
    client._hub = object()  # type: ignore[assignment]  # nothing is sent
    for number, line in enumerate(data.split(b"\n")[:-1]):
        if number % 2:
            before = len(client._to_host)
            if not line.startswith(b"#"):
                client.from_hub(line + b"\n")
                assert client._first or len(client._to_host) > before
        else:
            client.from_host(line + b"\n")
    assert not client._to_host or client._to_host.endswith(b"\n")
    return f"waits: {min(len(client._pending), 3)}, asked: {min(len(client._questions), 3)}"


# --- plans and packages -------------------------------------------------------------------------------------


def _plan(data: bytes) -> object:
    classes = (*planned_classes(), *ORDER_CLASSES, *MESSAGES)
    with contextlib.suppress(ValueError):
        decode_planned(data)
    value = codec.decode(data, classes)
    try:
        written = codec.encode(value)
    except TypeError:  # such as a set of texts and numbers
        return "unwritable"
    assert codec.encode(codec.decode(written, classes)) == written
    assert codec.pack(codec.unpack(codec.pack(value), classes)) == codec.pack(value)
    return type(value)


def _plan_examples() -> Iterator[bytes]:
    for name in contract_names():
        yield codec.encode(_plugin(name))
        order = LaunchOrder(Invocation("/x", args=("a", "\udcff")), {"A": "b"}, "/", 1.5)
        yield codec.encode((order, {"x": (1, 2.5, None, True)}, b"\0\xff", frozenset(("a", "b"))))


def _tar(data: bytes) -> object:
    listing = list_archive(io.BufferedReader(io.BytesIO(data)))
    paths = [each.path for each in listing.files]
    assert len(set(paths)) == len(paths) and all(each.isprintable() for each in paths)
    assert not any(path.startswith("/") or {"..", ".", ""} & set(path.split("/")) for path in paths)
    return len(paths)


def _tar_examples() -> Iterator[bytes]:
    files = {"a": b"x", "b/c": b"y" * 600, "b/" + "d" * 120: b"", "é": b"z"}
    yield from (tar_of(files), tar_of(files, "w:gz"), tar_of({}))


class _Contents:
    """In place of a FileStore: nothing is written."""

    def add(self, content: Iterable[bytes], executable: bool) -> str:
        return hashlib.sha256(b"".join(content)).hexdigest()


def _layer(data: bytes) -> object:
    """Two layers, the second above the first."""
    tree = ImageTree(_Contents())  # type: ignore[arg-type]  # as far as the tree needs one
    for half in data.partition(b"--layer--")[::2]:
        tree.add_layer(read_layer(io.BufferedReader(io.BytesIO(half)), 1 << 20))
    tree.make_places("/work")
    found, todo = 0, [(tree.root, 0)]
    while todo:
        folder, depth = todo.pop()
        assert depth <= MOST_DEPTH + 1
        for name, node in folder.children.items():
            assert name not in ("", ".", "..") and "/" not in name and name.isprintable()
            assert not name.startswith(".wh.")
            found += 1
            if isinstance(node, ImageFolder):
                todo.append((node, depth + 1))
    return found.bit_length()


def _layer_examples() -> Iterator[bytes]:
    files = {"a/b": b"x", "c": b"y" * 600, "a/.wh.b": b"", "a/.wh..wh..opq": b""}
    members = [link("l", "../a/b"), hard_link("h", "c"), link("d", "/a"), Member("d/new", b"1")]
    for packing in ("plain", "gzip", "zstd"):
        yield layer([Member("c", b"1"), *members], packing=packing) + b"--layer--" + tar_of(files)


def _image(data: bytes) -> object:
    found = []
    acts: dict[str, Callable[[], object]] = {
        "manifest": lambda: read_image(data, "", 1 << 30).layers,
        "index": lambda: [choose_manifest(data, "x")],
        "configuration": lambda: read_config(data).entrypoint,
    }
    for name, act in acts.items():
        try:
            act()
        except (PackageFault, BadContent) as fault:
            name = getattr(fault, "rule", "bad")
        found.append(name)
    return " ".join(found)


def _image_examples() -> Iterator[bytes]:
    image = build(b"", Entrypoint=["a"], Env=["A=1"], User="b", WorkingDir="/c", StopSignal="INT")
    yield from (image.manifest, image.blobs[0], index(("amd64", image), ("arm64", image)))


def _signature(data: bytes) -> object:
    with contextlib.suppress(DocumentError):
        keys = parse_keys("/etc/runner/keys", data)
        assert all(name == key.key_id for name, key in keys.items())
        return len(keys)
    with contextlib.suppress(PackageFault):
        image = parse_image_signature(data)
        assert json.loads(image.text) == image._asdict()
        return "image"
    signature = parse_signature(data)
    fields = signature._asdict()
    assert parse_signature(json.dumps(fields).encode()) == signature
    del fields["signature"]
    assert json.loads(signature.message) == fields
    return "signature"


_SIGNED = {
    "schema": 1,
    "algorithm": "ed25519",
    "key_id": "acme",
    "digest": "sha256:" + "a" * 64,
    "signed_at": "2026-11-16T03:00:00Z",
    "signature": "A" * 86 + "==",
}


def _oci(data: bytes) -> object:
    added = artifact.Descriptor(artifact.SIGNATURE, artifact.digest_of(b""), 2)
    acts: dict[str, Callable[[], list[artifact.Descriptor]]] = {
        "package": lambda: [artifact.read_package(data).layer],
        "signature": lambda: [artifact.read_signature(data, artifact.digest_of(b"{}"))],
        "added": lambda: artifact.read_referrers(artifact.add_to_index(data, added)),
        "referrers": lambda: artifact.read_referrers(data),
    }
    found = []
    for name, act in acts.items():
        try:
            read = act()
        except PackageFault as fault:
            found.append(fault.rule)
            continue
        found.append(name)
        assert all(re.fullmatch("sha256:[0-9a-f]{64}", each.digest) and each.size >= 0 for each in read)
        assert name != "added" or read[-1] == added
    return " ".join(found)


def _oci_examples() -> Iterator[bytes]:
    digest = artifact.digest_of(b"{}")
    yield artifact.write_package(digest, 10, "a/b", "1.0.0", "vai")
    yield artifact.write_signature(b"{}", artifact.Descriptor(artifact.INDEX, digest, 2))
    yield artifact.add_to_index(None, artifact.Descriptor(artifact.SIGNATURE, digest, 2))


# --- ssh ----------------------------------------------------------------------------------------------------

_SSH_HOST, _SSH_KEY, _SSH_SESSION = ed25519_key(b"h" * 32), ed25519_key(b"k" * 32), b"s" * 32
_SSH_RULES = AgentRules(
    {_SSH_KEY.blob: "own"}, {_SSH_HOST.blob: HostKey("git.example.com", load_verifier(_SSH_HOST.blob))}
)


def _ssh(data: bytes) -> object:
    """Messages of a client, each behind its length. Only a log-in in the host's own session is asked for."""
    talk = AgentConversation(_SSH_RULES)
    told: list[str] = []
    while len(data) >= 4 and len(told) < 64:
        end = 4 + int.from_bytes(data[:4])
        decision = talk.decide(data[4:end])
        if decision.request:
            assert decision.request[4:] == data[4:end]
            log_in = read_log_in(read_sign_request(Fields(data[5:end])).data)
            assert (log_in.session, log_in.key) == (_SSH_SESSION, _SSH_KEY.blob)
        assert bool(decision.answer) != bool(decision.request)
        told.append(decision.reason or "done")
        data = data[end:]
    for read in (read_identities, read_signature):
        with contextlib.suppress(Malformed):
            read(data)
    return told


def _ssh_examples() -> Iterator[bytes]:
    bind = string(session_bind(_SSH_HOST, _SSH_SESSION))
    for host_key in (None, _SSH_HOST.blob):
        signed = log_in(_SSH_SESSION, _SSH_KEY.blob, host_key=host_key)
        yield bind + string(sign_request(_SSH_KEY.blob, signed)) + string(b"\x0b")
    yield bind + bind + string(b"\x13")


def _known_hosts(data: bytes) -> object:
    known = KnownHosts([data])
    found = [known.keys(host, port) for host, port in (("a.example.com", 22), ("a.example.com", 2222))]
    for key in found[0][:3]:
        read_kind(key)
        assert (
            KnownHosts([data, b"\n@revoked * x " + b64encode(key)]).keys("a.example.com", 22).count(key) == 0
        )
    return [len(keys) for keys in found], known.has_authority("a.example.com", 22)


def _known_hosts_examples() -> Iterator[bytes]:
    line = b"ssh-ed25519 " + b64encode(_SSH_HOST.blob)
    for hosts in (
        b"a.example.com,b",
        b"[*.example.com]:2222,!b",
        b"|1|F1E1KeoE/eEWhi10WpGv4OdiO6Y=|YQ==",
        b"*",
    ):
        yield hosts + b" " + line + b" c\n@revoked x " + line[:-8] + b"\n@cert-authority * " + line


_TRACES = (
    b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01\na=b,tenant@system=c d",
    b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01\n"
    + b",".join(b"k%d=%d" % (n, n) for n in range(33)),
)


def _trace(data: bytes) -> str:
    parent, _, state = _text(data).partition("\n")
    found = read_trace({"traceparent": parent, "tracestate": state})
    for text in found.values():  # they become headers
        assert text.isascii() and text.replace("\t", " ").isprintable() and len(text) <= 512
    return " ".join(found)


TARGETS: dict[str, Target] = {
    "lines": Target(
        _framing(LineFraming(20), LineFraming(3, 2)),
        (),
        lambda: (b'{"a":1}\n\n{}\r\nx' * 3, b"a\nbb\n" + b"c" * 30),
    ),
    "headers": Target(
        _framing(*_header_framings()),
        (),
        lambda: (
            header_frame(b"{}") * 2,
            b"X: y\r\nContent-Length: 02\r\ncontent-length:+3\r\n\r\nabc",
            header_frame(b"x" * 99),
        ),
    ),
    **{f"dialect-{name}": _dialect(name) for name in contract_names()},
    "json": Target(
        _json,
        (WireFault,),
        lambda: (b'{"id": 1, "params": {"a": [1, -2.5e3, "\\u00e9\\ud83d", null]}}', *_of_syntax("json")[:5]),
    ),
    **{f"document-{syntax}": _document(syntax) for syntax in ("json", "jsonc", "toml", "yaml")},
    "edit": Target(
        _edits,
        (EditRefused, UnicodeDecodeError),
        lambda: [
            bytes([at]) + each
            for at, syntax in enumerate(("json", "jsonc", "toml", "yaml"))
            for each in _of_syntax(syntax)
        ],
    ),
    "wrap": Target(_wrap, (DocumentError,), _hosts_files),
    **{f"manifest-{name}": _manifest(name) for name in contract_names()},
    "policy": Target(_policy, (DocumentError,), lambda: _files("policies/*.toml")),
    "dns": Target(_dns, (dns.UnansweredMessage,), _dns_examples),
    "http": Target(_http, (), lambda: (*(raw for raw, _ in HTTP_REQUESTS if len(raw) < 4096), *HTTP_ANSWERS)),
    "peek": Target(_peek, (), _peek_examples),
    "words": Target(_words, (), lambda: _WORDS),
    "plan": Target(_plan, (ValueError,), _plan_examples),
    "tar": Target(_tar, (PackageFault,), _tar_examples),
    "layer": Target(_layer, (PackageFault, *UNREADABLE), _layer_examples),
    "image": Target(_image, (), _image_examples),
    "signature": Target(
        _signature,
        (PackageFault,),
        lambda: (
            json.dumps({**_SIGNED, "package_id": "a/b", "version": "1.0.0"}).encode(),
            json.dumps({**_SIGNED, "image": "docker.io/a/b"}).encode(),
            b"acme " + b"A" * 43 + b"= me\n# x\n",
        ),
    ),
    "oci": Target(_oci, (), _oci_examples),
    "ssh": Target(_ssh, (), _ssh_examples),
    "known-hosts": Target(_known_hosts, (), _known_hosts_examples),
    "sign-in": Target(_sign_in, (), lambda: _CALLBACKS),
    "remote-events": Target(_remote_events, (), lambda: _EVENTS),
    "trace": Target(_trace, (), lambda: _TRACES),
    "hub-hello": Target(_hello, (HubRefusal,), lambda: _HELLOS),
    "hub-client": Target(_thin_client, (), lambda: _LINES),
}
