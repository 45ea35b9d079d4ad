"""The operator's settings of the control plane: `runner serve --control FILE`.

    trust = "trusted-keys"              # keys whose packages become available, one a line
    review = "required"                 # default: "optional"; required: only packages that were approved
    registries = ["ghcr.io/acme"]       # from which packages may be imported; a folder or a whole host
    registry_ca = "ca.pem"              # certificates that are trusted in place of the system's
    registry_hosts = ["10.0.0.5:443"]   # where a registry may send the daemon to: tokens, private networks
    database = "control.db"             # default: beside the ledger
    store = "packages"                  # the folder of imported packages; default: beside the states

    [orgs.acme]
    tokens = ["@acme.token"]            # several while one is replaced; 32 characters or more
    secrets = {api_key = "@acme.key"}   # secret://acme/api_key; or env:NAME
    gateway_url = "https://api.example.com"               # of exports that act through the org's gateway
    gateway_token_command = ["/usr/local/bin/delegate"]   # makes a token for each call: delegation.py
    gateway_token_lifetime = "15m"      # the longest; default: until the call's deadline and grace are over

The file is read again when it changes, with all that it names. A new one with a fault is told and not used.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
from collections.abc import Mapping
from typing import Any, Literal

from runner.package.keys import TrustedKey, load_trusted
from runner.protocol.api_gateway import api_gateway_host
from runner.protocol.secrets import Secrets
from runner.serve.peer import read_token
from runner.serve.settings_file import SettingsFile, as_text
from sandbox.document.diagnostic import Diagnostic, DocumentError, did_you_mean, quoted
from sandbox.policy.load import trust_fault
from sandbox.spec import KeyPath
from sandbox.speed.value import NamedTuple
from sandbox.units import parse_limit

_KEYS = (
    *("trust", "review", "registries", "registry_ca", "registry_hosts"),
    *("database", "store", "orgs"),
)
_GATEWAY_KEYS = ("gateway_url", "gateway_token_command", "gateway_token_lifetime")
_ORG_KEYS = ("tokens", "secrets", *_GATEWAY_KEYS)
_MOST_ORGS, _MOST_TOKENS, _MOST_SECRETS, _MOST_REGISTRIES, _MOST_WORDS = 1000, 8, 256, 256, 64
_ORG = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")
_SECRET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,127}\Z")
_REGISTRY = re.compile(r"[a-z0-9][a-z0-9.-]*(:\d{1,5})?(/[a-z0-9][a-z0-9._/-]*)?\Z")

Review = Literal["optional", "required"]


class OrgApiGateway(NamedTuple):
    """What calls through an org's gateway need."""

    url: str
    token_command: tuple[str, ...]
    token_lifetime: float = 0.0  # seconds that a token may live, if its call takes less


class OrgSettings(NamedTuple):
    tokens: tuple[bytes, ...] = ()  # the SHA-256 of each: a traceback must not show one
    secrets: Secrets = Secrets()  # by name
    gateway: OrgApiGateway | None = None


class ControlSettings(NamedTuple):
    orgs: Mapping[str, OrgSettings] = {}
    trust: str = ""  # the path of the trust file, for messages
    trusted: Mapping[str, TrustedKey] = {}
    review: Review = "optional"
    registries: tuple[str, ...] = ()
    registry_ca: str = ""
    registry_hosts: tuple[str, ...] = ()
    database: str = ""  # empty: beside the ledger
    store: str = ""  # empty: beside the states of plugins
    watched: tuple[str, ...] = ()  # folders in which a change may mean other settings

    def org_of(self, token: bytes) -> str:
        """The org that a token belongs to, or ''. Every token is compared, whichever is right."""
        shown, found = hashlib.sha256(token).digest(), ""
        for name, org in self.orgs.items():
            for known in org.tokens:
                if hmac.compare_digest(shown, known):
                    found = name
        return found

    def secret_uris(self, org: str) -> frozenset[str]:
        """The references that bindings of an org may have: secret://ORG/NAME."""
        known = self.orgs.get(org)
        return frozenset() if known is None else frozenset(f"secret://{org}/{name}" for name in known.secrets)

    def secret(self, uri: str) -> str | bytes | None:
        """The value behind secret://ORG/NAME. None: there is no such secret."""
        org, _, name = uri.removeprefix("secret://").partition("/")
        known = self.orgs.get(org) if uri.startswith("secret://") else None
        value: str | bytes | None = None if known is None else known.secrets.get(name)
        return value

    def may_import(self, reference: str) -> bool:
        """Whether packages may be imported from REGISTRY/NAME, which is written without oci:// and digest."""
        return any(reference == each or reference.startswith(f"{each}/") for each in self.registries)


