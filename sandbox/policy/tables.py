"""The file of a policy: its tables, what each key may be, and what editors say about it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Self, get_args

from pydantic import AfterValidator, ConfigDict, Field, create_model, model_validator

from sandbox.document.diagnostic import did_you_mean, quoted
from sandbox.document.model import Wording, WrongValue, refuse
from sandbox.document.operator_table import EXPECTED, Kind, OperatorTable, table_schema
from sandbox.identity.accounts import UnknownAccount, find_account
from sandbox.identity.uid_range import DEFAULT_RANGE
from sandbox.network.egress import DNS_PORT, EgressLimits
from sandbox.network.redirect import REDIRECT_PORT
from sandbox.network.rules import LAST_PORT, MOST_PORTS, parse_rule
from sandbox.paths.denied_paths import lexical_fault, lexical_hit, normal
from sandbox.paths.scan import SCAN_LIMIT
from sandbox.policy.policy import LAYERS, LIMIT_MODES, LIMIT_NAMES, TRUST_FILE, Policy
from sandbox.spec import (
    DURATIONS,
    NETWORK_ORDER,
    SECCOMP_ORDER,
    SIZES,
    STATE_DIR_TOKEN,
    Place,
    is_variable_name,
)
from sandbox.units import parse_duration, parse_limit, parse_size

if TYPE_CHECKING:
    from sandbox.policy.policy import HookFailure, LimitMode, SignatureMode
    from sandbox.spec import NetworkMode, ProjectAccess, SeccompProfile
else:  # these have no meaning for pydantic: each key has a Kind
    HookFailure = LimitMode = SignatureMode = NetworkMode = ProjectAccess = SeccompProfile = str

WORDING = Wording(
    unknown="{name} is not a key of a policy",
    wrong_type="{name} must be {expected}, not {got}",
    value_rule="policy_value",
    skip=0,
    expected=EXPECTED,
)

_TEXT: dict[str, Any] = {"type": "string"}
_SIZE: dict[str, Any] = {"type": ["string", "integer"]}
_MOST_KEPT_SECONDS = 24 * 3600  # of what a command answered
_TIME: dict[str, Any] = {"type": ["string", "number"]}
_PATHS = "Absolute paths, each for all below it; * for all that is not denied. ${state_dir}: its own folder."
_HOSTS = 'Hosts: "example.com:443", "*.example.com:443", "*:443", "example.com:*", "10.0.0.0/8:5432".'
_NAMES = "Names of variables; * and ? are wildcards."
_IMAGES = 'References in full, with a tag or without: "docker.io/acme/*", "ghcr.io/acme/x:1".'
# The gate holds up to six descriptors for each connection. With more it could exceed its descriptor limit.
_MOST_CONNECTIONS = 1024
_GATE_PORTS = (REDIRECT_PORT, DNS_PORT)  # of the gate in the plugin's own namespace
_PERCENT = re.compile(r"(\d{1,3}(?:\.\d{1,6})?)%", re.ASCII)


# --- kinds of values ------------------------------------------------------------------------------


def _choice(about: str, *words: str) -> Kind:
    def read(value: object) -> str:
        if isinstance(value, str) and value in words:
            return value
        shown = quoted(value) if isinstance(value, str) else "this"
        narrower = [word for word in words if word != "host"]  # "hosts" is not meant to be the widest
        hint = did_you_mean(value, narrower) if isinstance(value, str) else ""
        if not hint and "host" in words:
            hint = '"allowlist" reaches the hosts of a list; "host" is the whole network of this machine'
        raise WrongValue(f"must be one of {', '.join(words)}, not {shown}", hint=hint)

    return Kind(read, {"enum": list(words), "description": about})


def _require_items(items: Iterable[tuple[str | int, Any]], fault_of: Callable[[Any], str | None]) -> None:
    """`fault_of` returns a fault as half a sentence, or None."""
    found = ((key, fault_of(item)) for key, item in items)
    refuse([WrongValue(fault, keys=(key,)) for key, fault in found if fault is not None])


def _texts(about: str, fault_of: Callable[[str], str | None]) -> Kind:
    def read(value: object) -> tuple[str, ...]:
        if not isinstance(value, list):
            raise WrongValue("must be a list of texts", "invalid_type")
        _require_items(
            enumerate(value), lambda item: fault_of(item) if isinstance(item, str) else "must be a text"
        )
        return tuple(dict.fromkeys(value))

    return Kind(read, {"type": "array", "items": _TEXT, "description": about})


def _number(about: str, low: int, high: int) -> Kind:
    def read(value: object) -> int:
        if isinstance(value, int) and not isinstance(value, bool) and low <= value <= high:
            return value
        raise WrongValue(f"must be a whole number from {low} to {high}")

    return Kind(read, {"type": "integer", "minimum": low, "maximum": high, "description": about})


def _parsed(about: str, schema: dict[str, Any], parse_value: Callable[[object], Any]) -> Kind:
    def read(value: object) -> Any:
        try:
            return parse_value(value)
        except ValueError as error:
            raise WrongValue(f"is wrong: {error}") from None

    return Kind(read, {**schema, "description": about})


def _amount(about: str, limit: str) -> Kind:
    """An amount of a limit. Its bounds are those of the limit."""
    number = _SIZE if limit in SIZES else _TIME if limit in DURATIONS else {"type": ["string", "number"]}
    return _parsed(about, number, partial(parse_limit, limit))


def _bytes(about: str) -> Kind:
    def parse_bytes(value: object) -> int:
        size = parse_size(value)
        if size == 0:
            raise ValueError("it has to be more than 0")
        return size

    return _parsed(about, _SIZE, parse_bytes)


def _read_version(value: object) -> int:
    if value is None:
        message, hint = "the version is missing", "write version = 1 at the top"
        raise WrongValue(message, "policy_version", hint, whole=True)
    if value != 1 or isinstance(value, bool):
        raise WrongValue("must be 1, the only version this runner knows", "policy_version")
    return 1


def _read_share(value: object) -> float:
    match = _PERCENT.fullmatch(value) if isinstance(value, str) else None
    share = float(match[1]) / 100 if match else 0.0
    if not 0 < share <= 1:
        raise WrongValue('must be a text such as "25%", above 0% and up to 100%')
    return share


def _read_ports(value: object) -> tuple[int, ...]:
    if not isinstance(value, list) or len(value) > MOST_PORTS:
        raise WrongValue(f"must be a list of up to {MOST_PORTS} ports, as in [6379]", "invalid_type")
    _require_items(enumerate(value), _port_fault)
    return tuple(dict.fromkeys(value))


def _kept_time(value: object) -> float:
    seconds = parse_duration(value)
    if not 1 <= seconds <= _MOST_KEPT_SECONDS:
        raise ValueError("it has to be from 1s to 24h")
    return seconds


def _read_source(value: object) -> tuple[str, ...]:
    if isinstance(value, list) and value and all(isinstance(word, str) and word for word in value):
        if "/" in value[0] and not value[0].startswith("/"):
            # It would be another one in each folder, and one of them may be a stranger's.
            raise WrongValue(f"starts {quoted(value[0])}, which is no absolute path, and no name in PATH")
        return ("command", *value)
    kind, _, place = value.partition(":") if isinstance(value, str) else ("", "", "")
    if kind == "file" and not lexical_fault(place):
        return "file", normal(place)
    if kind == "env" and is_variable_name(place):
        return "env", place
    hint = 'as in "file:/etc/runner/github.token", "env:GITHUB_TOKEN" or ["gh", "auth", "token"]'
    raise WrongValue("must be file:/PATH, env:NAME or the words of a command", hint=hint)


def _read_variable(value: object) -> str:
    if isinstance(value, str) and is_variable_name(value):
        return value
    raise WrongValue("must be the name of an environment variable")


def _read_variables(value: object) -> tuple[tuple[str, str], ...]:
    if not isinstance(value, dict):
        raise WrongValue("must be a table of texts", "invalid_type")
    _require_items(((name, (name, text)) for name, text in value.items()), _variable_fault)
    return tuple(value.items())


def _trust_file(path: str) -> str:
    if fault := lexical_fault(path or TRUST_FILE):
        raise WrongValue(fault)
    return path or TRUST_FILE


def _read_uids(value: object) -> tuple[int, int]:
    if isinstance(value, list) and len(value) == 2 and all(type(uid) is int for uid in value):
        first, last = value
        # 65534 is "nobody" and 65535 the 16-bit -1: files and processes of other programs have them.
        if 0 < first <= last < 1 << 31 and not (first <= 65534 <= last or first <= 65535 <= last):
            return first, last
    raise WrongValue(
        "must be [first, last] with 0 < first <= last, without root and without 65534 and 65535 (nobody)"
    )


def _read_account(value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        raise WrongValue("must be the name of an account, or a uid", "invalid_type")
    _numbers_of(str(value))
    return str(value)


def _numbers_of(account: str, *keys: str) -> tuple[int, int]:
    """The uid and the gid."""
    try:
        return find_account(account)[1:]
    except UnknownAccount as unknown:
        hint = "make an account for plugins (useradd --system NAME), or leave run_as out"
        raise WrongValue(str(unknown), hint=hint, keys=keys) from None


_VERSION = Kind(_read_version, {"const": 1, "description": "The version of this format."})
_SHARE = Kind(
    _read_share,
    {
        **_TEXT,
        "pattern": r"^[0-9]{1,3}(\.[0-9]{1,6})?%$",
        "description": "The most that one plugin may take of numbers that the whole machine shares.",
    },
)
_SOURCE = Kind(
    _read_source,
    {
        "anyOf": [{**_TEXT, "pattern": "^(file:/|env:.)"}, {"type": "array", "items": _TEXT, "minItems": 1}],
        "description": "Where its value is: file:/PATH, env:NAME, or a command that prints it.",
    },
)
_KEEP = _parsed("How long the answer of a command counts; without it, each launch asks.", _TIME, _kept_time)
_VARIABLE = Kind(
    _read_variable,
    {**_TEXT, "description": "The variable with the placeholder; without it the name of the credential."},
)
_PORTS = Kind(
    _read_ports,
    {
        "type": "array",
        "items": {"type": "integer", "minimum": 1, "maximum": LAST_PORT},
        "maxItems": MOST_PORTS,
        "description": 'Ports of this machine that an entry "localhost:6379" of a list may open.',
    },
)
_VARIABLES = Kind(
    _read_variables,
    {
        "type": "object",
        "additionalProperties": _TEXT,
        "description": "Set for every plugin; a manifest cannot change these.",
    },
)
_UIDS = Kind(
    _read_uids,
    {
        "type": "array",
        "items": {"type": "integer", "minimum": 1, "maximum": 2**31 - 1},
        "minItems": 2,
        "maxItems": 2,
        "description": "The first and the last uid that plugins are given.",
    },
)
_RUN_AS = Kind(
    _read_account,
    {
        "type": ["string", "integer"],
        "description": "An account for plugins that write where no owner can be mapped.",
    },
)


# --- faults of texts ------------------------------------------------------------------------------


def _deny_fault(path: str) -> str | None:
    fault = lexical_fault(path)
    if fault is None and normal(path) == "/":
        return "would deny everything"
    return fault


def _place_fault(path: str) -> str | None:
    if path == STATE_DIR_TOKEN:
        return None
    rest = path[len(STATE_DIR_TOKEN) :] if path.startswith(STATE_DIR_TOKEN + "/") else path
    fault = lexical_fault(rest)
    if fault is not None and "$" in path:
        fault += f"; of all variables only {STATE_DIR_TOKEN} is known, at the beginning"
    return fault


def _default_fault(path: str) -> str | None:
    hit = None if _place_fault(path) or path.startswith("$") else lexical_hit(path)
    return hit.clause() if hit else _place_fault(path)


def _ceiling_fault(path: str) -> str | None:
    if path == "*" or _place_fault(path) or path.startswith("$"):
        return None if path == "*" else _place_fault(path)
    hit = lexical_hit(path)
    # A ceiling that contains a denied path still admits the other folders below it.
    return hit.clause() if hit is not None and hit.relation != "above" else None


def _host_fault(host: str) -> str | None:
    try:
        parse_rule(host, ranges=True)
    except ValueError as error:
        return f"{error}; entries look like example.com:443, *.example.com:443, *:443 or example.com:*"
    return None


def _credential_host_fault(host: str) -> str | None:
    if fault := _host_fault(host):
        return fault
    rule = parse_rule(host, ranges=True)
    if rule.kind in ("any", "range") or rule.methods is not None:
        return "must be a host, as in api.example.com:443 or *.example.com:443"
    return None


def _place_of_request_fault(place: str) -> str | None:
    return None if place in get_args(Place) else "must be header or query"


def _port_fault(port: object) -> str | None:
    if type(port) is not int or not 0 < port <= LAST_PORT:
        return f"must be a port from 1 to {LAST_PORT}"
    return f"cannot be opened: the gate itself has port {port}" if port in _GATE_PORTS else None


def _variable_fault(variable: tuple[str, object]) -> str | None:
    name, text = variable
    if fault := _name_fault(name):
        return fault
    return None if isinstance(text, str) and "\0" not in text else "must be a text without NUL"


def _name_fault(name: str) -> str | None:
    return None if is_variable_name(name) else "cannot be the name of an environment variable"


def _glob_fault(pattern: str) -> str | None:
    if re.fullmatch(r"[A-Za-z0-9_*?]+", pattern, re.ASCII):
        return None
    return "must be a variable name, in which * and ? stand for anything"


def _image_fault(pattern: str) -> str | None:
    if pattern == "*" or ("/" in pattern and re.fullmatch(r"[A-Za-z0-9._:@/*?-]{1,512}", pattern, re.ASCII)):
        return None
    return 'must be a reference in full, as in "docker.io/library/python:3.12"; * and ? are wildcards'


def _capability_fault(pattern: str) -> str | None:
    # Protocols choose these names, so every printable name without spaces is accepted.
    if pattern and len(pattern) <= 256 and pattern.isprintable() and " " not in pattern:
        return None
    return "must be a capability or a method, in which * and ? stand for anything"


# --- tables ---------------------------------------------------------------------------------------

_Texts = tuple[str, ...]


def _require_order(order: Sequence[str], default: str, ceiling: str | None) -> None:
    if ceiling is not None and order.index(default) > order.index(ceiling):
        message = f"({default}) lies above the ceiling ({ceiling})"
        raise WrongValue(message, "policy_order", keys=("default",))


class _PathsTable(OperatorTable):
    default: Annotated[_Texts, _texts(f"What every plugin gets, if it exists. {_PATHS}", _default_fault)] = ()
    ceiling: Annotated[
        _Texts | None, _texts(f"The most a manifest may ask for. {_PATHS}", _ceiling_fault)
    ] = None


class _NetworkTable(OperatorTable):
    """The network."""

    # "allowlist" cannot be the default: without a manifest's list it would have no hosts.
    default: Annotated[NetworkMode, _choice("Of a plugin that does not ask.", "none", "host")] = "none"
    ceiling: Annotated[NetworkMode | None, _choice("The most a manifest may ask for.", *NETWORK_ORDER)] = None
    hosts: Annotated[_Texts, _texts(_HOSTS, _host_fault)] = ()
    private: Annotated[str, _choice("Whether names may lead to private addresses.", "deny", "allow")] = "deny"
    loopback: Annotated[tuple[int, ...], _PORTS] = ()
    environment: Annotated[
        str, _choice("Whether a contract's variable may raise the ceiling.", "ignored", "may_raise")
    ] = "ignored"
    connections: Annotated[int, _number("The most connections at once.", 1, _MOST_CONNECTIONS)] = (
        EgressLimits().connections
    )
    bytes: Annotated[int | None, _bytes("The most bytes of all connections, both ways.")] = None
    rate: Annotated[int | None, _bytes("The most bytes per second, both ways.")] = None
    idle: Annotated[float, _amount("How long a connection may be without a byte.", "idle")] = (
        EgressLimits().idle
    )

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        _require_order(NETWORK_ORDER, self.default, self.ceiling)
        return self


class _ProjectTable(OperatorTable):
    """The folder that a server works on."""

    access: Annotated[ProjectAccess, _choice("Whether it is shown.", "none", "read")] = "none"


class _EnvTable(OperatorTable):
    """The environment of plugins."""

    set: Annotated[tuple[tuple[str, str], ...], _VARIABLES] = ()
    passed: Annotated[_Texts, _texts("Passed on to every plugin, if the host has them.", _name_fault)] = (
        Field(default=(), alias="pass")
    )
    ceiling: Annotated[
        _Texts, _texts(f"What a manifest may ask for of the host's. {_NAMES}", _glob_fault)
    ] = ()
    steering: Annotated[
        _Texts,
        _texts(f"Variables that choose which code runs, and that a manifest may set. {_NAMES}", _glob_fault),
    ] = ()


class _SeccompTable(OperatorTable):
    """System calls."""

    default: Annotated[SeccompProfile, _choice("Of a plugin that does not ask.", *SECCOMP_ORDER)] = "default"
    ceiling: Annotated[SeccompProfile | None, _choice("The most a manifest may ask for.", *SECCOMP_ORDER)] = (
        None
    )

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        _require_order(SECCOMP_ORDER, self.default, self.ceiling)
        return self


class _LimitTable(OperatorTable):
    default: Any = None
    ceiling: Any = None
    mode: Annotated[LimitMode, _choice("What to do where it cannot be enforced in full.", *LIMIT_MODES)] = (
        "require"
    )

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.default is not None and self.ceiling is not None and self.default > self.ceiling:
            raise WrongValue("lies above the ceiling", "policy_order", keys=("default",))
        return self


def _limit_table(limit: str) -> Any:
    default = Annotated[float | None, _amount("Of a plugin that does not ask.", limit)]
    most = "The most a manifest or a command line may ask for."
    ceiling = Annotated[float | None, _amount(most, limit)]
    return create_model(
        f"_{limit}_table",
        __base__=_LimitTable,
        __doc__=f"The limit {limit}.",
        default=(default, None),
        ceiling=(ceiling, None),
    )


class _CapabilitiesTable(OperatorTable):
    """What a plugin and its host may say to each other; * and ? are wildcards."""

    declare: Annotated[_Texts, _texts("Capabilities that it may declare.", _capability_fault)] = ()
    host: Annotated[_Texts, _texts("Methods that it may call on its host.", _capability_fault)] = ()


class _HooksTable(OperatorTable):
    """Hooks."""

    on_failure: Annotated[
        HookFailure, _choice("What a hook that failed is taken for.", "continue", "abort")
    ] = "continue"


class _PackagesTable(OperatorTable):
    """Signed plugins."""

    signature: Annotated[
        SignatureMode, _choice("Whether a plugin has to be signed.", "optional", "required")
    ] = "optional"
    trust: Annotated[str, AfterValidator(_trust_file)] = Field(
        default=TRUST_FILE, description="The file of the keys whose signatures count."
    )


class _ImagesTable(OperatorTable):
    """Images in place of the system's files."""

    allow: Annotated[_Texts, _texts(f"Which a plugin may be started in. {_IMAGES}", _image_fault)] = ()


