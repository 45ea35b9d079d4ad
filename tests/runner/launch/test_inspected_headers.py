"""An inspection of a contract whose frames have a header."""

from __future__ import annotations

import os
from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.protocol.dialect import Violation
from runner.protocol.framing import HeaderFraming
from runner.protocol.header_frames import HeaderRules, header_frame, read_signed_digits
from sandbox.limits.meter import VIOLATION
from tests.runner.launch.test_inspection import PIPE, between, ended, got

BODY_LIMIT = 16 << 20
RULES = HeaderRules(8192, BODY_LIMIT, read_length=read_signed_digits, last_counts=True)
ODD_HEADER = b"content-length :\t+0002\r\nContent-Length: 4\r\n\r\n"


class HeaderInspector:
    """Refuses one word."""

    framing = HeaderFraming(RULES)
    handshake_seconds = 5.0
    handshake_is_raisable = False

    def __init__(self) -> None:
        self.heard: list[bytes | None] = []
        self.handshaken = False
        self.awaiting = False
        self.strays: Mapping[str, int] = {}

    def host_frame(self, raw: bytes | None) -> None:
        self.heard.append(raw)
        self.awaiting = raw == b"hello"

    def plugin_frame(self, raw: bytes) -> Violation | None:
        if raw == b"evil":
            return Violation("malformed_response", "an evil word", "evil")
        self.handshaken, self.awaiting = True, False
        return None


BODIES = st.lists(st.binary(max_size=40) | st.sampled_from([b"", b"\r\n", header_frame(b"evil")]), max_size=8)


@settings(max_examples=40, deadline=None)
@given(bodies=BODIES, data=st.data())
def test_any_split_arrives_as_it_was_sent(bodies: list[bytes], data: st.DataObject) -> None:
    stream = b"".join(map(header_frame, bodies)) + ODD_HEADER + b"good"
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    pieces = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    inspector = HeaderInspector()
    with between(inspector) as both:
        for piece in pieces:
            os.write(both.plugin_out, piece)
            os.write(both.host_in, piece)
            assert both.turn() is None
        both.shut("host_in")
        both.turn()
        assert got(both.plugin_in) == stream and ended(both.plugin_in)
        # Of two lengths the host gets the one that counts.
        to_host = stream.replace(ODD_HEADER, b"Content-Length: 4\r\n\r\n")
        assert got(both.host_out) == to_host
        assert inspector.heard == [*bodies, b"good"]
        both.shut("plugin_out")
        both.turn()
        both.finish()
        assert both.inspection.breach is None
        document = both.inspection.document()
        lost = len(stream) - len(to_host)
        assert document["to_host"] == {"frames": len(bodies) + 1, "bytes": len(to_host), "withheld": lost}


@pytest.mark.parametrize("cut", [1, 20, 24, 26, 40])
def test_the_host_gets_what_came_before_and_not_the_breach(cut: int) -> None:
    first = header_frame(b"good")
    stream = first + header_frame(b"evil") + header_frame(b"good")
    with between(HeaderInspector()) as both:
        os.write(both.plugin_out, stream[:cut])
        assert both.turn() is None
        os.write(both.plugin_out, stream[cut:])
        assert both.turn() == VIOLATION
        both.finish()
        assert got(both.host_out) == first
        assert both.inspection.breach is not None and both.inspection.breach.violation.cause == "evil"


@pytest.mark.parametrize(
    ("stream", "cause"),
    [
        (b"Content-Length: 16777217\r\n\r\n", "frame_too_large"),
        (b"Content-Length: 4\n\ngood", "bad_header"),
        (b"Content-Type: x\r\n", "bad_header"),
        (b"x" * 8193, "frame_too_large"),
        (b"loading...\n", "bad_header"),
    ],
)
def test_a_fault_is_found_before_the_frame_is_whole(stream: bytes, cause: str) -> None:
    with between(HeaderInspector()) as both:
        os.write(both.plugin_out, header_frame(b"good") + stream)
        assert both.turn() == VIOLATION
        breach = both.inspection.breach
        assert breach is not None and breach.violation.code == "malformed_response"
        assert breach.violation.cause == cause
        assert got(both.host_out) == header_frame(b"good")


def test_half_a_frame_is_withheld_until_it_is_whole() -> None:
    body = b"x" * (8 * PIPE)
    with between(HeaderInspector()) as both:
        stream = header_frame(body)
        for start in range(0, len(stream) - 1, PIPE):
            os.write(both.plugin_out, stream[start : min(start + PIPE, len(stream) - 1)])
            assert both.turn() is None and got(both.host_out) == b""
        os.write(both.plugin_out, stream[-1:])
        passed = b""
        while len(passed) < len(stream):
            both.turn()
            more = got(both.host_out)
            assert more
            passed += more
        assert passed == stream


def test_an_end_inside_a_frame_is_a_breach() -> None:
    with between(HeaderInspector()) as both:
        os.write(both.plugin_out, header_frame(b"good") + b"Content-Length: 9\r\n\r\nhal")
        assert both.turn() is None
        both.shut("plugin_out")
        assert both.turn() == VIOLATION
        assert both.inspection.breach is not None
        assert both.inspection.breach.violation.cause == "cut_short"
        both.finish()
        assert got(both.host_out) == header_frame(b"good")
        assert both.inspection.document()["to_host"]["withheld"] == len(b"Content-Length: 9\r\n\r\nhal")


def test_what_the_host_says_goes_on_at_once_and_at_any_length() -> None:
    inspector = HeaderInspector()
    with between(inspector) as both:
        os.write(both.host_in, b"Content-Le")
        both.turn()
        assert got(both.plugin_in) == b"Content-Le"
        os.write(both.host_in, b"ngth: %d\r\n\r\n" % (5 << 20))  # longer than we read
        both.turn()
        got(both.plugin_in)
        for _ in range((5 << 20) // PIPE):
            os.write(both.host_in, b"y" * PIPE)
            both.turn()
            assert got(both.plugin_in) == b"y" * PIPE
        os.write(both.host_in, header_frame(b"hi"))
        both.turn()
        assert got(both.plugin_in) == header_frame(b"hi")
        assert inspector.heard == [None, b"hi"]
        told = both.inspection.document()["to_plugin"]
        assert (told["frames"], told["unread"]) == (2, 1)


def test_the_clock_of_the_handshake_starts_when_the_plugin_has_the_question() -> None:
    with between(HeaderInspector()) as both:
        question = header_frame(b"hello")
        os.write(both.host_in, question[:-1])
        assert both.turn(100.0) is None
        os.write(both.host_in, question[-1:] + b"Content-")
        assert both.turn(200.0) is None  # the plugin has the question only now
        assert both.turn(204.0) is None
        assert both.turn(206.0) == VIOLATION
        assert both.inspection.breach is not None
        assert both.inspection.breach.violation.cause == "handshake"


def test_a_host_that_breaks_the_rules_is_not_our_business() -> None:
    inspector = HeaderInspector()
    with between(inspector) as both:
        os.write(both.host_in, b"Content-Length: 4\n\nhell" + header_frame(b"hi"))
        assert both.turn() is None
        assert got(both.plugin_in) == b"Content-Length: 4\n\nhell" + header_frame(b"hi")
        assert inspector.heard == [None]
