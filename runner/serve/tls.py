"""TLS at the TCP door: the daemon's own certificate, and who a client is by the client's."""

from __future__ import annotations

import os
import ssl
import stat
from typing import Any

from runner.serve.peer import DoorPeer
from sandbox.policy.load import trust_fault
from sandbox.speed.value import NamedTuple

_MOST_SUBJECT = 256  # characters: it stands in every record of its calls
_SHORT = {"commonName": "CN", "organizationName": "O", "organizationalUnitName": "OU", "countryName": "C"}
SPEAKS_HTTP = "it speaks HTTP without TLS; use https://"
_FAULTS = {
    "HTTP_REQUEST": SPEAKS_HTTP,
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": "it shows no certificate, and --client-ca asks for one",
}


class TlsFiles(NamedTuple):
    cert: str
    key: str
    client_ca: str | None = None  # None: clients show a token


class DoorTls:
    """What a new connection by TCP is wrapped in. Raises ValueError if the files cannot be used."""

    def __init__(self, files: TlsFiles) -> None:
        self._files = files
        self.context = _context(files)

    def reload(self) -> None:
        """Read the files again. Raises ValueError; then those that were read before stay in use."""
        self.context = _context(self._files)


def _context(files: TlsFiles) -> ssl.SSLContext:
    _require_safe("--tls-cert", files.cert)
    _require_safe("--tls-key", files.key, 0o077)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION
    try:
        context.load_cert_chain(files.cert, files.key, password="")  # else it asks on the terminal
    except (OSError, ValueError) as error:
        raise ValueError(
            f"--tls-cert {files.cert} and --tls-key {files.key} cannot be used: {_reason(error)}; they hold a"
            " certificate with its chain, and its key without a password, as PEM"
        ) from None
    if files.client_ca is not None:
        _require_safe("--client-ca", files.client_ca)
        context.verify_mode = ssl.CERT_REQUIRED
        try:
            context.load_verify_locations(files.client_ca)
        except (OSError, ValueError) as error:
            message = f"--client-ca {files.client_ca} cannot be used: {_reason(error)}"
            raise ValueError(f"{message}; it holds certificates of authorities, as PEM") from None
    return context


def _require_safe(option: str, path: str, forbidden: int = 0) -> None:
    """Raises ValueError if others can write the file, or have one of these permissions."""
    fault = trust_fault(path, "the file")
    if fault is not None:
        raise ValueError(f"{option} {path} is not used: {fault[0]}; {fault[1]}")
    try:
        mode = os.stat(path).st_mode
    except OSError as error:
        raise ValueError(f"{option} {path} cannot be read: {error.strerror}") from None
    if not stat.S_ISREG(mode):
        raise ValueError(f"{option} {path} is not used: it is not a regular file")
    if mode & forbidden:
        raise ValueError(f"{option} {path} is not used: others than its owner can read it; chmod 600 {path}")


def certified_peer(certificate: dict[str, Any] | None) -> DoorPeer:
    """Who a client is, by the certificate that was verified. Raises ValueError if that names nobody.

    Two subjects never have the same text: what separates their parts is escaped inside them."""
    if not certificate:
        return DoorPeer(None)
    parts = [
        f"{_SHORT.get(key, key)}={_escaped(value)}"
        for group in certificate.get("subject", ())
        for key, value in group
    ]
    subject = ",".join(parts)
    if not 0 < len(subject) <= _MOST_SUBJECT or not subject.isprintable():
        raise ValueError(f"the subject of its certificate is not 1 to {_MOST_SUBJECT} printable characters")
    return DoorPeer(None, 0, subject, ssl.cert_time_to_seconds(certificate["notAfter"]))


def _escaped(value: str) -> str:
    for each in "\\,=":
        value = value.replace(each, "\\" + each)
    return value


def handshake_fault(error: BaseException | None) -> str:
    """Why a handshake failed, in a sentence about the client."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is refused: {error.verify_message}"
    return _FAULTS.get(getattr(error, "reason", None) or "", "") or f"the handshake failed: {_reason(error)}"


def _reason(error: BaseException | None) -> str:
    if isinstance(error, ssl.SSLError) and error.reason:
        return error.reason.lower().replace("_", " ")
    if isinstance(error, OSError) and error.strerror and not isinstance(error, ssl.SSLError):
        return error.strerror
    return "the connection was closed" if error is None else str(error)
