"""Finds the contracts: each folder of runner/contracts/ is one."""

from __future__ import annotations

import importlib
import os

from sandbox import CODE_ROOT, look
from sandbox.speed.typed import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from runner.conformance.rules import RuleBook
    from runner.contracts.configurations import HostPlaces
    from runner.contracts.contract import Contract, ContractOption, ContractVerb
    from runner.plugin import LaunchFault, Plugin
    from runner.protocol.dialect import Call, Dialect, Setting
    from runner.protocol.inspector import Inspector


_FOLDER = os.path.join(CODE_ROOT, "runner", "contracts")


def contract_names() -> tuple[str, ...]:
    return tuple(
        sorted(
            name for name in look.listdir(_FOLDER) if look.isfile(os.path.join(_FOLDER, name, "__init__.py"))
        )
    )


def example_folder(name: str) -> str:
    """The folder with the example plugin of a contract."""
    return os.path.join(_FOLDER, name, "example")


class ContractBroken(Exception):
    """The folder of a contract cannot be used."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"the contract in runner/contracts/{name}/ cannot be loaded: {reason}")


def find_contract(name: str) -> Contract:
    """Raises ContractBroken."""
    try:
        contract: Contract = importlib.import_module(f"runner.contracts.{name}").CONTRACT
    except Exception as error:
        raise ContractBroken(name, f"{type(error).__name__}: {error}") from error
    if contract.name != name:
        raise ContractBroken(name, f"its CONTRACT calls itself {contract.name!r}")
    return contract


def make_dialect(contract: Contract, setting: Setting) -> Dialect:
    """A new dialect: `make` in the contract's dialect.py."""
    made: Dialect = _module(contract, "dialect").make(setting)
    return made


def make_inspector(contract: Contract, setting: Setting) -> Inspector:
    """A new inspector: `make` in the contract's inspector.py. It checks the messages of plugin and host for
    `exec --inspect`."""
    made: Inspector = _module(contract, "inspector").make(setting)
    return made


def host_methods(contract: Contract) -> Mapping[str, str]:
    """What plugins may ask of their host: METHODS in the contract's host_methods.py, method -> field of
    Services. It is in a file of its own because `services` needs trio, and who only looks does not."""
    if not look.isfile(os.path.join(_FOLDER, contract.name, "host_methods.py")):
        return {}
    found: Mapping[str, str] = _module(contract, "host_methods").METHODS
    return found


def plugin_rules(contract: Contract) -> RuleBook | None:
    """The rules that `runner conformance` tries a plugin by: BOOK in the contract's plugin_rules.py. None: it
    has written none down."""
    if not look.isfile(os.path.join(_FOLDER, contract.name, "plugin_rules.py")):
        return None
    book: RuleBook = _module(contract, "plugin_rules").BOOK
    return book


def check_hook(contract: Contract, plugin: Plugin, call: Call) -> None:
    """Check the call of a hook as the dialect does, by the manifest alone: an event for it may wait long
    before it is called. It is `check_hook` in the contract's calls.py, if that has one: a contract that
    prepares calls checks more then. Raises CallRefused."""
    if look.isfile(os.path.join(_FOLDER, contract.name, "calls.py")):
        check = getattr(_module(contract, "calls"), "check_hook", None)
        if check is not None:
            check(plugin, call)


def manifest_schema(contract: Contract) -> dict[str, object]:
    """The manifest as JSON Schema, for editors: `json_schema` in the contract's manifest.py."""
    found: dict[str, object] = _module(contract, "manifest").json_schema()
    return found


def _module(contract: Contract, name: str) -> Any:
    return importlib.import_module(f"{type(contract).__module__}.{name}")


def all_contracts() -> tuple[Contract, ...]:
    return tuple(map(find_contract, contract_names()))


def all_host_places() -> HostPlaces:
    """The places of all contracts together."""
    from runner.contracts.configurations import HostPlaces

    each = [hosts.places() for contract in all_contracts() if (hosts := contract.configurations) is not None]
    return HostPlaces(
        tuple(place for places in each for place in places.home),
        tuple(place for places in each for place in places.system),
        tuple(name for places in each for name in places.variables),
        tuple(name for places in each for name in places.project),
        tuple(place for places in each for place in places.tokens),
    )


def choice_fault(plugin: Plugin, options: Mapping[str, str]) -> LaunchFault | None:
    """See Choice.choice_fault. None for a contract that has no choice."""
    choice = find_contract(plugin.contract).choice
    return None if choice is None else choice.choice_fault(plugin, options)


def command_contract() -> str:
    """The contract that a program without a manifest is taken for."""
    return next(contract.name for contract in all_contracts() if contract.configurations is not None)


def all_kinds() -> tuple[str, ...]:
    """Every kind of call that some contract has."""
    return tuple(dict.fromkeys(kind for contract in all_contracts() for kind in contract.calls))


def contract_verbs() -> dict[str, ContractVerb]:
    """The verbs of contracts by name. If two contracts have the same name, the first counts."""
    found: dict[str, ContractVerb] = {}
    for contract in all_contracts():
        for verb in contract.verbs:
            found.setdefault(verb.name, verb)
    return found


def contract_options(verb: str) -> dict[str, ContractOption]:
    """The options of all contracts that a verb takes, by flag. If contracts share a flag, the help names
    them all."""
    found: dict[str, ContractOption] = {}
    verb = "exec" if verb == "plan" else verb  # it takes the same words
    for contract in all_contracts():
        for option in contract.options:
            if verb in option.verbs:
                known = found.get(option.flag)
                helped = option._replace(help=f"{contract.name}: {option.help}")
                found[option.flag] = helped if known is None else _join_help(known, helped)
    return found


def _join_help(one: ContractOption, other: ContractOption) -> ContractOption:
    return one._replace(help=f"{one.help}; {other.help}", names_file=one.names_file or other.names_file)


def option_owners(name: str) -> tuple[str, ...]:
    """The contracts that have an option of this name."""
    return tuple(
        contract.name
        for contract in all_contracts()
        if any(option.name == name and option.verbs for option in contract.options)
    )
