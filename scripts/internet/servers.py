"""The servers of machine.py, in a network namespace of their own: a resolver, and others on public addresses.

Started with a description as JSON in argv[1]. It waits for a line on stdin (the link to the other namespace
is made meanwhile), prints "ready", and then one line of JSON for each question, connection and HTTP request
that it sees, and for each further line on stdin.
"""

from __future__ import annotations

import json
import os
import socket
import socketserver
import ssl
import struct
import sys
import threading
import time
from typing import Any

_TYPES = {"A": 1, "CNAME": 5, "AAAA": 28}
_LATE_SECONDS = 0.5  # until a `late` server reads
_printing = threading.Lock()


def tell(**what: Any) -> None:
    with _printing:
        print(json.dumps(what), flush=True)


def bring_up(link: str, addresses: list[str]) -> None:
    from pyroute2 import IPRoute

    with IPRoute() as kernel:
        for name in ("lo", link):
            [number] = kernel.link_lookup(ifname=name)
            kernel.link("set", index=number, state="up")
        for address in addresses:
            host, _, bits = address.partition("/")
            no_detection = {"flags": 0x02} if ":" in host else {}  # usable at once
            kernel.addr("add", index=number, address=host, prefixlen=int(bits), **no_detection)


class Zone:
    """Names and their records. A list of lists is a list of successive answers; the last one stays."""

    def __init__(self, names: dict[str, dict[str, Any]]) -> None:
        self._names = names
        self._asked: dict[tuple[str, str], int] = {}

    def answer(self, message: bytes, over: str) -> bytes:
        labels, at = [], 12
        while message[at]:
            labels.append(message[at + 1 : at + 1 + message[at]])
            at += 1 + message[at]
        kind = struct.unpack_from(">H", message, at + 1)[0]
        question = message[12 : at + 5]
        name = b".".join(labels).decode().lower()
        tell(seen="question", name=name, type=kind, over=over)
        records = self._names.get(name)
        if records is None:
            return message[:2] + struct.pack(">HHHHH", 0x8183, 1, 0, 0, 0) + question
        found = b"".join(self._records(name, kind))
        count = sum(1 for _ in self._records(name, kind, look=True))
        header = message[:2] + struct.pack(">HHHHH", 0x8180, 1, count, 0, 0)
        whole = header + question + found
        if over == "udp" and len(whole) > 512:
            return message[:2] + struct.pack(">HHHHH", 0x8380, 1, 0, 0, 0) + question
        return whole

    def _records(self, name: str, kind: int, *, look: bool = False) -> Any:
        owner = name
        while alias := self._names.get(owner, {}).get("CNAME"):
            yield _name(owner) + struct.pack(">HHIH", 5, 1, 60, len(_name(alias))) + _name(alias)
            owner = alias
        word = {1: "A", 28: "AAAA"}.get(kind)
        addresses = self._names.get(owner, {}).get(word or "", [])
        if addresses and isinstance(addresses[0], list):
            turn = self._asked.get((owner, word or ""), 0)
            if not look:
                self._asked[owner, word or ""] = turn + 1
            else:
                turn -= 1
            addresses = addresses[min(turn, len(addresses) - 1)]
        for address in addresses:
            family = socket.AF_INET6 if word == "AAAA" else socket.AF_INET
            packed = socket.inet_pton(family, address)
            yield _name(owner) + struct.pack(">HHIH", kind, 1, 60, len(packed)) + packed


def _name(name: str) -> bytes:
    return b"".join(bytes([len(label)]) + label.encode() for label in name.split(".")) + b"\0"


