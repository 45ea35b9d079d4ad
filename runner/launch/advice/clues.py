"""Find clues in the last lines of a plugin's stderr: hosts it did not find, ports of its own loopback that
refused it, paths, variables.

These are guesses from the text alone. The plugin controls the text, so advice.py checks each clue: that the
path exists, or that the variable is set.
"""

from __future__ import annotations

import re

from sandbox.speed.value import NamedTuple

# How much of the end of stderr is read. Most programs say why they fail in their last lines.
MOST_CHARACTERS = 8 << 10
MOST_LINES = 40
_MOST_CLUES = 32  # of each kind, the last ones: each may cost file system calls
_LONGEST_PATH = 4096

_HTTPS, _HTTP, _DNS = 443, 80, 53

# Node, curl and git, urllib3, aiohttp, wget, Go, Java.
_UNRESOLVED = re.compile(
    r"(?:getaddrinfo (?:ENOTFOUND|EAI_AGAIN) "
    r"|[Cc]ould not resolve host:? "
    r"|[Ff]ailed to resolve "
    r"|[Cc]annot connect to host "
    r"|unable to resolve host address "
    r"|\blookup (?=[\w.-]+(?: on |: ))"
    r"|UnknownHostException: )"
    r"[\"'‘`]?([A-Za-z0-9][A-Za-z0-9.-]{0,252})(?::(\d{1,5}))?"
)
_POOL = re.compile(r"ConnectionPool\(host='([A-Za-z0-9][A-Za-z0-9.-]{0,252})', port=(\d{1,5})\)")
_URL = re.compile(r"\b(https?)://(?:[^\s/@'\"]{0,200}@)?([A-Za-z0-9][A-Za-z0-9.-]{0,252})(?::(\d{1,5}))?")
# A line that has one of these, and a URL, is about that URL.
_NO_NETWORK = re.compile(
    r"Name or service not known|[Nn]ame resolution|nodename nor servname|ENOTFOUND|EAI_AGAIN|ENETUNREACH"
    r"|[Nn]etwork is unreachable|lookup address information|fetch failed|ConnectError"
    r"|[Nn]o address associated"
)

# A line that has one of these is about a connection that was refused: Node, Python, Go, libpq, curl, MySQL.
_CLOSED = re.compile(
    r"ECONNREFUSED|[Cc]onnection ?[Rr]efused|Connect call failed|Err(?:no|or) 111\b|\(111\)"
    r"|[Ff]ailed to connect|\brefused\b"
)
_OWN_PORT = re.compile(
    r"(?<![\w.-])(?:localhost|127\.0\.0\.1|\[?::1\]?)['\"]?"
    r"(?: \((?:127\.0\.0\.1|::1)\))?(?::|,? port[ =]|, )(\d{1,5})(?!\w)"
)

_QUOTED = re.compile(r"'([^'\n]+)'|\"([^\"\n]+)\"|`([^`\n]+)`|‘([^‘’\n]+)’")
_BARE = re.compile(r"(?:(?<=[\s=(\[<:,])|^)(?:file://)?(~?/(?!/)[^\s'\"`‘’<>|;,(){}\[\]]+)")
# "cannot copy 'A' to 'B'", "copyfile 'A' -> 'B'": B is what could not be written.
_SOURCE = re.compile(r"(['\"‘])([^'\"‘’\n]+)['\"’] (?:to|->) ['\"‘]")
_PLACE = re.compile(r":\d+(?::\d+)?$")  # of a source line

# A line that has one of these is about a file that could not be used.
_FILE_ERROR = re.compile(
    r"ENOENT|EACCES|EPERM|EROFS|ENOTDIR|[Nn]o such file|[Pp]ermission ?[Dd]enied|PermissionError"
    r"|FileNotFound|[Oo]peration not permitted|[Rr]ead-only file ?system"
    r"|EBUSY|[Rr]esource busy"
)
_READ_ONLY = re.compile(r"EROFS|[Rr]ead-only file ?system")
# A file or folder that is mounted cannot be replaced by another one.
_MOUNTED = re.compile(r"EBUSY|[Rr]esource busy")
_REFUSED = re.compile(r"EACCES|EPERM|[Pp]ermission denied|[Oo]peration not permitted")
_WRITING = re.compile(
    r"\b(?:mkdir|write|writing|create|creating|unlink|remove|rename|rmdir|copyfile|touch|save|saving)", re.I
)

# What programs say when the kernel gives them no more memory, and no more processes or threads.
_EXHAUSTED = {
    "memory": re.compile(
        r"MemoryError|ENOMEM|bad_alloc|(?:[Cc]annot|[Cc]ould not|[Uu]nable to) allocate|[Oo]ut of memory"
        r"|OutOfMemory|memory allocation of \d+ bytes failed|[Ff]ailed to reserve"
    ),
    "pids": re.compile(
        r"EAGAIN|[Rr]esource temporarily unavailable|can't start new thread|pthread_create|[Cc]annot fork"
        r"|unable to create (?:new )?native thread"
    ),
}

# What entry points of images say that change their user, or the owners of files. The kernel calls an id that
# has no mapping an invalid argument.
_OTHER_USER = re.compile(
    r"\b(?:gosu|failed switching to|su-exec|setpriv|runuser|s6-\w+|su:|chown|set(?:res)?[ug]id|setgroups)"
    r"(?!\w).{0,300}(?:[Oo]peration not permitted|[Ii]nvalid argument)"
)

