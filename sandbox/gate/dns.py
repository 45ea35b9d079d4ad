"""DNS messages: the plugin's questions and our answers, our questions and the answers of a name server.

Both senders may be hostile. No loop and no allocation depends on a number in a message: every read is bounded
by the message's length, and a name by 255 bytes. All functions are pure.
"""

from __future__ import annotations

import struct

from sandbox.speed.value import NamedTuple

A, NS, CNAME, SOA, PTR, AAAA, OPT, SVCB, HTTPS, ANY = 1, 2, 5, 6, 12, 28, 41, 64, 65, 255
IN = 1
NOERROR, FORMERR, SERVFAIL, NXDOMAIN, NOTIMP, REFUSED = 0, 1, 2, 3, 4, 5
_BADVERS = 16

MOST_MESSAGE_BYTES = 1232  # of a question; also the EDNS size we announce (usual, to avoid fragments)
MOST_NAME_BYTES = 255
MOST_RECORDS = 128  # read from an answer
MOST_ADDRESSES = 16  # used from an answer
_MOST_ALIASES = 8
_MOST_POINTERS = 32  # in one name

_HEADER = struct.Struct("!6H")
_QUESTION_END = struct.Struct("!HH")
_RECORD = struct.Struct("!HHIH")
_QR, _AA, _TC, _RD, _RA = 0x8000, 0x0400, 0x0200, 0x0100, 0x0080
_OPCODE = 0x7800


class MalformedMessage(ValueError):
    """The message breaks a rule of the DNS format."""


class UnansweredMessage(ValueError):
    """The message is no question: it is an answer, or too short for a header. Nothing is sent back."""


NO_NAME = "(no name)"  # shown for a message whose question cannot be read


class NameQuestion(NamedTuple):
    id: int
    labels: tuple[bytes, ...]  # as they were sent
    kind: int  # A, AAAA, ...
    section: bytes  # the question as it was sent: an answer repeats these bytes
    recursion: bool
    extended: bool  # it has an OPT record (EDNS)

    @property
    def name(self) -> str | None:
        """The name as text, or None if a label has a dot or a byte outside ASCII."""
        joined = b".".join(self.labels)
        if not joined.isascii() or any(b"." in label for label in self.labels):
            return None
        return joined.decode("ascii")

    @property
    def shown(self) -> str:
        """The name for messages, with unusual bytes and dots inside labels escaped by a backslash."""
        joined = b".".join(label.replace(b"\\", b"\\\\").replace(b".", b"\\.") for label in self.labels)
        return joined.decode("ascii", "backslashreplace").replace("\0", "\\x00") or "."


class RefusedQuestion(NamedTuple):
    """A question of the plugin that is refused because of its form."""

    reply: bytes
    reason: str  # the rest of a sentence that begins with the name
    shown: str = NO_NAME


class NameReply(NamedTuple):
    """The reply of a name server."""

    code: int
    truncated: bool
    addresses: tuple[bytes, ...] = ()  # 4 or 16 bytes each
    seconds: int = 0  # TTL


# --- what the plugin asks ----------------------------------------------------------------------------


