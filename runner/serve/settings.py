"""What the operator gives to the daemon's plugins: `runner serve --settings FILE`.

The file has a table for each plugin that needs one, by its name:

    [notes]
    folder = "plugins/notes"            # whose name that is: a plugin chooses its name itself
    config = "notes.json"               # or a table
    secrets = {api_key = "@notes.key"}  # or env:NAME

The rules are those of a policy: a file that another user can write is not used, neither this one nor one that
it names, and an unknown key is a fault. No message has anything of a secret.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from runner.contracts.contract import Contract, ContractOption
from runner.contracts.registry import all_contracts, find_contract
from runner.lifecycle.spec import Spec
from runner.protocol import wire
from runner.protocol.secrets import Secrets
from runner.serve.settings_file import SettingsFile, as_text, limit_faults, without_line_end
from sandbox.document.diagnostic import Diagnostic, DocumentError, Severity, did_you_mean, quoted
from sandbox.document.model import WrongValue
from sandbox.spec import KeyPath, Limits

_MOST_PARKED = 16
# The keys of each table, beside the options of the plugin's contract, and the types that each may have.
_KEYS: Mapping[str, tuple[type, ...]] = {
    "folder": (str,),
    "config": (str, dict),
    "secrets": (str, dict),
    "limits": (dict,),
    "env": (dict,),
    "args": (list,),
    "state_dir": (str,),
    "staged": (bool,),
    "hide": (list,),
    "ssh": (list,),
    "parked": (int,),
    "eager": (bool,),
    "numbers": (dict,),
}
# What a plugin that has taken another's name may have of it. All else is for the folder that the table names.
_FOR_ANY = ("folder", "limits", "parked", "eager", "numbers")
_TYPES = {str: "a text", dict: "a table", list: "a list", int: "a whole number", bool: "true or false"}


class Settings(NamedTuple):
    plugins: Mapping[str, Mapping[str, Any]] = {}  # by name: fields of runner.lifecycle.Spec
    diagnostics: tuple[Diagnostic, ...] = ()  # a table that no plugin has is a warning
    watched: tuple[str, ...] = ()  # folders in which a change may mean other settings

    @property
    def faulty(self) -> bool:
        """Nothing of it counts."""
        return any(each.severity == "error" for each in self.diagnostics)


class ServedPlugin(NamedTuple):
    contract: str
    path: str  # its folder, or file


class PluginSettings:
    """The file as it is now: whose each name is, and then what each plugin gets."""

    def __init__(self, path: str, environ: Mapping[str, str]) -> None:
        """Never raises for what is in a file: `read` tells that."""
        self._path = os.path.abspath(path)
        self._reader: _SettingsReader | None = None
        self._faults: tuple[Diagnostic, ...] = ()
        try:
            self._reader = _SettingsReader(SettingsFile(self._path, environ))
        except DocumentError as error:
            self._faults = error.diagnostics

    def folders(self) -> dict[str, str] | None:
        """The path that a name is for, of those that have one. None: the file cannot be read."""
        return None if self._reader is None else self._reader.folders()

    def read(self, plugins: Mapping[str, ServedPlugin]) -> Settings:
        """`plugins`: those that have the names."""
        if self._reader is None:
            return Settings({}, self._faults, (os.path.dirname(self._path),))
        return self._reader.read(plugins)


class _SettingsReader:
    def __init__(self, file: SettingsFile) -> None:
        self._file = file
        self._faults: list[Diagnostic] = []

    def _fault(
        self, keys: KeyPath, rule: str, message: str, hint: str = "", severity: Severity = "error"
    ) -> None:
        self._faults.append(self._file.document.diagnostic(keys, rule, message, hint, severity))

    def _bytes(self, keys: KeyPath, read: Callable[[str], bytes], source: Any) -> bytes:
        """Those of a file or a secret; none if it has a fault."""
        try:
            return read(source)
        except WrongValue as wrong:
            self._fault(keys, wrong.rule, str(wrong), wrong.hint)
            return b""

    def folders(self) -> dict[str, str]:
        tables = {name: table for name, table in self._file.document.data.items() if isinstance(table, dict)}
        given = {name: table.get("folder") for name, table in tables.items()}
        return {name: self._file.path(each) for name, each in given.items() if isinstance(each, str) and each}

    def read(self, plugins: Mapping[str, ServedPlugin]) -> Settings:
        found: dict[str, Mapping[str, Any]] = {}
        for name, table in self._file.document.data.items():
            if name not in plugins:
                near = next((each for each in plugins if each.startswith(f"{name}.")), "")
                hint = f'write ["{near}"], in quotes' if near else did_you_mean(name, plugins)
                message = f"there is no plugin {quoted(name)}: its settings are not used"
                self._fault((name,), "settings_plugin", message, hint, "warning")
            elif not isinstance(table, dict):
                self._fault((name,), "invalid_type", f"{quoted(name)} is no table; write [{name}]")
            else:
                self._require_folder(name, table, plugins[name].path)
                found[name] = self._table(name, table, find_contract(plugins[name].contract))
        return Settings(found, tuple(self._faults), tuple(self._file.watched))

    def _require_folder(self, name: str, table: dict[str, Any], path: str) -> None:
        given = [key for key in table if key not in _FOR_ANY]
        if given and "folder" not in table:
            message = f"{given[0]}: the table does not say which folder it is for; plugins choose their names"
            hint = f'write folder = "{path}" here, if that is the one you mean'
            self._fault((name, given[0]), "settings_folder", message, hint)

    def _table(self, name: str, table: dict[str, Any], contract: Contract) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        options: dict[str, str] = {}
        secrets: dict[str, Any] = {}
        own = options_of(contract)
        for key, value in table.items():
            keys = (name, key)
            types = (str,) if key in own else _KEYS.get(key)
            if types is None:
                self._unknown(keys, contract, (*_KEYS, *own))
            elif type(value) not in types:
                self._fault(keys, "invalid_type", f"{key} is not {' or '.join(_TYPES[t] for t in types)}")
            elif value == "":
                self._fault(keys, "settings_value", f"{key}: its value is empty")
            elif key == "folder":
                continue  # it decided who has the name
            elif key in own:
                self._option(keys, own[key], value, options, secrets)
            elif key == "secrets":
                secrets |= self._secrets(keys, value, contract)
            elif key == "config":
                fields["config"] = self._json(keys, value) if isinstance(value, str) else value
            elif key == "limits":
                fields["limits"] = self._limits(keys, value)
            elif key == "parked" and not 0 <= value <= _MOST_PARKED:
                self._fault(keys, "settings_value", f"parked is not a number from 0 to {_MOST_PARKED}")
            elif key == "eager":
                fields["numbers"] = {**fields.get("numbers", {}), "eager": value}
            elif key == "numbers":
                fields["numbers"] = {**value, **fields.get("numbers", {})}
            else:
                fields[key] = self._file.path(value) if key == "state_dir" else value
        if options:
            fields["options"] = options
        if secrets:
            fields["secrets"] = Secrets(secrets)
        self._check((name,), fields)
        return fields

    def _check(self, keys: KeyPath, fields: dict[str, Any]) -> None:
        """By the rules of the library."""
        try:
            if not all(isinstance(word, str) for word in fields.get("args", ())):
                raise ValueError("args: one of them is not a text")
            if "config" in fields:
                self._require_json((*keys, "config"), fields["config"])
            others = {**fields, "config": None, "limits": None}
            Spec("settings", "settings", **others).checked().invocation()
        except ValueError as error:
            self._fault(keys, "settings_value", str(error))

    def _require_json(self, keys: KeyPath, value: Any) -> None:
        """TOML has dates, and numbers that are none."""
        try:
            wire.encode(value)
        except ValueError:
            message = "config: JSON has no dates and times, and no inf and nan; write them as texts"
            self._fault(keys, "settings_value", message)

    def _option(
        self,
        keys: KeyPath,
        option: ContractOption,
        value: str,
        options: dict[str, str],
        secrets: dict[str, Any],
    ) -> None:
        if option.secret:
            secrets[option.flag] = as_text(without_line_end(self._bytes(keys, self._file.secret, value)))
        elif option.reads_file:
            text = self._bytes(keys, self._file.file, value).decode("utf-8", "replace")
            options |= {option.name: text, f"{option.name}_file": self._file.path(value)}
        else:
            options[option.name] = self._file.path(value) if option.metavar == "DIR" else value

    def _json(self, keys: KeyPath, name: str) -> Any:
        raw = self._bytes(keys, functools.partial(self._file.file, hidden=keys[-1] == "secrets"), name)
        try:
            return wire.decode(raw) if raw else None
        except wire.WireFault as fault:
            where = f": {fault.detail}" if keys[-1] == "config" else ""  # its text may be a secret's
            self._fault(keys, "settings_file", f"{self._file.path(name)} is not JSON that can be used{where}")

    def _secrets(self, keys: KeyPath, given: Any, contract: Contract) -> dict[str, Any]:
        if not {"secrets", "secret_files"} & set(contract.takes):
            self._fault(keys, "settings_value", f"the contract {contract.name} sends its plugins no secrets")
            return {}
        if isinstance(given, str):
            if "secrets" not in contract.takes:
                self._fault(keys, "settings_value", "secrets has to be a table")
                return {}
            found = self._json(keys, given)
            if isinstance(found, dict):
                return found
            self._fault(keys, "settings_value", "secrets has to be a table, or a file with a JSON object")
            return {}
        texts = "secrets" in contract.takes  # sent in a message; otherwise the bytes are a file
        raw = {name: self._bytes((*keys, name), self._file.secret, source) for name, source in given.items()}
        values = {name: as_text(without_line_end(each) if texts else each) for name, each in raw.items()}
        for name, value in values.items():
            if texts and isinstance(value, bytes):
                message = f"the contract {contract.name} sends secrets as text, and this one is not UTF-8"
                self._fault((*keys, name), "settings_value", message)
        return values

    def _limits(self, keys: KeyPath, given: dict[str, Any]) -> dict[str, Any]:
        for name, message, hint in limit_faults(given):
            rule = "settings_value" if name in Limits._fields else "settings_key"
            self._fault((*keys, name), rule, message, hint)
        return given

    def _unknown(self, keys: KeyPath, contract: Contract, known: tuple[str, ...]) -> None:
        key = str(keys[-1])
        owners = [each.name for each in all_contracts() if key in options_of(each)]
        if owners:
            hint = f"it is for plugins of {' and '.join(owners)}, and this is one of {contract.name}"
        else:
            hint = did_you_mean(key, known) or f"there are {', '.join(known)}"
        self._fault(keys, "settings_key", f"{quoted(key)} is not a key of a plugin's settings", hint)


def options_of(contract: Contract) -> dict[str, ContractOption]:
    """The options of `runner call` for plugins of a contract that are not about one call."""
    calls = contract.prepared_calls
    once = () if calls is None else calls.OPTIONS_OF_ONE_CALL
    return {each.name: each for each in contract.options if "call" in each.verbs and each.name not in once}
