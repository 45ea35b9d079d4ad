"""What reaches a host of JSON-RPC in every contract: strictly one message, no answer before its question.

The host may be about to ask. It would take what it finds in its pipe as the answer to its question, which
nobody has judged.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from runner.protocol.dialect import Violation
from runner.protocol.rpc_reader import MOST_OPEN, Answered, RpcReader, Statement, Withheld
from tests.tables import check_rows

HELLO = "hello"
ASK = {"jsonrpc": "2.0", "id": 1, "method": HELLO}


def line(message: Any) -> bytes | None:
    return message if message is None or isinstance(message, bytes) else json.dumps(message).encode()


def answer(number: Any, **more: Any) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": number, **(more or {"result": {"name": "forged"}})}


def overhear(*asked: Any) -> RpcReader:
    """A reader after the host's messages."""
    reader = RpcReader(methods=frozenset((HELLO,)))
    for message in asked:
        reader.host(line(message))
    return reader


def hear(reader: RpcReader, message: Any, batch: int = 0) -> Any:
    """Why the line does not reach the host, or the messages in it that are known to mean something."""
    raw = line(message)
    assert raw is not None
    heard: list[Any] = []
    verdict = reader.plugin(raw, heard.append, batch=batch)
    if isinstance(verdict, Violation):
        return verdict.cause
    return verdict.kind if isinstance(verdict, Withheld) else [one for one in heard if one.method]


ODD: Mapping[str, tuple[Any, str]] = {
    "text": (b"server running", "not_json"),
    "half of a message": (b'{"jsonrpc":"2.0","method":"m"', "not_json"),
    "two messages": (b'{"method":"m"}{"method":"m"}', "not_json"),
    "two lines, for str.splitlines": ('{"method":"m"}\u2028{"method":"m"}'.encode(), "not_json"),
    "single quotes": (b"{'method':'m'}", "not_json"),
    "a comment": (b'{"method":"m"} // {}', "not_json"),
    "UTF-16": (json.dumps(ASK).encode("utf-16-le"), "not_json"),
    "a NUL at its end": (json.dumps(ASK).encode() + b"\0", "not_json"),
    "a number": (1, "not_rpc"),
    "an empty object": ({}, "not_rpc"),
    "a log": ({"level": "info", "id": 3}, "not_rpc"),
    "an array": ([ASK], "not_rpc"),
    "an empty array": ([], "not_rpc"),
    "the fields of a message": (["2.0", None, HELLO, {}], "not_rpc"),
    "keys in capital letters": ({"Method": HELLO, "PARAMS": {}}, "not_rpc"),
    "a key with a NUL": ({"method\0": HELLO}, "not_rpc"),
    "a method that is none": ({"jsonrpc": "2.0", "id": 1, "method": [HELLO]}, "not_rpc"),
    "no id": ({"jsonrpc": "2.0", "result": {}}, "not_rpc"),
    "a message of two spellings": ({**ASK, "Method": "m"}, "ambiguous"),
    "an empty method of two spellings": ({"method": "", "Id": 1}, "ambiguous"),
    "a question and an answer": ({**ASK, "result": {}}, "ambiguous"),
    "a result and an error": (answer(1, result={}, error={"code": 1}), "ambiguous"),
    "both to nobody": ({"result": {}, "error": {"code": 1}}, "not_rpc"),
    "a question and the answer null": ({**ASK, "id": 3, "result": None}, "ambiguous"),
    "a question and the error null": ({**ASK, "id": 1, "error": None}, "ambiguous"),
    **{
        f"a method spelled {method[:20]!r}": ({"method": method}, "ambiguous")
        for method in (
            *("Hello", "HELLO", " hello", "hel\0lo", "hello\r\n", "he\u200bllo", "hell\u00f6", "h\ufffdello"),
            *("hel lo", "m" * 1025),
        )
    },
    "NaN": (b'{"jsonrpc":"2.0","method":"m","params":NaN}', "bad_number"),
    "a message within a message, for lines that end at a carriage return": (
        b'{"method":"m","params":\r{"method":"n"}\r}',
        "ambiguous",
    ),
}


@pytest.mark.parametrize("settled", [False, True])
def test_what_is_not_strictly_one_message(settled: bool) -> None:
    def check(_: str, row: tuple[Any, str]) -> None:
        reader = overhear(ASK, {**ASK, "id": 2, "method": "m"})
        reader.settled = settled
        assert hear(reader, row[0]) == row[1]
        # The control: the same reader hears what is one.
        assert len(hear(reader, answer(1))) == 1

    check_rows(ODD, check)


