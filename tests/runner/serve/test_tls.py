"""TLS at the TCP door: who comes in by a certificate, and who does not."""

from __future__ import annotations

import datetime
import json
import math
import os
import ssl
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio
import trustme

from runner.cli import verb_parser
from runner.cli.serving import serve
from runner.ledger.file import LedgerFile
from runner.ledger.rows import InvocationRow
from runner.outcome import USAGE_ERROR
from runner.serve import connections, daemon
from runner.serve import door as door_module
from runner.serve.peer import DoorPeer, Rules, identify
from runner.serve.refusal import Refused
from runner.serve.tls import DoorTls, certified_peer
from tests.runner.serve.house import TOKEN, House, answer, code, house, request, status
from tests.tables import check_rows

HOST = "Host: localhost"
BEARER = f"Authorization: Bearer {TOKEN.decode()}"
NO_TOKEN = Rules(os.geteuid())


class Authorities:
    """The authority of the door and of its clients, and another one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)
        self.own, self.foreign = trustme.CA(), trustme.CA()
        self.cert, self.key, self.ca = (str(folder / name) for name in ("cert.pem", "key.pem", "ca.pem"))
        self.write(self.own)

    def write(self, authority: trustme.CA) -> None:
        """The door's files, as if this authority had issued them."""
        issued = authority.issue_cert("localhost")
        Path(self.cert).write_bytes(issued.cert_chain_pems[0].bytes())
        Path(self.key).write_bytes(issued.private_key_pem.bytes())
        Path(self.ca).write_bytes(authority.cert_pem.bytes())
        os.chmod(self.key, 0o600)

    def tls(self, *, mutual: bool = True) -> DoorTls:
        return DoorTls(self.cert, self.key, self.ca if mutual else None)

    def client(
        self, issuer: trustme.CA | None = None, server: trustme.CA | None = None, **about: Any
    ) -> ssl.SSLContext:
        """A client with a certificate of `issuer`, or with none."""
        context = ssl.create_default_context()
        (server or self.own).configure_trust(context)
        if issuer is not None:
            name = {"organization_name": "acme", "organization_unit_name": "ops", "common_name": "alice"}
            issuer.issue_cert("client.example", **{**name, **about}).configure_cert(context)
        return context


async def try_to(door: House, client: ssl.SSLContext, *headers: str) -> str:
    """The status of an answer, or how the connection ended."""
    try:
        async with await door.connect(tls=client) as stream:
            await stream.send_all(request("/health", HOST, *headers))
            found = await answer(stream)
    except trio.BrokenResourceError as error:
        reason = str(getattr(error.__cause__, "reason", "") or "closed")
        return "closed" if reason == "UNEXPECTED_EOF_WHILE_READING" else reason  # without a word of TLS
    return str(status(found)) if found else "closed"


