"""Published MCP servers: each entry as its README has it, what it is told here, what it is allowed, one call.

tests/published/test_readme_entries.py compares the entries with the READMEs of the installed packages.
`{work}` stands for a folder with the user's own files.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

# How many have to work where the registries answer.
NEEDED = 15


class ReadmeEntry(NamedTuple):
    """The README's own words: what a person pastes into the configuration of a host."""

    command: str
    args: tuple[str, ...]
    launcher: int  # how many of `args` are the launcher's: the installed program takes their place
    env: Mapping[str, str] = {}


class ToolCall(NamedTuple):
    tool: str
    input: Mapping[str, Any]
    answer: str  # what its answer contains


class Published(NamedTuple):
    name: str  # in the configuration
    package: str
    where: str  # "npm", or the environment of Python packages: servers before mcp 2 cannot share one
    program: str
    entry: ReadmeEntry
    told: Mapping[str, str]  # words of the README -> what stands there on this machine
    allowed: tuple[str, ...]  # options of `runner allow`: more than it asks for, which is nothing
    call: ToolCall | None  # None: every tool needs a service on the internet
    leaves: str = ""  # a file in {work} that the call has to have made


def _npx(*args: str, env: Mapping[str, str] | None = None) -> ReadmeEntry:
    return ReadmeEntry("npx", args, 2 if args[0] == "-y" else 1, env or {})


def _uvx(*args: str, env: Mapping[str, str] | None = None) -> ReadmeEntry:
    return ReadmeEntry("uvx", args, 1, env or {})


_SCOPE = "@modelcontextprotocol/server-"