class _UserTable(OperatorTable):
    """Who plugins run as, if the runner is root."""

    uids: Annotated[tuple[int, int], _UIDS] = DEFAULT_RANGE
    run_as: Annotated[str, _RUN_AS] = ""

    @model_validator(mode="after")
    def _not_of_plugins(self) -> Self:
        ranges = (self.uids, DEFAULT_RANGE)
        numbers = _numbers_of(self.run_as, "run_as") if self.run_as else ()
        if any(first <= number <= last for first, last in ranges for number in numbers):
            message = "is among the uids that plugins without it are given"
            raise WrongValue(message, keys=("run_as",))
        return self


class _ApprovalsTable(OperatorTable):
    """What a person may allow beyond the ceilings: runner allow, and the options of runner run."""

    read: Annotated[_Texts, _texts(_PATHS, _ceiling_fault)] = ()
    write: Annotated[_Texts, _texts(_PATHS, _ceiling_fault)] = ()
    network: Annotated[NetworkMode, _choice("Up to which mode.", *NETWORK_ORDER)] = "none"
    hosts: Annotated[_Texts, _texts(_HOSTS, _host_fault)] = ()
    env: Annotated[_Texts, _texts(_NAMES, _glob_fault)] = ()
    steering: Annotated[_Texts, _texts(_NAMES, _glob_fault)] = ()
    seccomp: Annotated[SeccompProfile, _choice("Up to which profile.", *SECCOMP_ORDER)] = "strict"
    project: Annotated[ProjectAccess, _choice("Whether the project may be shown.", "none", "read")] = "none"
    images: Annotated[_Texts, _texts(_IMAGES, _image_fault)] = ()