@pytest.mark.trio
async def test_a_certificate_replaces_the_token_and_names_the_caller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = Authorities(tmp_path / "tls")
    now = datetime.datetime.now(datetime.UTC)
    day = datetime.timedelta(days=1)
    early = ssl.create_default_context()
    known.own.configure_trust(early)
    early.minimum_version = ssl.TLSVersion.MINIMUM_SUPPORTED
    with pytest.warns(DeprecationWarning, match="TLSv1_1"):
        early.maximum_version = ssl.TLSVersion.TLSv1_1
    early.set_ciphers("ALL:@SECLEVEL=0")
    older = known.client(known.own)
    older.maximum_version = ssl.TLSVersion.TLSv1_2
    clients = {
        "right": known.client(known.own),
        "right, TLS 1.2": older,
        "none": known.client(),
        "foreign": known.client(known.foreign),
        "expired": known.client(known.own, not_before=now - 3 * day, not_after=now - day),
        "not valid yet": known.client(known.own, not_before=now + day, not_after=now + 2 * day),
        "no printable name": known.client(known.own, common_name="a\nb"),
        "TLS 1.1": early,
    }
    said: list[str] = []
    async with house(tmp_path, said=said, tls=known.tls(), rules=NO_TOKEN) as door:
        found = {name: await try_to(door, client, BEARER) for name, client in clients.items()}
        assert found.pop("right") == found.pop("right, TLS 1.2") == "200"
        assert found.pop("TLS 1.1") in ("TLSV1_ALERT_PROTOCOL_VERSION", "NO_PROTOCOLS_AVAILABLE")
        assert found == {
            "none": "TLSV13_ALERT_CERTIFICATE_REQUIRED",
            "foreign": "TLSV1_ALERT_UNKNOWN_CA",
            "expired": "SSLV3_ALERT_CERTIFICATE_EXPIRED",
            "not valid yet": "SSLV3_ALERT_BAD_CERTIFICATE",
            "no printable name": "closed",
        }
        plain = await door.ask(request("/health", HOST, BEARER), tcp=True)
        assert plain.startswith(b"HTTP/1.1 400 ") and b"use https://" in plain
        # They are told once a minute, and counted.
        told = [line for line in said if "was refused" in line]
        assert told == [
            "a client at 127.0.0.1 was refused: it shows no certificate, and --client-ca asks for one"
        ]
        text = await door.ask(request("/metrics", HOST))
        assert b'runner_refusals_total{reason="tls"} 7.0' in text
        monkeypatch.setattr(daemon, "_STRANGER_SECONDS", 0.0)
        assert await try_to(door, clients["expired"]) == "SSLV3_ALERT_CERTIFICATE_EXPIRED"
        assert said[-1] == (
            "a client at 127.0.0.1 was refused: its certificate is refused: certificate has expired"
            " (7 clients since the last such line)"
        )
        # Host and Origin are looked at all the same: a browser shows a certificate for any page.
        right, page = clients["right"], "Origin: http://evil.example"
        assert await try_to(door, right, page) == "403"
        # Also one of another port, and one that came without TLS; the control is the door's own.
        for foreign in ("https://localhost:1", "http://localhost", "null"):
            assert await try_to(door, right, f"Origin: {foreign}") == "403"
        for site, wanted in (("cross-site", "403"), ("same-site", "403"), ("none", "200")):
            assert await try_to(door, right, f"Sec-Fetch-Site: {site}") == wanted
        assert await try_to(door, right, "Origin: https://localhost", "Sec-Fetch-Site: same-origin") == "200"
        other = request("/health", "Host: evil.example")
        assert status(await door.ask(other, tls=right)) == 421
        # The subject is the caller: it sees its own calls only, and not those of another subject.
        alice, bob = "cert:O=acme,OU=ops,CN=alice", "cert:O=acme,OU=ops,CN=bob"
        for name, caller in (("call_1", "uid:0"), ("call_2", alice), ("call_3", bob), ("call_4", "token")):
            await door.ledger.accept(InvocationRow(name, "x", "y", "", caller))
        listed = json.loads((await door.ask(request("/calls", HOST), tls=right)).partition(b"\r\n\r\n")[2])
        assert [each["id"] for each in listed["calls"]] == ["call_2"]
        for path in ("/calls/call_1", "/calls/call_3", "/calls/call_4"):
            assert status(await door.ask(request(path, HOST), tls=right)) == 404
        assert code(await door.ask(request("/audit", HOST), tls=right)) == "local_only"
        assert code(await door.ask(request("/page/stream", HOST), tls=right)) == "page_only"
        # A stream ends with the certificate.
        async with await door.connect(tls=right) as stream:
            await stream.send_all(request("/events", HOST))
            assert b": open" in await stream.receive_some()
            async with await door.connect(tls=right) as brief:
                monkeypatch.setattr(door_module, "time", SimpleNamespace(time=lambda: math.inf))
                await brief.send_all(request("/events", HOST))
                while await brief.receive_some():
                    pass
                monkeypatch.undo()
            with trio.move_on_after(0) as still:
                await stream.receive_some()
            assert still.cancelled_caught
        while alice not in {row.caller for row in await door.ledger.do(LedgerFile.audit, "connection")}:
            pass  # no request waits for the audit
    # The control: the same clients where no certificate is asked for, with the token and without.
    async with house(tmp_path, tls=known.tls(mutual=False)) as door:
        for name in ("none", "foreign", "expired", "no printable name"):
            assert await try_to(door, clients[name], BEARER) == "200"
            assert await try_to(door, clients[name]) == "401"