def read_question(message: bytes) -> NameQuestion | RefusedQuestion:
    """The question, or a refusal with its complete reply. Raises UnansweredMessage if nothing may be sent."""
    if len(message) < _HEADER.size:
        raise UnansweredMessage("is shorter than a header")
    number, flags, questions, answers, authorities, extras = _HEADER.unpack_from(message)
    if flags & _QR:
        raise UnansweredMessage("is an answer")
    if flags & _OPCODE:
        reason = f"is another operation than a question (opcode {(flags & _OPCODE) >> 11})"
        return RefusedQuestion(_bare_reply(number, flags, NOTIMP), reason)
    try:
        if len(message) > MOST_MESSAGE_BYTES:
            raise MalformedMessage("is too long")
        if (questions, answers, authorities) != (1, 0, 0) or extras > 1:
            raise MalformedMessage("has more than one question, or records that a question has not")
        labels, at = _read_labels(message)
        kind, family = _unpack(_QUESTION_END, message, at)
        section = message[_HEADER.size : at + _QUESTION_END.size]
        version = _read_extension(message, at + _QUESTION_END.size, extras)
    except MalformedMessage as error:
        reason = f"is a DNS message that {error}"
        return RefusedQuestion(_bare_reply(number, flags, FORMERR), reason)
    question = NameQuestion(number, labels, kind, section, bool(flags & _RD), extras == 1)
    if version:
        reason = f"was asked for with version {version} of EDNS; only version 0 is known"
        return RefusedQuestion(write_reply(question, _BADVERS), reason, question.shown)
    if family not in (IN, 255):
        reason = f"was asked for in class {family}; only class IN is answered"
        return RefusedQuestion(write_reply(question, REFUSED), reason, question.shown)
    return question


def _read_labels(message: bytes) -> tuple[tuple[bytes, ...], int]:
    """The labels of the question's name, and the offset behind it. It is the first name of the message, so a
    compression pointer in it is malformed."""
    labels: list[bytes] = []
    at = _HEADER.size
    while True:
        if at >= len(message):
            raise MalformedMessage("ends within a name")
        length = message[at]
        at += 1
        if length == 0:
            return tuple(labels), at
        if length > 63:
            raise MalformedMessage("has a pointer, or a label of an unknown kind")
        label = message[at : at + length]
        at += length
        if len(label) < length or at - _HEADER.size >= MOST_NAME_BYTES:
            raise MalformedMessage("ends within a label, or has a name that is too long")
        labels.append(label)


def _read_extension(message: bytes, at: int, extras: int) -> int:
    """The EDNS version of the OPT record, or 0 if there is none. Nothing may follow it."""
    version = 0
    if extras:
        if message[at : at + 1] != b"\0":
            raise MalformedMessage("has an additional record that is no OPT")
        kind, _, ttl, length = _unpack(_RECORD, message, at + 1)
        if kind != OPT:
            raise MalformedMessage("has an additional record that is no OPT")
        version = ttl >> 16 & 0xFF
        at += 1 + _RECORD.size + length
    if at != len(message):
        raise MalformedMessage("has bytes after its end, or too few")
    return version


def _bare_reply(number: int, flags: int, code: int) -> bytes:
    return _HEADER.pack(number, _QR | flags & (_OPCODE | _RD) | _RA | code, 0, 0, 0, 0)


def write_reply(question: NameQuestion, code: int, address: bytes = b"", seconds: int = 0) -> bytes:
    """The reply to a question. NOERROR without an address means that the name has no record of this kind."""
    flags = _QR | _RA | (_RD if question.recursion else 0) | code & 0xF
    counts = 1, 1 if address else 0, 0, 1 if question.extended else 0
    parts = [_HEADER.pack(question.id, flags, *counts), question.section]
    if address:
        # 0xC00C: the name at offset 12, the question's.
        parts.append(b"\xc0\x0c" + _RECORD.pack(question.kind, IN, seconds, len(address)) + address)
    if question.extended:
        parts.append(b"\0" + _RECORD.pack(OPT, MOST_MESSAGE_BYTES, code >> 4 << 24, 0))
    return b"".join(parts)


# --- what we ask -------------------------------------------------------------------------------------


def write_question(number: int, name: str, kind: int) -> bytes:
    """A query for `name`, which is in its normal spelling (sandbox/network/hosts.py). It has no EDNS: an
    answer with more than 28 addresses comes truncated, and is asked for again over TCP."""
    labels = b"".join(bytes([len(label)]) + label.encode("ascii") for label in name.split("."))
    return _HEADER.pack(number, _RD, 1, 0, 0, 0) + labels + b"\0" + _QUESTION_END.pack(kind, IN)


