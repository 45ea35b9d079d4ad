"""Checks a document against a pydantic model: wrong types, missing keys and unknown keys, as sentences.

pydantic takes a tenth of a second to import, so only the modules with the models import it
(contracts/*/manifest.py). This one uses a few attributes of its classes and imports nothing.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any, Literal, Union, get_args, get_origin

from runner.manifest.faults import Faults
from sandbox.document.diagnostic import did_you_mean, quoted
from sandbox.spec import KeyPath

# sandbox.spec.SeccompProfile for a model: pydantic needs the Literal of typing.
Seccomp = Literal["strict", "default", "compat"]

# The settings of every table's model. Models are built when first used: one contract has forty of them, and a
# manifest uses few.
TABLE: Any = {"strict": True, "extra": "forbid", "defer_build": True}

_EXPECTED = {
    "string_type": "a string",
    "int_type": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
    "list_type": "an array",
    "dict_type": "a table",
    "model_type": "a table",
    "model_attributes_type": "a table",
}
# Imported by pydantic when it builds its first model: it looks for plugins among all installed packages.
_PLUGIN_LOADER = "pydantic.plugin._loader"
_MOST_SUGGESTIONS = 50  # difflib is slow; the first suggestions are enough


def check(
    faults: Faults, model: Any, data: object, keys: KeyPath, strict: Callable[[KeyPath], str | None]
) -> None:
    """Report everything in `data` (at `keys`) that does not fit `model`.

    Unknown keys are warnings, except in tables for which `strict` gives the rule they break.
    """
    try:
        _validate(model, data)
    except ValueError as error:
        # pydantic_core.ValidationError; `input` is left out, because it may be large.
        errors: list[dict[str, Any]] = error.errors(  # type: ignore[attr-defined]
            include_url=False, include_input=True
        )
    else:
        return
    for number, fault in enumerate(errors):
        loc: KeyPath = tuple(fault["loc"])
        _report(faults, model, fault, loc, (*keys, *loc), strict, suggest=number < _MOST_SUGGESTIONS)


def _validate(model: Any, data: object) -> None:
    """Validate without pydantic's plugins: no other package may change what a manifest means. Looking for
    plugins takes 40 of the 330 ms of processor time of a manifest that is not cached, mostly to import
    importlib.metadata. Plugins that a host program has loaded before stay loaded."""
    if _PLUGIN_LOADER in sys.modules:
        model.model_validate(data)
        return
    stand_in: Any = types.ModuleType(_PLUGIN_LOADER)
    stand_in.get_plugins = tuple
    sys.modules[_PLUGIN_LOADER] = stand_in
    try:
        model.model_validate(data)
    finally:
        if sys.modules.get(_PLUGIN_LOADER) is stand_in:
            del sys.modules[_PLUGIN_LOADER]


def _report(
    faults: Faults,
    model: Any,
    fault: dict[str, Any],
    loc: KeyPath,
    place: KeyPath,
    strict: Callable[[KeyPath], str | None],
    *,
    suggest: bool,
) -> None:
    kind: str = fault["type"]
    name = quoted(str(_last_name(place)))
    table = shown_table(place[:-1])
    if kind == "extra_forbidden":
        known = _known_keys(model, loc[:-1]) if suggest and not faults.full else ()
        hint = did_you_mean(str(place[-1]), known)
        rule = strict(place[:-1])
        if rule is not None:
            listed = f"known here: {', '.join(known)}" if known else ""
            faults.error(place, rule, f"the key {name} is unknown in {table}", hint or listed)
        else:
            faults.warn(place, "unknown_key", f"the key {name} is unknown in {table} and ignored", hint)
    elif kind == "missing":
        faults.error(place, "missing_key", f"the key {name} is missing in {table}")
    elif kind in _EXPECTED:
        is_item = isinstance(place[-1], int) if place else False
        subject = f"item {place[-1]} of {name}" if is_item else name
        got = type_name(fault.get("input"))
        faults.error(place, "invalid_type", f"{subject} has to be {_EXPECTED[kind]}, not {got}")
    elif kind == "literal_error":
        expected = str(fault.get("ctx", {}).get("expected", ""))
        value = fault.get("input")
        given = quoted(value) if isinstance(value, str) else type_name(value)
        faults.error(place, "invalid_value", f"{name} is {given}; possible are {expected}")
    else:
        message = str(fault.get("msg", "is not valid"))
        faults.error(place, "invalid_value", f"{name}: {message[:1].lower()}{message[1:]}")


def _last_name(place: KeyPath) -> str | int:
    return next((key for key in reversed(place) if isinstance(key, str)), place[-1] if place else "")


def shown_table(keys: KeyPath) -> str:
    """`[table.sub]`, `[table.list[0]]`, or "the document" for the root."""
    if not keys:
        return "the document"
    text = ""
    for key in keys:
        text += f"[{key}]" if isinstance(key, int) else f".{key}" if text else key
    return "[" + quoted(text, 100)[1:-1] + "]"


def type_name(value: object) -> str:
    names: dict[type, str] = {
        bool: "a boolean",
        int: "an integer",
        float: "a number",
        str: "a string",
        list: "an array",
        dict: "a table",
        type(None): "null",
    }
    return names.get(type(value), "a date or time")


def _known_keys(model: Any, loc: KeyPath) -> tuple[str, ...]:
    """The keys of the table that `loc` leads to, walking the annotations."""
    current: Any = model
    for key in loc:
        fields = getattr(current, "model_fields", None)
        if fields is not None:
            found = [f for name, f in fields.items() if (f.alias or name) == key]
            if not found:
                return ()
            current = _bare(found[0].annotation)
        else:
            # list[X] and dict[str, X]: an index or a free key leads to X.
            arguments = get_args(current)
            if not arguments:
                return ()
            current = _bare(arguments[-1])
    fields = getattr(current, "model_fields", None)
    return tuple(f.alias or name for name, f in fields.items()) if fields else ()


def _bare(annotation: Any) -> Any:
    """X of `X | None`."""
    if get_origin(annotation) in (Union, types.UnionType):
        return next((a for a in get_args(annotation) if a is not type(None)), annotation)
    return annotation


def editor_schema(model: Any, title: str, closed: tuple[str, ...]) -> dict[str, object]:
    """The model as JSON Schema 2020-12. Unknown keys are open, except in the tables named in `closed`."""
    schema: dict[str, Any] = model.model_json_schema(by_alias=True)
    definitions: dict[str, Any] = schema.get("$defs", {})
    for name, definition in (("", schema), *definitions.items()):
        if name not in closed:
            definition.pop("additionalProperties", None)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": title}