@pytest.mark.trio
async def test_a_handshake_has_a_deadline_and_counts_as_a_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = Authorities(tmp_path / "tls")
    said: list[str] = []
    async with house(tmp_path, said=said, tls=known.tls(), rules=NO_TOKEN, most_connections=4) as door:
        client = known.client(known.own)
        # One of four places is by TCP. The deadline comes, or before it a client that needs the place.
        for asks in (False, True):
            monkeypatch.setattr(connections, "HANDSHAKE_SECONDS", 3600.0 if asks else 0.5)
            async with await door.connect(tcp=True) as silent:
                await silent.send_all(b"\x16\x03\x01")
                if asks:
                    assert await try_to(door, client) == "200"
                with suppress(trio.BrokenResourceError):
                    assert await silent.receive_some() == b""
        # Who has shown a certificate keeps it. The place of the last one is free when the door has noticed.
        with trio.fail_after(60):
            while True:
                async with await door.connect(tls=client) as own:
                    with suppress(trio.BrokenResourceError):
                        await own.send_all(request("/health", HOST))
                        assert status(await answer(own)) == 200
                        assert await try_to(door, client) == "closed"
                        break
        assert any("no handshake within 0.5 seconds" in line for line in said)


@pytest.mark.trio
async def test_large_bodies_and_answers_pass_by_tls(tmp_path: Path) -> None:
    known = Authorities(tmp_path / "tls")
    named = NO_TOKEN._replace(names=(*NO_TOKEN.names, "plugins.example", "127.0.0.1"))
    large = request("/deliveries", HOST, method="POST", body=b"x" * (1 << 20))
    async with (
        house(tmp_path, tls=known.tls(), rules=named) as door,
        await door.connect(tls=known.client(known.own)) as stream,
    ):
        await stream.send_all(large)
        assert code(await answer(stream)) == "invalid_json"
        await stream.send_all(request("/openapi.json", HOST))
        assert len(await answer(stream)) > 10_000
        # A link to the page has a name for which there may be a certificate.
        opened = await door.ask(request("/session/codes", HOST, method="POST"))
        assert f'"https://plugins.example:{door.tcp}/#code='.encode() in opened


@pytest.mark.trio
async def test_renewed_files_are_read_with_the_configuration(tmp_path: Path) -> None:
    known = Authorities(tmp_path / "tls")
    said: list[str] = []
    reload = request("/reload", HOST, method="POST")
    async with house(tmp_path, said=said, tls=known.tls(), rules=NO_TOKEN) as door:
        old = known.client(known.own)
        new = known.client(known.foreign, server=known.foreign)
        assert (await try_to(door, old), await try_to(door, new)) == ("200", "CERTIFICATE_VERIFY_FAILED")
        known.write(known.foreign)
        os.chmod(known.key, 0o644)
        assert status(await door.ask(reload)) == 200
        assert "chmod 600" in said[-1] and "the certificate that was read before" in said[-1]
        assert await try_to(door, old) == "200"
        os.chmod(known.key, 0o600)
        assert status(await door.ask(reload)) == 200
        assert (await try_to(door, old), await try_to(door, new)) == ("CERTIFICATE_VERIFY_FAILED", "200")


