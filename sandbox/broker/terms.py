"""HostTerms: what holds for the requests to one host and port, and for the answers. Pure: a request becomes
the one that is sent, or it is refused.

A request is written anew from what was read. So the server never gets a line that only it would read in
another way.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import h11

from sandbox.broker.echo import NOTHING, Replacements, blanked, escape
from sandbox.broker.judge import find_rule, is_for, normal_path, rules_of
from sandbox.broker.placeholder import same_shape
from sandbox.network.credentials import BrokerPlan, HiddenValue
from sandbox.network.hosts import Host, parse_host
from sandbox.network.rules import LOCAL_ADDRESSES, LOCALHOST, NEVER_ALLOWED, parse_authority, parse_rule

_METHOD = re.compile(r"[A-Z][A-Z-]{0,31}\Z", re.ASCII)
_ABSOLUTE = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://(?P<authority>[^/?#]*)(?P<path>[^#]*)\Z")
_MOST_SHOWN = 300  # characters of a path in a line about a request
_MOST_LISTED = 8  # rules in a reason

_FRAMING = frozenset((b"content-length", b"transfer-encoding", b"host"))
_OF_THE_CONNECTION = frozenset(
    (
        *(b"connection", b"keep-alive", b"proxy-connection", b"proxy-authorization", b"proxy-authenticate"),
        *(b"te", b"trailer", b"upgrade", b"http2-settings"),
        # We say ourselves that the body may come. Some servers that answer at once take the body for the next
        # request, which nobody would have judged.
        b"expect",
    )
)
# A server that hears on these does something else than the line says that was judged.
_OTHER_REQUEST = frozenset(
    (
        *(b"x-http-method-override", b"x-http-method", b"x-method-override", b"x-method"),
        *(b"x-original-method", b"x-forwarded-method", b"x-envoy-original-method"),
        *(b"x-original-url", b"x-original-uri", b"x-original-path", b"x-envoy-original-path"),
        *(b"x-rewrite-url", b"x-rewrite-uri", b"x-rewrite-path", b"x-request-uri", b"x-proxy-url"),
        *(b"x-forwarded-url", b"x-forwarded-uri", b"x-forwarded-path", b"x-forwarded-prefix"),
        *(b"forwarded", b"x-forwarded-host", b"x-original-host", b"x-host"),
        b"destination",  # of COPY and MOVE
    )
)
_FOLDED = re.compile(rb"[^a-z0-9]")
# They make an answer that cannot be searched for the value: compressed, or in pieces.
_MAKE_UNREADABLE = frozenset(
    (b"accept-encoding", b"range", b"if-range", b"a-im", b"sec-websocket-extensions")
)
_WEBSOCKET = b"websocket"

Headers = list[tuple[bytes, bytes]]
GivenHeaders = Any  # of h11, which does not export the type: names in lower case, and raw_items()


class RequestRefused(Exception):
    """A request is not passed on. The text is the rest of a sentence that begins with the host."""

    def __init__(self, reason: str, advice: str = "", status: int = 403, verdict: str = "refused") -> None:
        super().__init__(reason)
        self.verdict = verdict
        self.advice = advice  # a sentence for the author of the plugin or of its policy
        self.status = status


class Secret(NamedTuple):
    """A credential that is for a host."""

    name: str
    placeholder: bytes
    value: bytes
    where: tuple[str, ...]

    def __repr__(self) -> str:
        return f"<secret {self.name}>"


class Outgoing(NamedTuple):
    """A request as it is sent."""

    method: bytes
    target: bytes
    headers: Headers
    rule: str
    credentials: tuple[str, ...]  # the names of those that were put in
    upgrades: bool


class BrokerTerms:
    """What holds for all hosts. Raises ValueError for values that cannot be replaced safely."""

    def __init__(self, plan: BrokerPlan, hidden: Sequence[HiddenValue]) -> None:
        self.requests = tuple(map(parse_rule, plan.requests))
        self.hosts = tuple(map(parse_rule, plan.hosts))
        self._values = {each.name: each for each in hidden}
        if {each.name for each in plan.credentials} != self._values.keys():
            raise ValueError("the hidden values are not those of the plan")
        for each in hidden:
            check_value(each)
        self._credentials = [(each, tuple(map(parse_rule, each.hosts))) for each in plan.credentials]
        self._authorities = [(tuple(map(parse_rule, each.hosts)), each.files) for each in plan.authorities]
        every = [rule for _, rules in self._credentials for rule in rules]
        if any(rule.kind == "any" for rule in self.hosts) or any(rule.methods is not None for rule in every):
            raise ValueError("a credential is for hosts that are named")
        if any(rule.methods is None for rule in self.requests):
            raise ValueError("a rule about requests has no methods")
        # In a path, the value and its placeholder are nobody's business.
        self.shown = blanked(text for each in hidden for text in (each.value, each.placeholder))

    def secrets(self, host: str, port: int) -> tuple[Secret, ...]:
        return tuple(
            Secret(each.name, self._values[each.name].placeholder, self._values[each.name].value, each.where)
            for each, rules in self._credentials
            if any(is_for(rule, host, port) for rule in rules)
        )

    def authorities(self, host: str, port: int) -> tuple[str, ...]:
        """Files of the roots that this server may have beside the system's."""
        for rules, files in self._authorities:
            if any(is_for(rule, host, port) for rule in rules):
                return files
        return ()


