"""Ed25519 keys: the private one that signs packages, and the file of public ones that an operator trusts.

A private key is a PEM file (PKCS #8, not encrypted) that only its owner can read. A trusted key is one line:

    KEY_ID BASE64 COMMENT

BASE64 is the public key's 32 bytes. The comment may be missing. Empty lines and lines that begin with # do
not count. `runner keygen FILE` writes such a line to FILE.pub.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
import re
import stat
from collections.abc import Mapping
from typing import Any, NamedTuple

from runner.package.fault import PackageFault
from sandbox.document.diagnostic import Diagnostic, DocumentError, printable, quoted
from sandbox.document.read import read_bounded
from sandbox.files import write_all
from sandbox.policy.load import trust_fault

ALGORITHM = "ed25519"
PUBLIC_BYTES = 32
SIGNATURE_BYTES = 64

_KEY_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@/+-]{0,127}\Z")
KEY_ID_HINT = "use up to 128 letters, digits and . _ : @ / + -, and begin with a letter or a digit"

_KEY_FILE_BYTES = 16 << 10  # an Ed25519 key has 119
_TRUST_FILE_BYTES = 1 << 20
_ID_DIGITS = 16  # hexadecimal digits of the public key's SHA-256 in the id of a key that was given none
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class SigningKey(NamedTuple):
    key_id: str
    public: bytes
    private: Any  # an Ed25519PrivateKey

    def sign(self, message: bytes) -> bytes:
        signature: bytes = self.private.sign(message)
        return signature

    def secret(self) -> bytes:
        """The 32 bytes that the key is made of."""
        from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

        raw: bytes = self.private.private_bytes(Encoding.Raw, PrivateFormat.Raw, NoEncryption())
        return raw


class TrustedKey(NamedTuple):
    key_id: str
    public: bytes
    comment: str = ""

    def verifies(self, signature: bytes, message: bytes) -> bool:
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

        try:
            Ed25519PublicKey.from_public_bytes(self.public).verify(signature, message)
        except (InvalidSignature, ValueError):
            return False
        return True


def is_key_id(text: str) -> bool:
    return _KEY_ID.match(text) is not None


def derive_key_id(public: bytes) -> str:
    return f"{ALGORITHM}-{hashlib.sha256(public).hexdigest()[:_ID_DIGITS]}"


def decode_base64(text: str, size: int) -> bytes | None:
    """Returns the bytes, or None unless there are exactly `size` of them in canonical base64."""
    try:
        raw = base64.b64decode(text.encode("ascii"), validate=True)
    except (UnicodeEncodeError, binascii.Error):
        return None
    return raw if len(raw) == size and base64.b64encode(raw).decode() == text else None


# --- making one ---------------------------------------------------------------------------------------------


def make_key(path: str, key_id: str = "", comment: str = "") -> TrustedKey:
    """Write a new private key to `path` and its line for trust files to `path`.pub. Neither may exist.
    Raises PackageFault and OSError; then neither is left."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import (
        Encoding,
        NoEncryption,
        PrivateFormat,
        PublicFormat,
    )

    if key_id and not is_key_id(key_id):
        raise PackageFault("key_id", f"{quoted(key_id)} cannot be the id of a key", KEY_ID_HINT)
    private = Ed25519PrivateKey.generate()
    public = private.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)
    made = TrustedKey(key_id or derive_key_id(public), public, comment)
    _write_new(path, private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()), 0o600)
    try:
        _write_new(f"{path}.pub", (format_line(made) + "\n").encode(), 0o644)
    except BaseException:
        os.unlink(path)
        raise
    return made


def format_line(key: TrustedKey) -> str:
    return " ".join(filter(None, (key.key_id, base64.b64encode(key.public).decode(), key.comment)))


def _write_new(path: str, content: bytes, mode: int) -> None:
    try:
        fd = os.open(path, _NEW_FILE, mode)
    except FileExistsError:
        hint = "name another FILE: an existing key is never overwritten"
        raise PackageFault("key_exists", f"{path} exists already", hint) from None
    try:
        try:
            os.fchmod(fd, mode)  # independent of the umask
            write_all(fd, content)
        finally:
            os.close(fd)
    except BaseException:
        os.unlink(path)
        raise


# --- the private one ----------------------------------------------------------------------------------------


