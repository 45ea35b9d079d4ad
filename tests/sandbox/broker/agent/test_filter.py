"""What the agent in a cage answers: a conversation is a list of messages, and the last answer counts."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from sandbox.broker.agent import filter as rules
from sandbox.broker.agent.filter import AgentConversation, AgentDecision, AgentRules, HostKey, fingerprint
from sandbox.broker.agent.host_key import load_verifier
from sandbox.broker.agent.messages import (
    EXTENSION,
    FAILURE,
    IDENTITIES_ANSWER,
    LENGTH,
    REQUEST_IDENTITIES,
    SUCCESS,
    Fields,
    message,
    string,
)
from tests.sandbox.broker.agent.keys import ed25519_key, log_in, rsa_key, session_bind, sign_request
from tests.tables import one_case

HOST, SECOND, OTHER = ed25519_key(), ed25519_key(), ed25519_key()  # the last is not given
OWN, RSA, NOT_GIVEN = ed25519_key().blob, rsa_key().blob, ed25519_key().blob
SESSION, ANOTHER = bytes(range(32)), bytes(range(1, 33))
GIVEN = AgentRules(
    {OWN: fingerprint(OWN), RSA: fingerprint(RSA)},
    {
        HOST.blob: HostKey("git.example.com", load_verifier(HOST.blob)),
        SECOND.blob: HostKey("two.example.com", load_verifier(SECOND.blob)),
    },
)
BIND = session_bind(HOST, SESSION)
LIST = bytes((REQUEST_IDENTITIES,))
LOG_IN = sign_request(OWN, log_in(SESSION, OWN))


def last(messages: Sequence[bytes]) -> AgentDecision:
    conversation = AgentConversation(GIVEN)
    return [conversation.decide(each) for each in messages][-1]


def signed(**changes: object) -> bytes:
    return sign_request(OWN, log_in(SESSION, OWN, **changes))  # type: ignore[arg-type]


@one_case(
    ("data", "key", "flags", "algorithm"),
    [
        (log_in(SESSION, OWN), OWN, 0, b"ssh-ed25519"),
        (log_in(SESSION, OWN, host_key=HOST.blob), OWN, 0, b"ssh-ed25519"),
        (log_in(SESSION, RSA, algorithm=b"rsa-sha2-256"), RSA, 2, b"rsa-sha2-256"),
        (log_in(SESSION, RSA, algorithm=b"rsa-sha2-512"), RSA, 4, b"rsa-sha2-512"),
    ],
)
def test_a_log_in_at_a_given_host_is_asked_for_outside(
    data: bytes, key: bytes, flags: int, algorithm: bytes
) -> None:
    asked = sign_request(key, data, flags)
    assert last([BIND, asked]) == AgentDecision(
        request=LENGTH.pack(len(asked)) + asked,
        algorithm=algorithm,
        host="git.example.com",
        key=fingerprint(key),
    )


def test_only_the_given_keys_are_listed() -> None:
    for talk in ([LIST], [BIND, LIST]):
        answer = Fields(Fields(last(talk).answer).string())
        assert answer.byte() == IDENTITIES_ANSWER and answer.number() == 2
        listed = [(answer.string(), answer.string()) for _ in range(2)]
        answer.end()
        # The person's own comments may name accounts and machines.
        assert listed == [(key, fingerprint(key).encode()) for key in (OWN, RSA)]


def test_a_session_with_a_given_host_is_accepted() -> None:
    for bind in (
        BIND,
        session_bind(SECOND, SESSION),
        session_bind(HOST, b"s" * 20),
        session_bind(HOST, b"s" * 64),
    ):
        assert last([bind]) == AgentDecision(message(SUCCESS))


UNSIGNED = b"\0\0\0\x0bssh-ed25519" + string(bytes(64))


@one_case(
    ("talk", "reason"),
    [
        # No session, or not the one.
        ([LOG_IN], rules.UNBOUND),
        ([LIST, LOG_IN], rules.UNBOUND),
        ([session_bind(OTHER, SESSION)], rules.UNKNOWN_HOST),
        ([session_bind(OTHER, SESSION), LOG_IN], rules.REFUSED_BEFORE),
        ([session_bind(OTHER, SESSION), BIND], rules.REFUSED_BEFORE),
        ([session_bind(OTHER, SESSION), LIST], rules.REFUSED_BEFORE),
        ([session_bind(HOST, SESSION, UNSIGNED)], rules.UNPROVED),
        ([session_bind(HOST, SESSION, HOST.sign(ANOTHER))], rules.UNPROVED),
        ([session_bind(HOST, SESSION, OTHER.sign(SESSION))], rules.UNPROVED),
        ([session_bind(HOST, SESSION, SECOND.sign(SESSION))], rules.UNPROVED),
        ([session_bind(HOST, SESSION, HOST.sign(SESSION) + b"\0")], rules.UNPROVED),
        ([session_bind(HOST, SESSION, b"")], rules.UNPROVED),
        ([session_bind(HOST, SESSION, HOST.sign(ANOTHER)), BIND, LOG_IN], rules.REFUSED_BEFORE),
        ([session_bind(HOST, b"")], rules.UNPROVED),
        ([session_bind(HOST, b"s" * 19)], rules.UNPROVED),
        ([session_bind(HOST, b"s" * 65)], rules.UNPROVED),
        # A second session, also the same again.
        ([BIND, BIND], rules.SECOND_SESSION),
        ([BIND, session_bind(SECOND, ANOTHER)], rules.SECOND_SESSION),
        ([BIND, session_bind(SECOND, ANOTHER), LOG_IN], rules.REFUSED_BEFORE),
        # A forwarded agent.
        ([session_bind(HOST, SESSION, forwards=b"\1")], rules.FORWARDED),
        ([session_bind(HOST, SESSION, forwards=b"\2")], rules.FORWARDED),
        ([session_bind(HOST, SESSION, forwards=b"\1"), LOG_IN], rules.REFUSED_BEFORE),
        ([session_bind(HOST, SESSION, forwards=b"\1"), BIND], rules.REFUSED_BEFORE),
        ([BIND, session_bind(HOST, ANOTHER, forwards=b"\1")], rules.SECOND_SESSION),
        # Another key: as the one that signs, and as the one that logs in.
        ([BIND, sign_request(NOT_GIVEN, log_in(SESSION, NOT_GIVEN))], rules.OTHER_KEY),
        ([BIND, sign_request(NOT_GIVEN, log_in(SESSION, OWN))], rules.OTHER_KEY),
        ([BIND, sign_request(OWN, log_in(SESSION, NOT_GIVEN))], rules.OTHER_KEY),
        ([BIND, sign_request(OWN, log_in(SESSION, RSA))], rules.OTHER_KEY),
        ([BIND, sign_request(b"", log_in(SESSION, b""))], rules.OTHER_KEY),
        # Another session or host in what is signed.
        ([BIND, sign_request(OWN, log_in(ANOTHER, OWN))], rules.OTHER_SESSION),
        ([BIND, sign_request(OWN, log_in(b"", OWN))], rules.OTHER_SESSION),
        ([BIND, signed(host_key=SECOND.blob)], rules.OTHER_HOST),
        ([BIND, signed(host_key=OTHER.blob)], rules.OTHER_HOST),
        # Something else than a log-in.
        ([BIND, signed(kind=51)], rules.NO_LOG_IN),
        ([BIND, signed(service=b"ssh-userauth")], rules.NO_LOG_IN),
        ([BIND, signed(method=b"hostbased")], rules.NO_LOG_IN),
        ([BIND, signed(method=b"publickey-hostbound-v00@openssh.com")], rules.NO_LOG_IN),
        ([BIND, signed(host_key=b"")], rules.NO_LOG_IN),
        ([BIND, signed(has_signature=b"\0")], rules.NO_LOG_IN),
        ([BIND, signed(has_signature=b"\2")], rules.NO_LOG_IN),
        ([BIND, signed(rest=b"\0")], rules.NO_LOG_IN),
        ([BIND, signed(rest=string(HOST.blob))], rules.NO_LOG_IN),
        ([BIND, signed(host_key=HOST.blob, rest=b"\0")], rules.NO_LOG_IN),
        ([BIND, sign_request(OWN, log_in(SESSION, OWN)[:-1])], rules.NO_LOG_IN),
        ([BIND, sign_request(OWN, b"")], rules.NO_LOG_IN),
        ([BIND, sign_request(OWN, b"SSHSIG" + string(b"git") + string(b""))], rules.NO_LOG_IN),
        # Another algorithm: SHA-1, one of another kind of key, one that the flags do not mean.
        ([BIND, sign_request(RSA, log_in(SESSION, RSA, algorithm=b"ssh-rsa"))], rules.OTHER_ALGORITHM),
        ([BIND, sign_request(RSA, log_in(SESSION, RSA, algorithm=b"rsa-sha2-256"))], rules.OTHER_ALGORITHM),
        (
            [BIND, sign_request(RSA, log_in(SESSION, RSA, algorithm=b"rsa-sha2-256"), 4)],
            rules.OTHER_ALGORITHM,
        ),
        (
            [BIND, sign_request(RSA, log_in(SESSION, RSA, algorithm=b"rsa-sha2-512"), 6)],
            rules.OTHER_ALGORITHM,
        ),
        ([BIND, sign_request(RSA, log_in(SESSION, RSA, algorithm=b"ssh-ed25519"), 2)], rules.OTHER_ALGORITHM),
        ([BIND, signed(algorithm=b"rsa-sha2-256")], rules.OTHER_ALGORITHM),
        ([BIND, sign_request(OWN, log_in(SESSION, OWN), 1)], rules.OTHER_ALGORITHM),
        ([BIND, sign_request(OWN, log_in(SESSION, OWN), 2)], rules.OTHER_ALGORITHM),
        # Other requests: those of version 1, all that change the agent, and numbers that are none.
        *(
            ([BIND, bytes((kind,)) + string(b"x")], rules.UNKNOWN)
            for kind in range(256)
            if kind not in (11, 13, 27)
        ),
        ([BIND, bytes((EXTENSION,)) + string(b"query")], rules.EXTENSION),
        ([BIND, bytes((EXTENSION,)) + string(b"restrict-destination-v00@openssh.com")], rules.EXTENSION),
        ([BIND, bytes((EXTENSION,)) + string(b"session-bind@openssh.co")], rules.EXTENSION),
        # Too short, or too long.
        ([b""], rules.MALFORMED),
        ([LIST + b"\0"], rules.MALFORMED),
        ([bytes((EXTENSION,))], rules.MALFORMED),
        ([BIND[:-1]], rules.MALFORMED),
        ([BIND + b"\0"], rules.MALFORMED),
        ([BIND[:-1], BIND], rules.REFUSED_BEFORE),
        ([BIND, LOG_IN[:-1]], rules.MALFORMED),
        ([BIND, LOG_IN + b"\0"], rules.MALFORMED),
        ([bytes((EXTENSION,)) + b"\xff\xff\xff\xff"], rules.MALFORMED),
    ],
)
def test_all_else_is_refused(talk: list[bytes], reason: str) -> None:
    decision = last(talk)
    assert (decision.answer, decision.request, decision.reason) == (message(FAILURE), b"", reason)


def test_a_refused_signature_does_not_end_the_session() -> None:
    """ssh asks for the signature of the next key on the same connection."""
    assert last([BIND, sign_request(NOT_GIVEN, b""), LOG_IN]).request


def test_a_refusal_names_the_host_of_the_session() -> None:
    assert last([session_bind(SECOND, SESSION), sign_request(NOT_GIVEN, b"")]).host == "two.example.com"


@pytest.mark.parametrize("cut", range(len(BIND)))
def test_no_part_of_a_message_is_a_message(cut: int) -> None:
    assert last([BIND[:cut]]).answer == message(FAILURE)
