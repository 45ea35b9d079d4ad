"""The tools a server has listed, until it announces a change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from runner.protocol.dialect import Event, Notice, Reply, Violation
from runner.protocol.memory import COMPILED, BoundedCache, Share
from sandbox.document.diagnostic import did_you_mean, printable, quoted

if TYPE_CHECKING:
    from runner.protocol.schema import Schema


class Catalogue:
    """Empty until the list is requested. From then on calls and results are checked against it."""

    def __init__(self, standing: Share) -> None:
        self._standing = standing
        self._weight = 0  # bytes taken of that share
        self._tools: dict[str, Any] | None = None  # name -> outputSchema
        self._schemas: BoundedCache[Schema] = BoundedCache(COMPILED)
        self._unusable: set[str] = set()  # tools whose schema cannot be used

    def remember(self, name: str, items: Sequence[Mapping[str, Any]], weight: int) -> None:
        """`weight`: bytes of memory that the list takes."""
        if name != "tools":
            return
        self._forget()
        if not self._standing.take(weight):
            return  # other lists fill the share: the tools stay unknown and unchecked
        self._weight = weight
        self._tools = {}
        for tool in items:
            self._tools.setdefault(tool["name"], tool.get("outputSchema"))

    def forget(self, name: str) -> None:
        if name == "tools":
            self._forget()

    def _forget(self) -> None:
        self._tools = None
        self._schemas.clear()
        self._unusable.clear()
        self._standing.give_back(self._weight)
        self._weight = 0

    def find_missing(self, token: int, name: str) -> Violation | None:
        """The violation of a call to a tool that a known list does not have."""
        if self._tools is None or name in self._tools:
            return None
        names = [printable(one) for one in list(self._tools)[:100]]
        hint = did_you_mean(name, names) or f"it has {', '.join(quoted(one) for one in names[:20]) or 'none'}"
        return Violation("tool_not_exposed", f"the server has no tool {quoted(name)}", "", hint, call=token)

    def check_result(self, reply: Reply, name: str) -> list[Event]:
        """Checks the result of a tool against its outputSchema."""
        document = (self._tools or {}).get(name)
        if document is None:
            return [reply]
        if "structuredContent" not in reply.value:
            return [_broken(reply, name, "it has an outputSchema and answers without structuredContent")]
        notices: list[Event] = []
        if name not in self._unusable and self._schemas.get(name) is None:
            notices = self._compile(name, document)
        schema = self._schemas.get(name)
        faults = schema.faults(reply.value["structuredContent"]) if schema is not None else ()
        return [*notices, _broken(reply, name, faults[0]) if faults else reply]

    def _compile(self, name: str, document: Any) -> list[Event]:
        """A schema that cannot be used is reported once. The tool's results are then not checked."""
        from runner.protocol.schema import Schema  # few tools have one
        from runner.protocol.schema_cost import SchemaFault

        try:
            schema = Schema(document)
            self._schemas.put(name, schema, schema.size)
        except SchemaFault as fault:
            self._unusable.add(name)
            return [Notice("schema", {"tool": name, "why": f"its results are not checked: {fault}"})]
        return []


def _broken(reply: Reply, name: str, why: str) -> Violation:
    message = f"the result of {quoted(name)} does not fit its outputSchema: {why}"
    hint = "this is a fault of the server: its answers have to fit its own schema"
    return Violation("malformed_response", message, "output_schema", hint, call=reply.call)
