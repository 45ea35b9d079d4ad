"""Why a package cannot be signed, or is not what its signature says."""

from __future__ import annotations


class PackageFault(Exception):
    """The message says what is wrong, `rule` by which rule, `hint` what to do about it."""

    def __init__(self, rule: str, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.rule = rule
        self.hint = hint