SERVERS = (
    Published(
        "filesystem",
        f"{_SCOPE}filesystem",
        "npm",
        "mcp-server-filesystem",
        _npx("-y", f"{_SCOPE}filesystem", "/Users/username/Desktop", "/path/to/other/allowed/dir"),
        {"/Users/username/Desktop": "{work}", "/path/to/other/allowed/dir": "{work}/other"},
        ("--write", "{work}"),
        ToolCall("write_file", {"path": "{work}/note.txt", "content": "hello"}, "Successfully wrote"),
        leaves="note.txt",
    ),
    Published(
        "memory",
        f"{_SCOPE}memory",
        "npm",
        "mcp-server-memory",
        _npx("-y", f"{_SCOPE}memory", env={"MEMORY_FILE_PATH": "/path/to/custom/memory.jsonl"}),
        {"/path/to/custom/memory.jsonl": "{work}/memory.jsonl"},
        ("--write", "{work}"),
        ToolCall(
            "create_entities",
            {"entities": [{"name": "Ada", "entityType": "person", "observations": ["likes gears"]}]},
            "likes gears",
        ),
        leaves="memory.jsonl",
    ),
    Published(
        "everything",
        f"{_SCOPE}everything",
        "npm",
        "mcp-server-everything",
        _npx("-y", f"{_SCOPE}everything"),
        {},
        (),
        ToolCall("echo", {"message": "hello"}, "Echo: hello"),
    ),
    Published(
        "sequential-thinking",
        f"{_SCOPE}sequential-thinking",
        "npm",
        "mcp-server-sequential-thinking",
        _npx("-y", f"{_SCOPE}sequential-thinking"),
        {},
        (),
        ToolCall(
            "sequentialthinking",
            {"thought": "one", "nextThoughtNeeded": False, "thoughtNumber": 1, "totalThoughts": 1},
            '"thoughtHistoryLength": 1',
        ),
    ),
    Published(
        "git-mcp-server",
        "@cyanheads/git-mcp-server",
        "npm",
        "git-mcp-server",
        _npx(
            "@cyanheads/git-mcp-server@latest",
            env={
                "MCP_TRANSPORT_TYPE": "stdio",
                "MCP_LOG_LEVEL": "info",
                "GIT_BASE_DIR": "~/Developer/",
                "LOGS_DIR": "~/Developer/logs/git-mcp-server/",
                "GIT_USERNAME": "cyanheads",
                "GIT_EMAIL": "casey@caseyjhand.com",
                "GIT_SIGN_COMMITS": "true",
            },
        ),
        {"~/Developer/": "{work}", "~/Developer/logs/git-mcp-server/": "{work}/logs"},
        ("--write", "{work}"),
        ToolCall("git_status", {"path": "{work}"}, "main"),
    ),
    Published(
        "github",
        f"{_SCOPE}github",
        "npm",
        "mcp-server-github",
        _npx("-y", f"{_SCOPE}github", env={"GITHUB_PERSONAL_ACCESS_TOKEN": "<YOUR_TOKEN>"}),
        {},
        ("--net", "api.github.com:443"),
        None,
    ),
    Published(
        "context7",
        "@upstash/context7-mcp",
        "npm",
        "context7-mcp",
        _npx("-y", "@upstash/context7-mcp", "--api-key", "YOUR_API_KEY"),
        {},
        ("--net", "context7.com:443"),
        None,
    ),
    Published(
        "notionApi",
        "@notionhq/notion-mcp-server",
        "npm",
        "notion-mcp-server",
        _npx("-y", "@notionhq/notion-mcp-server", env={"NOTION_TOKEN": "ntn_****"}),
        {},
        ("--net", "api.notion.com:443"),
        None,
    ),
    Published(
        "playwright",
        "@playwright/mcp",
        "npm",
        "playwright-mcp",
        _npx("@playwright/mcp@latest"),
        {},
        (),
        None,
    ),
    Published(
        "tavily-mcp",
        "tavily-mcp",
        "npm",
        "tavily-mcp",
        _npx("-y", "tavily-mcp@latest", env={"TAVILY_API_KEY": "your-api-key-here"}),
        {},
        ("--net", "api.tavily.com:443"),
        None,
    ),
    Published(
        "brave-search",
        f"{_SCOPE}brave-search",
        "npm",
        "mcp-server-brave-search",
        _npx("-y", f"{_SCOPE}brave-search", env={"BRAVE_API_KEY": "YOUR_API_KEY_HERE"}),
        {},
        ("--net", "api.search.brave.com:443"),
        None,
    ),
    Published(
        "postgres",
        f"{_SCOPE}postgres",
        "npm",
        "mcp-server-postgres",
        _npx("-y", f"{_SCOPE}postgres", "postgresql://localhost/mydb"),
        {},
        (),
        None,
    ),
    Published(
        "time",
        "mcp-server-time",
        "mcp-2",
        "mcp-server-time",
        _uvx("mcp-server-time"),
        {},
        (),
        ToolCall(
            "convert_time",
            {"source_timezone": "Europe/Paris", "time": "12:00", "target_timezone": "Asia/Tokyo"},
            "+09:00",
        ),
    ),
    Published(
        "git",
        "mcp-server-git",
        "mcp-2",
        "mcp-server-git",
        _uvx("mcp-server-git", "--repository", "path/to/git/repo"),
        {"path/to/git/repo": "{work}"},
        ("--read", "{work}"),
        ToolCall("git_log", {"repo_path": "{work}"}, "the first commit"),
    ),
    Published(
        "fetch",
        "mcp-server-fetch",
        "mcp-2",
        "mcp-server-fetch",
        _uvx("mcp-server-fetch"),
        {},
        ("--net", "example.com:443"),
        None,
    ),
    Published(
        "excel",
        "excel-mcp-server",
        "mcp-2",
        "excel-mcp-server",
        _uvx("excel-mcp-server", "stdio", "--allow-dir", "/path/to/workbooks"),
        {"/path/to/workbooks": "{work}"},
        ("--write", "{work}"),
        ToolCall("create_workbook", {"path": "{work}/book.xlsx"}, "book.xlsx"),
        leaves="book.xlsx",
    ),
    Published(
        "my_sqlite_db",
        "mcp-alchemy",
        "mcp-2",
        "mcp-alchemy",
        ReadmeEntry(
            "uvx",
            ("--from", "mcp-alchemy==2026.10.15.202659", "--refresh-package", "mcp-alchemy", "mcp-alchemy"),
            5,
            {"DB_URL": "sqlite:////absolute/path/to/database.db"},
        ),
        {"sqlite:////absolute/path/to/database.db": "sqlite:///{work}/alchemy.db"},
        ("--write", "{work}"),
        ToolCall("execute_query", {"query": "create table answers (n integer)"}, ""),
        leaves="alchemy.db",
    ),
    Published(
        "sqlite",
        "mcp-server-sqlite",
        "mcp-1",
        "mcp-server-sqlite",
        ReadmeEntry(
            "uv",
            (
                "--directory",
                "parent_of_servers_repo/servers/src/sqlite",
                "run",
                "mcp-server-sqlite",
                "--db-path",
                "~/test.db",
            ),
            4,
        ),
        {"~/test.db": "{work}/test.db"},
        ("--write", "{work}"),
        ToolCall("create_table", {"query": "create table answers (n integer)"}, "Table created"),
        leaves="test.db",
    ),
    Published(
        "calculator",
        "mcp-server-calculator",
        "mcp-1",
        "mcp-server-calculator",
        _uvx("mcp-server-calculator"),
        {},
        (),
        ToolCall("calculate", {"expression": "2+3*4"}, "14"),
    ),
    Published(
        "arxiv",
        "arxiv-mcp-server",
        "mcp-1",
        "arxiv-mcp-server",
        _uvx("arxiv-mcp-server"),
        {},
        (),
        ToolCall("list_papers", {}, '"total_papers": 0'),
    ),
    Published(
        "shell",
        "mcp-shell-server",
        "mcp-1",
        "mcp-shell-server",
        _uvx("mcp-shell-server", env={"ALLOW_COMMANDS": "ls,cat,pwd,grep,wc,touch,find"}),
        {},
        ("--read", "{work}"),
        ToolCall(
            "shell_execute", {"command": ["cat", "hello.txt"], "directory": "{work}"}, "hello from the host"
        ),
    ),
    Published(
        "ddg-search",
        "duckduckgo-mcp-server",
        "mcp-2",
        "duckduckgo-mcp-server",
        _uvx("duckduckgo-mcp-server"),
        {},
        ("--net", "html.duckduckgo.com:443"),
        None,
    ),
    Published(
        "text-editor",
        "mcp-text-editor",
        "mcp-1",
        "mcp-text-editor",
        _uvx("mcp-text-editor"),
        {},
        ("--read", "{work}"),
        ToolCall(
            "get_text_file_contents",
            {"files": [{"file_path": "{work}/hello.txt", "ranges": [{"start": 1}]}]},
            "hello from the host",
        ),
    ),
    Published(
        "word-document-server",
        "office-word-mcp-server",
        "mcp-1",
        "word_mcp_server",
        ReadmeEntry("uvx", ("--from", "office-word-mcp-server", "word_mcp_server"), 3),
        {},
        ("--write", "{work}"),
        ToolCall(
            "create_document", {"filename": "{work}/letter.docx", "title": "Letter"}, "created successfully"
        ),
        leaves="letter.docx",
    ),
)