def load_key(path: str, key_id: str = "") -> SigningKey:
    """The private key of a PEM file. Its id: as given, else that in `path`.pub, else derived from the key.
    Raises PackageFault."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key

    if key_id and not is_key_id(key_id):
        raise PackageFault("key_id", f"{quoted(key_id)} cannot be the id of a key", KEY_ID_HINT)
    raw = _read_private(path)
    try:
        private = load_pem_private_key(raw, password=None)
    except TypeError:
        message = f"{path} is encrypted with a password, which the runner does not ask for"
        hint = f"decrypt it into a file of your own: openssl pkey -in {path} -out FILE, then chmod 600 FILE"
        raise PackageFault("key_encrypted", message, hint) from None
    except ValueError:
        hint = "make one with runner keygen FILE, or with openssl genpkey -algorithm ed25519"
        raise PackageFault("key_format", f"{path} is not a private key in PEM format", hint) from None
    if not isinstance(private, Ed25519PrivateKey):
        message = f"{path} is a key of another algorithm; packages are signed with {ALGORITHM}"
        raise PackageFault("key_format", message, "make one with runner keygen FILE")
    public = private.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)
    return SigningKey(key_id or _id_beside(path, public) or derive_key_id(public), public, private)


def _read_private(path: str) -> bytes:
    """Raises PackageFault, also if others than its owner can read the file."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    except OSError as error:
        message = f"{path} cannot be opened: {error.strerror}"
        raise PackageFault("key_unreadable", message, "make a key with runner keygen FILE") from None
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise PackageFault("key_format", f"{path} is not a file", "name the file of a private key")
        if status.st_uid not in (0, os.geteuid()):
            message = f"{path} belongs to uid {status.st_uid}, which knows the key"
            raise PackageFault("key_exposed", message, "sign with a key of your own: runner keygen FILE")
        if status.st_mode & 0o077:
            message = f"{path} can be read or written by others (mode {status.st_mode & 0o777:04o})"
            hint = f"chmod 600 {path}, or make a new key if somebody may have read this one"
            raise PackageFault("key_exposed", message, hint)
        raw = os.read(fd, _KEY_FILE_BYTES + 1)
    except OSError as error:
        raise PackageFault("key_unreadable", f"{path} cannot be read: {error.strerror}") from None
    finally:
        os.close(fd)
    if len(raw) > _KEY_FILE_BYTES:
        raise PackageFault("key_format", f"{path} is larger than a private key", "name another file")
    return raw


def _id_beside(path: str, public: bytes) -> str:
    """The id in the .pub file beside the key, if that file belongs to this key."""
    try:
        trusted = parse_keys(f"{path}.pub", read_bounded(f"{path}.pub", limit=_KEY_FILE_BYTES))
    except DocumentError:
        return ""
    return next((key.key_id for key in trusted.values() if key.public == public), "")


# --- the trusted ones ---------------------------------------------------------------------------------------


def load_trusted(path: str) -> Mapping[str, TrustedKey]:
    """The keys of a trust file, by id. Raises DocumentError with every fault, also if others than root and
    the runner's own user can change the file."""
    path = os.path.abspath(path)
    raw = read_bounded(path, limit=_TRUST_FILE_BYTES)
    fault = trust_fault(path, "the trust file")
    if fault is not None:
        raise DocumentError(Diagnostic(path, 0, 0, "trust_untrusted", *fault))
    return parse_keys(path, raw)


def parse_keys(path: str, raw: bytes) -> Mapping[str, TrustedKey]:
    """Raises DocumentError with every fault."""
    found: dict[str, TrustedKey] = {}
    lines: dict[str, int] = {}
    faults: list[Diagnostic] = []

    def fault(number: int, rule: str, message: str, hint: str = "") -> None:
        faults.append(Diagnostic(path, number, 1, rule, message, hint))

    # Not splitlines(), which takes U+2028 and others for the end of a line.
    for number, bytes_ in enumerate(raw.split(b"\n"), 1):
        try:
            line = bytes_.decode().strip(" \t\r")
        except UnicodeDecodeError:
            fault(number, "trust_line", "the line is not UTF-8", "remove it, or save the file as UTF-8")
            continue
        if not line or line.startswith("#"):
            continue
        key_id, _, rest = line.replace("\t", " ").partition(" ")
        encoded, _, comment = rest.strip().partition(" ")
        public = decode_base64(encoded, PUBLIC_BYTES)
        if not is_key_id(key_id):
            fault(number, "trust_line", f"{quoted(key_id)} cannot be the id of a key", KEY_ID_HINT)
        elif public is None:
            message = f"the key of {quoted(key_id)} is not base64 of {PUBLIC_BYTES} bytes"
            hint = "a line is KEY_ID BASE64 COMMENT, as runner keygen writes it to FILE.pub"
            fault(number, "trust_line", message, hint)
        elif key_id in found:
            message = f"the key id {quoted(key_id)} stands already on line {lines[key_id]}"
            fault(number, "trust_twice", message, "remove one of the two lines: an id means one key")
        else:
            found[key_id], lines[key_id] = TrustedKey(key_id, public, comment.strip()), number
    if faults:
        raise DocumentError(*faults)
    return found


# --- the private key inside of a package
# ---------------------------------------------------------------------


class KeySearch:
    """Finds the private key in the files of a package while they are listed: a copy, a hard link, or its
    bytes in another file. A `FileSink` (listing.py)."""

    def __init__(self, key: SigningKey) -> None:
        secret = key.secret()
        # In DER the 32 bytes stand behind 16 others. PEM is base64 of that, and 18 bytes are 24 characters.
        texts = (base64.b64encode(secret[2:]), base64.b64encode(secret)[:-2], secret.hex().encode())
        self._traces = (secret, *texts, secret.hex().upper().encode())
        self._longest = max(map(len, self._traces))
        self._path = ""
        self._tail = b""

    def open_file(self, path: str, mode: int, folder_modes: tuple[int, ...], size: int) -> None:
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
