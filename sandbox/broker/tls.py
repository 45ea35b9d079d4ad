"""The two sides of TLS: the broker as the server of the plugin, and as a careful client of servers."""

from __future__ import annotations

import os
import ssl
from collections.abc import Callable, Sequence

# Where systems have their roots. The first that exists is read.
_ROOTS = (
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/etc/ssl/cert.pem",
)
_HTTP1 = ["http/1.1"]


class PluginTls(ssl.SSLObject):
    """TLS with the plugin, which says by which name it asks."""

    is_named: Callable[[str], bool]
    other_name = False

    def judge_name(self, name: str | None) -> int | None:
        if name is None or self.is_named(name):
            return None
        self.other_name = True
        return ssl.ALERT_DESCRIPTION_UNRECOGNIZED_NAME


def make_plugin_context(chain: bytes) -> ssl.SSLContext:
    """`chain`: the key and the certificate, as PEM. They are in memory only."""
    context = _make_context(ssl.PROTOCOL_TLS_SERVER)
    file = os.memfd_create("certificate", os.MFD_CLOEXEC)
    try:
        with open(file, "wb", closefd=False) as written:
            written.write(chain)
        context.load_cert_chain(f"/proc/self/fd/{file}")
    finally:
        os.close(file)
    context.num_tickets = 0
    context.options |= ssl.OP_NO_TICKET
    context.sslobject_class = PluginTls
    context.sni_callback = _judge_name
    return context


def _judge_name(tls: ssl.SSLObject, name: str | None, _: ssl.SSLContext) -> int | None:
    assert isinstance(tls, PluginTls)
    return tls.judge_name(name)


def make_server_context(authorities: Sequence[str]) -> ssl.SSLContext:
    """`authorities`: files of roots beside those of the system."""
    context = _make_context(ssl.PROTOCOL_TLS_CLIENT)
    assert context.check_hostname and context.verify_mode is ssl.CERT_REQUIRED
    for file in (*[root for root in _ROOTS if os.path.exists(root)][:1], *authorities):
        context.load_verify_locations(file)
    return context


def _make_context(protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_COMPRESSION | ssl.OP_NO_RENEGOTIATION
    # Python sets it. An answer that was cut would look whole.
    context.options &= ~getattr(ssl, "OP_IGNORE_UNEXPECTED_EOF", 0)
    context.set_alpn_protocols(_HTTP1)
    return context


def rehearse(plugin_tls: ssl.SSLContext, server_tls: ssl.SSLContext) -> None:
    """Let both sides speak to each other, while OpenSSL and Python can still load what they need on first use. The
    client does not trust the server."""
    pipes = [ssl.MemoryBIO() for _ in range(2)]
    ends = [
        plugin_tls.wrap_bio(pipes[0], pipes[1], server_side=True),
        server_tls.wrap_bio(pipes[1], pipes[0], server_hostname="example.com"),
    ]
    assert isinstance(ends[0], PluginTls)
    ends[0].is_named = lambda _: True
    for _ in range(3):
        for end in reversed(ends):
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                pass
            except ssl.SSLError as error:
                str(error)
