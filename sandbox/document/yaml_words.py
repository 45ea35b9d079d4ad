"""The words of YAML: what a plain word means by the core schema of YAML 1.2, and a parser's messages."""

from __future__ import annotations

import re

from sandbox.document.diagnostic import quoted
from sandbox.document.positions import WORD_LIMIT, Fault

_TAG = "tag:yaml.org,2002:"

# Tags, and the kind of node that each may stand on: a scalar, a list or a mapping.
PLAIN_TAGS: dict[str, type] = {
    **{f"{_TAG}{name}": str for name in ("null", "bool", "int", "float", "str")},
    f"{_TAG}seq": list,
    f"{_TAG}map": dict,
}

_CONSTANTS: dict[str, bool | None] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL")),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}

# Possessive throughout (the *+), see json.py.
_DECIMAL = re.compile(r"[-+]?+[0-9]++")
_LEADING_ZERO = re.compile(r"[-+]?+0[0-9]++")
_BASED = re.compile(r"0o[0-7]++|0x[0-9a-fA-F]++")
_FLOAT = re.compile(r"[-+]?+(?:\.[0-9]++|[0-9]++\.[0-9]*+|[0-9]++)(?:[eE][-+]?+[0-9]++|)")
_ENDLESS = re.compile(r"[-+]?+\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)")


def read_word(word: str, offset: int) -> object:
    """A plain scalar: null, a boolean, a number, else a string."""
    if word in _CONSTANTS:
        return _CONSTANTS[word]
    if word[0] not in "+-.0123456789":
        return word
    if _DECIMAL.fullmatch(word):
        _check_length(word, offset)
        if _LEADING_ZERO.fullmatch(word):
            message = f"the number {quoted(word)} starts with a zero, which means octal to some programs"
            raise Fault(offset, "yaml_number", message, "write it without the zero, as 0o17, or in quotes")
        return int(word)
    if _BASED.fullmatch(word):
        _check_length(word, offset)
        return int(word[2:], 8 if word[1] == "o" else 16)
    if _FLOAT.fullmatch(word):
        _check_length(word, offset)
        number = float(word)
        if number in (float("inf"), float("-inf")):
            raise Fault(offset, "number_too_large", f"the number {quoted(word)} is too large")
        return number
    if _ENDLESS.fullmatch(word):
        raise Fault(
            offset,
            "yaml_number",
            f"{quoted(word)} is no number that can be used",
            "write it in quotes if a text is meant",
        )
    return word


def read_tagged(text: str, tag: str, offset: int) -> object:
    """A scalar with one of the plain tags."""
    name = tag.removeprefix(_TAG)
    if name == "str":
        return text
    value = read_word(text, offset)
    if name == "float" and type(value) is int:
        _check_float(value, text, offset)
        return float(value)
    kinds = {"null": type(None), "bool": bool, "int": int, "float": float}
    if type(value) is not kinds[name]:
        raise Fault(offset, "yaml_tag", f"the text {quoted(text)} is not what its tag !!{name} says")
    return value


def _check_float(value: int, text: str, offset: int) -> None:
    try:
        float(value)
    except OverflowError:
        raise Fault(offset, "number_too_large", f"the number {quoted(text)} is too large") from None


def _check_length(word: str, offset: int) -> None:
    if len(word) > WORD_LIMIT:
        message = f"a number of {len(word)} characters, the limit is {WORD_LIMIT}"
        raise Fault(offset, "number_too_large", message)


_QUOTE_HINT = """a text with a colon, a bracket or a star in it has to stand in quotes: "net:[]\""""
_KEY_HINT = "a key and its colon stand on one line, within 1024 characters"

# Parts of the messages of both parsers, and plain words for them. The first that fits decides.
_SYNTAX: tuple[tuple[tuple[str, ...], str, str], ...] = (
    (("end of stream",), "this string is not closed", ""),
    (("',' or ']'",), "a comma or the closing bracket is missing here", _KEY_HINT),
    (("',' or '}'",), "a comma or the closing brace is missing here", _KEY_HINT),
    (("expected ':'",), "a colon is missing after a key", _QUOTE_HINT),
    (
        ("mapping values are not", "unexpected ':'"),
        "a value may not start here",
        f"quote a text that contains a colon; {_KEY_HINT}",
    ),
    (("mapping keys are not",), "a key may not start here", "start it on a line of its own"),
    (("sequence entries are not",), "a list item may not start here", "start it on a line of its own"),
    (
        ("<block end>", "expected key", "'-' indicator", "document start>"),
        "this does not fit the lines above",
        "check the indentation, and quotes around texts",
    ),
    (("node content",), "a value is missing here", ""),
    (("cannot start any token",), "no value may start with this character", "write the text in quotes"),
    (
        ("document indicator", "document separator"),
        "the document ends inside of a string",
        "indent the lines of the string",
    ),
    (("unknown escape",), "this backslash escape does not exist in YAML", "write a backslash as \\\\"),
    (("hexadecimal", "hexdecimal"), "this escape needs more hexadecimal digits", ""),
    (
        ("indentation indicator", "comment or line break", "comment or a line break"),
        "this is no header of a block text",
        "write | or >, behind it only + or - and a digit from 1 to 9",
    ),
    (("alphabetic or numeric",), "a name of letters, digits, - and _ is needed here", ""),
    (("directive", "non-alphabetical"), "a directive may not stand here", "write a text with % in quotes"),
)


def syntax_words(problem: str) -> tuple[str, str]:
    """A parser's message in plain words, with a hint."""
    for parts, message, hint in _SYNTAX:
        if any(part in problem for part in parts):
            return message, hint
    return problem, ""
