"""Answers that the host has not asked for, until the handshake is complete. In every contract it is the same.

The host may be about to ask. It would take what it finds in its pipe as the answer to its question, which
nobody has judged.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from runner.protocol.dialect import Violation
from runner.protocol.observer import MOST_OPEN, Answered, Observer, Withheld

HELLO = "hello"
ASK = {"jsonrpc": "2.0", "id": 1, "method": HELLO}


def line(message: Any) -> bytes | None:
    return message if message is None or isinstance(message, bytes) else json.dumps(message).encode()


def answer(number: Any, **more: Any) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": number, **(more or {"result": {"name": "forged"}})}


def overhear(*asked: Any) -> Observer:
    """An observer after the host's messages."""
    observer = Observer(methods=frozenset((HELLO,)))
    for message in asked:
        observer.host(line(message))
    return observer


def hear(observer: Observer, message: Any) -> Any:
    """Why it is withheld, or the answers among the messages."""
    raw = line(message)
    assert raw is not None
    heard = observer.plugin(raw)
    assert not isinstance(heard, Violation)
    if isinstance(heard, Withheld):
        return heard.kind
    return [one for one in heard if isinstance(one, Answered)]


@pytest.mark.parametrize(
    "said",
    [
        answer(1),
        answer("1"),
        answer(None),
        answer(1, result=None),
        answer(1, result={}, error=None),
        answer(1, result={}, error=""),
        answer(1, result={}, error=0),
        answer(1, result={}, error={"code": -1}),
        [answer(1)],
        {"id": [1], "result": {}},
        {"id": {"v": 1}, "result": {}},
    ],
)
def test_an_answer_before_the_question(said: Any) -> None:
    assert hear(overhear(), said) == "unasked"
    # Asked by another number, the host still has that question ahead.
    assert hear(overhear({**ASK, "id": 7}), said) == "unasked"
    # The control: after the handshake the same line passes, and counts as a stray.
    observer = overhear({**ASK, "id": 7})
    assert len(hear(observer, answer(7))) == 1
    assert hear(observer, said) == []
    assert observer.strays


@pytest.mark.parametrize("said", [answer(1, error={"code": -1}), answer(None, error={"code": -32700})])
def test_an_error_is_no_answer_that_a_host_could_use(said: Any) -> None:
    observer = overhear()
    assert hear(observer, said) == []
    assert observer.strays == {"unasked": 1}
    assert hear(observer, answer(1)) == "unasked"
    assert observer.strays == {"unasked": 2}


def test_odd_methods_and_ids_are_no_fault_of_ours() -> None:
    observer = overhear(ASK)
    assert len(hear(observer, answer(1))) == 1
    assert hear(observer, {"jsonrpc": "2.0", "method": []}) == []
    assert hear(observer, answer("0x" + "f" * 5000)) == []


def test_an_error_does_not_complete_the_handshake() -> None:
    observer = overhear(ASK)
    assert hear(observer, answer(1, error={"code": -1})) == [Answered(HELLO, None, {"code": -1})]
    assert hear(observer, answer(2)) == "unasked"


def test_another_answer_does_not_complete_the_handshake() -> None:
    observer = overhear({**ASK, "method": "other"})
    assert len(hear(observer, answer(1))) == 1
    assert hear(observer, answer(2)) == "unasked"


@pytest.mark.parametrize("number", ["1", 1.0, [1], [["1"]]])
def test_an_id_that_some_hosts_take_for_theirs_is_judged(number: Any) -> None:
    """It does not complete the handshake: other hosts still wait."""
    observer = overhear(ASK)
    assert hear(observer, answer(number)) == [Answered(HELLO, {"name": "forged"}, None)]
    assert not observer.settled
    assert hear(observer, answer(2)) == "unasked"


@pytest.mark.parametrize(
    "asked",
    [
        None,  # too long for us
        b'{"jsonrpc":"2.0","id":1,"method":"hello","params":[NaN]}',
        b'{"jsonrpc":"2.0","id":1,"method":"hello","params":' + b"[" * 200 + b"]" * 200 + b"}",
        {**ASK, "id": 1.5},
        {**ASK, "id": None},
        {**ASK, "id": "i" * 300},
    ],
)
def test_the_answer_to_a_question_that_we_could_not_read(asked: Any) -> None:
    """It passes, and so does no second one."""
    number = json.loads(asked)["id"] if isinstance(asked, bytes) else (asked or ASK)["id"]
    observer = overhear(asked)
    assert hear(observer, answer(number)) == []
    assert hear(observer, answer(number)) == "unasked"


def test_the_answer_to_a_question_that_was_forgotten() -> None:
    observer = overhear(*({**ASK, "id": number, "method": "m"} for number in range(1, MOST_OPEN + 2)))
    assert hear(observer, answer(1)) == []
    assert len(hear(observer, answer(2))) == 1
    assert hear(observer, answer(1)) == "unasked"


def test_blank_lines_and_notifications_of_the_host_ask_nothing() -> None:
    observer = overhear(b"", b"\r", {"jsonrpc": "2.0", "method": "m"}, answer(3))
    assert hear(observer, answer(1)) == "unasked"


def test_a_number_that_the_host_uses_twice_is_judged_twice() -> None:
    observer = overhear({**ASK, "method": "other"}, ASK)
    assert hear(observer, answer(1, error={"code": -1})) == [Answered(HELLO, None, {"code": -1})]
    assert hear(observer, answer(1)) == [Answered(HELLO, {"name": "forged"}, None)]
    assert hear(observer, answer(1)) == []
    assert observer.strays == {"unasked": 1}


def test_a_host_without_a_handshake() -> None:
    observer = overhear()
    observer.settled = True
    assert hear(observer, answer(1)) == []


def test_an_error_of_no_text_is_none() -> None:
    """Some hosts take the result, so it is judged."""
    said = answer(1, result={"name": "forged"}, error="")
    assert hear(overhear(ASK), said) == [Answered(HELLO, {"name": "forged"}, None)]
