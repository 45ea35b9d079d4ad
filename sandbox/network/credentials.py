"""Credentials that a plugin uses and never has: the values that the plan, the launch and the broker share.

A placeholder stands in the plugin's variable. The broker (sandbox/broker) ends the TLS of connections to some
hosts, and puts the value in the placeholder's place, in requests to the hosts that the value is for.
"""

from __future__ import annotations

from sandbox.spec import Credential as Credential
from sandbox.spec import EnvRequest
from sandbox.spec import HostAuthorities as HostAuthorities
from sandbox.speed.typed import Sequence
from sandbox.speed.value import NamedTuple

_QUERY = "?query"

# Where systems have the authorities that programs trust: one file for all.
AUTHORITIES = (
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/pki/tls/cert.pem",
    "/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem",
    "/etc/ssl/ca-bundle.pem",
    "/etc/ssl/cert.pem",
)

# With the authorities that a launch makes of its own, if it has such credentials: in the cage.
BUNDLE = "/.authorities.pem"

# A secret that signs and does not travel: with a placeholder every signature would be wrong.
_SIGNS = """
    AWS_SECRET SECRET_ACCESS_KEY PRIVATE_KEY PRIVATEKEY SIGNING JWT_SECRET HMAC WEBHOOK_SECRET SERVICE_ACCOUNT
"""

# In names of variables whose values are most often secrets.
_SECRET = """
    TOKEN SECRET PASSW PASSPHRASE API_KEY APIKEY ACCESS_KEY ACCESSKEY PRIVATE_KEY PRIVATEKEY CREDENTIAL AUTH
    COOKIE SESSION DATABASE_URL DSN
"""
_SECRET_ENDS = ("_KEY", "_PAT")


class Hiding(NamedTuple):
    """What somebody writes to hide a credential: NAME, NAME@HOST or NAME@HOST?query."""

    name: str  # of a variable, or of a credential of the policy
    host: str = ""  # a rule; "": every host that the plugin may reach, or those of the policy's credential
    query: bool = False  # whether it is also replaced in the query of a request

    def __str__(self) -> str:
        return (
            f"{self.name}@{self.host}{_QUERY * self.query}" if self.host else self.name + _QUERY * self.query
        )


def hidden_name(text: str) -> str:
    return text.partition("@")[0].removesuffix(_QUERY)


def parse_hiding(text: str, *, default_ports: tuple[int, ...] = ()) -> Hiding:
    """Raises ValueError with the rest of a sentence that begins with the text."""
    rest = text.removesuffix(_QUERY)
    name, at, host = rest.partition("@")
    if not name or not all(each.isalnum() or each in "_-." for each in name) or not name.isascii():
        raise ValueError("has no name in front; write NAME@HOST, as in GITHUB_TOKEN@api.github.com")
    if at:
        from sandbox.network.rules import parse_rule

        rule = parse_rule(host, default_ports=default_ports)
        if rule.methods is not None:
            raise ValueError("has a rule about requests; write that for the network, and the host only here")
        if rule.kind == "any":
            raise ValueError("stands for every name; name the hosts that the value is for")
        host = str(rule)
    return Hiding(name, host, text.endswith(_QUERY))


HTTPS_PORTS = (443,)  # of a host without one


def read_hidings(words: Sequence[str], option: str) -> tuple[str, ...]:
    """Entries as an operator writes them, in their normal form. `option`: begins the message of the
    ValueError about a wrong one."""
    found: dict[str, None] = {}
    for word in words:
        try:
            found[str(parse_hiding(word, default_ports=HTTPS_PORTS))] = None
        except ValueError as error:
            raise ValueError(f"{option} {word}: it {error}") from None
    return tuple(found)


def looks_secret(name: str) -> bool:
    """Whether the value of a variable with this name is most often a secret."""
    upper = name.upper()
    return upper.endswith(_SECRET_ENDS) or any(word in upper for word in _SECRET.split())


def signs(name: str) -> bool:
    """Whether a secret with this name makes signatures."""
    return any(word in name.upper() for word in _SIGNS.split())


def written_values(requests: Sequence[EnvRequest]) -> dict[str, str]:
    """The variables that a manifest sets itself. One that stands for the host's of the same name does not
    count: ${TOKEN}, $TOKEN, ${env:TOKEN}."""
    return {
        each.name: each.value
        for each in requests
        if each.value is not None
        if each.value not in (f"${{{each.name}}}", f"${{env:{each.name}}}", f"${each.name}")
    }


class CertifiedHosts(NamedTuple):
    """What the certificate of a broker is for."""

    names: tuple[str, ...] = ()  # also *.example.com
    addresses: tuple[str, ...] = ()


class BrokerPlan(NamedTuple):
    """What the broker of one plugin does. Plain data, part of the plan. It has no value and no
    placeholder."""

    credentials: tuple[Credential, ...] = ()
    # Rules about requests, as rules.py writes them: "GET,HEAD api.github.com:443/repos/acme/**". A host that
    # has some gets no other requests.
    requests: tuple[str, ...] = ()
    authorities: tuple[HostAuthorities, ...] = ()
    certified: CertifiedHosts = CertifiedHosts()  # the same hosts as below, without their ports

    @property
    def hosts(self) -> tuple[str, ...]:
        """Rules of the connections that the broker reads. All others pass unread."""
        every = [host for credential in self.credentials for host in credential.hosts]
        return tuple(dict.fromkeys((*every, *self.requests)))


class HiddenValue(NamedTuple):
    """What a credential is in one launch."""

    name: str
    placeholder: bytes
    value: bytes

    def __repr__(self) -> str:
        return f"<hidden value of {self.name}>"
