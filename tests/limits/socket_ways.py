"""Programs that hold memory of the kernel, in every way that we know but file locks. Only for tests.

Each way adds sockets until they hold `goal` bytes, by what the kernel says of each (SO_MEMINFO), and returns
that sum. Nothing is read from them again.
"""

from __future__ import annotations

from pathlib import Path

WAY_NAMES = (
    *("netlink", "UDP received", "UDP errors", "UDP held back", "TCP", "TCP errors"),
    *("UDP received, disconnected", "UDP errors, disconnected", "TCP, reset"),
    *("TCP errors, closed", "unix", "UDP errors, in transit", "attached filters"),
    *("packet options", "access lists"),
)
# By the filter. tests/escape/test_kernel.py shows that they work without it. A kernel without IPv6 has no
# such sockets at all.
REFUSED_WAYS = {
    "attached filters": "ENOPROTOOPT",
    "packet options": "ENOPROTOOPT" if Path("/proc/net/if_inet6").exists() else "EAFNOSUPPORT",
    "access lists": "ENOTSUP",
}
WAYS = r"""
import array, ctypes, errno, json, os, socket, struct, sys

kept = []
_libc = ctypes.CDLL(None, use_errno=True)
_NEVER = struct.pack("ii", 1, 0)  # SO_LINGER: close with a reset


def held(one):
    received, _, sent, _, _, queued, options, waiting, _ = struct.unpack("9I", one.getsockopt(1, 55, 36))
    return received + max(sent, queued) + options + waiting


def large(one):
    one.setsockopt(1, socket.SO_RCVBUF, 4 << 20)
    one.setsockopt(1, socket.SO_SNDBUF, 4 << 20)
    one.setblocking(False)
    return one


def datagrams():
    one = large(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
    kept.append(one)
    return one


def until(goal, add):
    total = 0
    while total < goal:
        more = add(goal - total)
        assert more, "this machine does not let a socket hold anything in this way"
        total += more
    return total


def netlink(goal):
    def add(rest):
        one = large(socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0))
        one.bind((0, 0))
        kept.append(one)
        ask = struct.pack("=IHHII", 32, 18, 1, 1, 0) + struct.pack("=BxHiII", 0, 0, 1, 0, 0)  # of lo
        before = -1
        while before < held(one) < rest:
            before = held(one)
            for _ in range(100):
                one.send(ask)
        return held(one)
    return until(goal, add)


def received(goal, disconnect=False):
    sender = datagrams()
    sender.bind(("127.0.0.1", 0))
    def add(rest):
        one = datagrams()
        one.connect(sender.getsockname())
        before = -1
        while before < held(one) < rest:
            before = held(one)
            sender.sendto(bytes(60000), one.getsockname())
        if disconnect:
            assert _libc.connect(one.fileno(), bytes(16), 16) == 0
        return held(one)
    return until(goal, add)


def errors(goal, disconnect=False, each=1 << 30):
    # Time stamps of what was sent, with a copy of it. The receiver has no room.
    receiver = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    receiver.setsockopt(1, socket.SO_RCVBUF, 2048)
    receiver.bind(("127.0.0.1", 0))
    kept.append(receiver)
    def add(rest):
        one = datagrams()
        one.connect(receiver.getsockname())
        before = -1
        while before < held(one) < min(rest, each):
            before = held(one)
            # As the option SO_TIMESTAMPING, but for one message: no filter of options sees it.
            one.sendmsg([bytes(30000)], [(1, 37, struct.pack("I", 2))])
        if disconnect:
            assert _libc.connect(one.fileno(), bytes(16), 16) == 0
        return held(one)
    return until(goal, add)


def held_back(goal):
    def add(rest):
        one = datagrams()
        one.connect(("127.0.0.1", 9))
        one.send(bytes(65000), socket.MSG_MORE)
        return held(one)
    return until(goal, add)


_listeners = []


def connection():
    if not _listeners:
        _listeners.append(socket.create_server(("127.0.0.1", 0), backlog=1000))
    client = socket.create_connection(_listeners[0].getsockname())
    return client, _listeners[0]


def fill(client, enough=lambda: False):
    client.setblocking(False)
    try:
        while not enough():
            client.send(bytes(1 << 16))
    except BlockingIOError:
        pass


def tcp(goal, reset=False):
    def add(rest):
        client, listener = connection()
        other, _ = listener.accept()
        large(other)
        fill(client, lambda: held(client) + held(other) >= rest)
        kept.extend([client, other])
        if not reset:
            return held(client) + held(other)
        client.setsockopt(1, socket.SO_LINGER, _NEVER)
        client.close()
        return held(other)
    return until(goal, add)


def tcp_errors(goal, close=False):
    def add(rest):
        client, listener = connection()
        other, _ = listener.accept()
        large(client)
        client.setsockopt(6, 1, 1)  # TCP_NODELAY: each send is a packet
        client.setsockopt(1, 37, 2 | 16 | 512)  # of what was sent and of what was acknowledged
        other.setblocking(False)
        before = -1
        while before < held(client) < rest:
            before = held(client)
            for _ in range(20):
                client.send(bytes(4096))
                try:
                    while other.recv(1 << 20):
                        pass
                except BlockingIOError:
                    pass
        amount = held(client)
        kept.append(other)
        if close:
            fill(client)  # more than the receiver has room for: the connection stays
            amount = held(client) + held(other)
            client.close()
        else:
            kept.append(client)
        return amount
    return until(goal, add)


def unix(goal):
    def add(rest):
        one, other = socket.socketpair()
        large(one)
        fill(one, lambda: held(one) >= rest)
        kept.extend([one, other])
        return held(one)
    return until(goal, add)


def in_transit(goal):
    # As `errors`, disconnected; then nobody has the descriptor but a message that nobody receives.
    known = len(kept)
    total = errors(goal, True, goal // 32)
    way, end = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    for one in kept[known:]:
        way.sendmsg([b"."], [(1, socket.SCM_RIGHTS, array.array("i", [one.fileno()]))])
        one.close()
    kept[known:] = [way, end]
    return total


def filters(goal):
    # A program that takes 8 KiB: a socket of any kind may have one.
    load, end = struct.pack("HBBI", 0, 0, 0, 0), struct.pack("HBBI", 6, 0, 0, 0)
    code = ctypes.create_string_buffer(load * 999 + end)
    program = struct.pack("HxxxxxxQ", 1000, ctypes.addressof(code))
    def add(_):
        one = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        one.bind(("127.0.0.1", 0))
        one.setsockopt(1, 26, program)
        kept.append(one)
        return held(one)
    return until(goal, add)


def packet_options(_):
    # What each packet gets: 64 KiB for a socket of a few. By IPV6_2292PKTOPTIONS, in one header of padding.
    padding = b"\x06\xff" + b"\x01\xfe" + bytes(2044)
    one = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
    kept.append(one)
    one.setsockopt(41, 6, struct.pack("@QII", 16 + len(padding), 41, 54) + padding)
    return len(padding)


def access_lists(_):
    # Of 8,187 entries, on a folder of /tmp.
    path = f"/tmp/listed-{os.getpid()}"
    os.mkdir(path)
    users = b"".join(struct.pack("=HHI", 2, 7, uid) for uid in range(1, 8184))
    last = b"".join(struct.pack("=HHI", tag, 7, 0xFFFFFFFF) for tag in (4, 16, 32))
    whole = struct.pack("=I", 2) + struct.pack("=HHI", 1, 7, 0xFFFFFFFF) + users + last
    os.setxattr(path, "system.posix_acl_access", whole)
    return len(whole)


ALL = {
    "netlink": netlink,
    "UDP received": received,
    "UDP errors": errors,
    "UDP held back": held_back,
    "TCP": tcp,
    "TCP errors": tcp_errors,
    # The kernel does not list these:
    "UDP received, disconnected": lambda goal: received(goal, True),
    "UDP errors, disconnected": lambda goal: errors(goal, True),
    "TCP, reset": lambda goal: tcp(goal, True),
    # No process has these:
    "TCP errors, closed": lambda goal: tcp_errors(goal, True),
    "UDP errors, in transit": in_transit,
    "unix": unix,
    # The runner's filter refuses these:
    "attached filters": filters,
    "packet options": packet_options,
    "access lists": access_lists,
}
"""
