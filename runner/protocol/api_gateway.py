"""The address of an API gateway, which plugins of this contract call with delegated credentials."""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import urlsplit

from sandbox.document.diagnostic import printable, quoted
from sandbox.network.rules import parse_authority

MOST_URL_CHARACTERS = 2048


def api_gateway_host(url: Any) -> str:
    """The host and the port of a gateway's base_url, as a rule for the network: api.example.com:443.

    It is an https URL. http is for a gateway on this machine only. Raises ValueError with the second half of
    a sentence.
    """
    if not isinstance(url, str) or not 0 < len(url) <= MOST_URL_CHARACTERS:
        raise ValueError(f"is not a text of 1 to {MOST_URL_CHARACTERS} characters")
    if not url.isascii() or not url.isprintable() or " " in url or "\\" in url:
        raise ValueError("has characters that no URL has")
    try:
        parts = urlsplit(url)
    except ValueError:
        raise ValueError("is not a URL") from None
    if parts.scheme not in ("https", "http") or not parts.netloc:
        raise ValueError(f"is {quoted(url)}, and not an https URL")
    if "@" in parts.netloc or "?" in url or "#" in url:
        raise ValueError("has a user name, a query or a fragment, which a base URL does not have")
    try:
        host, port = parse_authority(parts.netloc, 443 if parts.scheme == "https" else 80)
    except ValueError as error:
        raise ValueError(f"has a host that {printable(str(error))}") from None
    if parts.scheme == "http" and host.text not in ("localhost", "::1") and not _is_loopback(host.text):
        raise ValueError("is an http URL of another machine: the token would travel in the open, use https")
    return f"{host}:{port}"


def _is_loopback(host: str) -> bool:
    return bool(re.match(r"127\.\d+\.\d+\.\d+\Z", host))
