"""References to images, as docker and podman take them, in one spelling.

acme/fetch                      docker.io/acme/fetch:latest
python:3.12                     docker.io/library/python:3.12
ghcr.io/acme/x@sha256:4f0c…     the same
"""

from __future__ import annotations

import re

from runner.install.request import LATEST, Request, UnusableSpec

SCHEME = "docker://"
NOT_INSTALLED = "image_not_installed"  # the cause of a launch that is refused
HUB = "docker.io"
_HUB_NAMES = (HUB, "index.docker.io", "registry-1.docker.io", "registry.hub.docker.com")
_LONGEST = 512
_PART = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_PATH = re.compile(rf"{_PART}(?:/{_PART})*")
_HOST = re.compile(r"(?:[A-Za-z0-9][A-Za-z0-9.-]*|\[[0-9A-Fa-f:.]+\])(?::[0-9]{1,5})?")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


def normal_reference(text: str) -> str:
    """HOST/NAME:TAG or HOST/NAME@sha256:DIGEST. Of a reference with both, the digest decides, as everywhere.
    Raises UnusableSpec."""
    name, at, digest = text.removeprefix(SCHEME).partition("@")
    folder, slash, last = name.rpartition("/")
    last, colon, tag = last.partition(":")
    path = folder + slash + last
    host, slash, rest = path.partition("/")
    if slash and ("." in host or ":" in host or host == "localhost"):
        path = rest
    else:
        host = HUB
    if host in _HUB_NAMES:
        host = HUB
        path = path if "/" in path else f"library/{path}"
    if len(text) > _LONGEST or not _HOST.fullmatch(host) or not _PATH.fullmatch(path):
        raise UnusableSpec(
            f"names the image {text[:80]!r}, which is no reference: write NAME:TAG in lower case"
        )
    if at and not _DIGEST.fullmatch(digest):
        told = "write sha256: and 64 digits, 0 to 9 and a to f"
        raise UnusableSpec(f"names the image {text[:80]!r}, whose digest is none: {told}")
    if colon and not _TAG.fullmatch(tag):
        told = "write up to 128 letters, digits and . _ -"
        raise UnusableSpec(f"names the image {text[:80]!r}, whose tag is none: {told}")
    return f"{host}/{path}@{digest}" if at else f"{host}/{path}:{tag or LATEST}"


def image_request(text: str) -> Request:
    """Raises UnusableSpec."""
    return Request("image", (normal_reference(text),))