_HTTP_PORT = 80
_VALUE = re.compile(rb"[\x21-\x7e\x80-\xff](?:[\x20-\x7e\x80-\xff]*[\x21-\x7e\x80-\xff])?\Z")
FEWEST_VALUE_BYTES = 8


def check_value(hidden: HiddenValue) -> None:
    """Raises ValueError. The text has the name alone."""
    if len(hidden.value) < FEWEST_VALUE_BYTES:
        raise ValueError(f"the value of {hidden.name} has fewer than {FEWEST_VALUE_BYTES} bytes")
    if not _VALUE.match(hidden.value):
        raise ValueError(f"the value of {hidden.name} has a character that no header has")
    if hidden.value == hidden.placeholder or not same_shape(hidden.value, hidden.placeholder):
        raise ValueError(f"the placeholder of {hidden.name} has another shape than its value")


class HostTerms:
    def __init__(self, terms: BrokerTerms, host: str, port: int, *, secure: bool) -> None:
        self.host, self.port, self.secure = host, port, secure
        self._rules = rules_of(terms.requests, host, port)
        self._shown = terms.shown
        # A certificate for *.example.com is for one label below it.
        places = {rule.host for rule in terms.hosts if rule.kind == "below"}
        self.is_certified = host.partition(".")[2] in places or any(
            rule.host == host for rule in terms.hosts if rule.kind != "below"
        )
        # The plugin chooses whether it speaks TLS. Where servers expect it, no value goes in clear text.
        readable = secure or host == LOCALHOST or port == _HTTP_PORT
        self.secrets = terms.secrets(host, port) if readable else ()
        self.authorities = terms.authorities(host, port)
        self.echoes = (
            Replacements((each.value, each.placeholder) for each in self.secrets) if self.secrets else NOTHING
        )

    # --- requests ----------------------------------------------------------------------------------

    def show_path(self, target: bytes) -> str:
        """The path for people, without the query."""
        path = target.partition(b"?")[0]
        return self._shown.replace(path).decode("ascii", "replace")[:_MOST_SHOWN]

    def is_named(self, text: str) -> bool:
        """Whether a name in a request is that of the host."""
        try:
            # Other names are not on the wire, and to read one Python would load a module.
            return text.isascii() and self._is_this(parse_host(text))
        except ValueError:
            return False

    def _is_this(self, host: Host) -> bool:
        return host.text == self.host or (self.host == LOCALHOST and host.text in LOCAL_ADDRESSES)

    def judge(self, request: h11.Request) -> Outgoing:
        """Raises RequestRefused."""
        method, target = request.method.decode("ascii"), request.target.decode("ascii")
        if not _METHOD.match(method) or method in NEVER_ALLOWED:
            raise RequestRefused(f"is asked with the method {method[:32]!a}, which is never passed on")
        if request.http_version != b"1.1":
            raise RequestRefused(
                "is asked with HTTP/1.0, in which an answer that was cut looks whole", status=505
            )
        target = self._own_target(method, target)
        self._check_host(request)
        _check_names(request.headers)
        rule = self._find_rule(method, target, request)
        upgrades = self._upgrades(request)
        headers, names = self._headers(request, upgrades=upgrades)
        path, mark, query = target.encode().partition(b"?")
        for secret in self.secrets:
            if "query" in secret.where and (put := _put_into_query(query, secret)) != query:
                query, names = put, {**names, secret.name: None}
        return Outgoing(request.method, path + mark + query, headers, rule, tuple(names), upgrades)

    def _own_target(self, method: str, target: str) -> str:
        """The target with the path in front."""
        if target.startswith("/") or (target == "*" and method == "OPTIONS"):
            own = target
        elif (found := _ABSOLUTE.match(target)) is None or found["scheme"].lower() != self._scheme:
            raise RequestRefused("is asked for something that is no path")
        else:
            self._check_authority(found["authority"])
            own = found["path"] if found["path"].startswith("/") else f"/{found['path']}"
        if "#" in own:
            raise RequestRefused("is asked for a path with a number sign, which programs read in two ways")
        return own

    @property
    def _scheme(self) -> str:
        return "https" if self.secure else "http"

    def _check_host(self, request: h11.Request) -> None:
        # h11 refuses a request without the header, or with two of them.
        self._check_authority(dict(request.headers).get(b"host", b"").decode("latin-1"))

    def _check_authority(self, text: str) -> None:
        try:
            if not text.isascii():
                raise ValueError  # as in is_named()
            host, port = parse_authority(text, 443 if self.secure else 80)
        except ValueError:
            raise RequestRefused("is asked for another host in its headers: that is no name") from None
        if not self._is_this(host) or port != self.port:
            raise RequestRefused(
                f"is asked for {f'{host}:{port}'!a} in the headers, and that is another place", status=421
            )

    def _find_rule(self, method: str, target: str, request: h11.Request) -> str:
        if not self._rules:
            return ""
        for name, _ in request.headers:
            if fold(name) in _OTHER_REQUEST:
                raise RequestRefused(
                    f"is asked with the header {name.decode()}, which may stand for another request"
                )
        path = target
        if any(rule.path for rule in self._rules):
            try:
                path = normal_path(target)
            except ValueError as error:
                raise RequestRefused(
                    f"is asked for a path that {error}; the rules about requests need a plain one"
                ) from None
        rule = find_rule(self._rules, method, self.host, self.port, path)
        if rule is None:
            listed = "; ".join(map(str, self._rules[:_MOST_LISTED]))
            shown = self.show_path(path.encode())
            raise RequestRefused(
                f"is asked for {method} {shown}, and no rule about requests allows that (rules: {listed})",
                f"To allow it, add a rule: --net '{method} {self.host}:{self.port}{shown}'.",
            )
        return str(rule)

    def _upgrades(self, request: h11.Request) -> bool:
        asked = [value.lower() for name, value in request.headers if name == b"upgrade"]
        if not asked or asked == [b"h2c"]:
            return False  # an offer that a server may leave out, as we do
        if asked != [_WEBSOCKET]:
            raise RequestRefused("is asked to change to another protocol than websocket")
        return b"upgrade" in nominated(request.headers)

    def _headers(self, request: h11.Request, *, upgrades: bool) -> tuple[Headers, dict[str, None]]:
        dropped = _OF_THE_CONNECTION | (nominated(request.headers) - _FRAMING)
        if self.secrets:
            dropped |= _MAKE_UNREADABLE
        names: dict[str, None] = {}
        headers: Headers = []
        for raw, value in request.headers.raw_items():
            name = raw.lower()
            if name in dropped or fold(name) in dropped:
                continue
            if name not in _FRAMING:
                for secret in self.secrets:
                    put = _put_into_header(name, value, secret) if "header" in secret.where else value
                    if put != value:
                        value, names[secret.name] = put, None
            headers.append((raw, value))
        if self.secrets:
            headers.append((b"Accept-Encoding", b"identity"))
        if upgrades:
            headers += [(b"Connection", b"Upgrade"), (b"Upgrade", _WEBSOCKET)]
        return headers, names

    # --- answers -----------------------------------------------------------------------------------

    def answer_headers(
        self, headers: GivenHeaders, *, upgrade: bool = False, trailer: bool = False
    ) -> Headers:
        """Those that are passed on."""
        dropped = (_OF_THE_CONNECTION | nominated(headers) | {b"transfer-encoding"}) - {b"content-length"}
        if trailer:
            dropped |= _FRAMING
        kept = [(name, value) for name, value in headers.raw_items() if name.lower() not in dropped]
        if upgrade:
            kept += [(b"Connection", b"Upgrade"), (b"Upgrade", _WEBSOCKET)]
        return self.echoes.replace_in(kept)

    def unreadable(self, headers: GivenHeaders) -> str:
        """Why an answer cannot be searched for the value, as the rest of a sentence that begins with the
        host; "" if it can."""
        if not self.secrets:
            return ""
        for name, value in headers:
            if name == b"content-encoding" and value.strip().lower() not in (b"", b"identity"):
                return "answers with a compressed body, in which its credential could not be found"
            if name == b"sec-websocket-extensions":
                return "answers with an extension of websocket, in which its credential could not be found"
        return ""


