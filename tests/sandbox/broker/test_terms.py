from __future__ import annotations

from typing import Any

import h11

from sandbox.broker.terms import BrokerTerms, HostTerms, Secret
from sandbox.network.credentials import BrokerPlan, Credential, HiddenValue
from tests.sandbox.broker.rig import HOST, PLACEHOLDER, VALUE
from tests.tables import one_case

PLAN = BrokerPlan((Credential("TOKEN", (f"{HOST}:443", "*.b.example:443", "localhost:8000")),))
TERMS = BrokerTerms(PLAN, [HiddenValue("TOKEN", PLACEHOLDER, VALUE)])


def read(pairs: list[tuple[str, str]]) -> Any:
    return h11.Response(status_code=200, headers=pairs).headers


@one_case(
    ("host", "port", "names"),
    [
        (HOST, 443, ["TOKEN"]),
        (HOST, 80, []),
        (f"x.{HOST}", 443, []),
        ("x.b.example", 443, ["TOKEN"]),
        ("b.example", 443, []),
        ("localhost", 8000, ["TOKEN"]),
        ("127.0.0.1", 8000, []),
    ],
)
def test_for_whom_a_value_is(host: str, port: int, names: list[str]) -> None:
    assert [each.name for each in TERMS.secrets(host, port)] == names


@one_case(
    ("host", "port", "secure", "count"),
    [(HOST, 8443, True, 1), (HOST, 8443, False, 0), (HOST, 80, False, 1), ("localhost", 8000, False, 1)],
)
def test_no_value_goes_in_clear_text_where_tls_is_spoken(
    host: str, port: int, secure: bool, count: int
) -> None:
    plan = BrokerPlan((Credential("TOKEN", (f"{HOST}:80,8443", "localhost:8000")),))
    terms = HostTerms(
        BrokerTerms(plan, [HiddenValue("TOKEN", PLACEHOLDER, VALUE)]), host, port, secure=secure
    )
    assert len(terms.secrets) == count


HEADERS = [
    ("Content-Length", "5"),
    ("Connection", "X-Own, content-length"),
    ("X-Own", "x"),
    ("Keep-Alive", "timeout=5"),
    ("Transfer-Encoding", "chunked"),
    ("X-Echo", VALUE.decode()),
]


def test_headers_of_an_answer() -> None:
    terms = HostTerms(TERMS, HOST, 443, secure=True)
    kept = [(b"Content-Length", b"5"), (b"X-Echo", PLACEHOLDER)]
    assert terms.answer_headers(read(HEADERS)) == kept
    assert terms.answer_headers(read(HEADERS), trailer=True) == kept[1:]
    switched = terms.answer_headers(read(HEADERS), upgrade=True)
    assert switched[-2:] == [(b"Connection", b"Upgrade"), (b"Upgrade", b"websocket")]
    other = HostTerms(TERMS, "other.example", 443, secure=True)
    assert other.answer_headers(read(HEADERS))[1] == (b"X-Echo", VALUE)


@one_case(
    ("target", "shown"),
    [
        (b"/a?" + PLACEHOLDER, "/a"),
        (b"/" + PLACEHOLDER, "/xxx_" + "x" * (len(PLACEHOLDER) - 4)),
        (b"/" + VALUE + b"/b", "/xxx_" + "x" * (len(PLACEHOLDER) - 4) + "/b"),
        (b"/" + b"y" * 400, "/" + "y" * 299),
    ],
)
def test_a_path_for_people(target: bytes, shown: str) -> None:
    assert HostTerms(TERMS, HOST, 443, secure=True).show_path(target) == shown


def test_nothing_shows_a_value() -> None:
    terms = HostTerms(TERMS, HOST, 443, secure=True)
    assert isinstance(terms.secrets[0], Secret)
    for each in (TERMS, terms, terms.secrets, terms.echoes, HiddenValue("TOKEN", PLACEHOLDER, VALUE)):
        assert VALUE.decode() not in repr(each)
