"""Request: the packages and the program that a launcher such as npx or uvx is asked for, or a reference to a
package or an image in an OCI registry."""

from __future__ import annotations

import re

from sandbox.cache import fingerprint
from sandbox.speed.typed import Literal
from sandbox.speed.value import NamedTuple

Registry = Literal["npm", "pypi", "oci", "image"]

# What is asked for by a reference: a package of ours, and an image that docker and podman run.
REFERENCES: tuple[Registry, ...] = ("oci", "image")

LATEST = "latest"
_MOST_PACKAGES = 32
_LONGEST = 200
_NPM_NAME = r"(?:@[a-z0-9~][a-z0-9._~-]*/)?[a-z0-9~][a-z0-9._~-]*"
_NPM = re.compile(rf"(?P<name>{_NPM_NAME})(?:@(?P<version>[A-Za-z0-9.^~<>=*|+ -]+))?", re.IGNORECASE)
_PYPI = re.compile(
    r"(?P<name>[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)\s*(?P<extras>\[[A-Za-z0-9._, -]*\])?\s*"
    r"(?P<version>(?:(?:===|==|~=|!=|<=|>=|<|>)\s*[A-Za-z0-9.*+!_-]+\s*,?\s*)*)"
)
_EXACT = {
    "npm": re.compile(r"[0-9]+\.[0-9]+\.[0-9]+[A-Za-z0-9.+-]*"),
    "pypi": re.compile(r"={2,3}\s*[0-9][^*,]*"),
}
_PYTHON = re.compile(r"(?:python)?(3(?:\.[0-9]{1,2})?)(?:\.[0-9]+)?")


class UnusableSpec(ValueError):
    """The packages are not those of a registry. The text is the second half of a sentence."""


class Request(NamedTuple):
    registry: Registry
    packages: tuple[str, ...]  # specs, as npm and pip take them; the first is the program's; or one reference
    program: str = ""  # a command of these packages; empty: the one that the first package is named for
    python: str = ""  # the version that it asks for: "3.12"; empty: any

    @property
    def key(self) -> str:
        """Names the request in a store. Other words for the same packages are another request."""
        return fingerprint(
            *(part.encode() for part in (self.registry, self.program, self.python, *self.packages))
        )[:32]

    @property
    def name(self) -> str:
        """The first package, without its version."""
        return package_name(self.registry, self.packages[0])

    @property
    def unpinned(self) -> tuple[str, ...]:
        """Packages that may be another version tomorrow."""
        if self.registry in REFERENCES:
            return tuple(spec for spec in self.packages if "@" not in spec)
        return tuple(
            spec
            for spec in self.packages
            if not _EXACT[self.registry].fullmatch(_version(self.registry, spec))
        )

    @property
    def command(self) -> tuple[str, ...]:
        """A launcher's command line that asks for the same; of a reference, itself."""
        first, *more = self.packages
        if self.registry in REFERENCES:
            return (first if self.registry == "oci" else f"docker://{first}",)
        if self.registry == "npm":
            packages = tuple(word for each in self.packages for word in ("--package", each))
            return ("npx", "-y", *packages, self.program) if self.program else ("npx", "-y", first)
        extra = tuple(word for each in more for word in ("--with", each))
        python = ("--python", self.python) if self.python else ()
        own = ("--from", first, self.program) if self.program else (first,)
        return "uvx", *python, *extra, *own

    def __str__(self) -> str:
        return " ".join(self.packages)


def package_name(registry: Registry, spec: str) -> str:
    if registry in REFERENCES:
        path, slash, last = spec.partition("@")[0].rpartition("/")
        return path + slash + last.partition(":")[0]
    found = (_NPM if registry == "npm" else _PYPI).fullmatch(spec)
    assert found is not None  # checked when the request was made
    return found["name"]


def _version(registry: Registry, spec: str) -> str:
    found = (_NPM if registry == "npm" else _PYPI).fullmatch(spec)
    return (found["version"] or "").strip() if found is not None else ""


def npm_request(packages: tuple[str, ...], program: str) -> Request:
    """Raises UnusableSpec."""
    _check(packages, program)
    for spec in packages:
        if not _NPM.fullmatch(spec):
            raise UnusableSpec(f"asks for {spec!r}, which is not a package of a registry")
    return Request("npm", packages, program)


def pypi_request(packages: tuple[str, ...], program: str, python: str = "") -> Request:
    """`packages`: as uv and pipx take them: NAME@VERSION means NAME==VERSION. Raises UnusableSpec."""
    _check(packages, program)
    found: list[str] = []
    for spec in packages:
        name, at, version = spec.partition("@")
        plain = spec if not at else name if version == LATEST else f"{name}=={version}"
        if not _PYPI.fullmatch(plain):
            raise UnusableSpec(f"asks for {spec!r}, which is not a package of an index")
        if package_name("pypi", plain).lower() == "python":  # an index may have a package of this name
            raise UnusableSpec("starts Python itself, which is not a package of an index")
        found.append(plain.replace(" ", ""))
    asked = _PYTHON.fullmatch(python)
    if python and asked is None:
        raise UnusableSpec(f"asks for the Python {python!r}; give a version such as 3.12")
    return Request("pypi", tuple(found), program, asked[1] if asked is not None else "")


def _check(packages: tuple[str, ...], program: str) -> None:
    if not packages:
        raise UnusableSpec("names no package")
    if len(packages) > _MOST_PACKAGES:
        raise UnusableSpec(f"names more than {_MOST_PACKAGES} packages")
    for word in (*packages, program):
        if len(word) > _LONGEST or not word.isprintable() or word.startswith("-"):
            raise UnusableSpec("names a package in an unusual way")
    if program and ("/" in program or program in (".", "..")):
        raise UnusableSpec(f"starts {program!r}, which is not the name of a command")
