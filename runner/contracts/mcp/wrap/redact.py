"""Command lines without what is, or may be, a secret.

A diff is shown on shared screens and copied into reports. So too much is hidden rather than too little.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from sandbox.document.diagnostic import printable

HIDDEN = "…"

_SECRET = (
    r"(?:key|token|secret|pass|pwd|auth|cred|dsn|cookie|jwt|bearer|signature|connection[_-]?string"
    r"|(?<![a-z])pat(?![a-z]))"
)
_SECRET_NAME = re.compile(_SECRET, re.IGNORECASE)
_OPTION = re.compile(r"--?[\w.-]+")
# NAME=VALUE, "NAME": "VALUE" and Name: VALUE, anywhere in a word.
_SECRET_VALUE = re.compile(rf"({_SECRET}[\w.-]{{0,64}}[\"']?\s?[=:]\s?)\S.*", re.IGNORECASE | re.DOTALL)
# As in the header Authorization.
_SCHEME = re.compile(r"\b((?:bearer|basic|token)[\s:=])\s*+\S.*", re.IGNORECASE | re.DOTALL)
_SCHEMES = ("bearer", "basic")
_KNOWN_TOKENS = re.compile(r"\b(?:gh[a-z]_|github_pat_|glpat-|sk-|xox[a-z]-|AKIA|eyJ)[\w.-]{8,}")
_LONGEST_WORD = 2000
_USER_OPTIONS = ("-u", "--user")


def shown_word(word: str, previous: str) -> str:
    """`previous`: the word before it, which may say that this one is a secret."""
    if len(word) > _LONGEST_WORD or _announces_secret(previous):
        return HIDDEN
    if previous in _USER_OPTIONS and ":" in word:
        return HIDDEN
    # USER:PASSWORD@HOST, with or without a scheme. A password may hold slashes, colons and more of @.
    colon, last = word.find(":"), word.rfind("@")
    if 0 <= colon < last:
        word = f"{word[: colon + 1]}{HIDDEN}{word[last:]}"
    for pattern in (_SECRET_VALUE, _SCHEME):
        word = pattern.sub(lambda found: found[1] + HIDDEN, word)
    return _KNOWN_TOKENS.sub(HIDDEN, word)


def _announces_secret(word: str) -> bool:
    """--api-key, and "Authorization: Bearer" with the rest in the next word."""
    if len(word) > _LONGEST_WORD:
        return False
    if _OPTION.fullmatch(word):
        return _SECRET_NAME.search(word) is not None
    return word.lower().split()[-1:] in ([each] for each in _SCHEMES)


def shown_words(words: Sequence[str]) -> list[str]:
    return [shown_word(word, words[number - 1] if number else "") for number, word in enumerate(words)]


def shown_line(words: Sequence[str]) -> str:
    """A command line on one line."""
    from shlex import quote

    return printable(" ".join(word if HIDDEN in word else quote(word) for word in shown_words(words)))
