"""The signature of a package, in the file marketplace.signature.json at its root.

    {"schema": 1, "package_id": …, "version": …, "algorithm": "ed25519", "key_id": …,
     "digest": "sha256:…", "signed_at": "2026-11-16T03:00:00Z", "signature": …}

`digest` is that of the list of all other files (listing.py). `signature` is base64 of the Ed25519 signature
over the UTF-8 of the canonical JSON of the other keys: keys sorted, no spaces, no escapes but those that JSON
needs. A key that is not among these is refused: it would be signed, and nobody would know what it means.
"""

from __future__ import annotations

import base64
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import NamedTuple, Protocol

from runner.package.fault import PackageFault
from runner.package.keys import (
    ALGORITHM,
    SIGNATURE_BYTES,
    SigningKey,
    TrustedKey,
    decode_base64,
    is_key_id,
)
from runner.package.listing import SIGNATURE_NAME, FileList
from sandbox.document.diagnostic import DocumentError, printable, quoted
from sandbox.document.read import parse, read_bounded
from sandbox.files import replace_file

SCHEMA = 1
SIGN_AGAIN = "sign the package again: runner package sign DIR --key FILE"

_FILE_BYTES = 64 << 10  # of marketplace.signature.json; one has about 400
_CLOCK_SKEW_SECONDS = 300  # of the clock of the signer's machine
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}\Z")
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{1,6})?Z\Z", re.ASCII)


class Signature(NamedTuple):
    """The document, with its fields in the order in which they are written."""

    schema: int
    package_id: str
    version: str
    algorithm: str
    key_id: str
    digest: str
    signed_at: str  # RFC 3339, UTC
    signature: str = ""  # base64; empty: not signed yet

    @property
    def message(self) -> bytes:
        """What is signed."""
        return canonical_json({name: value for name, value in self._asdict().items() if name != "signature"})


class FilesDigest(Protocol):
    """The files of a package, as much as a signature has to know of them: a FileList is one."""

    @property
    def digest(self) -> str: ...
    @property
    def files(self) -> Sequence[object]: ...


class VerifiedPackage(NamedTuple):
    """A package whose signature is valid."""

    package_id: str
    version: str
    key_id: str
    digest: str
    signed_at: str
    files: int = 0
    comment: str = ""  # of the key, in the trust file
    warning: str = ""


def canonical_json(value: Mapping[str, object]) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


# --- signing ------------------------------------------------------------------------------------------------


def sign(listing: FileList, package_id: str, version: str, key: SigningKey, now: float) -> Signature:
    """`now`: seconds since 1970."""
    unsigned = Signature(SCHEMA, package_id, version, ALGORITHM, key.key_id, listing.digest, utc_text(now))
    return unsigned._replace(signature=base64.b64encode(key.sign(unsigned.message)).decode())


