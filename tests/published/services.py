"""What the published servers use: answers of services on the internet, and two databases.

The services are names of the test internet. The databases are real ones, PGlite (PostgreSQL as WebAssembly,
from npm) and Debian's Redis: each listens on a Unix socket, which a name of that internet leads to.
"""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

_VIDEO = '{"captionTracks":[{"baseUrl":"https://www.youtube.com/api/timedtext","vssId":".en"}]}'
_ADA = {"title": "Ada", "url": "https://example.com/ada"}
# Host and path -> the body: text, or JSON.
ANSWERS: Mapping[str, Any] = {
    "api.github.com/repos/ada/gears/issues": [{"title": "a loose gear"}],
    "gitlab.com/api/v4/projects": [
        {
            "id": 1,
            "name": "gears",
            "path_with_namespace": "ada/gears",
            "visibility": "private",
            "web_url": "https://gitlab.com/ada/gears",
            "description": "a loose gear",
            "ssh_url_to_repo": "git@gitlab.com:ada/gears.git",
            "http_url_to_repo": "https://gitlab.com/ada/gears.git",
            "created_at": "2026-01-01T00:00:00Z",
            "last_activity_at": "2026-01-01T00:00:00Z",
            "default_branch": "main",
        }
    ],
    "slack.com/api/conversations.info": {"ok": True, "channel": {"id": "C01234567", "name": "gears"}},
    "maps.googleapis.com/maps/api/geocode/json": {
        "status": "OK",
        "results": [
            {
                "geometry": {"location": {"lat": 51.5, "lng": -0.1}},
                "formatted_address": "12 St James's Square",
                "place_id": "1",
            }
        ],
    },
    "api.todoist.com/api/v1/projects": {"results": [{"id": "1", "name": "gears"}], "next_cursor": None},
    "api.firecrawl.dev/v2/scrape": {"success": True, "data": {"markdown": "# a loose gear", "metadata": {}}},
    "api.figma.com/v1/files/gears": {
        "name": "a loose gear",
        "lastModified": "2026-01-01T00:00:00Z",
        "thumbnailUrl": "",
        "version": "1",
        "document": {"id": "0:0", "name": "Document", "type": "DOCUMENT", "children": []},
        "components": {},
        "componentSets": {},
        "styles": {},
    },
    "api.perplexity.ai/search": {"id": "1", "results": [{**_ADA, "snippet": "a loose gear"}]},
    "www.youtube.com/watch": _VIDEO,
    "youtube.com/watch": _VIDEO,
    "www.youtube.com/api/timedtext": '<?xml version="1.0" encoding="utf-8" ?><transcript>'
    '<text start="0" dur="1">a loose gear</text></transcript>',
    "context7.com/api/v2/libs/search": {
        "results": [
            {
                "id": "/ada/gears",
                "title": "gears",
                "description": "a loose gear",
                "branch": "main",
                "lastUpdateDate": "2026-01-01",
                "state": "finalized",
                "totalTokens": 1,
                "totalSnippets": 1,
                "stars": 1,
                "trustScore": 9,
                "versions": [],
            }
        ]
    },
    "api.notion.com/v1/users/me": {"object": "user", "id": "1", "type": "bot", "name": "a loose gear"},
    "api.tavily.com/search": {"results": [{**_ADA, "content": "a loose gear"}], "images": []},
    "api.search.brave.com/res/v1/web/search": {"web": {"results": [{**_ADA, "description": "a loose gear"}]}},
    "html.duckduckgo.com/html": '<html><div class="result"><h2 class="result__title"><a href="https://example.com/">'
    'Ada</a></h2><a class="result__snippet">a loose gear</a></div></html>',
    "en.wikipedia.org/w/api.php": {
        "query": {
            "search": [
                {
                    "title": "Ada Lovelace",
                    "snippet": "a loose gear",
                    "pageid": 1,
                    "wordcount": 3,
                    "timestamp": "2026-01-01T00:00:00Z",
                }
            ]
        }
    },
    "docs.aws.amazon.com/gears/guide.html": "<html><body><main><h1>Gears</h1>"
    "<p>a loose gear</p></main></body></html>",
    "your-company.atlassian.net/rest/api/2/project/search": {
        "isLast": True,
        "total": 1,
        "values": [{"id": "1", "key": "GEARS", "name": "a loose gear"}],
    },
}

POSTGRES, REDIS = ("postgres.example.net", 5432), ("redis.example.net", 6379)
# Unix sockets in the folder of the test internet.
SOCKETS = {"postgres.sock": POSTGRES, "redis.sock": REDIS}

_REDIS = "/usr/bin/redis-check-rdb"
_READY_SECONDS = 120.0


@contextmanager
def databases(programs: Path, folder: Path) -> Iterator[None]:
    """Both, empty, until the end."""
    pglite = str(programs / "npm/node_modules/.bin/pglite-server")
    # One program of two names. Under the other one it comes without a service.
    (folder / "redis-server").symlink_to(_REDIS)
    redis = ("./redis-server", "--port", "0", "--unixsocket", "redis.sock", "--save", "")
    with ExitStack() as stack:
        _start(stack, ("node", pglite, "--path=postgres.sock", "--max-connections=8"), "listening", folder)
        _start(stack, redis, "ready to accept connections", folder)
        yield


def _start(stack: ExitStack, argv: Sequence[str], ready: str, folder: Path) -> None:
    """It also ends when this process is killed."""
    process = subprocess.Popen(
        ["/usr/bin/setpriv", "--pdeathsig=KILL", "--", *argv],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    stack.enter_context(process)
    stack.callback(process.kill)
    assert process.stdout
    too_late = threading.Timer(_READY_SECONDS, process.kill)
    too_late.start()
    said = []
    try:
        for line in process.stdout:
            said.append(line)
            if ready in line:
                return
    finally:
        too_late.cancel()
    raise AssertionError(f"{argv[0]} did not start in {_READY_SECONDS:.0f} s: {''.join(said)}")
