"""TLS at the TCP door: the daemon's own certificate, and who a client is by the client's."""

from __future__ import annotations

import os
import ssl
import stat
from typing import Any

from runner.serve.peer import DoorPeer
from sandbox.policy.load import trust_fault

_MOST_SUBJECT = 256  # characters: it stands in every record of its calls
_SHORT = {"commonName": "CN", "organizationName": "O", "organizationalUnitName": "OU", "countryName": "C"}
SPEAKS_HTTP = "it speaks HTTP without TLS; use https://"
_FAULTS = {
    "HTTP_REQUEST": SPEAKS_HTTP,
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": "it shows no certificate, and --client-ca asks for one",
}


class DoorTls:
    """What new connections by TCP are wrapped in. Raises ValueError if the files cannot be used.

    `client_ca`: None if clients show a token."""

    def __init__(self, cert: str, key: str, client_ca: str | None = None) -> None:
        self._cert, self._key, self._client_ca = cert, key, client_ca
        self.reload()

    def reload(self) -> None:
        """Read the files again. Raises ValueError; then those that were read before stay in use."""
        _require_safe("--tls-cert", self._cert)
        _require_safe("--tls-key", self._key, 0o077)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.options |= ssl.OP_NO_RENEGOTIATION
        try:
            context.load_cert_chain(self._cert, self._key, password="")  # else it asks on the terminal
        except (OSError, ValueError) as error:
            message = f"--tls-cert {self._cert} and --tls-key {self._key} cannot be used: {_reason(error)}"
            hint = "they hold a certificate with its chain, and its key without a password, as PEM"
            raise ValueError(f"{message}; {hint}") from None
        if self._client_ca is not None:
            _require_safe("--client-ca", self._client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
            try:
                context.load_verify_locations(self._client_ca)
            except (OSError, ValueError) as error:
                message = f"--client-ca {self._client_ca} cannot be used: {_reason(error)}"
                raise ValueError(f"{message}; it holds certificates of authorities, as PEM") from None
        self.context = context


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
    subject = ",".join(
        "+".join(f"{_SHORT.get(key, key)}={_escaped(value)}" for key, value in group)
        for group in certificate.get("subject", ())
    )
    if not 0 < len(subject) <= _MOST_SUBJECT or not subject.isprintable():
        raise ValueError(f"the subject of its certificate is not 1 to {_MOST_SUBJECT} printable characters")
    return DoorPeer(None, 0, subject, ssl.cert_time_to_seconds(certificate["notAfter"]))


def _escaped(value: str) -> str:
    for each in "\\,+=":
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