def read_control_settings(path: str, environ: Mapping[str, str]) -> ControlSettings:
    """Raises DocumentError with every fault of the file and of those that it names."""
    return _ControlReader(os.path.abspath(path), environ).read()


class _ControlReader(SettingsFile):
    def read(self) -> ControlSettings:
        data = self._document.data
        self._known((), data, _KEYS)
        review: Any = data.get("review", "optional")
        if review not in ("optional", "required"):
            self._fault(("review",), "settings_value", 'review is neither "optional" nor "required"')
        trust = self._named("trust")
        found = ControlSettings(
            self._orgs(),
            trust,
            self._trusted(trust),
            review,
            self._registries(),
            self._named("registry_ca"),
            self._texts(("registry_hosts",), self._document.data.get("registry_hosts", []), _MOST_REGISTRIES),
            self._named("database"),
            self._named("store"),
            tuple(self._watched),
        )
        if self._faults:
            raise DocumentError(*self._faults)
        return found

    def _known(self, keys: KeyPath, table: Mapping[str, object], known: tuple[str, ...]) -> None:
        for key in table:
            if key not in known:
                hint = did_you_mean(key, known) or f"there are {', '.join(known)}"
                self._fault(
                    (*keys, key), "settings_key", f"{quoted(key)} is not a key of these settings", hint
                )

    def _named(self, key: str) -> str:
        """The path that a key of the file gives, or ''."""
        value = self._document.data.get(key, "")
        if not isinstance(value, str) or "\0" in value or (key in self._document.data and not value):
            self._fault((key,), "settings_value", f"{key} is not the path of a file or folder")
            return ""
        return self._path(value) if value else ""

    def _trusted(self, path: str) -> Mapping[str, TrustedKey]:
        if not path:
            return {}
        self._watched[os.path.dirname(path)] = None
        try:
            return load_trusted(path)
        except DocumentError as error:
            self._faults += error.diagnostics
            return {}

    def _registries(self) -> tuple[str, ...]:
        given = self._texts(("registries",), self._document.data.get("registries", []), _MOST_REGISTRIES)
        for index, each in enumerate(given):
            if not _REGISTRY.match(each):
                message = f"{quoted(each)} is not a registry, or a folder of one"
                self._fault(("registries", index), "settings_value", message, "write ghcr.io/acme")
        return given

    def _texts(self, keys: KeyPath, given: object, most: int) -> tuple[str, ...]:
        if isinstance(given, list) and len(given) <= most and all(isinstance(each, str) for each in given):
            return tuple(given)
        self._fault(keys, "settings_type", f"{keys[-1]} is not a list of at most {most} texts")
        return ()

    def _orgs(self) -> dict[str, OrgSettings]:
        given = self._document.data.get("orgs", {})
        if not isinstance(given, dict) or len(given) > _MOST_ORGS:
            self._fault(("orgs",), "settings_type", f"orgs is not a table of at most {_MOST_ORGS} orgs")
            return {}
        found = {name: self._org(name, table) for name, table in given.items()}
        owners: dict[bytes, str] = {}
        for name, org in found.items():
            for token in org.tokens:
                if owners.setdefault(token, name) != name:
                    message = f"a token of {quoted(name)} is one of {quoted(owners[token])} too"
                    self._fault(("orgs", name, "tokens"), "settings_value", message, "make another one")
        return found

    def _org(self, name: str, table: object) -> OrgSettings:
        keys = ("orgs", name)
        if not _ORG.match(name):
            hint = "use up to 64 letters, digits and . _ -, and begin with a letter or a digit"
            self._fault(keys, "settings_value", f"{quoted(name)} cannot be the name of an org", hint)
        if not isinstance(table, dict):
            self._fault(keys, "settings_type", f"{quoted(name)} is no table; write [orgs.{name}]")
            return OrgSettings()
        self._known(keys, table, _ORG_KEYS)
        tokens = self._texts((*keys, "tokens"), table.get("tokens", []), _MOST_TOKENS)
        secrets = table.get("secrets", {})
        if not isinstance(secrets, dict) or len(secrets) > _MOST_SECRETS:
            message = f"secrets is not a table of at most {_MOST_SECRETS} secrets"
            self._fault((*keys, "secrets"), "settings_type", message)
            secrets = {}
        for each in secrets:
            if not _SECRET.match(each):
                message = f"{quoted(each)} cannot be the name of a secret"
                self._fault((*keys, "secrets", each), "settings_value", message)
        values = {each: self._secret((*keys, "secrets", each), source) for each, source in secrets.items()}
        digests = tuple(self._token((*keys, "tokens", index), each) for index, each in enumerate(tokens))
        found = Secrets({each: as_text(value) for each, value in values.items()})
        return OrgSettings(digests, found, self._api_gateway(keys, table))

    def _api_gateway(self, keys: KeyPath, table: Mapping[str, Any]) -> OrgApiGateway | None:
        given = [key for key in _GATEWAY_KEYS if key in table]
        if not given:
            return None
        for key in _GATEWAY_KEYS[:2]:
            if key not in table:
                self._fault((*keys, given[0]), "settings_value", f"{given[0]} is there without {key}")
                return None
        url, at = table["gateway_url"], (*keys, "gateway_token_command")
        try:
            api_gateway_host(url)
        except ValueError as error:
            self._fault((*keys, "gateway_url"), "settings_value", f"gateway_url {error}")
        command = self._texts(at, table["gateway_token_command"], _MOST_WORDS)
        if not command or not command[0].startswith("/") or not all(command) or "\0" in "".join(command):
            message = "gateway_token_command is not a program by its absolute path, and words for it"
            self._fault(at, "settings_value", message)
        elif (fault := trust_fault(command[0], "the program")) is not None:
            self._fault(at, "settings_untrusted", f"{command[0]} is not used: {fault[0]}", fault[1])
        elif not os.path.isfile(command[0]) or not os.access(command[0], os.X_OK):
            self._fault(at, "settings_file", f"{command[0]} is not a program that the daemon can start")
        lifetime = table.get("gateway_token_lifetime", 0)
        try:
            seconds = float(parse_limit("call", lifetime)) if lifetime else 0.0
        except ValueError as error:
            message = f"gateway_token_lifetime: {error}"
            self._fault((*keys, "gateway_token_lifetime"), "settings_value", message)
            seconds = 0.0
        return OrgApiGateway(str(url), command, seconds)

    def _token(self, keys: KeyPath, source: str) -> bytes:
        """The SHA-256 of a token. The source itself may be a token, by mistake."""
        if not source.startswith("@"):
            message = "a token is given by the name of its file"
            self._fault(keys, "settings_value", message, 'write "@FILE"; only its owner may read the file')
            return b""
        path = self._path(source[1:])
        self._watched[os.path.dirname(path)] = None
        try:
            return hashlib.sha256(read_token(path)).digest()
        except ValueError as error:
            shown = str(error) if os.path.lexists(path) else "there is no such file"
            self._fault(keys, "settings_file", shown)
            return b""


def told(error: DocumentError) -> str:
    """All faults as one text, for the operator."""
    return "\n".join(_line(each) for each in error.diagnostics)


def _line(fault: Diagnostic) -> str:
    return f"{fault.text()}; {fault.hint}" if fault.hint else fault.text()
