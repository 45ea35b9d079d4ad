"""The JSON Schema of a policy, for editors. `runner check` finds more: it also checks the values."""

from __future__ import annotations

from typing import Any

from sandbox.network.rules import LAST_PORT, MOST_PORTS
from sandbox.policy.policy import LAYERS, LIMIT_MODES, LIMIT_NAMES
from sandbox.spec import DURATIONS, NETWORK_ORDER, SECCOMP_ORDER, SIZES

_TEXT: dict[str, Any] = {"type": "string"}
_SIZE: dict[str, Any] = {"type": ["string", "integer"], "description": 'A size: "512K", "256M", "1.5G".'}
_TIME: dict[str, Any] = {"type": ["string", "number"], "description": 'A time: "500ms", "30s", "1h30m".'}
_PATHS = "Absolute paths, each for all below it; * for all that is not denied. ${state_dir}: its own folder."
_HOSTS = 'Hosts: "example.com:443", "*.example.com:443", "*:443", "example.com:*", "10.0.0.0/8:5432".'
_NAMES = "Names of variables; * and ? are wildcards."


def policy_schema() -> dict[str, Any]:
    properties = {
        "version": {"const": 1, "description": "The version of this format."},
        "description": {**_TEXT, "description": "One line about it, for people."},
        "unsandboxed": _choice("Whether a manifest may ask to run without a cage.", "deny", "allow"),
        "deny": _texts("More paths that no plugin gets, nor anything below or above them."),
        "scan_limit": {
            "type": "integer",
            "minimum": 1,
            "maximum": 100_000_000,
            "description": "The most entries of a folder that is shown to a plugin.",
        },
        "machine_share": {
            **_TEXT,
            "pattern": r"^[0-9]{1,3}(\.[0-9]{1,6})?%$",
            "description": "The most that one plugin may take of numbers that the whole machine shares.",
        },
        "read": _paths("Host paths that plugins may read."),
        "write": _paths("Host paths that plugins may write."),
        "network": _network(),
        "project": _table(
            "The folder that a server works on.", access=_choice("Whether it is shown.", "none", "read")
        ),
        "env": _env(),
        "seccomp": _table(
            "System calls.",
            default=_choice("Of a plugin that does not ask.", *SECCOMP_ORDER),
            ceiling=_choice("The most a manifest may ask for.", *SECCOMP_ORDER),
        ),
        "limits": _table("Limits, by name.", **{name: _limit(name) for name in LIMIT_NAMES}),
        "capabilities": _table(
            "What a plugin and its host may say to each other; * and ? are wildcards.",
            declare=_texts("Capabilities that it may declare."),
            host=_texts("Methods that it may call on its host."),
        ),
        "hooks": _table(
            "Hooks.", on_failure=_choice("What a hook that failed is taken for.", "continue", "abort")
        ),
        "packages": _table(
            "Signed plugins.",
            signature=_choice("Whether a plugin has to be signed.", "optional", "required"),
            trust={**_TEXT, "description": "The file of the keys whose signatures count."},
        ),
        "user": _table(
            "Who plugins run as, if the runner is root.",
            uids={
                "type": "array",
                "items": {"type": "integer", "minimum": 1, "maximum": 2**31 - 1},
                "minItems": 2,
                "maxItems": 2,
                "description": "The first and the last uid that plugins are given.",
            },
            run_as={
                "type": ["string", "integer"],
                "description": "An account for plugins that write where no owner can be mapped.",
            },
        ),
        "approvals": _approvals(),
        "cgroups": _table(
            "How the runner makes room for cgroups of plugins (cgroup v2).",
            host=_choice(
                "Whether other processes of its own delegated unit may be moved to a group below it.",
                "stay",
                "move",
            ),
        ),
        "layers": _table(
            "What to do if a machine cannot enforce a layer.",
            **{name: _choice("Whether it has to be enforced.", "require", "prefer") for name in LAYERS},
        ),
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "policy of the runner",
        **_table("What the operator allows.", **properties),
        "required": ["version"],
    }


def _table(description: str, /, **properties: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "description": description,
        "additionalProperties": False,
        "properties": properties,
    }


def _choice(description: str, *words: str) -> dict[str, Any]:
    return {"enum": list(words), "description": description}


def _texts(description: str) -> dict[str, Any]:
    return {"type": "array", "items": _TEXT, "description": description}


def _paths(description: str) -> dict[str, Any]:
    return _table(
        description,
        default=_texts(f"What every plugin gets, if it exists. {_PATHS}"),
        ceiling=_texts(f"The most a manifest may ask for. {_PATHS}"),
    )


def _network() -> dict[str, Any]:
    return _table(
        "The network.",
        default=_choice("Of a plugin that does not ask.", "none", "host"),
        ceiling=_choice("The most a manifest may ask for.", *NETWORK_ORDER),
        hosts=_texts(_HOSTS),
        private=_choice("Whether names may lead to private addresses.", "deny", "allow"),
        loopback={
            "type": "array",
            "items": {"type": "integer", "minimum": 1, "maximum": LAST_PORT},
            "maxItems": MOST_PORTS,
            "description": 'Ports of this machine that an entry "localhost:6379" of a list may open.',
        },
        environment=_choice("Whether a contract's variable may raise the ceiling.", "ignored", "may_raise"),
        connections={
            "type": "integer",
            "minimum": 1,
            "maximum": 1024,
            "description": "The most connections at once.",
        },
        bytes={**_SIZE, "description": "The most bytes of all connections, both ways."},
        rate={**_SIZE, "description": "The most bytes per second, both ways."},
        idle={**_TIME, "description": "How long a connection may be without a byte."},
    )


def _env() -> dict[str, Any]:
    return _table(
        "The environment of plugins.",
        set={
            "type": "object",
            "additionalProperties": _TEXT,
            "description": "Set for every plugin; a manifest cannot change these.",
        },
        ceiling=_texts(f"What a manifest may ask for of the host's. {_NAMES}"),
        steering=_texts(f"Variables that choose which code runs, and that a manifest may set. {_NAMES}"),
        **{"pass": _texts("Passed on to every plugin, if the host has them.")},
    )


def _limit(name: str) -> dict[str, Any]:
    amount = _SIZE if name in SIZES else _TIME if name in DURATIONS else {"type": ["string", "number"]}
    return _table(
        f"The limit {name}.",
        default={**amount, "description": "Of a plugin that does not ask."},
        ceiling={**amount, "description": "The most a manifest or a command line may ask for."},
        mode=_choice("What to do where it cannot be enforced in full.", *LIMIT_MODES),
    )


def _approvals() -> dict[str, Any]:
    return _table(
        "What a person may allow beyond the ceilings: runner allow, and the options of runner run.",
        read=_texts(_PATHS),
        write=_texts(_PATHS),
        network=_choice("Up to which mode.", *NETWORK_ORDER),
        hosts=_texts(_HOSTS),
        env=_texts(_NAMES),
        steering=_texts(_NAMES),
        seccomp=_choice("Up to which profile.", *SECCOMP_ORDER),
        project=_choice("Whether the project may be shown.", "none", "read"),
    )
