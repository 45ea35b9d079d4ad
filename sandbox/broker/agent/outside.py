"""The connection to the person's own agent: one request is under way, and the others wait."""

from __future__ import annotations

import _socket as socket
from collections import deque
from collections.abc import Callable

from sandbox.broker.agent import messages as wire
from sandbox.broker.agent.filter import AgentDecision
from sandbox.broker.agent.messages import Malformed
from sandbox.gate.loop import BROKEN, READ, Loop

# Between two requests. The agent works and may ask the person, and a plugin does not decide how often.
_REST_SECONDS = 0.05

SIGNED = "signed a log-in"
UNSIGNED = "got no signature from your agent"
GONE = "has no connection to your agent any more"

_FAILURE = wire.message(wire.FAILURE)
# Takes a verdict, a reason, the host and the key.
Tell = Callable[[str, str, str, str], None]
Take = Callable[[bytes], None]


class Outside:
    def __init__(self, loop: Loop, connection: socket.socket, tell: Tell) -> None:
        self._loop = loop
        self._connection = connection
        self._tell = tell
        self._waiting: deque[tuple[AgentDecision, Take]] = deque()
        self._asked: tuple[AgentDecision, Take] | None = None
        self._rests = False
        self._received = b""
        self.is_open = True
        connection.setblocking(False)
        loop.watch(connection.fileno(), READ, self._on_event)

    def ask(self, decision: AgentDecision, take: Take) -> None:
        """Pass a request on, in its turn. `take`: called with the answer."""
        self._waiting.append((decision, take))
        self._ask_next()

    def withdraw(self, take: Take) -> None:
        """Forget what waits for this client, which has gone. What is under way cannot be taken back."""
        self._waiting = deque(each for each in self._waiting if each[1] != take)

    def _ask_next(self) -> None:
        if not self._waiting or self._asked is not None or self._rests:
            return
        self._asked = self._waiting.popleft()
        request = self._asked[0].request
        try:
            sent = self._connection.send(request)
        except OSError:
            sent = 0
        if sent < len(request):  # it fits into the socket's buffer, where nothing else is
            self._break()

    def _on_event(self, mask: int) -> None:
        room = wire.LENGTH.size + wire.MOST_MESSAGE_BYTES - len(self._received)
        try:
            received = self._connection.recv(room)
        except BlockingIOError:
            if not mask & BROKEN:
                return
            received = b""
        except OSError:
            received = b""
        self._received += received
        length = int.from_bytes(self._received[: wire.LENGTH.size])
        end = wire.LENGTH.size + length
        is_expected = self._asked is not None and len(self._received) <= end
        if not received or not is_expected or length > wire.MOST_MESSAGE_BYTES:
            self._break()
        elif len(self._received) == end:
            answer, self._received = self._received[wire.LENGTH.size :], b""
            self._finish(answer)

    def _finish(self, answer: bytes) -> None:
        assert self._asked is not None
        (decision, take), self._asked = self._asked, None
        self._rests = True
        self._loop.call_later(_REST_SECONDS, self._on_rested)
        try:
            is_signed = wire.read_signature(answer) == decision.algorithm
        except Malformed:
            is_signed = False
        if is_signed:
            self._tell("allowed", SIGNED, decision.host, decision.key)
        else:
            self._tell("failed", UNSIGNED, decision.host, decision.key)
        take(wire.string(answer) if is_signed else _FAILURE)

    def _on_rested(self) -> None:
        self._rests = False
        if self.is_open:
            self._ask_next()

    def _break(self) -> None:
        """End it. What comes from now on could be the answer to another request than the one under way."""
        self.is_open = False
        self._loop.retire(self._connection)
        failed = [*([self._asked] if self._asked else []), *self._waiting]
        self._asked = None
        self._waiting.clear()
        for decision, take in failed:
            self._tell("failed", GONE, decision.host, decision.key)
            take(_FAILURE)