def test_a_subject_is_one_caller() -> None:
    later = "Jan  1 00:00:00 2100 GMT"

    def named(*parts: tuple[str, str]) -> str:
        return certified_peer({"subject": tuple((each,) for each in parts), "notAfter": later}).subject

    assert named(("organizationName", "a"), ("commonName", "b")) == "O=a,CN=b"
    assert named(("organizationName", "a,CN=b")) == r"O=a\,CN\=b"
    assert named(("organizationName", "a\\"), ("commonName", "b")) == r"O=a\\,CN=b"
    assert named(("commonName", "x" * 253)) == "CN=" + "x" * 253
    several = certified_peer(
        {"subject": ((("organizationName", "a"), ("commonName", "b+")),), "notAfter": later}
    )
    assert several.subject == r"O=a+CN=b\+"
    wrong = [[], [("commonName", "x" * 254)], [("commonName", "a\0b")], [("commonName", "a\u202eb")]]
    for parts in wrong:
        with pytest.raises(ValueError, match="printable characters"):
            named(*parts)
    # A certificate that has expired since the connection was made.
    host = {"host": ["localhost"]}
    assert identify(DoorPeer(None, 0, "CN=x", math.inf), host, NO_TOKEN) == "cert:CN=x"
    with pytest.raises(Refused, match="has expired"):
        identify(DoorPeer(None, 0, "CN=x", time.time()), host, NO_TOKEN)


def test_files_and_options_are_refused_with_a_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    known = Authorities(tmp_path / "tls")
    token = tmp_path / "token"
    token.write_bytes(TOKEN)
    token.chmod(0o600)
    loose, empty, other, locked = (tmp_path / name for name in ("loose", "empty", "other", "locked"))
    loose.write_bytes(Path(known.key).read_bytes())
    loose.chmod(0o640)
    empty.write_bytes(b"")
    other.write_bytes(known.own.issue_cert("localhost").private_key_pem.bytes())
    locked.write_bytes(
        b"-----BEGIN ENCRYPTED PRIVATE KEY-----\n" + b"A" * 64 + b"\n-----END ENCRYPTED PRIVATE KEY-----\n"
    )
    for path in (empty, other, locked):
        path.chmod(0o600)
    writable = tmp_path / "writable"
    writable.write_bytes(Path(known.ca).read_bytes())
    writable.chmod(0o666)
    http = ("--http", "127.0.0.1:0")
    cert, key = ("--tls-cert", known.cert), ("--tls-key", known.key)
    rows: list[tuple[tuple[str, ...], str]] = [
        (http, "need a token or a certificate"),
        ((*http, *cert, *key), "need a token or a certificate"),
        ((*cert, *key, "--client-ca", known.ca), "add --http"),
        ((*http, *cert), "TLS needs both"),
        ((*http, *key), "TLS needs both"),
        ((*http, "--client-ca", known.ca), "TLS needs both"),
        ((*http, *cert, *key, "--client-ca", known.ca, "--token-file", str(token)), "leave out --token-file"),
        ((*http, *cert, "--tls-key", str(loose)), f"chmod 600 {loose}"),
        ((*http, *cert, "--tls-key", str(other)), "key values mismatch"),
        ((*http, *cert, "--tls-key", str(locked)), "key without a password"),
        ((*http, *cert, "--tls-key", str(tmp_path / "none")), "No such file"),
        ((*http, *cert, "--tls-key", str(tmp_path)), "not a regular file"),
        ((*http, "--tls-cert", str(empty), *key), "cannot be used"),
        ((*http, *cert, *key, "--client-ca", str(empty)), "certificates of authorities"),
        ((*http, *cert, *key, "--client-ca", str(writable)), "can be written by"),
        ((*http, *cert, *key, "--client-ca", ""), "is a variable unset?"),
    ]

    def check(words: tuple[str, ...], told: str) -> None:
        given = ["--config", str(tmp_path), "--socket", str(tmp_path / "run/serve.sock"), *words]
        assert serve.run(verb_parser("serve").parse_args(given)) == USAGE_ERROR
        said = capsys.readouterr().err
        assert told in said and said.count("\n") == 1

    check_rows(rows, check)
