"""The two sides of TLS: the broker as the server of the plugin, and as a careful client of servers.

By `_ssl`, on which the module `ssl` is built: that makes hundreds of constants, and takes 10 to 20 ms and
0.4 MB of each broker. A test compares the settings with those of `ssl.create_default_context`.
"""

from __future__ import annotations

import _ssl
import os
from _ssl import (
    MemoryBIO,
    SSLCertVerificationError,
    SSLEOFError,
    SSLError,
    SSLWantReadError,
    SSLZeroReturnError,
)
from collections.abc import Callable, Sequence
from typing import Any

from sandbox.network.credentials import AUTHORITIES

__all__ = [
    "AskedName",
    "Context",
    "MemoryBIO",
    "SSLCertVerificationError",
    "SSLEOFError",
    "SSLError",
    "SSLWantReadError",
    "SSLZeroReturnError",
    "make_plugin_context",
    "make_server_context",
    "rehearse",
    "wrap",
]

Context = _ssl._SSLContext

_HTTP1 = b"\x08http/1.1"  # as ALPN has it


class AskedName:
    """Judges the name by which the plugin asks (SNI). Without one, the headers have to say it."""

    def __init__(self, is_named: Callable[[str], bool]) -> None:
        self._is_named = is_named
        self.is_heard = False  # the hello of the plugin is whole, with a name or without
        self.is_other = False

    def judge(self, name: str | None) -> int | None:
        self.is_heard = True
        if name is None or self._is_named(name):
            return None
        self.is_other = True
        return _ssl.ALERT_DESCRIPTION_UNRECOGNIZED_NAME


def wrap(
    context: Context,
    incoming: MemoryBIO,
    outgoing: MemoryBIO,
    server: str = "",
    asked: AskedName | None = None,
) -> Any:
    """TLS that reads and writes memory. `server`: its name, if we are the client."""
    made: Any = context
    return made._wrap_bio(incoming, outgoing, not server, server or None, owner=asked)


def make_plugin_context(chain: bytes) -> Context:
    """`chain`: the key and the certificate, as PEM. They are in memory only."""
    context = _make_context(_ssl.PROTOCOL_TLS_SERVER)
    file = os.memfd_create("certificate", os.MFD_CLOEXEC)
    try:
        with open(file, "wb", closefd=False) as written:
            written.write(chain)
        context.load_cert_chain(f"/proc/self/fd/{file}")
    finally:
        os.close(file)
    context.num_tickets = 0
    context.options |= _ssl.OP_NO_TICKET
    context.sni_callback = lambda asked, name, _: asked.judge(name)  # type: ignore[attr-defined]  # AskedName
    return context


def make_server_context(authorities: Sequence[str]) -> Context:
    """`authorities`: files of roots beside those of the system."""
    context = _make_context(_ssl.PROTOCOL_TLS_CLIENT)
    if not context.check_hostname or context.verify_mode != _ssl.CERT_REQUIRED:
        raise ValueError("servers would not be checked")
    for file in (*[root for root in AUTHORITIES if os.path.exists(root)][:1], *authorities):
        context.load_verify_locations(file)
    return context


def _make_context(protocol: int) -> Context:
    context = Context(protocol)
    context.minimum_version = _ssl.PROTO_TLSv1_2
    context.options |= _ssl.OP_NO_COMPRESSION | _ssl.OP_NO_RENEGOTIATION
    # Python sets it. An answer that was cut would look whole.
    context.options &= ~getattr(_ssl, "OP_IGNORE_UNEXPECTED_EOF", 0)
    made: Any = context
    made._set_alpn_protocols(_HTTP1)
    return context


def rehearse(plugin_tls: Context, server_tls: Context) -> None:
    """Let both sides speak to each other, while OpenSSL and Python can still load what they need on first
    use. The client does not trust the server."""
    pipes = [MemoryBIO() for _ in range(2)]
    asked = AskedName(lambda _: True)
    ends = [
        wrap(server_tls, pipes[1], pipes[0], "example.com"),
        wrap(plugin_tls, pipes[0], pipes[1], "", asked),
    ]
    for _ in range(3):
        for end in ends:
            try:
                end.do_handshake()
            except SSLWantReadError:
                pass
            except SSLError as error:
                str(error)
