"""The host side: knows plugins and speaks their protocols. The cage itself is in sandbox/.

For programs: `open_plugin`, `run` and what they raise and return (runner/library.py). They are imported when
they are asked for, so that `runner exec` does not pay for trio.
"""

TYPE_CHECKING = False  # typing is imported by whoever needs more of it

__version__ = "0.1.0"

if TYPE_CHECKING:
    from runner.exceptions import InvalidCall, NotOnTrio, PluginError, PluginFailure
    from runner.library import OpenPlugin, Result, open_plugin, run
    from runner.outcome import Outcome
    from runner.protocol.dialect import Identity, Notice, Progress
    from runner.protocol.host_services import Completion, HostError, Services

__all__ = [
    "Completion",
    "HostError",
    "Identity",
    "InvalidCall",
    "NotOnTrio",
    "Notice",
    "OpenPlugin",
    "Outcome",
    "PluginError",
    "PluginFailure",
    "Progress",
    "Result",
    "Services",
    "__version__",
    "open_plugin",
    "run",
]

_HOMES = {
    "Identity": "runner.protocol.dialect",
    "Notice": "runner.protocol.dialect",
    "Progress": "runner.protocol.dialect",
    "Completion": "runner.protocol.host_services",
    "HostError": "runner.protocol.host_services",
    "Services": "runner.protocol.host_services",
    "OpenPlugin": "runner.library",
    "Result": "runner.library",
    "open_plugin": "runner.library",
    "run": "runner.library",
    "Outcome": "runner.outcome",
    "InvalidCall": "runner.exceptions",
    "NotOnTrio": "runner.exceptions",
    "PluginError": "runner.exceptions",
    "PluginFailure": "runner.exceptions",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'runner' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
