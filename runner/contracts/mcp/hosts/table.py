"""Every host whose configuration is read: where its files are, and how it writes its servers."""

from __future__ import annotations

from runner.contracts.mcp.hosts.host import Host
from sandbox.spec import KeyPath

_SERVERS: tuple[KeyPath, ...] = (("mcpServers",),)
_VSCODE_STORAGE = tuple(
    f"~/{data}/User/globalStorage"
    for data in (".config/Code", ".config/Code - Insiders", ".config/VSCodium", ".vscode-server/data")
)
_CLINE_KEYS = ("disabled", "timeout", "autoApprove", "alwaysAllow", "transportType", "headers", "metadata")

CLAUDE_CODE = Host(
    "Claude Code",
    "json",
    (("mcpServers",), ("projects", "*", "mcpServers")),
    files=("~/.claude.json", "$CLAUDE_CONFIG_DIR/.claude.json"),
    project_files=(".mcp.json",),
    rules="claude",
    live=True,
    keys=("headers", "headersHelper", "oauth", "timeout"),
    log="~/.cache/claude-cli-nodejs/*/mcp-logs-NAME",
)

VSCODE = Host(
    "VS Code",
    "jsonc",
    (("servers",),),
    files=(
        "~/.config/Code/User/mcp.json",
        "~/.config/Code - Insiders/User/mcp.json",
        "~/.config/VSCodium/User/mcp.json",
        "~/.vscode-server/data/User/mcp.json",
        "~/.config/Code/User/profiles/*/mcp.json",
    ),
    project_files=(".vscode/mcp.json",),
    rules="vscode",
    sandbox_switch="sandboxEnabled",
    keys=("envFile", "dev", "sandboxEnabled", "sandbox", "headers", "gallery", "version", "oauth"),
    log="the Output panel (MCP: NAME)",
)

ZED = Host(
    "Zed",
    "jsonc",
    (("context_servers",),),
    files=("~/.config/zed/settings.json",),
    project_files=(".zed/settings.json",),
    shape="nested",
    keys=("timeout", "enabled", "remote", "source", "settings", "headers", "tools", "oauth"),
    log="~/.local/share/zed/logs/Zed.log",
)

CODEX = Host(
    "Codex",
    "toml",
    (("mcp_servers",),),
    files=("$CODEX_HOME/config.toml", "~/.codex/config.toml"),
    project_files=(".codex/config.toml",),
    keys=tuple(
        (
            "env_vars enabled required startup_timeout_sec startup_timeout_ms tool_timeout_sec enabled_tools"
            " disabled_tools bearer_token_env_var http_headers env_http_headers tools scopes oauth_resource"
            " default_tools_approval_mode supports_parallel_tool_calls"
        ).split()
    ),
    log="~/.codex/log",
)

GOOSE = Host(
    "Goose",
    "yaml",
    (("extensions",),),
    files=("~/.config/goose/config.yaml",),
    shape="cmd",
    keys=tuple(
        (
            "name cmd envs env_keys enabled bundled available_tools display_name timeout description config"
            " uri headers"
        ).split()
    ),
    log="~/.local/state/goose/logs",
)

OPENCODE = Host(
    "opencode",
    "jsonc",
    (("mcp",), ("mcp", "servers")),
    files=("~/.config/opencode/opencode.json", "~/.config/opencode/opencode.jsonc"),
    project_files=("opencode.json", "opencode.jsonc", ".opencode/opencode.json", ".opencode/opencode.jsonc"),
    shape="argv",
    rules="opencode",
    keys=("environment", "enabled", "disabled", "timeout", "headers", "oauth"),
    log="~/.local/share/opencode/log",
)

CONTINUE = Host(
    "Continue",
    "yaml",
    _SERVERS,
    files=("~/.continue/config.yaml", "~/.continue/mcpServers/*.yaml", "~/.continue/mcpServers/*.yml"),
    project_files=(".continue/mcpServers/*.yaml", ".continue/mcpServers/*.yml", ".continue/config.yaml"),
    named_list=True,
    rules="continue",
    keys=("name", "connectionTimeout", "requestOptions", "faviconUrl", "sourceFile", "serverName", "apiKey"),
    log="~/.continue/logs",
)

AMP = Host(
    "Amp",
    "jsonc",
    (("amp.mcpServers",),),
    files=("~/.config/amp/settings.json", "~/.config/amp/settings.jsonc"),
    project_files=(".amp/settings.json", ".amp/settings.jsonc"),
    keys=("headers", "includeTools", "oauth"),
)

VIBE = Host(
    "Mistral Vibe",
    "toml",
    (("mcp_servers",),),
    files=("$VIBE_HOME/config.toml", "~/.vibe/config.toml"),
    project_files=(".vibe/config.toml",),
    named_list=True,
    keys=("name", "transport", "prompt", "headers", "api_key_env", "startup_timeout_sec", "tool_timeout_sec"),
)

