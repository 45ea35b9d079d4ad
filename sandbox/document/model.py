"""Checks a document against a pydantic model: wrong types, missing keys and unknown keys, as sentences.

pydantic takes a tenth of a second to import, so only the modules with the models import it (of contracts, of
the policy, of settings). This one uses a few attributes of its classes and imports nothing.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Union, get_args, get_origin

from sandbox.document.diagnostic import did_you_mean, nearest, quoted
from sandbox.document.faults import Faults
from sandbox.document.read import Format
from sandbox.spec import KeyPath
from sandbox.speed.value import NamedTuple

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
    "list_type": "LIST",
    "tuple_type": "LIST",
    "dict_type": "TABLE",
    "model_type": "TABLE",
    "model_attributes_type": "TABLE",
}
# What a list and a table are called, by format.
_WORDS: Mapping[Format, tuple[str, str]] = {
    "toml": ("an array", "a table"),
    "json": ("an array", "an object"),
    "jsonc": ("an array", "an object"),
    "yaml": ("a list", "a mapping"),
}
# Limits of a value, in words: the name of the limit in the validator's report, and a sentence.
_LIMITS = {
    "too_short": ("min_length", "has {count} items, and at least {limit} are needed"),
    "too_long": ("max_length", "has {count} items, and at most {limit} are allowed"),
    "string_too_short": ("min_length", "has {count} characters, and at least {limit} are needed"),
    "string_too_long": ("max_length", "has {count} characters, and at most {limit} are allowed"),
    "greater_than": ("gt", "is {value}, and has to be greater than {limit}"),
    "greater_than_equal": ("ge", "is {value}, and has to be at least {limit}"),
    "less_than": ("lt", "is {value}, and has to be less than {limit}"),
    "less_than_equal": ("le", "is {value}, and has to be at most {limit}"),
    "string_pattern_mismatch": ("pattern", "is {value}, which does not match {limit}"),
}
# Imported by pydantic when it builds its first model: it looks for plugins among all installed packages.
_PLUGIN_LOADER = "pydantic.plugin._loader"
# What the validator adds to the keys of a value that may have one of several types.
_UNION_PARTS = ("int", "float", "str", "bool")
_MOST_SUGGESTIONS = 50  # difflib is slow; the first suggestions are enough


# Called with the table that has an unknown key, and with the key's value.
Strict = Callable[[KeyPath, object], str | None]


class Wording(NamedTuple):
    """How messages about one kind of file are worded. {key}: the key in quotes; {name}: with the tables that
    it is in; {table}, {owner}: its table."""

    unknown: str = "the key {key} is unknown in {table}"
    missing: str = "the key {key} is missing in {table}"
    wrong_type: str = "{name} has to be {expected}, not {got}"
    value_rule: str = "invalid_value"  # of what a validator refuses
    # How many of the first keys no name has. None: a name is the last key, in quotes.
    skip: int | None = None
    expected: Mapping[str, str] = {}  # in place of those of _EXPECTED


_OF_MANIFESTS = Wording()


class WrongValue(ValueError):
    """Raised by a validator of a model. The name of the key stands in front of the message, unless it is
    `whole`. A validator may also raise any other ValueError. `keys`: what is wrong in the value."""

    def __init__(
        self, message: str, rule: str = "", hint: str = "", *, keys: KeyPath = (), whole: bool = False
    ) -> None:
        super().__init__(message)
        self.rule, self.hint, self.keys, self.whole = rule, hint, keys, whole
        self.all: tuple[WrongValue, ...] = (self,)


def refuse(several: Sequence[WrongValue]) -> None:
    """Raise all that one validator found; nothing if it is nothing."""
    if several:
        several[0].all = tuple(several)
        raise several[0]


def check(
    faults: Faults,
    model: Any,
    data: object,
    keys: KeyPath,
    strict: Strict,
    wording: Wording = _OF_MANIFESTS,
    context: object = None,
) -> Any:
    """The model of `data` (at `keys`), or None. Reports everything that does not fit.

    Unknown keys are warnings, except those for which `strict` gives the rule they break. `context`: for
    validators.
    """
    try:
        return _validate(model, data, context)
    except ValueError as error:
        # pydantic_core.ValidationError
        errors: list[dict[str, Any]] = error.errors(include_url=False)  # type: ignore[attr-defined]
    misspelled = _misspelled(errors, keys, strict)
    for number, fault in enumerate(errors):
        loc: KeyPath = tuple(fault["loc"])
        if loc in misspelled.values():
            continue  # told with the missing key
        if loc in misspelled and fault["type"] == "missing":
            table = shown_table((*keys, *loc[:-1]), faults.document.format)
            wrong = misspelled[loc]
            message = (
                f"the key {quoted(str(loc[-1]))} is missing in {table}, which has {quoted(str(wrong[-1]))}"
            )
            faults.error((*keys, *wrong), "missing_key", message, f"did you mean {quoted(str(loc[-1]))}?")
            continue
        suggest = number < _MOST_SUGGESTIONS
        _report(faults, model, fault, loc, (*keys, *loc), strict, wording, suggest=suggest)
    return None


def _misspelled(errors: list[dict[str, Any]], keys: KeyPath, strict: Strict) -> dict[KeyPath, KeyPath]:
    """The missing keys for which the same table has an unknown key that is nearly the same."""
    unknown: dict[KeyPath, list[str]] = {}
    for fault in errors:
        table = tuple(fault["loc"][:-1])
        if fault["type"] == "extra_forbidden" and strict((*keys, *table), None) is None:
            unknown.setdefault(table, []).append(str(fault["loc"][-1]))
    found: dict[KeyPath, KeyPath] = {}
    for fault in errors[:_MOST_SUGGESTIONS]:
        if fault["type"] != "missing":
            continue
        *table, name = fault["loc"]
        if close := nearest(str(name), unknown.get(tuple(table), [])[:_MOST_SUGGESTIONS]):
            unknown[tuple(table)].remove(close)
            found[(*table, name)] = (*table, close)
    return found


def _validate(model: Any, data: object, context: object) -> Any:
    """Validate without pydantic's plugins: no other package may change what a manifest means. Looking for
    plugins takes 40 of the 330 ms of processor time of a manifest that is not cached, mostly to import
    importlib.metadata. Plugins that a host program has loaded before stay loaded."""
    if _PLUGIN_LOADER in sys.modules:
        return model.model_validate(data, context=context)
    loader: Any = types.ModuleType(_PLUGIN_LOADER)
    loader.get_plugins = tuple
    sys.modules[_PLUGIN_LOADER] = loader
    try:
        return model.model_validate(data, context=context)
    finally:
        if sys.modules.get(_PLUGIN_LOADER) is loader:
            del sys.modules[_PLUGIN_LOADER]


def _report(
    faults: Faults,
    model: Any,
    fault: dict[str, Any],
    loc: KeyPath,
    place: KeyPath,
    strict: Strict,
    wording: Wording,
    *,
    suggest: bool,
) -> None:
    kind: str = fault["type"]
    if wording.skip is None and len(loc) > 1 and loc[-1] in _UNION_PARTS and kind in _EXPECTED:
        place = place[:-1]  # the validator's name of one type of several
    syntax = faults.document.format
    words = _words(place, wording, syntax)
    if kind == "extra_forbidden":
        known = _known_keys(model, loc[:-1]) if suggest and not faults.full else ()
        hint = did_you_mean(str(place[-1]), known)
        rule = strict(place[:-1], fault["input"])
        message = wording.unknown.format_map(words)
        if rule is not None:
            listed = f"known here: {', '.join(known)}" if known else ""
            faults.error(place, rule, message, hint or listed)
        else:
            faults.warn(place, "unknown_key", f"{message} and ignored", hint)
    elif kind == "missing":
        faults.error(place, "missing_key", wording.missing.format_map(words))
    elif kind in _EXPECTED:
        expected = wording.expected.get(kind, _EXPECTED[kind])
        expected = expected.replace("LIST", _WORDS[syntax][0]).replace("TABLE", _WORDS[syntax][1])
        got = type_name(fault["input"], syntax)
        message = wording.wrong_type.format_map({**words, "expected": expected, "got": got})
        is_table = wording.skip is not None and _EXPECTED[kind] == "TABLE"
        hint = f"write {shown_table(place)}" if is_table else ""
        faults.error(place, "invalid_type", message, hint)
    elif kind == "value_error":
        error: Exception = fault["ctx"]["error"]
        if place[-1:] == ("[key]",):
            place = place[:-1]  # the validator's name of a key of a table
        for refused in error.all if isinstance(error, WrongValue) else (WrongValue(str(error)),):
            at = (*place, *refused.keys)
            name = "" if refused.whole else f"{_words(at, wording, syntax)['name']} "
            faults.error(at, refused.rule or wording.value_rule, f"{name}{refused}", refused.hint)
    elif kind == "literal_error":
        expected = str(fault.get("ctx", {}).get("expected", ""))
        value = fault.get("input")
        given = quoted(value) if isinstance(value, str) else type_name(value, syntax)
        faults.error(place, wording.value_rule, f"{words['name']} is {given}; possible are {expected}")
    else:
        faults.error(place, wording.value_rule, f"{words['name']} {_limit_text(fault)}")


def _words(place: KeyPath, wording: Wording, syntax: Format) -> dict[str, str]:
    """What the words in braces of a Wording stand for."""
    key = quoted(str(_last_name(place)))
    if wording.skip is not None:
        name = _dotted(place[wording.skip :] or place)
    else:
        name = f"item {place[-1]} of {key}" if place and isinstance(place[-1], int) else key
    owner = quoted(str(place[-2])) if len(place) > 1 else ""
    return {"key": key, "name": name, "owner": owner, "table": shown_table(place[:-1], syntax)}


def _limit_text(fault: dict[str, Any]) -> str:
    """What is wrong with a value of the right type."""
    key, text = _LIMITS.get(fault["type"], ("", "has a value that is not allowed"))
    value, limit = fault.get("input"), fault.get("ctx", {}).get(key)
    if isinstance(value, str | list) and not value and limit == 1:
        return "is empty"
    count = len(value) if isinstance(value, str | list | dict) else 0
    shown = quoted(value) if isinstance(value, str) else str(value)
    return text.format(count=count, limit=limit, value=shown)


def _last_name(place: KeyPath) -> str | int:
    return next((key for key in reversed(place) if isinstance(key, str)), place[-1] if place else "")


def shown_table(keys: KeyPath, syntax: Format = "toml") -> str:
    """`[table.sub]`, `[table.list[0]]`, or "the document" for the root. In other formats than TOML, quotes
    stand in place of the brackets."""
    if not keys:
        return "the document"
    text = quoted(_dotted(keys), 100)
    return f"[{text[1:-1]}]" if syntax == "toml" else text


def _dotted(keys: KeyPath) -> str:
    text = ""
    for key in keys:
        text += f"[{key}]" if isinstance(key, int) else f".{key}" if text else key
    return text


def type_name(value: object, syntax: Format = "toml") -> str:
    names: dict[type, str] = {
        bool: "a boolean",
        int: "an integer",
        float: "a number",
        str: "a string",
        list: _WORDS[syntax][0],
        dict: _WORDS[syntax][1],
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


def editor_schema(
    model: Any, title: str, closed: tuple[str, ...], *, tables: bool = True
) -> dict[str, object]:
    """The model as JSON Schema 2020-12. Unknown keys are open, except in the tables named in `closed`. With
    `tables` False, no unknown key may be a table."""
    schema: dict[str, Any] = model.model_json_schema(by_alias=True)
    definitions: dict[str, Any] = schema.get("$defs", {})
    for name, definition in (("", schema), *definitions.items()):
        if name not in closed:
            had = definition.pop("additionalProperties", None)
            if not tables and had is False:
                definition["additionalProperties"] = {"not": {"type": "object"}}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": title}