_NAME = re.compile(r"\b[A-Z][A-Z0-9_]{2,63}\b")
_ABOUT_A_VARIABLE = re.compile(
    r"\benv(?:ironment)?\b|\bnot set\b|\bunset\b|\bmissing\b|\brequired?\b|\bundefined\b|KeyError|\bmust\b"
    r"|\bnot (?:provided|found|defined|configured|given)\b|\bplease (?:set|provide)\b|\bset the\b|\bno\b",
    re.I,
)


# Of SYNTHETIC_IPV4 and SYNTHETIC_IPV6 (sandbox/network/egress.py).
_GIVEN = re.compile(r"\b198\.18\.(?:12[89]|1[3-9]\d|2\d\d)\.\d{1,3}\b|\bfd6e:a9c1:52e7:b04d:[0-9a-f:]{1,20}")
# Servers that make requests for others refuse addresses that are not public.
_NOT_PUBLIC = re.compile(
    r"SSRF|private|internal|reserved|benchmark|non-?public|not (?:public|allowed|permitted|global)|block"
    r"|disallow|forbid|restricted|unsafe",
    re.I,
)


class PathClue(NamedTuple):
    paths: tuple[str, ...]  # readings of one word, each absolute or starting with ~/, longest first
    written: bool = False  # its line says that it could not be written
    read_only: bool = False  # its line says that the filesystem is read-only
    mounted: bool = False  # its line says that it is busy, as what is mounted is


class Clues(NamedTuple):
    hosts: tuple[tuple[str, int], ...] = ()  # with the port
    paths: tuple[PathClue, ...] = ()
    names: tuple[str, ...] = ()
    offline: bool = False  # some line says that a host was not found, or the network
    given: str = ""  # an address that a name has in the cage alone, and that is not public for the plugin
    exhausted: tuple[str, ...] = ()  # limits that some line may be about
    closed: tuple[int, ...] = ()  # ports of its own loopback that refused a connection
    other_user: bool = False  # it could not become another user, or give files away


def read_clues(stderr: str) -> Clues:
    """Clues from the last line first: most programs say there why they failed."""
    lines = stderr[-MOST_CHARACTERS:].splitlines()[-MOST_LINES:]
    lines.reverse()
    hosts: dict[tuple[str, int], None] = {}
    paths: dict[tuple[str, ...], PathClue] = {}
    names: dict[str, None] = {}
    closed: dict[int, None] = {}
    for line in lines:
        hosts.update(dict.fromkeys(_hosts(line)))
        for clue in _paths(line):
            known = paths.get(clue.paths)
            if known is None or clue.written > known.written:
                paths[clue.paths] = clue
        if _ABOUT_A_VARIABLE.search(line):
            names.update(dict.fromkeys(_NAME.findall(line)))
        if _CLOSED.search(line):
            closed.update(dict.fromkeys(map(int, _OWN_PORT.findall(line))))
    return Clues(
        tuple(hosts)[:_MOST_CLUES],
        tuple(paths.values())[:_MOST_CLUES],
        tuple(names)[:_MOST_CLUES],
        any(map(_NO_NETWORK.search, lines)),
        next((found[0] for line in lines if (found := _GIVEN.search(line)) and _NOT_PUBLIC.search(line)), ""),
        tuple(name for name, said in _EXHAUSTED.items() if any(map(said.search, lines))),
        tuple(port for port in closed if 0 < port < 65536 and port != _DNS)[:_MOST_CLUES],
        any(map(_OTHER_USER.search, lines)),
    )


def read_answer_clues(answers: str) -> Clues:
    """Clues from errors that a plugin answered calls with. A path counts only where its line says that a file
    could not be used: answers name files for many reasons."""
    lines = [line for line in answers.splitlines() if _FILE_ERROR.search(line)]
    return read_clues(answers)._replace(paths=read_clues("\n".join(lines)).paths)


def _hosts(line: str) -> list[tuple[str, int]]:
    found = [(host, int(port or _HTTPS)) for host, port in _UNRESOLVED.findall(line)]
    if not _NO_NETWORK.search(line) and not found:
        return []
    pool = [(host, int(port)) for host, port in _POOL.findall(line)]
    urls = [
        (host, int(port or (_HTTPS if scheme == "https" else _HTTP)))
        for scheme, host, port in _URL.findall(line)
    ]
    # Pools and URLs have the port.
    named = dict(found) | dict(urls) | dict(pool)
    return [(host.rstrip("."), port) for host, port in named.items() if 0 < port < 65536]


def _paths(line: str) -> list[PathClue]:
    read_only = bool(_READ_ONLY.search(line))
    written = read_only or bool(_REFUSED.search(line) and _WRITING.search(line))
    words = ["".join(groups) for groups in _QUOTED.findall(line)] + _BARE.findall(line)
    if written:
        sources = [source for _, source in _SOURCE.findall(line)]
        words = [word for word in words if word not in sources]
    mounted = bool(_MOUNTED.search(line))
    found: list[PathClue] = []
    for word in words:
        path = word.removeprefix("file://")
        if not path.startswith(("/", "~/")) or len(path) > _LONGEST_PATH or "\0" in path or "://" in path:
            continue
        # `/etc/app.conf:12:3`, `/etc/app.conf:`, `in /etc/app.conf.`
        plain = path.rstrip(".:")
        readings = dict.fromkeys((path, plain, _PLACE.sub("", plain)))
        if kept := tuple(each for each in readings if each not in ("/", "~/", "~", "")):
            found.append(PathClue(kept, written, read_only, mounted))
    return found