def read_reply(message: bytes, number: int, name: str, kind: int) -> NameReply:
    """The addresses in a reply. Aliases (CNAME) are followed within it. Raises MalformedMessage unless it is
    the reply to this question."""
    if len(message) < _HEADER.size:
        raise MalformedMessage("is shorter than a header")
    its_number, flags, questions, answers, _, _ = _HEADER.unpack_from(message)
    if its_number != number or not flags & _QR or flags & _OPCODE:
        raise MalformedMessage("answers another question")
    if questions != 1:
        raise MalformedMessage("does not repeat the question")
    asked, at = read_name(message, _HEADER.size)
    wanted = name.encode("ascii").lower()
    if asked != wanted or _unpack(_QUESTION_END, message, at) != (kind, IN):
        raise MalformedMessage("answers another question")
    code, truncated = flags & 0xF, bool(flags & _TC)
    if truncated or code != NOERROR:
        return NameReply(code, truncated)
    return _collect(message, at + _QUESTION_END.size, min(answers, MOST_RECORDS), wanted, kind)


def _collect(message: bytes, at: int, records: int, wanted: bytes, kind: int) -> NameReply:
    aliases: dict[bytes, bytes] = {}
    found: dict[bytes, list[bytes]] = {}
    seconds = 0xFFFFFFFF
    size = 4 if kind == A else 16
    for _ in range(records):
        owner, at = read_name(message, at)
        its_kind, family, ttl, length = _unpack(_RECORD, message, at)
        at += _RECORD.size
        if at + length > len(message):
            raise MalformedMessage("ends within a record")
        if family == IN and its_kind == CNAME:
            target, end = read_name(message, at)
            if end != at + length:
                raise MalformedMessage("has an alias of another length than it says")
            aliases.setdefault(owner, target)
            seconds = min(seconds, ttl)
        elif family == IN and its_kind == kind:
            if length != size:
                raise MalformedMessage("has an address of a wrong length")
            found.setdefault(owner, []).append(message[at : at + length])
            seconds = min(seconds, ttl)
        at += length
    for _ in range(_MOST_ALIASES):
        if wanted in found or wanted not in aliases:
            break
        wanted = aliases[wanted]
    addresses = tuple(dict.fromkeys(found.get(wanted, ())))[:MOST_ADDRESSES]
    # A TTL with its highest bit set counts as 0 (RFC 2181).
    return NameReply(NOERROR, False, addresses, seconds if seconds < 1 << 31 else 0)


def read_name(message: bytes, at: int) -> tuple[bytes, int]:
    """A name in lower case, its labels joined by dots, and the offset behind it.

    Each pointer has to lead further back than the one before, so that a chain of pointers cannot loop.
    """
    labels: list[bytes] = []
    total, pointers, end, limit = 0, 0, -1, at
    while True:
        if at >= len(message):
            raise MalformedMessage("ends within a name")
        length = message[at]
        if length >= 0xC0:
            if at + 1 >= len(message):
                raise MalformedMessage("ends within a pointer")
            target = (length & 0x3F) << 8 | message[at + 1]
            end = at + 2 if end < 0 else end
            pointers += 1
            if target >= limit or pointers > _MOST_POINTERS:
                raise MalformedMessage("has a pointer that does not lead back")
            at = limit = target
            continue
        if length > 63:
            raise MalformedMessage("has a label of an unknown kind")
        at += 1
        total += 1 + length
        if total > MOST_NAME_BYTES or at + length > len(message):
            raise MalformedMessage("has a name that is too long, or ends within it")
        if length == 0:
            return b".".join(labels).lower(), end if end >= 0 else at
        label = message[at : at + length]
        if b"." in label:
            raise MalformedMessage("has a label with a dot in it")
        labels.append(label)
        at += length


def _unpack(form: struct.Struct, message: bytes, at: int) -> tuple[int, ...]:
    try:
        return form.unpack_from(message, at)
    except struct.error:
        raise MalformedMessage("ends within a record") from None