def utc_text(now: float) -> str:
    return datetime.fromtimestamp(int(now), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def write_signature(root: str, signature: Signature) -> None:
    """Write it into the package atomically. Raises OSError."""
    text = json.dumps(signature._asdict(), indent=2, ensure_ascii=False) + "\n"
    folder = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        replace_file(folder, SIGNATURE_NAME, text.encode(), 0o644, sync=True)
    finally:
        os.close(folder)


# --- verifying ----------------------------------------------------------------------------------------------


def verify(
    raw: bytes,
    package_id: str,
    version: str,
    trusted: Mapping[str, TrustedKey],
    trust_file: str,
    now: float,
    make_listing: Callable[[], FilesDigest],
) -> VerifiedPackage:
    """Raises PackageFault at the first check that fails, in this order: the document, its key, whose package
    it is, the files, the signature itself. `make_listing` is called only when the first three are right."""
    signature = parse_signature(raw)
    key = trusted_key(signature.key_id, trusted, trust_file, "the package")
    if (signature.package_id, signature.version) != (package_id, version):
        message = (
            f"the signature is for {quoted(signature.package_id)} {quoted(signature.version)}, "
            f"and the manifest says {quoted(package_id)} {quoted(version)}"
        )
        raise PackageFault("signature_identity", message, SIGN_AGAIN)
    listing = make_listing()
    if listing.digest != signature.digest:
        message = (
            "the files of the package are not those that were signed: "
            f"their digest is {listing.digest}, and the signature has {signature.digest}"
        )
        hint = "install the package again; if you changed it yourself, " + SIGN_AGAIN
        raise PackageFault("signature_digest", message, hint)
    require_made_with(key, signature.signature, signature.message, trust_file, "the package", SIGN_AGAIN)
    return VerifiedPackage(
        package_id,
        version,
        key.key_id,
        listing.digest,
        signature.signed_at,
        len(listing.files),
        key.comment,
        future_warning(signature.signed_at, now),
    )


def trusted_key(key_id: str, trusted: Mapping[str, TrustedKey], trust_file: str, subject: str) -> TrustedKey:
    """Raises PackageFault. `subject`: what it signed."""
    key = trusted.get(key_id)
    if key is None:
        message = f"the key {quoted(key_id)}, which signed {subject}, is not trusted"
        hint = f"if you trust its owner, add the line of the key's .pub file to {trust_file}"
        raise PackageFault("signature_untrusted", message, hint)
    return key


def require_made_with(
    key: TrustedKey, signature: str, message: bytes, trust_file: str, subject: str, again: str
) -> None:
    """Raises PackageFault. `message`: what is signed. `again`: how to sign it again."""
    encoded = decode_base64(signature, SIGNATURE_BYTES)
    if encoded is None or not key.verifies(encoded, message):
        told = f"the signature was not made with the key {quoted(key.key_id)} that {trust_file} has"
        hint = f"{subject} was forged, or the trust file has another key under this id; {again}"
        raise PackageFault("signature_invalid", told, hint)


def read_signature(root: str) -> bytes:
    """The bytes of the package's signature. Raises PackageFault."""
    path = os.path.join(root, SIGNATURE_NAME)
    try:
        if not os.path.lexists(path):
            raise PackageFault(
                "signature_missing",
                f"{root} has no {SIGNATURE_NAME}",
                "sign it: runner package sign DIR --key FILE",
            )
        if os.path.islink(path):
            raise PackageFault("package_kind", f"{path} is a symbolic link", "put the file itself there")
        return read_bounded(path, limit=_FILE_BYTES)
    except DocumentError as error:
        raise _malformed(error.diagnostics[0].message) from None


def parse_signature(raw: bytes) -> Signature:
    """Raises PackageFault for what is not exactly such a document."""
    return Signature(SCHEMA, **read_fields(raw, Signature._fields))


def read_fields(
    raw: bytes, fields: Sequence[str], what: str = SIGNATURE_NAME, again: str = SIGN_AGAIN
) -> dict[str, str]:
    """The texts of a signature that has exactly these keys, among them those that every signature has; all
    but the schema. Raises PackageFault. `what`: the document, for a message."""
    try:
        return _read_fields(raw, fields)
    except _Malformed as reason:
        message = f"{what} cannot be used: {printable(str(reason))}"
        raise PackageFault("signature_malformed", message, again) from None


class _Malformed(Exception):
    """Why a document is no signature."""


def _read_fields(raw: bytes, fields: Sequence[str]) -> dict[str, str]:
    """Raises _Malformed."""
    try:
        data = parse(SIGNATURE_NAME, raw, "json").data
    except DocumentError as error:
        raise _Malformed(error.diagnostics[0].message) from None
    schema = data.get("schema")
    if type(schema) is not int or schema != SCHEMA:  # in Python 1.0 and True equal 1
        raise _Malformed(f"its schema is not {SCHEMA}, the only one that this runner knows")
    for name in (*fields, *data):
        if name not in fields:
            raise _Malformed(f"{quoted(name)} is not a key of schema {SCHEMA}")
        if name not in data:
            raise _Malformed(f"{name} is missing")
        if name != "schema" and not isinstance(data[name], str):
            raise _Malformed(f"{name} is not a text")
    found = {name: str(data[name]) for name in fields if name != "schema"}
    if found["algorithm"] != ALGORITHM:
        raise _Malformed(f"its algorithm is {quoted(found['algorithm'])}, and only {ALGORITHM} is known")
    if not is_key_id(found["key_id"]):
        raise _Malformed(f"{quoted(found['key_id'])} cannot be the id of a key")
    if not _DIGEST.match(found["digest"]):
        raise _Malformed("its digest is not sha256: and 64 hexadecimal digits")
    if _seconds(found["signed_at"]) is None:
        raise _Malformed("signed_at is not a time such as 2026-11-16T03:00:00Z")
    if decode_base64(found["signature"], SIGNATURE_BYTES) is None:
        raise _Malformed(f"its signature is not base64 of {SIGNATURE_BYTES} bytes")
    try:
        canonical_json(found)
    except UnicodeEncodeError:
        raise _Malformed("it has half of a surrogate pair, which is not UTF-8") from None
    return found


def _malformed(reason: str) -> PackageFault:
    message = f"{SIGNATURE_NAME} cannot be used: {printable(reason)}"
    return PackageFault("signature_malformed", message, SIGN_AGAIN)


def _seconds(time: str) -> float | None:
    if not _TIME.match(time):
        return None
    try:
        return datetime.fromisoformat(time).timestamp()
    except ValueError:
        return None


def future_warning(signed_at: str, now: float, subject: str = "the package") -> str:
    """Returns a warning if the signature is from the future, or ''. It stays valid: a clock may be wrong."""
    if (_seconds(signed_at) or 0.0) <= now + _CLOCK_SKEW_SECONDS:
        return ""
    return f"{subject} says that it was signed at {signed_at}, which is in the future: check both clocks"