@pytest.mark.parametrize("method", [HELLO, "Hello.World", "hello/", "log", "m" * 1024])
def test_a_method_that_every_host_reads_alike(method: str) -> None:
    assert hear(overhear(), {"method": method}) == [Statement(method, None, False)]


def test_arrays_where_the_contract_has_them() -> None:
    def verdict(*messages: Any) -> Any:
        reader = overhear({**ASK, "method": "m"})
        return hear(reader, list(messages), 3), dict(reader.strays)

    note = {"jsonrpc": "2.0", "method": "m"}
    assert verdict(answer(1), note)[0] == [
        Answered("m", {"name": "forged"}, None),
        Statement("m", None, False),
    ]
    assert verdict() == ("not_rpc", {"not_rpc": 1})
    assert verdict(note, 1, [note]) == ("not_rpc", {"not_rpc": 1})
    assert verdict(answer(1), answer(1)) == ("unasked", {"unasked": 1})
    # What ends a session ends it, wherever it is.
    assert verdict(1, {**note, "Method": "n"})[0] == "ambiguous"
    assert verdict(note, note, note, note)[0] == "batch_too_large"


@pytest.mark.parametrize(
    "said",
    [
        answer(1),
        answer("1"),
        answer(None),
        answer(1, result=None),
        answer(1, result={}, error=None),
        answer(1, result={}, error=""),
        answer(1, error=0),
        answer(1, error={}),
        {"id": [1], "result": {}},
        {"id": {"v": 1}, "error": {"code": -1}},
        answer(True),
        answer(1.0),
    ],
)
def test_an_answer_before_the_question(said: Any) -> None:
    assert hear(overhear(), said) == "unasked"
    # Asked by another number, the host still has that question ahead.
    reader = overhear({**ASK, "id": 7})
    assert hear(reader, said) == "unasked"
    # And after the handshake, too.
    assert len(hear(reader, answer(7))) == 1
    assert hear(reader, said) == "unasked"
    assert reader.strays == {"unasked": 2}


@pytest.mark.parametrize("said", [answer(1, error={"code": -1}), answer(None, error={"code": -32700})])
def test_an_error_is_no_answer_that_a_host_could_use(said: Any) -> None:
    reader = overhear()
    assert hear(reader, said) == []
    assert reader.strays == {"unasked": 1}
    assert hear(reader, answer(1)) == "unasked"
    assert reader.strays == {"unasked": 2}


def test_an_error_does_not_complete_the_handshake() -> None:
    reader = overhear(ASK)
    assert hear(reader, answer(1, error={"code": -1})) == [Answered(HELLO, None, {"code": -1})]
    assert hear(reader, answer(2)) == "unasked"


def test_another_answer_does_not_complete_the_handshake() -> None:
    reader = overhear({**ASK, "method": "other"})
    assert len(hear(reader, answer(1))) == 1
    assert hear(reader, answer(2)) == "unasked"


@pytest.mark.parametrize("number", ["1", " 1", "0x1", 1.0, True, [1], [["1"]]])
def test_an_id_that_some_hosts_take_for_theirs(number: Any) -> None:
    """Also where a request could not be read, and may have had this id."""
    reader = overhear(None, ASK)
    assert hear(reader, answer(number)) == "unasked"
    assert not reader.settled
    assert len(hear(reader, answer(1))) == 1
    assert hear(reader, answer(2)) == []  # the one that could not be read


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
    reader = overhear(asked)
    assert hear(reader, answer(number)) == []
    assert hear(reader, answer(number)) == "unasked"


def test_the_answer_to_a_question_that_was_forgotten() -> None:
    reader = overhear(*({**ASK, "id": number, "method": "m"} for number in range(1, MOST_OPEN + 2)))
    assert hear(reader, answer(1)) == []
    assert len(hear(reader, answer(2))) == 1
    assert hear(reader, answer(1)) == "unasked"


def test_blank_lines_and_notifications_of_the_host_ask_nothing() -> None:
    reader = overhear(b"", b"\r", {"jsonrpc": "2.0", "method": "m"}, answer(3))
    assert hear(reader, answer(1)) == "unasked"


def test_a_number_that_the_host_uses_twice_is_judged_twice() -> None:
    reader = overhear({**ASK, "method": "other"}, ASK)
    assert hear(reader, answer(1, error={"code": -1})) == [Answered(HELLO, None, {"code": -1})]
    assert hear(reader, answer(1)) == [Answered(HELLO, {"name": "forged"}, None)]
    assert hear(reader, answer(1)) == "unasked"


def test_an_error_of_no_text_is_none() -> None:
    """Some hosts take the result, so it is judged."""
    said = answer(1, result={"name": "forged"}, error="")
    assert hear(overhear(ASK), said) == [Answered(HELLO, {"name": "forged"}, None)]
