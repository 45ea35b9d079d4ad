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
    hide = ["api_key@api.example.com"]  # used there, and never in the cage
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
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo, model_validator

from runner.package.keys import TrustedKey, load_trusted
from runner.protocol.api_gateway import api_gateway_host
from runner.protocol.secrets import Secrets
from runner.serve.peer import read_token
from runner.serve.settings_file import SettingsFile, as_text
from sandbox.document.diagnostic import Diagnostic, DocumentError, quoted
from sandbox.document.faults import Faults
from sandbox.document.model import Wording, WrongValue, check
from sandbox.document.operator_table import EXPECTED, Kind, OperatorTable, Texts
from sandbox.network.credentials import hidden_name, read_hidings
from sandbox.policy.load import trust_fault
from sandbox.units import parse_limit

_GATEWAY_KEYS = ("gateway_url", "gateway_token_command", "gateway_token_lifetime")
_MOST_ORGS, _MOST_TOKENS, _MOST_SECRETS, _MOST_REGISTRIES, _MOST_WORDS = 1000, 8, 256, 256, 64
_ORG = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")
_SECRET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,127}\Z")
_REGISTRY = re.compile(r"[a-z0-9][a-z0-9.-]*(:\d{1,5})?(/[a-z0-9][a-z0-9._/-]*)?\Z")
_WORDING = Wording(
    unknown="{key} is not a key of these settings",
    wrong_type="{name} is not {expected}",
    value_rule="settings_value",
    skip=2,
    expected=EXPECTED,
)

Review = Literal["optional", "required"]


class OrgApiGateway(NamedTuple):
    """What calls through an org's gateway need."""

    url: str
    token_command: tuple[str, ...]
    token_lifetime: float = 0.0  # seconds that a token may live, if its call takes less


class OrgSettings(NamedTuple):
    tokens: tuple[bytes, ...] = ()  # the SHA-256 of each: a traceback must not show one
    secrets: Secrets = Secrets()  # by name
    hide: tuple[str, ...] = ()  # NAME@HOST of secrets that plugins use and do not get
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


class _NamedFiles(NamedTuple):
    """What validators read from: the file with all that it names."""

    file: SettingsFile
    trusted: dict[str, TrustedKey]
    faults: list[Diagnostic]  # of the trust file


def _named(value: object, info: ValidationInfo) -> str:
    if not isinstance(value, str) or "\0" in value or not value:
        raise WrongValue("is not the path of a file or folder")
    return _files(info).file.path(value)


def _trust(path: str, info: ValidationInfo) -> str:
    files = _files(info)
    files.file.watch(path)
    try:
        files.trusted.update(load_trusted(path))
    except DocumentError as error:
        files.faults.extend(error.diagnostics)
    return path


def _files(info: ValidationInfo) -> _NamedFiles:
    assert isinstance(info.context, _NamedFiles)
    return info.context


def _registry(name: str) -> str:
    if not _REGISTRY.match(name):
        message = f"{quoted(name)} is not a registry, or a folder of one"
        raise WrongValue(message, hint="write ghcr.io/acme", whole=True)
    return name


def _review(value: object) -> object:
    if value not in ("optional", "required"):
        raise WrongValue('is neither "optional" nor "required"')
    return value


def _token(source: object, info: ValidationInfo) -> bytes:
    """The SHA-256 of a token. The source itself may be a token, by mistake."""
    if not isinstance(source, str) or not source.startswith("@"):
        message = "a token is given by the name of its file"
        raise WrongValue(message, hint='write "@FILE"; only its owner may read the file', whole=True)
    file = _files(info).file
    path = file.path(source[1:])
    file.watch(path)
    try:
        return hashlib.sha256(read_token(path)).digest()
    except ValueError as error:
        shown = str(error) if os.path.lexists(path) else "there is no such file"
        raise WrongValue(shown, "settings_file", whole=True) from None


def _secret(source: object, info: ValidationInfo) -> str | bytes:
    return as_text(_files(info).file.secret(source))


def _secret_name(name: str) -> str:
    if not _SECRET.match(name):
        raise WrongValue(f"{quoted(name)} cannot be the name of a secret", whole=True)
    return name


def _org_name(name: str) -> str:
    if not _ORG.match(name):
        hint = "use up to 64 letters, digits and . _ -, and begin with a letter or a digit"
        raise WrongValue(f"{quoted(name)} cannot be the name of an org", hint=hint, whole=True)
    return name


def _url(url: str) -> str:
    api_gateway_host(url)
    return url


def _command(command: tuple[str, ...]) -> tuple[str, ...]:
    if not command or not command[0].startswith("/") or not all(command):
        raise WrongValue("is not a program by its absolute path, and words for it")
    if (fault := trust_fault(command[0], "the program")) is not None:
        message = f"{command[0]} is not used: {fault[0]}"
        raise WrongValue(message, "settings_untrusted", fault[1], whole=True)
    if not os.path.isfile(command[0]) or not os.access(command[0], os.X_OK):
        message = f"{command[0]} is not a program that the daemon can start"
        raise WrongValue(message, "settings_file", whole=True)
    return command


