"""The file of a gateway's settings: `--settings FILE`, or `--gateway-settings FILE` of a daemon.

    trust_first = true                      # false: tools of a plugin are shown after `runner allow --diff`
    webhook = "https://hooks.example.com/x" # of a daemon: is told of questions; in the policy, too

    [clients.default]                       # of every client that has no table of its own
    plugins = ["notes", "git*"]             # which plugins; * and ? are wildcards
    tools = ["notes__*", "git__log"]        # which tools and prompts of them, by their public names
    rename = { notes__search = "find" }     # public name -> the name for this client
    calls_per_minute = 60
    policy = "strict"                       # or a path, from this file; on stdio: a daemon has one for all
    confirm = ["git__push*", "destructive"] # a person is asked before these; "hosts": about refused hosts too
    confirm_wait = "2m"                     # without an answer until then it is a no
    confirm_by = "operator"                 # never the client, also if it can ask its person

    [clients.cursor]                        # runner gateway --client cursor
    [clients."uid:1000"]                    # at a daemon's door: by uid, "token", or "cert:SUBJECT"

    [plugins.notes]                         # on stdio
    folder = "/home/me/plugins/notes"       # whose name that is, if several plugins ask for it
    limits = { call = "30s" }               # as --limit of `runner call`
    staged = true                           # what it writes waits: runner diff, runner apply
    hide = ["TOKEN@api.example.com"]        # it uses the variable's value there, and does not get it
    ssh = ["SHA256:47DEQpj8…", "git.example.com"]   # it logs in there with this key of your ssh agent

    [remotes.tracker]                       # a server on streamable HTTP, as one more plugin
    url = "https://mcp.example.com/mcp"
    token_file = "/home/me/.secrets/tracker"    # or token_command = ["pass", "show", "tracker"]

    [remotes.forge]                         # without a token: runner gateway login forge --settings FILE
    url = "https://mcp.example.org/mcp"
    client_id = "runner-at-home"            # these four only where the server registers no clients by itself
    client_secret_file = "/home/me/.secrets/forge"
    issuer = "https://login.example.org"    # the only one who gets that secret
    callback_port = 8765                    # of the loopback address that the server knows

Every unknown key and every value of a wrong type is refused, with its place.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo

from runner.approvals.confirmations import DESTRUCTIVE, HOSTS, MOST_PATTERNS, pattern_fault
from runner.gateway.names import MOST_NAME, SEPARATOR
from runner.gateway.settings import CONFIRM_SECONDS, ClientSettings, GatewaySettings, RemoteSettings
from runner.serve.settings_file import limit_faults
from sandbox.document.diagnostic import Diagnostic, DocumentError, quoted
from sandbox.document.faults import Faults
from sandbox.document.model import Wording, WrongValue, refuse
from sandbox.document.operator_table import EXPECTED, OperatorTable, Text, Texts, read_table
from sandbox.document.read import parse, read_bounded
from sandbox.network.credentials import parse_hiding
from sandbox.network.ssh import parse_access
from sandbox.policy.load import trust_fault
from sandbox.units import parse_duration

_MOST_WAIT = 600  # a client of the newer protocol has no more for its reply
_MOST_RATE = 1_000_000
_WORDS = (DESTRUCTIVE, HOSTS)
_WILDCARD = re.compile(r"[*?[]")
_NAME = re.compile(rf"[A-Za-z0-9_-]{{1,{MOST_NAME}}}\Z", re.ASCII)
_TOKEN_KEYS = ("token", "bearer_token", "headers", "authorization", "api_key")
_SIGN_IN_KEYS = ("client_id", "client_secret_file", "issuer", "callback_port")
_TOKEN_HINT = "write it to a file that only you can read, and give token_file, or give token_command"
_WORDING = Wording(
    unknown="there is no key {key} here",
    missing="the remote {owner} has no {name}",
    skip=2,
    expected=EXPECTED,
)


def _new_names(given: dict[str, Any]) -> dict[str, str]:
    found: dict[str, str] = {}
    faults: list[WrongValue] = []
    for public, own in given.items():
        # A name with two underscores could be that of another plugin's tool.
        if not isinstance(own, str) or not _NAME.match(own) or SEPARATOR in own:
            message = f"the new name of {quoted(public)} cannot be used"
            hint = f"letters, digits, - and _, at most {MOST_NAME}, and no {SEPARATOR}"
            faults.append(WrongValue(message, "bad_name", hint, keys=(public,), whole=True))
        elif own in found.values():
            message = f"two tools cannot both be called {quoted(own)}"
            faults.append(WrongValue(message, "name_taken", keys=(public,), whole=True))
        else:
            found[public] = own
    refuse(faults)
    return found


def _rate(given: object) -> object:
    if type(given) is not int or not 1 <= given <= _MOST_RATE:
        raise WrongValue(f"has to be a whole number from 1 to {_MOST_RATE}", "invalid_type")
    return given


def _patterns(given: tuple[str, ...]) -> tuple[str, ...]:
    faults = []
    for number, each in enumerate(given):
        fault = pattern_fault(each)
        # Nobody would be asked, and nobody would notice.
        if not fault and each not in _WORDS and SEPARATOR not in each and not _WILDCARD.search(each):
            fault = "can be no tool's public name"
        if fault:
            hint = f"PLUGIN{SEPARATOR}TOOL, with * and ? as wildcards; or {' or '.join(_WORDS)}"
            faults.append(WrongValue(f"{each!a} {fault}", "bad_pattern", hint, keys=(number,), whole=True))
    if len(given) > MOST_PATTERNS:
        faults.append(WrongValue(f"has more than {MOST_PATTERNS} patterns", "bad_pattern"))
    refuse(faults)
    return given


def _wait(given: object) -> object:
    try:
        seconds = parse_duration(given)
    except ValueError as error:
        raise WrongValue(str(error), "bad_time") from None
    if not 1 <= seconds <= _MOST_WAIT:
        raise WrongValue(f"has to be from 1s to {_MOST_WAIT}s", "bad_time")
    return seconds


def _limits(given: dict[str, Any]) -> dict[str, Any]:
    refuse(
        [
            WrongValue(message, "bad_limit", hint, keys=(name,), whole=True)
            for name, message, hint in limit_faults(given)
        ]
    )
    return given


def _each(read: Callable[[str], object], rule: str) -> AfterValidator:
    """Every entry of a list is one that `read` takes, which raises ValueError for others."""

    def check(given: tuple[str, ...]) -> tuple[str, ...]:
        faults = []
        for number, text in enumerate(given):
            try:
                read(text)
            except ValueError as error:
                faults.append(WrongValue(f"{text!a} {error}", rule, keys=(number,), whole=True))
        refuse(faults)
        return given

    return AfterValidator(check)


def _folder(given: str, info: ValidationInfo) -> str:
    return os.path.join(str(info.context), given)  # of the file


def _policy(given: str, info: ValidationInfo) -> str:
    return _folder(given, info) if "/" in given or "." in given else given  # a word is a name


def _url(given: str) -> str:
    if not given.startswith("https://") or "@" in given.partition("//")[2].partition("/")[0]:
        message = "has to begin with https:// and must not name a user or a password"
        raise WrongValue(message, "bad_url", _TOKEN_HINT if "@" in given else "")
    return given


def _word(given: str) -> str:
    if not given.isascii() or not given.isprintable():
        raise WrongValue("has to be printable ASCII characters", "bad_value")
    return given


def _port(given: object) -> object:
    if type(given) is not int or not 1 <= given <= 65535:
        raise WrongValue("has to be a whole number from 1 to 65535", "invalid_type")
    return given


def _absolute(given: str) -> str:
    if not given.startswith("/"):
        raise WrongValue("has to be an absolute path", "bad_path")
    return given


class _ClientTable(OperatorTable):
    plugins: Texts = ("*",)
    tools: Texts = ("*",)
    rename: Annotated[dict[str, Any], AfterValidator(_new_names)] = Field(default_factory=dict)
    calls_per_minute: Annotated[int, BeforeValidator(_rate)] = 0
    policy: Annotated[Text, AfterValidator(_policy)] | None = None
    confirm: Annotated[Texts, AfterValidator(_patterns)] = ()
    confirm_wait: Annotated[float, BeforeValidator(_wait)] = CONFIRM_SECONDS
    confirm_by: Literal["client", "operator"] = "client"


class _PluginTable(OperatorTable):
    folder: Annotated[Text, AfterValidator(_folder)] | None = None
    limits: Annotated[dict[str, Any], AfterValidator(_limits)] = Field(default_factory=dict)
    staged: bool = False
    hide: Annotated[Texts, _each(partial(parse_hiding, default_ports=(443,)), "hide")] = ()
    ssh: Annotated[Texts, _each(parse_access, "ssh")] = ()


class _RemoteTable(OperatorTable):
    url: Annotated[Text, AfterValidator(_url)]
    token_file: Annotated[Text, AfterValidator(_absolute)] = ""
    token_command: Texts = ()
    client_id: Annotated[Text, AfterValidator(_word)] = ""
    client_secret_file: Annotated[Text, AfterValidator(_absolute)] = ""
    issuer: Annotated[Text, AfterValidator(_url)] = ""
    callback_port: Annotated[int, BeforeValidator(_port)] = 0


class _GatewayFile(OperatorTable):
    clients: dict[str, _ClientTable] = Field(default_factory=dict)
    plugins: dict[str, _PluginTable] = Field(default_factory=dict)
    remotes: dict[str, _RemoteTable] = Field(default_factory=dict)
    trust_first: bool = True
    webhook: Annotated[Text, AfterValidator(_url)] = ""


def read_settings(path: str) -> GatewaySettings:
    """Raises DocumentError with every fault of the file."""
    path = os.path.abspath(path)
    fault = trust_fault(path, "the settings", private_groups=True)
    if fault is not None:
        raise DocumentError(Diagnostic(path, 0, 0, "settings_untrusted", *fault))
    document = parse(path, read_bounded(path), "toml")
    faults = Faults(document)
    _take_tokens(faults, document.data.get("remotes"))
    file: _GatewayFile = read_table(
        document, faults, _GatewayFile, _WORDING, "unknown_key", os.path.dirname(path)
    )
    return GatewaySettings(
        {name: _client(each) for name, each in file.clients.items()},
        tuple(RemoteSettings(name, **dict(each), file=path) for name, each in file.remotes.items()),
        file.trust_first,
        file.webhook,
        {name: each.folder for name, each in file.plugins.items() if each.folder is not None},
        {
            name: {"limits": each.limits, "staged": each.staged, "hide": each.hide, "ssh": each.ssh}
            for name, each in file.plugins.items()
        },
    )


def _client(table: _ClientTable) -> ClientSettings:
    values = dict(table)
    return ClientSettings(confirm_seconds=values.pop("confirm_wait"), **values)


def _take_tokens(faults: Faults, remotes: object) -> None:
    """A token in the file has a message of its own, which is more than that of an unknown key."""
    for name, table in remotes.items() if isinstance(remotes, dict) else ():
        for key in _TOKEN_KEYS if isinstance(table, dict) else ():
            if key in table:
                del table[key]
                message = f"{key}: a token does not belong here"
                faults.error(("remotes", name, key), "literal_token", message, _TOKEN_HINT)
        if isinstance(table, dict) and table.get("token_file") and table.get("token_command"):
            message = "give token_file or token_command, not both"
            faults.error(("remotes", name, "token_command"), "two_tokens", message)
        signs_in = [key for key in _SIGN_IN_KEYS if isinstance(table, dict) and key in table]
        if signs_in and (table.get("token_file") or table.get("token_command")):
            message = f"{signs_in[0]}: it is for a sign-in, and this server has a token"
            faults.error(("remotes", name, signs_in[0]), "two_tokens", message, "leave one of them out")
        if "client_secret_file" in signs_in and not {"client_id", "issuer"}.issubset(signs_in):
            message = (
                "client_secret_file: it needs client_id, and issuer, who is the only one to get the secret"
            )
            faults.error(("remotes", name, "client_secret_file"), "no_issuer", message)
