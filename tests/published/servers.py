"""Published MCP servers: each entry as its README has it, what it is told here, what it is allowed, one call.

tests/published/test_readme_entries.py compares the entries with the READMEs of the installed packages.
`{work}` stands for a folder with the user's own files. What services answer is in services.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from tests.published.services import POSTGRES, REDIS

# How many have to be called where the registries answer.
NEEDED = 38


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
    call: ToolCall | None  # None: `lacks` says why
    leaves: str = ""  # a file in {work} that the call has to have made
    more: tuple[str, ...] = ()  # words behind the README's, which its recipe has
    lacks: str = ""  # what a call needs that is not here
    adds: Mapping[str, str] = {}  # variables beside the README's, for the gateway

    @property
    def is_read(self) -> bool:
        """Whether a broker reads its requests. It says by itself whom to trust."""
        return "--hide" in self.allowed or any(" " in word for word in self.allowed)

    @property
    def hidden_key(self) -> str:
        """The value that it uses and does not have; empty if it has all that it is told."""
        if "--hide" not in self.allowed:
            return ""
        variable = self.allowed[self.allowed.index("--hide") + 1].partition("@")[0]
        return self.told[self.entry.env[variable]]


def _npx(*args: str, env: Mapping[str, str] | None = None) -> ReadmeEntry:
    return ReadmeEntry("npx", args, 2 if args[0] == "-y" else 1, env or {})


def _uvx(*args: str, env: Mapping[str, str] | None = None) -> ReadmeEntry:
    return ReadmeEntry("uvx", args, 1, env or {})


_SCOPE = "@modelcontextprotocol/server-"
# A description that has the members of a set is in another order at each start, and a gateway withholds it.
_ONE_ORDER = {"PYTHONHASHSEED": "0"}

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
        {"<YOUR_TOKEN>": "ghp_Zq7eVh2KfLw0RtXyBn4MdJs8GcPa1UoT3iQv"},
        ("--net", "api.github.com:443", "--hide", "GITHUB_PERSONAL_ACCESS_TOKEN@api.github.com"),
        ToolCall("list_issues", {"owner": "ada", "repo": "gears"}, "a loose gear"),
    ),
    Published(
        "context7",
        "@upstash/context7-mcp",
        "npm",
        "context7-mcp",
        _npx("-y", "@upstash/context7-mcp", "--api-key", "YOUR_API_KEY"),
        {},
        ("--net", "context7.com:443"),
        ToolCall("resolve-library-id", {"query": "gears", "libraryName": "gears"}, "a loose gear"),
    ),
    Published(
        "notionApi",
        "@notionhq/notion-mcp-server",
        "npm",
        "notion-mcp-server",
        _npx("-y", "@notionhq/notion-mcp-server", env={"NOTION_TOKEN": "ntn_****"}),
        {"ntn_****": "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"},
        ("--net", "api.notion.com:443", "--hide", "NOTION_TOKEN@api.notion.com"),
        ToolCall("API-get-self", {}, "a loose gear"),
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
        lacks="a browser",
    ),
    Published(
        "tavily-mcp",
        "tavily-mcp",
        "npm",
        "tavily-mcp",
        _npx("-y", "tavily-mcp@latest", env={"TAVILY_API_KEY": "your-api-key-here"}),
        {},
        ("--net", "api.tavily.com:443"),
        ToolCall("tavily_search", {"query": "gears"}, "a loose gear"),
    ),
    Published(
        "brave-search",
        f"{_SCOPE}brave-search",
        "npm",
        "mcp-server-brave-search",
        _npx("-y", f"{_SCOPE}brave-search", env={"BRAVE_API_KEY": "YOUR_API_KEY_HERE"}),
        {"YOUR_API_KEY_HERE": "BSAZq7eVh2KfLw0RtXyBn4MdJs8GcPa"},
        ("--net", "api.search.brave.com:443", "--hide", "BRAVE_API_KEY@api.search.brave.com"),
        ToolCall("brave_web_search", {"query": "gears"}, "a loose gear"),
    ),
    Published(
        "postgres",
        f"{_SCOPE}postgres",
        "npm",
        "mcp-server-postgres",
        _npx("-y", f"{_SCOPE}postgres", "postgresql://localhost/mydb"),
        {"postgresql://localhost/mydb": f"postgresql://postgres@{POSTGRES[0]}/postgres"},
        ("--net", f"{POSTGRES[0]}:{POSTGRES[1]}"),
        ToolCall("query", {"sql": "select 6 * 7 as answer"}, "42"),
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
        ("--net", "GET example.com:443/**"),  # so a broker reads what its httpx sends
        ToolCall("fetch", {"url": "https://example.com/gears", "raw": True}, "GET /gears"),
        more=("--allow-private-ips",),
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
        ToolCall("execute_query", {"query": "create table if not exists answers (n integer)"}, ""),
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
        ToolCall(
            "create_table", {"query": "create table if not exists answers (n integer)"}, "Table created"
        ),
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
        adds=_ONE_ORDER,
    ),
    Published(
        "ddg-search",
        "duckduckgo-mcp-server",
        "mcp-2",
        "duckduckgo-mcp-server",
        _uvx("duckduckgo-mcp-server"),
        {},
        ("--net", "html.duckduckgo.com:443"),
        ToolCall("search", {"query": "gears"}, "a loose gear"),
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
    Published(
        "gitlab",
        f"{_SCOPE}gitlab",
        "npm",
        "mcp-server-gitlab",
        _npx("-y", f"{_SCOPE}gitlab", env={"GITLAB_PERSONAL_ACCESS_TOKEN": "<YOUR_TOKEN>"}),
        {},
        ("--net", "gitlab.com:443"),
        ToolCall("search_repositories", {"search": "gears"}, "a loose gear"),
    ),
    Published(
        "slack",
        f"{_SCOPE}slack",
        "npm",
        "mcp-server-slack",
        _npx(
            "-y",
            f"{_SCOPE}slack",
            env={
                "SLACK_BOT_TOKEN": "xoxb-your-bot-token",
                "SLACK_TEAM_ID": "T01234567",
                "SLACK_CHANNEL_IDS": "C01234567, C76543210",
            },
        ),
        {"xoxb-your-bot-token": "xoxb-2718281828-3141592653-Zq7eVh2KfLw0RtXyBn4MdJs8"},
        ("--net", "slack.com:443", "--hide", "SLACK_BOT_TOKEN@slack.com"),
        ToolCall("slack_list_channels", {}, "gears"),
    ),
    Published(
        "redis",
        f"{_SCOPE}redis",
        "npm",
        "mcp-server-redis",
        _npx("-y", f"{_SCOPE}redis", "redis://localhost:6379"),
        {"redis://localhost:6379": f"redis://{REDIS[0]}:{REDIS[1]}"},
        ("--net", f"{REDIS[0]}:{REDIS[1]}"),
        ToolCall("set", {"key": "ada", "value": "gears"}, "Successfully set key: ada"),
    ),
    Published(
        "google-maps",
        f"{_SCOPE}google-maps",
        "npm",
        "mcp-server-google-maps",
        _npx("-y", f"{_SCOPE}google-maps", env={"GOOGLE_MAPS_API_KEY": "<YOUR_API_KEY>"}),
        {},
        ("--net", "maps.googleapis.com:443"),
        ToolCall("maps_geocode", {"address": "Ada"}, "12 St James"),
    ),
    Published(
        "todoist",
        "todoist-mcp",
        "npm",
        "todoist-mcp",
        _npx("-y", "todoist-mcp", env={"API_KEY": "your_todoist_api_token"}),
        {},
        ("--net", "api.todoist.com:443"),
        ToolCall("get_projects_list", {}, "gears"),
    ),
    Published(
        "firecrawl",
        "firecrawl-mcp",
        "npm",
        "firecrawl-mcp",
        _npx("-y", "firecrawl-mcp", env={"FIRECRAWL_API_KEY": "YOUR-API-KEY"}),
        {},
        ("--net", "api.firecrawl.dev:443"),
        ToolCall("firecrawl_scrape", {"url": "https://example.com/"}, "a loose gear"),
    ),
    Published(
        "figma",
        "figma-developer-mcp",
        "npm",
        "figma-developer-mcp",
        _npx("-y", "figma-developer-mcp", "--figma-api-key=YOUR-KEY", "--stdio"),
        {},
        ("--net", "api.figma.com:443"),
        ToolCall("get_figma_data", {"fileKey": "gears"}, "a loose gear"),
    ),
    Published(
        "perplexity",
        "@perplexity-ai/mcp-server",
        "npm",
        "perplexity-mcp",
        _npx("-y", "@perplexity-ai/mcp-server", env={"PERPLEXITY_API_KEY": "your_key_here"}),
        {"your_key_here": "pplx-Zq7eVh2KfLw0RtXyBn4MdJs8GcPa1UoT3iQv"},
        ("--net", "api.perplexity.ai:443", "--hide", "PERPLEXITY_API_KEY@api.perplexity.ai"),
        ToolCall("perplexity_search", {"query": "gears"}, "a loose gear"),
    ),
    Published(
        "youtube-transcript",
        "@kimtaeyoon83/mcp-server-youtube-transcript",
        "npm",
        "mcp-server-youtube-transcript",
        _npx("-y", "@kimtaeyoon83/mcp-server-youtube-transcript"),
        {},
        ("--net", "www.youtube.com:443", "--net", "youtube.com:443"),
        None,
        lacks="a client that takes `toolResult` for the answer: the official one refuses it",
    ),
    Published(
        "obsidian",
        "@bitbonsai/mcpvault",
        "npm",
        "mcpvault",
        _npx("@bitbonsai/mcpvault@latest", "/path/to/your/vault"),
        {"/path/to/your/vault": "{work}"},
        ("--write", "{work}"),
        ToolCall("write_note", {"path": "gears.md", "content": "a loose gear"}, "gears.md"),
        leaves="gears.md",
    ),
    Published(
        "mcp-atlassian",
        "mcp-atlassian",
        "mcp-1",
        "mcp-atlassian",
        _uvx(
            "mcp-atlassian",
            env={
                "JIRA_URL": "https://your-company.atlassian.net",
                "JIRA_USERNAME": "your.email@company.com",
                "JIRA_API_TOKEN": "your_api_token",
                "CONFLUENCE_URL": "https://your-company.atlassian.net/wiki",
                "CONFLUENCE_USERNAME": "your.email@company.com",
                "CONFLUENCE_API_TOKEN": "your_api_token",
            },
        ),
        {"your_api_token": "ATATT3xFfGF0Zq7eVh2KfLw0RtXyBn4MdJs8GcPa1UoT3iQv"},
        (
            *("--net", "your-company.atlassian.net:443"),
            *("--hide", "JIRA_API_TOKEN@your-company.atlassian.net"),
            *("--hide", "CONFLUENCE_API_TOKEN@your-company.atlassian.net"),
        ),
        ToolCall("jira_get_all_projects", {}, "a loose gear"),
    ),
    Published(
        "wikipedia",
        "wikipedia-mcp",
        "mcp-2",
        "wikipedia-mcp",
        ReadmeEntry("wikipedia-mcp", (), 0),
        {},
        ("--net", "en.wikipedia.org:443"),
        ToolCall("search_wikipedia", {"query": "Ada"}, "a loose gear"),
    ),
    Published(
        "aws-documentation",
        "awslabs.aws-documentation-mcp-server",
        "mcp-2",
        "awslabs.aws-documentation-mcp-server",
        _uvx(
            "awslabs.aws-documentation-mcp-server@latest",
            env={"FASTMCP_LOG_LEVEL": "ERROR", "AWS_DOCUMENTATION_PARTITION": "aws"},
        ),
        {},
        ("--net", "docs.aws.amazon.com:443"),
        ToolCall(
            "read_documentation", {"url": "https://docs.aws.amazon.com/gears/guide.html"}, "a loose gear"
        ),
    ),
    Published(
        "cli",
        "cli-mcp-server",
        "mcp-1",
        "cli-mcp-server",
        _uvx(
            "cli-mcp-server",
            env={"ALLOWED_DIR": "</your/desired/dir>", "ALLOWED_COMMANDS": "ls,cat,pwd,echo"},
        ),
        {"</your/desired/dir>": "{work}"},
        ("--read", "{work}"),
        ToolCall("run_command", {"command": "cat hello.txt"}, "hello from the host"),
        adds=_ONE_ORDER,
    ),
    Published(
        "ppt",
        "office-powerpoint-mcp-server",
        "mcp-1",
        "ppt_mcp_server",
        ReadmeEntry("uvx", ("--from", "office-powerpoint-mcp-server", "ppt_mcp_server"), 3),
        {},
        (),
        ToolCall("create_presentation", {"id": "gears"}, "gears"),
    ),
    Published(
        "weather",
        "mcp-weather-server",
        "mcp-1",
        "python",
        ReadmeEntry("python", ("-m", "mcp_weather_server"), 0),
        {},
        (),
        ToolCall(
            "convert_time",
            {
                "datetime_str": "2026-01-01T12:00:00",
                "from_timezone": "Europe/Paris",
                "to_timezone": "Asia/Tokyo",
            },
            "20:00",
        ),
    ),
)
