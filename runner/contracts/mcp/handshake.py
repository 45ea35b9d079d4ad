"""Finds out which era a server speaks: a modern request first, then the legacy one.

A modern server answers `server/discover`, and the conversation is modern from then on. A legacy server
answers with some error (-32601, -32602 and others occur) or not at all.

Sending both too early does no harm. A server that starts slowly finds both requests in its pipe and answers
both in order; one answer counts, and the other is dropped. So a DiscoverResult is accepted until a version
is agreed on, even after `initialize` was sent. A server that has answered in the modern era refuses
`initialize`.
"""

from __future__ import annotations

from typing import Any, Final, Literal

from runner.contracts.mcp import versions
from runner.contracts.mcp.versions import Era
from runner.protocol.dialect import Event, Identity, Ready, Send, Setting, Violation
from runner.protocol.frames import line
from runner.protocol.jsonrpc import Peer, RpcError, RpcResult
from sandbox.document.diagnostic import printable, quoted

# Time limit of the handshake. An interpreter that loads some hundred files from a cold disk starts slowly.
SECONDS: Final = 30.0
# After this time without an answer, a server counts as one that ignores unknown requests. Most servers start
# faster and are asked once. A longer time would delay every start of a server that ignores the request.
PATIENCE_SECONDS: Final = 3.0

UNSUPPORTED_VERSION: Final = -32022
MISSING_CAPABILITY: Final = -32021

DISCOVER: Final = "discover"
INITIALIZE: Final = "initialize"

# waiting: for the answer to initialize; server/discover may still be unanswered.
# last: initialize was refused; server/discover is still unanswered.
Stage = Literal["new", "probing", "waiting", "last", "over"]


def handshake_seconds(setting: Setting) -> float:
    """The limit of the grant or what the plugin declares, or else ours: the contract has none."""
    times = setting.limits.handshake, dict(setting.plugin.timeouts).get("handshake")
    return min((each for each in times if each is not None), default=SECONDS)


class Handshake:
    """From the first message to Ready, or to a Violation."""

    def __init__(self, setting: Setting, peer: Peer) -> None:
        self._setting = setting
        self._peer = peer
        self._stage: Stage = "new"
        self._probes = self._asked = 0
        self._refusal: Violation | None = None  # of `initialize`, kept while server/discover is unanswered
        self.era: Era | None = None

    @property
    def seconds(self) -> float:
        return handshake_seconds(self._setting)

    @property
    def patience(self) -> float | None:
        if self._stage not in ("probing", "last"):
            return None
        return min(PATIENCE_SECONDS, self.seconds / 3)

    def opening(self) -> list[Event]:
        if self._stage != "new":
            return []
        self._stage = "probing"
        return [self._discover()]

    def silence(self) -> list[Event]:
        if self._stage == "probing":
            return [self._initialize(versions.LEGACY[0])]
        if self._stage == "last":
            return self._failed()
        return []

    def feed(self, incoming: RpcResult | RpcError) -> list[Event]:
        """The answer to server/discover or to initialize."""
        if incoming.token == DISCOVER:
            return self._probed(incoming)
        if isinstance(incoming, RpcError):
            return self._refused(incoming)
        return self._initialized(incoming.value)

    # --- the probe ----------------------------------------------------------------------------------------

    def _probed(self, incoming: RpcResult | RpcError) -> list[Event]:
        if isinstance(incoming, RpcResult):
            identity = versions.discovered(self._setting.plugin.id, incoming.value)
            return self._not_modern() if identity is None else self._ready(identity, modern=True)
        if incoming.code == MISSING_CAPABILITY:
            return self._violate(
                Violation(
                    "handshake_failed",
                    f"the server needs a capability that the host does not offer: {_said(incoming)}",
                    "missing_capability",
                    "offer the service (roots, sampling or elicitation) and allow it in the policy",
                )
            )
        supported = _supported(incoming)
        if incoming.code == UNSUPPORTED_VERSION and supported is not None:
            if versions.common(versions.MODERN, supported) and self._probes < 2:
                return [self._discover()]
            if not versions.common((*versions.MODERN, *versions.LEGACY), supported):
                return self._no_common(supported)
        return self._not_modern()

    def _not_modern(self) -> list[Event]:
        if self._stage == "probing":
            return [self._initialize(versions.LEGACY[0])]
        return self._failed() if self._stage == "last" else []

    # --- initialize ---------------------------------------------------------------------------------------

    def _initialized(self, result: Any) -> list[Event]:
        identity = versions.initialized(self._setting.plugin.id, result)
        if isinstance(identity, str):
            return self._violate(bad_initialize_result(identity))
        if identity.protocol not in versions.LEGACY:
            return self._no_common([identity.protocol])
        done = Send(line(self._peer.notification("notifications/initialized")))
        return [done, *self._ready(identity, modern=False)]

    def _refused(self, error: RpcError) -> list[Event]:
        message = f"the server refused initialize: {_said(error)}"
        self._refusal = Violation("handshake_failed", message, f"initialize:{error.code}")
        self._stage = "last"
        if self._peer.waits_for(DISCOVER) is not None:
            return []  # a modern server may refuse it; wait for its answer to server/discover
        supported = _supported(error)
        if versions.common(versions.MODERN, supported) and self._probes < 2:
            return [self._discover()]
        older = versions.common(versions.LEGACY, supported)
        if older is not None and self._asked < 2:
            return [self._initialize(older)]
        return self._failed() if supported is None else self._no_common(supported)

    # --- both eras ----------------------------------------------------------------------------------------

    def _discover(self) -> Send:
        self._probes += 1
        meta = versions.envelope(versions.MODERN[0], self._setting.services)
        return Send(line(self._peer.request(DISCOVER, "server/discover", {"_meta": meta})))

    def _initialize(self, version: str) -> Send:
        self._stage = "waiting"
        self._asked += 1
        params = versions.initialize(version, self._setting.services)
        return Send(line(self._peer.request(INITIALIZE, "initialize", params)))

    def _ready(self, identity: Identity, *, modern: bool) -> list[Event]:
        self._end()
        self.era = Era(identity.protocol, modern)
        return [Ready(identity)]

    def _violate(self, violation: Violation) -> list[Event]:
        self._end()
        return [violation]

    def _failed(self) -> list[Event]:
        return self._violate(self._refusal or Violation("handshake_failed", "the server did not answer"))

    def _no_common(self, theirs: list[Any]) -> list[Event]:
        shown = ", ".join(quoted(version) for version in theirs[:8] if isinstance(version, str)) or "none"
        message = (
            f"the server speaks {shown}; the runner speaks {', '.join((*versions.MODERN, *versions.LEGACY))}"
        )
        hint = "use a version of the server that speaks one of these"
        return self._violate(Violation("protocol_version_mismatch", message, "", hint))

    def _end(self) -> None:
        """Forget both requests: an answer that still comes counts as late."""
        self._stage = "over"
        self._peer.forget(DISCOVER)
        self._peer.forget(INITIALIZE)


def bad_initialize_result(why: str) -> Violation:
    message = f"the answer to initialize breaks the protocol: {why}"
    return Violation("handshake_failed", message, "bad_initialize_result")


def _supported(error: RpcError) -> list[Any] | None:
    found = error.data.get("supported") if isinstance(error.data, dict) else None
    return found if isinstance(found, list) else None


def _said(error: RpcError) -> str:
    return f"{error.code} {printable(error.message[:200])}".strip()
