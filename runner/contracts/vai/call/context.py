"""The context of an invocation: ids, deadline and credentials.

A key that does not apply is left out. It is never null.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

from runner.contracts.vai import CONTRACT, IDENTITIES
from runner.contracts.vai.cage import OptionsFault, scratch_dir
from runner.contracts.vai.declared import DeclaredExport, Kind
from runner.contracts.vai.terms import SECRETS
from runner.protocol.api_gateway import api_gateway_host
from runner.protocol.dialect import Call, CallRefused, Refusal, stray_context
from runner.protocol.secrets import MARK

# Why a call is refused before anything is started.
INVALID_BINDING = "binding.invalid"
SECRET_MISSING = "binding.secret_missing"
INACTIVE = "binding.inactive"
TOO_LARGE = "asset.payload_too_large"
INVALID_SCHEMA = "asset.invalid_schema"
INVALID_DELEGATION = "auth.invalid_delegation"

MOST_ID_CHARACTERS = 256
MOST_ATTEMPTS = 2**31 - 1
MOST_TOKEN_CHARACTERS = 16 * 1024
_LAST_SECOND = 253_402_300_799.0  # 9999-12-31T23:59:59Z: the last that RFC 3339 can write

# RFC 3339. Other spellings of ISO 8601 are not.
_TIME = re.compile(
    r"\d{4}-\d\d-\d\d[Tt]\d\d:\d\d:\d\d(\.\d{1,9})?([Zz]|[+-]\d\d:\d\d)\Z",
    re.ASCII,
)

# kind -> its own id in the request, and how one begins that the runner makes
_OWN_ID: Mapping[Kind, tuple[str, str]] = {
    "tool": ("tool_execution_id", "toolx_"),
    "hook": ("delivery_id", "del_"),
    "compactor": ("compaction_id", "cmp_"),
    "harness": ("execution_id", "exec_"),
}


class HiddenText(str):
    """A text that is sent and not shown: a traceback or a log has a mark in its place."""

    __slots__ = ()

    def __repr__(self) -> str:
        return repr(MARK)


def refused(code: str, message: str, data: Any = None) -> CallRefused:
    """A call that is not made. Such a call has failed, and repeating it does not help."""
    return CallRefused(Refusal(0, code, message, "failed", data))


def invalid_input(kind: Kind) -> str:
    """The code for an input that a kind of export does not take."""
    return f"{kind}.invalid_input"


def identify(call: Call, kind: Kind, options: Mapping[str, str], named: Mapping[str, str]) -> dict[str, Any]:
    """All ids of an invocation: by the call's context, by the options, by `named` (in its input), or made.
    Raises CallRefused."""
    code = invalid_input(kind)
    flags = {option.name: option.flag for option in CONTRACT.options if "call" in option.verbs}
    stray = stray_context(call._replace(kind=kind), CONTRACT.calls, flags)
    if stray:
        raise refused(code, stray)
    given = {key: value for key, value in call.context.items() if value is not None and key != "attempt"}
    asked = {key: options[key] for key in ("invocation_id", "delivery_id") if options.get(key)}
    given = {**named, **asked, **given}
    own, prefix = _OWN_ID[kind]
    if kind != "hook" and "delivery_id" in given:
        raise refused(code, f"--delivery-id is for hooks, and this export is a {kind}: leave it out")
    for key, value in given.items():
        if not is_id(value):
            limit = f"1 to {MOST_ID_CHARACTERS} printable characters"
            place = "it in --context" if key in call.context else f"--{key.replace('_', '-')}"
            raise refused(code, f"{key} is not a text of {limit}: correct {place}")
    given.setdefault("invocation_id", make_id("inv_"))
    try:
        scratch_dir(given["invocation_id"])
    except OptionsFault as fault:
        raise refused(code, f"{fault.message}; {fault.hint}") from None
    given.setdefault("trace_id", make_id("tr_"))
    given.setdefault(own, make_id(prefix))
    if kind == "hook":
        given["attempt"] = _attempt(call.context.get("attempt"))
    return given


def is_id(value: Any) -> bool:
    return isinstance(value, str) and 0 < len(value) <= MOST_ID_CHARACTERS and value.isprintable()


def is_attempt(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MOST_ATTEMPTS


def _attempt(value: Any) -> int:
    if value is None:
        return 1
    if not is_attempt(value):
        message = f"attempt is not an integer from 1 to {MOST_ATTEMPTS}: correct it in --context"
        raise refused(invalid_input("hook"), message)
    return int(value)


def describe(ids: Mapping[str, Any], export: DeclaredExport, deadline: float) -> dict[str, Any]:
    """The `context` of a request, without credentials. `deadline`: seconds since 1970."""
    context = {key: ids[key] for key in IDENTITIES if key in ids}
    context["deadline_at"] = timestamp(deadline)
    if export.permissions.filesystem == "scratch":
        context["scratch_dir"] = scratch_dir(ids["invocation_id"])
    if export.permissions.slots:
        context["secrets_dir"] = SECRETS
    return context


def make_id(prefix: str) -> str:
    return prefix + secrets.token_hex(12)


def timestamp(seconds: float) -> str:
    """RFC 3339 in UTC, with milliseconds."""
    moment = datetime.fromtimestamp(min(seconds, _LAST_SECOND), UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def is_timestamp(value: Any) -> bool:
    if not isinstance(value, str) or not _TIME.match(value):
        return False
    try:
        datetime.fromisoformat(value.upper().replace("Z", "+00:00")[:19])
    except ValueError:
        return False
    return True


# --- credentials -------------------------------------------------------------------------------------------


def make_api_gateway(base_url: Any, token: Any, scopes: Iterable[str]) -> dict[str, Any]:
    """The `gateway` of a context. Raises CallRefused, with a message that does not show the token."""
    try:
        api_gateway_host(base_url)
    except ValueError as error:
        raise refused(INVALID_DELEGATION, f"the gateway's base_url {error}: give --gateway-url URL") from None
    if not isinstance(token, str) or not token or not token.isprintable() or " " in token:
        message = "the gateway's token is empty, or has spaces or characters that are not printed"
        raise refused(INVALID_DELEGATION, f"{message}: check what --gateway-token names")
    if len(token) > MOST_TOKEN_CHARACTERS or not token.isascii():
        message = f"the gateway's token is not ASCII, or has more than {MOST_TOKEN_CHARACTERS} characters"
        raise refused(INVALID_DELEGATION, f"{message}: check what --gateway-token names")
    return {"base_url": base_url, "delegation_token": HiddenText(token), "scopes": list(scopes)}
