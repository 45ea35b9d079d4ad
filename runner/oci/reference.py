"""Reference: where a package is in a registry, by tag or by digest.

oci://registry.example.com/acme/devkit:1.2.0
oci://localhost:5000/devkit@sha256:4f0c…
"""

from __future__ import annotations

import re
from typing import NamedTuple

from runner.package.fault import PackageFault
from sandbox.document.diagnostic import quoted
from sandbox.network.rules import parse_authority

SCHEME = "oci://"
_HTTPS = 443
_LONGEST = 512
_REPOSITORY = re.compile(r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*(?:/[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*)*")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_HINT = "write oci://HOST/NAME:TAG or oci://HOST/NAME@sha256:DIGEST"


class Reference(NamedTuple):
    registry: str  # host, with a port if it is not 443
    repository: str
    tag: str = ""
    digest: str = ""  # "sha256:" and 64 digits; exactly one of tag and digest is there

    @property
    def name(self) -> str:
        """Without tag and digest."""
        return f"{SCHEME}{self.registry}/{self.repository}"

    @property
    def version(self) -> str:
        """The tag or the digest."""
        return self.tag or self.digest

    def __str__(self) -> str:
        return f"{self.name}:{self.tag}" if self.tag else f"{self.name}@{self.digest}"


def parse_reference(text: str) -> Reference:
    """`text`: with or without oci://. Raises PackageFault."""
    rest = text.removeprefix(SCHEME)
    registry, slash, path = rest.partition("/")
    path, at, digest = path.partition("@")
    path, colon, tag = path.partition(":")
    if "@" in registry:
        raise _fault("oci://…", "has a user name; log in with docker login or podman login")
    if len(text) > _LONGEST or not slash or not registry:
        raise _fault(text, "does not name a registry and a package")
    if bool(at) == bool(colon):
        raise _fault(text, "has neither a tag nor a digest" if not at else "has a tag and a digest")
    if not _REPOSITORY.fullmatch(path):
        raise _fault(text, f"names the package {quoted(path)}; its parts are of lower case, digits and . _ -")
    if (at and not _DIGEST.fullmatch(digest)) or (colon and not _TAG.fullmatch(tag)):
        raise _fault(text, "has a wrong digest" if at else "has a wrong tag")
    try:
        host, port = parse_authority(registry, _HTTPS)
    except ValueError as error:
        raise _fault(text, f"has a registry that {error}") from None
    named = str(host) if port == _HTTPS else f"{host}:{port}"
    return Reference(named, path, tag, digest)


def _fault(text: str, reason: str) -> PackageFault:
    return PackageFault("reference", f"{quoted(text, 200)} {reason}", _HINT)
