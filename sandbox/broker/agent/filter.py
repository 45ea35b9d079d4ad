"""What the agent in a cage answers: pure, from bytes to a decision.

A plugin may list the given keys. It gets a signature by one of them only to log in at a given host, in a
session that this host has proved with a key that known_hosts has for it. All else is refused.

A connection is for one session: the first `session-bind` decides, and if that is refused the connection is of
no use any more. A client that goes on after a refusal is then not even told which keys there are.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from typing import NamedTuple

from sandbox.broker.agent import messages as wire
from sandbox.broker.agent.host_key import Verifier
from sandbox.broker.agent.messages import Fields, LogIn, Malformed, SignRequest

# Hashes of a key exchange: SHA-1 to SHA-512. A host also signs longer texts that others choose
# (hostkeys-prove-00@openssh.com); none of those can pass for a session.
_SESSION_BYTES = range(20, 64 + 1)

# The algorithms that a key of each kind may sign with, and the flags that ask for it. Not SHA-1.
_ALGORITHMS: Mapping[bytes, Mapping[bytes, int]] = {
    b"ssh-rsa": {b"rsa-sha2-256": 2, b"rsa-sha2-512": 4},
    **{
        kind: {kind: 0}
        for kind in (
            *(b"ssh-ed25519", b"ecdsa-sha2-nistp256", b"ecdsa-sha2-nistp384", b"ecdsa-sha2-nistp521"),
            *(b"sk-ssh-ed25519@openssh.com", b"sk-ecdsa-sha2-nistp256@openssh.com"),
        )
    },
}

# Reasons of refusals: the rest of a sentence that begins with the ssh agent. No word in them is the plugin's.
MALFORMED = "refused a message that is none of the protocol"
UNKNOWN = "refused a request that is neither for a list of keys nor for a signature"
EXTENSION = "refused an extension other than session-bind"
REFUSED_BEFORE = "refused a request on a connection whose session it had refused"
FORWARDED = "refused to serve another machine: agent forwarding"
SECOND_SESSION = "refused a second session on one connection"
UNKNOWN_HOST = "refused a session with a host whose key known_hosts does not have for the given hosts"
UNPROVED = "refused a session that its host has not signed"
UNBOUND = "refused a signature on a connection that names no session (session-bind, OpenSSH 8.9)"
OTHER_KEY = "refused a signature by a key that was not given"
NO_LOG_IN = "refused to sign something else than a log-in"
OTHER_SESSION = "refused to sign a log-in to another session than the connection's"
OTHER_HOST = "refused to sign a log-in to another host than the session's"
OTHER_ALGORITHM = "refused a signature by an algorithm that is not the key's, or by SHA-1"


class HostKey(NamedTuple):
    host: str  # as the person wrote it
    verify: Verifier


class AgentRules(NamedTuple):
    keys: Mapping[bytes, str]  # the given keys, with their fingerprints
    hosts: Mapping[bytes, HostKey]  # the keys of the given hosts


class AgentDecision(NamedTuple):
    answer: bytes = b""  # to the client
    # To the agent outside, whose signature has to be of this algorithm.
    request: bytes = b""
    algorithm: bytes = b""
    reason: str = ""  # of a refusal
    host: str = ""  # that this is about; '': none was named, or it is not known
    key: str = ""  # the fingerprint of the key that signs


class _AgentRefusal(Exception):
    pass


class _BoundSession(NamedTuple):
    id: bytes
    host_key: bytes
    host: str


class AgentConversation:
    """One connection to the agent."""

    def __init__(self, rules: AgentRules) -> None:
        self._rules = rules
        self._session: _BoundSession | None = None
        self._is_refused = False

    def decide(self, message: bytes) -> AgentDecision:
        """`message`: without its length."""
        try:
            return self._decide(Fields(message))
        except Malformed:
            return self._refuse(MALFORMED)
        except _AgentRefusal as refused:
            return self._refuse(str(refused))

    def _refuse(self, reason: str) -> AgentDecision:
        host = "" if self._session is None else self._session.host
        return AgentDecision(wire.message(wire.FAILURE), reason=reason, host=host)

    def _decide(self, fields: Fields) -> AgentDecision:
        if self._is_refused:
            raise _AgentRefusal(REFUSED_BEFORE)
        kind = fields.byte()
        if kind == wire.REQUEST_IDENTITIES:
            fields.end()
            return AgentDecision(wire.identities(self._rules.keys.items()))
        if kind == wire.SIGN_REQUEST:
            return self._sign(wire.read_sign_request(fields))
        if kind != wire.EXTENSION:
            raise _AgentRefusal(UNKNOWN)
        if fields.string() != wire.SESSION_BIND:
            raise _AgentRefusal(EXTENSION)
        self._is_refused = True  # until it is not
        self._bind(wire.read_session_bind(fields))
        self._is_refused = False
        return AgentDecision(wire.message(wire.SUCCESS))

    def _bind(self, bind: wire.SessionBind) -> None:
        if self._session is not None:
            raise _AgentRefusal(SECOND_SESSION)
        if bind.forwards:
            raise _AgentRefusal(FORWARDED)
        known = self._rules.hosts.get(bind.host_key)
        if known is None:
            raise _AgentRefusal(UNKNOWN_HOST)
        if len(bind.session) not in _SESSION_BYTES or not known.verify(bind.signature, bind.session):
            raise _AgentRefusal(UNPROVED)
        self._session = _BoundSession(bind.session, bind.host_key, known.host)

    def _sign(self, asked: SignRequest) -> AgentDecision:
        if self._session is None:
            raise _AgentRefusal(UNBOUND)
        fingerprint = self._rules.keys.get(asked.key)
        if fingerprint is None:
            raise _AgentRefusal(OTHER_KEY)
        try:
            log_in = wire.read_log_in(asked.data)
        except Malformed:
            raise _AgentRefusal(NO_LOG_IN) from None
        self._judge(asked, log_in, self._session)
        request = wire.message(
            wire.SIGN_REQUEST, wire.string(asked.key), wire.string(asked.data), wire.LENGTH.pack(asked.flags)
        )
        return AgentDecision(
            request=request, algorithm=log_in.algorithm, host=self._session.host, key=fingerprint
        )

    def _judge(self, asked: SignRequest, log_in: LogIn, session: _BoundSession) -> None:
        if log_in.session != session.id:
            raise _AgentRefusal(OTHER_SESSION)
        if log_in.host_key not in (b"", session.host_key):
            raise _AgentRefusal(OTHER_HOST)
        if log_in.key != asked.key:
            raise _AgentRefusal(OTHER_KEY)
        algorithms = _ALGORITHMS.get(Fields(asked.key).string(), {})
        if algorithms.get(log_in.algorithm) != asked.flags:
            raise _AgentRefusal(OTHER_ALGORITHM)


def can_sign(key: bytes) -> bool:
    """Whether it is a key of a kind that is served. A certificate is none."""
    try:
        return Fields(key).string() in _ALGORITHMS
    except Malformed:
        return False


def fingerprint(key: bytes) -> str:
    """As `ssh-add -l` writes it."""
    return "SHA256:" + base64.b64encode(hashlib.sha256(key).digest()).decode().rstrip("=")