def _hidings(words: tuple[str, ...]) -> tuple[str, ...]:
    try:
        return read_hidings(words, "hide:")
    except ValueError as error:
        raise WrongValue(str(error), whole=True) from None


def _lifetime(value: object) -> float:
    try:
        return float(parse_limit("call", value)) if value else 0.0
    except ValueError as error:
        raise WrongValue(f"gateway_token_lifetime: {error}", whole=True) from None


_Named = Annotated[str, BeforeValidator(_named)]


class _OrgTable(OperatorTable):
    tokens: Annotated[
        tuple[Annotated[bytes, BeforeValidator(_token)], ...], Field(strict=False, max_length=_MOST_TOKENS)
    ] = ()
    secrets: Annotated[
        Mapping[Annotated[str, AfterValidator(_secret_name)], Annotated[Any, BeforeValidator(_secret)]],
        Field(max_length=_MOST_SECRETS),
        AfterValidator(Secrets),  # which shows none of them
    ] = Field(default_factory=Secrets)
    hide: Annotated[Texts, AfterValidator(_hidings)] = ()
    gateway_url: Annotated[str, AfterValidator(_url)] = ""
    gateway_token_command: Annotated[Texts, Field(max_length=_MOST_WORDS), AfterValidator(_command)] = ()
    gateway_token_lifetime: Annotated[float, Kind(_lifetime, {})] = 0.0

    @model_validator(mode="after")
    def _url_and_command(self) -> Self:
        given = [key for key in _GATEWAY_KEYS if key in self.model_fields_set]
        for key in _GATEWAY_KEYS[:2]:
            if given and key not in given:
                raise WrongValue(f"{given[0]} is there without {key}", keys=(given[0],), whole=True)
        return self

    @model_validator(mode="after")
    def _hides_its_own(self) -> Self:
        for each in map(hidden_name, self.hide):
            if each not in self.secrets:
                raise WrongValue(f"{quoted(each)} is none of the secrets", keys=("hide",), whole=True)
        return self

    def settings(self) -> OrgSettings:
        gateway = OrgApiGateway(self.gateway_url, self.gateway_token_command, self.gateway_token_lifetime)
        given = gateway if self.gateway_url else None
        return OrgSettings(self.tokens, Secrets(self.secrets), self.hide, given)


def _distinct(orgs: dict[str, _OrgTable]) -> dict[str, _OrgTable]:
    owners: dict[bytes, str] = {}
    for name, org in orgs.items():
        for token in org.tokens:
            if owners.setdefault(token, name) != name:
                message = f"a token of {quoted(name)} is one of {quoted(owners[token])} too"
                raise WrongValue(message, hint="make another one", keys=(name, "tokens"), whole=True)
    return orgs


class _ControlFile(OperatorTable):
    trust: Annotated[_Named, AfterValidator(_trust)] = ""
    review: Annotated[Review, BeforeValidator(_review)] = "optional"
    registries: Annotated[
        tuple[Annotated[str, AfterValidator(_registry)], ...],
        Field(strict=False, max_length=_MOST_REGISTRIES),
    ] = ()
    registry_ca: _Named = ""
    registry_hosts: Annotated[tuple[str, ...], Field(strict=False, max_length=_MOST_REGISTRIES)] = ()
    database: _Named = ""
    store: _Named = ""
    orgs: Annotated[
        dict[Annotated[str, AfterValidator(_org_name)], _OrgTable],
        Field(max_length=_MOST_ORGS),
        AfterValidator(_distinct),
    ] = Field(default_factory=dict)


def read_control_settings(path: str, environ: Mapping[str, str]) -> ControlSettings:
    """Raises DocumentError with every fault of the file and of those that it names."""
    files = _NamedFiles(SettingsFile(os.path.abspath(path), environ), {}, [])
    document = files.file.document
    faults = Faults(document)
    found: _ControlFile | None = check(
        faults, _ControlFile, document.data, (), lambda *_: "settings_key", _WORDING, files
    )
    if found is None or files.faults:
        raise DocumentError(*faults.diagnostics(), *files.faults)
    return ControlSettings(
        **{**dict(found), "orgs": {name: each.settings() for name, each in found.orgs.items()}},
        trusted=files.trusted,
        watched=tuple(files.file.watched),
    )


def fault_text(error: DocumentError) -> str:
    """All faults as one text, for the operator."""
    return "\n".join(_line(each) for each in error.diagnostics)


def _line(fault: Diagnostic) -> str:
    return f"{fault.text()}; {fault.hint}" if fault.hint else fault.text()