class _CredentialTable(OperatorTable):
    """A credential that plugins use and do not get."""

    hosts: Annotated[_Texts, _texts(f"For whom its value is. {_HOSTS}", _credential_host_fault)]
    source: Annotated[tuple[str, ...], _SOURCE] = Field(alias="from")
    variable: Annotated[str, _VARIABLE] = ""
    where: Annotated[_Texts, _texts("Where in a request: header, query.", _place_of_request_fault)] = (
        "header",
    )
    authorities: Annotated[
        _Texts, _texts("Files of roots that its hosts may have beside the system's.", lexical_fault)
    ] = ()

    keep: Annotated[float, _KEEP] = 0.0

    @model_validator(mode="after")
    def _may_travel(self) -> Self:
        if not self.where:
            raise WrongValue("is empty: nothing could be put in", keys=("where",))
        if self.keep and self.source[0] != "command":
            raise WrongValue("counts for the answer of a command only", keys=("keep",))
        return self


class _CgroupsTable(OperatorTable):
    """How the runner makes room for cgroups of plugins (cgroup v2)."""

    host: Annotated[
        str,
        _choice(
            "Whether other processes of its own delegated unit may be moved to a group below it.",
            "stay",
            "move",
        ),
    ] = "stay"


if TYPE_CHECKING:

    class _LimitsTable(OperatorTable): ...

    class _LayersTable(OperatorTable): ...