def serve_dns(zone: Zone, address: str) -> None:
    class Udp(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            data, sock = self.request
            sock.sendto(zone.answer(data, "udp"), self.client_address)

    class Tcp(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            length = self.rfile.read(2)
            answer = zone.answer(self.rfile.read(int.from_bytes(length, "big")), "tcp")
            self.wfile.write(len(answer).to_bytes(2, "big") + answer)

    for server in (
        socketserver.ThreadingUDPServer((address, 53), Udp),
        socketserver.ThreadingTCPServer((address, 53), Tcp),
    ):
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 512


class _Server6(_Server):
    address_family = socket.AF_INET6


class _Files(socketserver.StreamRequestHandler):
    folder: str

    def handle(self) -> None:
        tell(seen="connection", kind="files", address=self.server.server_address[0])  # type: ignore[index]
        while request := self.rfile.readline():
            headers = [line for line in iter(self.rfile.readline, b"\r\n") if line]
            asked = request.decode().split()[1]
            tell(seen="request", line=f"GET {asked}", headers=[line.decode().strip() for line in headers])
            name = asked.partition("?")[0].strip("/").replace("%2f", "__").replace("%2F", "__")
            path = os.path.join(self.folder, name.replace("/", "__") or "index")
            try:
                with open(path, "rb") as file:
                    body = file.read()
            except OSError:
                self.wfile.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
                continue
            if not body:
                self.rfile.read()  # until the client gives up
                return
            if body.startswith(b"HTTP/"):
                self.wfile.write(body)
                return
            kind = b"text/html" if body.startswith(b"<") else b"application/octet-stream"
            head = b"HTTP/1.1 200 OK\r\nContent-Type: %s\r\nContent-Length: %d\r\n\r\n"
            self.wfile.write(head % (kind, len(body)) + body)


class _Forward(socketserver.BaseRequestHandler):
    socket_path: str
    name: str

    def handle(self) -> None:
        with socket.socket(socket.AF_UNIX) as other:
            is_path = self.name.startswith("/")
            other.connect(self.name if is_path else self.socket_path)
            if not is_path:
                other.sendall(f"{self.name}\n".encode())
            threading.Thread(target=pump, args=(other, self.request), daemon=True).start()
            pump(self.request, other)


def pump(source: socket.socket, target: socket.socket) -> None:
    try:
        while data := source.recv(65536):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)
    except OSError:
        return


def serve(kind: str, address: str, port: int, tls: dict[str, str]) -> None:
    """`line`: says who it is first, then echoes. `http`: HTTP/1.1. `tls`: HTTP/1.1 in TLS. `echo`: bytes as
    they come. `sink`: reads nothing at all. `late`: begins to read after a moment, and tells how much there
    was and how it ended. `source`: sends what each line asks for, in bytes. `http2`: HTTP/2 in TLS.
    `files`: HTTP/1.1 with the files of a folder; a file that begins with "HTTP/" is sent as it is, and an
    empty one never. `forward`: passes on what comes to the Unix socket `forward`, behind a line with the name
    that this address has in `tls`; if that is the path of a Unix socket, to this one without the line. `http`
    and `tls` answer with the request (below /headers with its headers too), or what `answers`, a file of
    JSON, has for its host and path."""
    answers = json.loads(_content(tls["answers"])) if "answers" in tls else {}

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            tell(seen="connection", kind=kind, address=address, port=port)
            if kind == "line":
                self.wfile.write(f"220 {address}\n".encode())
            if kind == "sink":
                threading.Event().wait()
            if kind == "late":
                self._read_late()
                return
            if kind == "source":
                while line := self.rfile.readline():
                    self._send(int(line))
                return
            if kind == "http2":
                self._serve_http2()
                return
            if kind in ("http", "tls"):
                self._serve_http()
                return
            while data := self.request.recv(65536):
                self.request.sendall(data)

        def _read_late(self) -> None:
            time.sleep(_LATE_SECONDS)
            count, trouble = 0, ""
            try:
                while data := self.request.recv(65536):
                    count += len(data)
            except OSError as error:
                trouble = type(error).__name__
            tell(seen="bytes", count=count, trouble=trouble)

        def _send(self, count: int) -> None:
            piece = b"x" * 65536
            while count > 0:
                self.request.sendall(piece[:count])
                count -= len(piece)

        def _serve_http(self) -> None:
            while request := self.rfile.readline():
                headers = {}
                while (line := self.rfile.readline()).strip():
                    name, _, value = line.decode().partition(":")
                    headers[name.lower()] = value.strip()
                tell(seen="request", line=request.decode().strip(), headers=headers)
                _skip_body(self.rfile, headers)
                echo = {"at": address, "host": headers.get("host"), "request": request.decode().strip()}
                path = request.decode().split()[1].partition("?")[0]
                echo |= {"headers": headers} if path.startswith("/headers") else {}
                self.wfile.write(_reply(answers.get(f"{headers.get('host')}{path}", echo)))

        def _serve_http2(self) -> None:
            """Answer each request with its body "two", whatever it asks for."""
            assert self.request.selected_alpn_protocol() == "h2"
            assert self.rfile.read(24) == b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
            settings, headers, data, ack, end_headers, end_stream = 4, 1, 0, 1, 4, 1
            self.wfile.write(_frame(settings, 0, 0))
            while head := self.rfile.read(9):
                kind, flags = head[3], head[4]
                stream = int.from_bytes(head[5:9], "big")
                self.rfile.read(int.from_bytes(head[:3], "big"))
                if kind == settings and not flags & ack:
                    self.wfile.write(_frame(settings, ack, 0))
                elif kind == headers:
                    status_200 = b"\x88"  # RFC 7541, appendix A
                    self.wfile.write(_frame(headers, end_headers, stream, status_200))
                    self.wfile.write(_frame(data, end_stream, stream, b"two"))

    class Tls(Handler):
        def setup(self) -> None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            if kind == "http2":
                context.set_alpn_protocols(["h2"])
            context.load_cert_chain(tls["certificate"], tls["key"])
            self.request.settimeout(30)
            self.request = context.wrap_socket(self.request, server_side=True)
            super().setup()

    server = _Server6 if ":" in address else _Server
    files = type("Files", (_Files,), {"folder": tls.get("files")})
    forward = type("Forward", (_Forward,), {"socket_path": tls.get("forward"), "name": tls.get(address)})
    handlers = {"tls": Tls, "http2": Tls, "files": files, "forward": forward}
    running = server((address, port), handlers.get(kind, Handler))
    running.handle_error = lambda *_: None  # type: ignore[assignment]
    threading.Thread(target=running.serve_forever, daemon=True).start()


def _skip_body(stream: Any, headers: dict[str, str]) -> None:
    stream.read(int(headers.get("content-length", 0)))
    if headers.get("transfer-encoding") == "chunked":
        while size := int(stream.readline(), 16):
            stream.read(size + 2)
        stream.readline()


def _reply(answer: Any) -> bytes:
    """Text, or JSON."""
    is_text = isinstance(answer, str)
    body = (answer if is_text else json.dumps(answer)).encode()
    kind = b"text/html; charset=utf-8" if is_text else b"application/json"
    head = b"HTTP/1.1 200 OK\r\nContent-Type: %s\r\nContent-Length: %d\r\n\r\n"
    return head % (kind, len(body)) + body


def _content(path: str) -> str:
    with open(path) as file:
        return file.read()


def _frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """Of HTTP/2."""
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


def main() -> None:
    told = json.loads(sys.argv[1])
    sys.stdin.readline()
    bring_up(told["link"], told["addresses"])
    for address in told["resolvers"]:
        serve_dns(Zone(told["names"]), address)
    for kind, address, port in told["servers"]:
        serve(kind, address, port, told["tls"])
    print("ready", flush=True)
    for line in sys.stdin:  # until the end of who started it
        tell(seen="command", line=line.strip())


if __name__ == "__main__":
    main()
