"""host/network/fetch: HTTPS requests to hosts that both the manifest and the policy allow."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from runner.contracts.ainb.host.params import denied, invalid
from runner.protocol.host_services import Fetched, HostError
from runner.protocol.jsonrpc import INTERNAL_ERROR
from sandbox.network.rules import HostRule, covers, parse_rule

CAPABILITY = "network"
PORT = 443
# Bytes of an answer's body: with its headers, as base64, it fits into a frame.
BODY_MOST_BYTES = 8 << 20

_SHOWN = 1000  # characters of a reason


def common_rules(listed: Sequence[str] | None, allowed: Sequence[str]) -> tuple[HostRule, ...]:
    """What a manifest and a policy both allow, on the port of HTTPS.

    `listed`: the manifest's exact names; None: it says `true`. `allowed`: the policy's patterns. An entry
    that is no rule allows nothing.
    """
    asked = [HostRule("any", "", ((PORT, PORT),))] if listed is None else list(_parse(listed, exact=True))
    return tuple(dict.fromkeys(_common(asked, list(_parse(allowed, exact=False)))))


def _parse(texts: Sequence[str], *, exact: bool) -> Iterator[HostRule]:
    for text in texts:
        try:
            rule = parse_rule(text, default_ports=(PORT,), ranges=not exact)
        except ValueError:
            continue
        if exact and rule.kind not in ("name", "address"):
            continue
        if any(first <= PORT <= last for first, last in rule.ports):
            yield rule._replace(ports=((PORT, PORT),))


def _common(asked: Sequence[HostRule], allowed: Sequence[HostRule]) -> Iterator[HostRule]:
    for one in asked:
        for other in allowed:
            if covers(other, one):
                yield one
            elif covers(one, other):
                yield other


class HttpsFetcher:
    def __init__(self, rules: Sequence[HostRule]) -> None:
        self.rules = tuple(rules)

    async def fetch(
        self, url: str, method: str, headers: Sequence[tuple[str, str]], body: bytes | None
    ) -> Fetched:
        # Few plugins fetch anything, and TLS takes a while to import.
        from runner.protocol.https.failure import FetchFailed
        from runner.protocol.https.fetch import fetch
        from runner.protocol.https.request import HttpsRequest

        request = HttpsRequest(url, method, tuple(headers), body)
        try:
            answer = await fetch(request, self.rules, most_bytes=BODY_MOST_BYTES)
        except FetchFailed as failed:
            reason = str(failed)[:_SHOWN]
            if failed.kind == "denied":
                raise denied(CAPABILITY, reason=reason) from None
            if failed.kind == "invalid":
                raise invalid(reason) from None
            raise HostError(INTERNAL_ERROR, f"fetch failed: {reason}", {"kind": failed.kind}) from None
        return Fetched(answer.status, answer.headers, answer.body)
