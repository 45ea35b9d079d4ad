"""traceparent and tracestate: what is passed on, and what is left out."""

from __future__ import annotations

from runner.protocol.trace import read_trace
from tests.tables import one_case

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
ID, SPAN = PARENT.split("-")[1:3]


@one_case(
    "parent",
    [
        PARENT + "0",
        PARENT + "\n",
        PARENT.upper(),
        PARENT[:-1],
        f"ff-{ID}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{ID}-{'0' * 16}-01",
        f"00-{ID}-{SPAN}-0\u0661",
        "",
        7,
        None,
        [PARENT],
    ],
)
def test_a_parent_that_is_none(parent: object) -> None:
    assert read_trace({"traceparent": parent, "tracestate": "a=b"}) == {}


@one_case(
    "state, passes",
    [
        ("congo=t61rcWkgMzE", True),
        ("rojo=00f067aa0ba902b7,congo=t61rcWkgMzE", True),
        ("a=b, tenant@system=c ,", True),
        ("a=" + "x" * 256, True),
        ("a=" + "x" * 257, False),
        (",".join(f"k{number}=1" for number in range(32)), True),
        (",".join(f"k{number}=1" for number in range(33)), False),
        (",".join(f"k{number}={'x' * 50}" for number in range(10)), False),  # more than 512 characters
        ("a=b,a=c", False),
        ("a=b=c", False),
        ("A=b", False),
        ("a=b\r\nX-Header: y", False),
        ("a=\u00e9", False),
        ("a", False),
        ("", False),
        (None, False),
        (["a=b"], False),
    ],
)
def test_a_state_passes_if_it_is_well_formed(state: object, passes: bool) -> None:
    more = {"tracestate": state} if passes else {}
    assert read_trace({"traceparent": PARENT, "tracestate": state, "baggage": "x=1"}) == {
        "traceparent": PARENT,
        **more,
    }