HOSTS: tuple[Host, ...] = (
    Host(
        "Claude Desktop",
        "json",
        _SERVERS,
        ("~/.config/Claude/claude_desktop_config.json",),
        log="~/.config/Claude/logs/mcp-server-NAME.log",
    ),
    CLAUDE_CODE,
    Host(
        "Cursor",
        "json",
        _SERVERS,
        ("~/.cursor/mcp.json",),
        (".cursor/mcp.json",),
        rules="cursor",
        comments=True,
        keys=("envFile", "headers", "auth", "disabled"),
        log="the Output panel (MCP Logs)",
    ),
    VSCODE,
    Host(
        "GitHub Copilot",
        "json",
        _SERVERS,
        ("$COPILOT_HOME/mcp-config.json", "~/.copilot/mcp-config.json"),
        rules="claude",
        keys=("headers", "tools", "timeout"),
        log="~/.copilot/logs",
    ),
    Host(
        "Windsurf",
        "json",
        _SERVERS,
        ("~/.codeium/windsurf/mcp_config.json", "~/.codeium/mcp_config.json"),
        rules="windsurf",
        keys=("disabled", "serverUrl", "headers", "disabledTools", "alwaysAllow"),
    ),
    ZED,
    Host(
        "Cline",
        "json",
        _SERVERS,
        (
            *(f"{each}/saoudrizwan.claude-dev/settings/cline_mcp_settings.json" for each in _VSCODE_STORAGE),
            "$CLINE_MCP_SETTINGS_PATH",
            "~/.cline/data/settings/cline_mcp_settings.json",
        ),
        keys=_CLINE_KEYS,
        log="the Output panel (Cline)",
    ),
    Host(
        "Roo Code",
        "json",
        _SERVERS,
        tuple(f"{each}/rooveterinaryinc.roo-cline/settings/mcp_settings.json" for each in _VSCODE_STORAGE),
        (".roo/mcp.json",),
        rules="roo",
        keys=(*_CLINE_KEYS, "disabledTools", "watchPaths"),
    ),
    CONTINUE,
    Host(
        "Continue",
        "json",
        _SERVERS,
        ("~/.continue/mcpServers/*.json",),
        (".continue/mcpServers/*.json",),
        rules="continue",
        keys=CONTINUE.keys,
        log=CONTINUE.log,
    ),
    Host(
        "Gemini CLI",
        "jsonc",
        _SERVERS,
        ("~/.gemini/settings.json", "~/.gemini/extensions/*/gemini-extension.json"),
        (".gemini/settings.json", ".gemini/extensions/*/gemini-extension.json"),
        ("/etc/gemini-cli/settings.json",),
        rules="gemini",
        keys=tuple(
            (
                "timeout trust includeTools excludeTools httpUrl headers description tcp oauth"
                " authProviderType targetAudience targetServiceAccount extensionName"
            ).split()
        ),
        log="the debug console (gemini --debug)",
    ),
    CODEX,
    GOOSE,
    Host(
        "LM Studio",
        "json",
        _SERVERS,
        ("~/.lmstudio/mcp.json", "~/.cache/lm-studio/mcp.json"),
        rules="cursor",
        keys=("headers", "timeout"),
    ),
    Host("Junie", "json", _SERVERS, ("~/.junie/mcp/mcp.json",), (".junie/mcp/mcp.json",), keys=("enabled",)),
    OPENCODE,
    Host(
        "Amazon Q",
        "json",
        _SERVERS,
        (
            "~/.aws/amazonq/cli-agents/*.json",
            "~/.aws/amazonq/agents/default.json",
            "~/.aws/amazonq/default.json",
            "~/.aws/amazonq/mcp.json",
        ),
        (".amazonq/mcp.json", ".amazonq/default.json", ".amazonq/cli-agents/*.json"),
        keys=("timeout", "disabled", "headers", "oauthScopes"),
        log="$XDG_RUNTIME_DIR/qlog, or $TMPDIR/qlog",
    ),
    Host(
        "Kiro",
        "json",
        _SERVERS,
        ("~/.kiro/settings/mcp.json",),
        (".kiro/settings/mcp.json",),
        keys=("disabled", "autoApprove", "disabledTools", "timeout", "headers"),
        log="the Output panel (Kiro - MCP Logs)",
    ),
    Host(
        "Factory",
        "json",
        _SERVERS,
        ("~/.factory/mcp.json",),
        (".factory/mcp.json",),
        keys=("disabled", "headers"),
    ),
    Host("Kimi", "json", _SERVERS, ("~/.kimi/mcp.json",), keys=("headers", "transport", "auth", "timeout")),
    Host(
        "Trae",
        "json",
        _SERVERS,
        ("~/.config/Trae/User/mcp.json", "~/.config/Trae CN/User/mcp.json"),
        (".trae/mcp.json",),
        keys=("headers", "disabled", "fromGalleryId", "enabled"),
    ),
    Host(
        "Antigravity",
        "json",
        _SERVERS,
        ("~/.gemini/antigravity/mcp_config.json",),
        keys=("disabled", "serverUrl", "headers", "disabledTools"),
    ),
    AMP,
    VIBE,
)
