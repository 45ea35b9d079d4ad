"""JSON-RPC between two others: which answer belongs to which question, for who only listens.

Every line of a plugin's is one of three things: JSON with a fault that nobody may be handed, something that
is not the protocol and that hosts ignore (counted), or messages.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from runner import wire
from runner.dialect import Violation
from runner.jsonrpc import IDENTITY
from sandbox.value import NamedTuple

# Questions of the host's that are open. Of more, the oldest is forgotten, and its answer is a stray.
MOST_OPEN = 4096
# Of what is kept of each: who uses longer ids gets strays.
LONGEST = 256


class Asked(NamedTuple):
    """The plugin asks or tells its host something."""

    method: str
    params: Any
    is_question: bool


class Answered(NamedTuple):
    """The plugin answers a question of its host's."""

    method: str  # the question's
    result: Any
    error: Any  # None: there is none


Heard = Asked | Answered


class Overheard:
    def __init__(self) -> None:
        self._open: dict[tuple[type, Any], str] = {}
        self._strays: dict[str, int] = {}

    @property
    def strays(self) -> Mapping[str, int]:
        return self._strays

    def stray(self, kind: str) -> None:
        self._strays[kind] = self._strays.get(kind, 0) + 1

    def host(self, raw: bytes | None) -> list[Asked]:
        """What the host says, as far as it is for us to understand: its faults are its own."""
        if raw is None:
            return []
        value, cause, _ = wire.message(raw)
        said = value if isinstance(value, list) else [value]
        if cause is not None:
            return []
        return [asked for one in said if (asked := self._from_host(one)) is not None]

    def _from_host(self, message: Any) -> Asked | None:
        if not isinstance(message, dict) or not isinstance(method := message.get("method"), str):
            return None
        number = message.get("id")
        # Anything longer is no method we look for: kept short, as the host may ask without end.
        method = method[:LONGEST]
        if type(number) in (int, str) and len(str(number)) <= LONGEST:
            self._open.pop((type(number), number), None)
            self._open[type(number), number] = method
            if len(self._open) > MOST_OPEN:
                del self._open[next(iter(self._open))]
        return Asked(method, message.get("params"), "id" in message)

    def plugin(self, raw: bytes, *, batch: int = 0) -> list[Heard] | Violation:
        """`batch`: how many messages may come in one array; 0: there are no such arrays."""
        if not raw.strip():
            return []
        value, cause, detail = wire.message(raw, identity=IDENTITY)
        if cause == "bad_json":
            self.stray("not_json")
            return []
        if cause is not None:
            return Violation("malformed_response", f"a line that is not right: {detail}", cause)
        said = value if batch and isinstance(value, list) else [value]
        if len(said) > max(batch, 1):
            return Violation(
                "malformed_response", f"more than {batch} messages in one array", "batch_too_large"
            )
        return list(self._from_plugin(said))

    def _from_plugin(self, messages: list[Any]) -> Iterator[Heard]:
        for message in messages:
            method = message.get("method") if isinstance(message, dict) else None
            if isinstance(method, str) and method:
                yield Asked(method, message.get("params"), "id" in message)
            elif (
                isinstance(message, dict) and "id" in message and ("result" in message or "error" in message)
            ):
                number = message["id"]
                known = type(number) in (int, str)
                asked = self._open.pop((type(number), number), None) if known else None
                if asked is None:
                    self.stray("unasked")
                else:
                    yield Answered(asked, message.get("result"), message.get("error"))
            else:
                self.stray("not_rpc")