def fold(name: bytes) -> bytes:
    """A header's name as servers read it that make a variable of it, as CGI and WSGI do: X_Method and
    X-Method are one. `name`: in lower case."""
    return _FOLDED.sub(b"-", name)


def _check_names(headers: Iterable[tuple[bytes, bytes]]) -> None:
    """Raises RequestRefused for a header that only some servers take for one about the message's end."""
    for name, _ in headers:
        if name not in _FRAMING and fold(name) in _FRAMING:
            raise RequestRefused(f"is asked with the header {name.decode()}, which servers read in two ways")


def nominated(headers: Iterable[tuple[bytes, bytes]]) -> frozenset[bytes]:
    """The headers that are about the connection, by the header Connection."""
    return frozenset(
        word.strip().lower() for name, value in headers if name == b"connection" for word in value.split(b",")
    )


def _put_into_header(name: bytes, value: bytes, secret: Secret) -> bytes:
    scheme, _, given = value.partition(b" ")
    if name == b"authorization" and scheme.lower() == b"basic":
        try:
            plain = base64.b64decode(given.strip(), validate=True)
        except (binascii.Error, ValueError):
            plain = b""
        if secret.placeholder in plain:
            put = plain.replace(secret.placeholder, secret.value)
            return scheme + b" " + base64.b64encode(put)
    return value.replace(secret.placeholder, secret.value)


def _put_into_query(query: bytes, secret: Secret) -> bytes:
    value = escape(secret.value)
    for spelling in dict.fromkeys((secret.placeholder, escape(secret.placeholder))):
        query = query.replace(spelling, value)
    return query