else:
    _LimitsTable = create_model(
        "_LimitsTable",
        __base__=OperatorTable,
        __doc__="Limits, by name.",
        **{name: (_limit_table(name), None) for name in LIMIT_NAMES},
    )
    _Layer = Annotated[str, _choice("Whether it has to be enforced.", "require", "prefer")]
    _LayersTable = create_model(
        "_LayersTable",
        __base__=OperatorTable,
        __doc__="What to do if a machine cannot enforce a layer.",
        **dict.fromkeys(LAYERS, (_Layer, "require")),
    )


def _one_variable_each(tables: dict[str, _CredentialTable]) -> dict[str, _CredentialTable]:
    known: dict[str, str] = {}
    for name, table in tables.items():
        variable = table.variable or name
        if not is_variable_name(variable):
            raise WrongValue("needs a variable: its own name cannot be one", keys=(name,))
        if variable in known:
            raise WrongValue(
                f"has the variable {variable}, as {known[variable]} has", keys=(name, "variable")
            )
        known[variable] = name
    return tables


class PolicyFile(OperatorTable):
    """What the operator allows."""

    model_config = ConfigDict(json_schema_extra={"required": ["version"]})

    version: Annotated[int, _VERSION] = Field(default=None, validate_default=True)
    description: str = Field(default="", description="One line about it, for people.")
    unsandboxed: Annotated[
        str, _choice("Whether a manifest may ask to run without a cage.", "deny", "allow")
    ] = "deny"
    deny: Annotated[
        _Texts, _texts("More paths that no plugin gets, nor anything below or above them.", _deny_fault)
    ] = ()
    scan_limit: Annotated[
        int, _number("The most entries of a folder that is shown to a plugin.", 1, 100_000_000)
    ] = SCAN_LIMIT
    machine_share: Annotated[float, _SHARE] = Policy("", "").machine_share
    read: _PathsTable = Field(default_factory=_PathsTable, description="Host paths that plugins may read.")
    write: _PathsTable = Field(default_factory=_PathsTable, description="Host paths that plugins may write.")
    network: _NetworkTable = Field(default_factory=_NetworkTable)
    project: _ProjectTable = Field(default_factory=_ProjectTable)
    env: _EnvTable = Field(default_factory=_EnvTable)
    seccomp: _SeccompTable = Field(default_factory=_SeccompTable)
    limits: _LimitsTable = Field(default_factory=_LimitsTable)
    capabilities: _CapabilitiesTable = Field(default_factory=_CapabilitiesTable)
    hooks: _HooksTable = Field(default_factory=_HooksTable)
    packages: _PackagesTable = Field(default_factory=_PackagesTable)
    images: _ImagesTable = Field(default_factory=_ImagesTable)
    user: _UserTable = Field(default_factory=_UserTable)
    approvals: _ApprovalsTable = Field(default_factory=_ApprovalsTable)
    credentials: Annotated[dict[str, _CredentialTable], AfterValidator(_one_variable_each)] = Field(
        default_factory=dict, description="Credentials that plugins use and do not get, by name."
    )
    cgroups: _CgroupsTable = Field(default_factory=_CgroupsTable)
    layers: _LayersTable = Field(default_factory=_LayersTable)


def policy_schema() -> dict[str, Any]:
    """The JSON Schema of a policy, for editors. `runner check` finds more: it also reads the values."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "policy of the runner",
        **table_schema(PolicyFile),
    }
