"""The signing key among the files that it signs: a copy, a hard link, or its bytes in some other file."""

from __future__ import annotations

import base64

from runner.package.fault import PackageFault
from runner.package.keys import SigningKey
from sandbox.document.diagnostic import printable


class KeySearch:
    """Looks through a package while it is listed (listing.Keeper)."""

    def __init__(self, key: SigningKey) -> None:
        secret = key.secret()
        # In DER the 32 bytes stand behind 16 others. PEM is base64 of that, and 18 bytes are 24 characters.
        texts = (base64.b64encode(secret[2:]), base64.b64encode(secret)[:-2], secret.hex().encode())
        self._traces = (secret, *texts, secret.hex().upper().encode())
        self._longest = max(map(len, self._traces))
        self._path = ""
        self._tail = b""

    def open_file(self, path: str, mode: int, folder_modes: tuple[int, ...]) -> None:
        self._path, self._tail = path, b""

    def write(self, data: bytes) -> None:
        """Raises PackageFault."""
        window = self._tail + data
        if any(trace in window for trace in self._traces):
            message = (
                f"{printable(self._path)} holds the private key: everybody who has the package could sign"
            )
            hint = "remove the file, and make another key with runner keygen FILE if somebody has the package"
            raise PackageFault("key_exposed", message, hint)
        self._tail = window[1 - self._longest :]

    def close_file(self) -> None:
        self._tail = b""
