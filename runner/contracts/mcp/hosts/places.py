"""Places from which hosts run code, which no plugin may write to. Constants only.

Each is a file, or a folder if everything in it counts (extensions, hooks, commands, servers). The files of
servers are named beside their folders, because a hard link to a file is found by the file's own name.
"""

from __future__ import annotations

from sandbox.paths.guarded import GuardedName

_CODE = (".config/Code", ".config/Code - Insiders", ".config/VSCodium", ".config/Cursor", ".config/Windsurf")

# Below a home. What begins with .config is also meant below $XDG_CONFIG_HOME.
HOME_PLACES: tuple[str, ...] = (
    ".mcp.json",
    ".claude.json",
    ".claude",
    ".claude/settings.json",
    ".config/Claude",
    ".config/Claude/claude_desktop_config.json",
    ".cursor",
    ".cursor/mcp.json",
    *_CODE,
    *(f"{place}/User/{name}" for place in _CODE for name in ("mcp.json", "settings.json", "tasks.json")),
    *(
        f"{place}/User/globalStorage/{name}"
        for place in (*_CODE, ".vscode-server/data")
        for name in (
            "saoudrizwan.claude-dev/settings/cline_mcp_settings.json",
            "rooveterinaryinc.roo-cline/settings/mcp_settings.json",
        )
    ),
    ".vscode",
    ".vscode-insiders",
    ".vscode-oss",
    ".vscode-server",
    ".vscode-server/data/User/mcp.json",
    ".cursor-server",
    ".windsurf-server",
    ".copilot",
    ".copilot/mcp-config.json",
    ".codeium",
    ".codeium/mcp_config.json",
    ".codeium/windsurf/mcp_config.json",
    ".config/zed",
    ".config/zed/settings.json",
    ".local/share/zed",
    ".cline",
    ".cline/data/settings/cline_mcp_settings.json",
    ".roo",
    ".continue",
    ".continue/config.yaml",
    ".continue/config.json",
    ".gemini",
    ".gemini/settings.json",
    ".gemini/antigravity/mcp_config.json",
    ".qwen",
    ".qwen/settings.json",
    ".config/crush",
    ".config/crush/crush.json",
    ".local/share/crush",
    ".local/share/crush/crush.json",
    ".codex",
    ".codex/config.toml",
    ".config/goose",
    ".config/goose/config.yaml",
    ".lmstudio",
    ".lmstudio/mcp.json",
    ".cache/lm-studio",
    ".cache/lm-studio/mcp.json",
    ".junie",
    ".junie/mcp/mcp.json",
    ".config/JetBrains",
    ".config/opencode",
    ".config/opencode/opencode.json",
    ".config/opencode/opencode.jsonc",
    ".aws/amazonq",
    ".aws/amazonq/mcp.json",
    ".aws/amazonq/default.json",
    ".aws/amazonq/agents/default.json",
    ".amazonq",
    ".kiro",
    ".kiro/settings/mcp.json",
    ".factory",
    ".factory/mcp.json",
    ".kimi",
    ".kimi/mcp.json",
    ".config/Trae",
    ".config/Trae CN",
    ".config/Trae CN/User/mcp.json",
    ".config/Trae/User/mcp.json",
    ".config/amp",
    ".config/amp/settings.json",
    ".config/amp/settings.jsonc",
    ".vibe",
    ".vibe/config.toml",
)

# Of these, the files with the tokens of servers, which no plugin may read either; and sign-ins to servers.
TOKEN_FILES: tuple[str, ...] = (
    *(place for place in HOME_PLACES if place.endswith((".json", ".jsonc", ".toml", ".yaml"))),
    ".gemini/mcp-oauth-tokens.json",
    ".gemini/mcp-oauth-tokens-v2.json",
    ".local/share/opencode/mcp-auth.json",
    ".local/share/amp/secrets.json",
    ".cline/data/secrets.json",
    ".vibe/.env",
)

SYSTEM_PLACES: tuple[str, ...] = ("/etc/gemini-cli", "/etc/claude-code", "/etc/codex")

# Variables that name another place.
VARIABLES: tuple[str, ...] = (
    "CLAUDE_CONFIG_DIR",
    "CODEX_HOME",
    "COPILOT_HOME",
    "CLINE_MCP_SETTINGS_PATH",
    "OPENCODE_CONFIG",
    "OPENCODE_CONFIG_DIR",
    "CONTINUE_GLOBAL_DIR",
    "VIBE_HOME",
    "GEMINI_CLI_SYSTEM_SETTINGS_PATH",
)

_NO_SERVERS = '{"mcpServers": {}}\n'

# At the top of a project. git lists a stand-in that is a file as new, so few of them are files. An optional
# name can be made by a plugin, and is told after its end: its host asks a person first, or few read it.
PROJECT_NAMES: tuple[GuardedName, ...] = (
    GuardedName(".mcp.json", "Claude Code", _NO_SERVERS),
    GuardedName("mcp.json", "some hosts", _NO_SERVERS, True),  # no host reads it by itself
    GuardedName("opencode.json", "opencode", "{}\n"),
    GuardedName("opencode.jsonc", "opencode", "{}\n"),
    GuardedName("crush.json", "Crush", "{}\n"),
    GuardedName(".crush.json", "Crush", "{}\n"),
    GuardedName(".vscode", "VS Code"),
    GuardedName("*.code-workspace", "VS Code", None, True),  # a person opens it by name
    GuardedName(".devcontainer", "VS Code"),  # initializeCommand runs outside of the container
    GuardedName(".devcontainer.json", "VS Code", "{}\n", True),  # an empty one is offered to the person
    GuardedName(".cursor", "Cursor"),
    GuardedName(".windsurf", "Windsurf"),
    GuardedName(".zed", "Zed"),
    GuardedName(".vs", "Visual Studio"),
    GuardedName(".idea", "a JetBrains IDE"),
    GuardedName(".helix", "Helix", None, True),
    GuardedName(".roo", "Roo Code"),
    GuardedName(".kilocode", "Kilo Code"),
    GuardedName(".clinerules", "Cline", None, True),  # hooks/ in it
    GuardedName(".continue", "Continue"),
    GuardedName(".gemini", "Gemini CLI"),
    GuardedName(".qwen", "Qwen Code"),
    GuardedName(".codex", "Codex"),
    GuardedName(".junie", "Junie"),
    GuardedName(".amazonq", "Amazon Q"),
    GuardedName(".claude", "Claude Code"),
    GuardedName(".kiro", "Kiro"),
    GuardedName(".opencode", "opencode"),
    GuardedName(".factory", "Factory"),
    GuardedName(".trae", "Trae"),
    GuardedName(".amp", "Amp"),
    GuardedName(".vibe", "Vibe"),
    GuardedName(".copilot", "Copilot"),
    GuardedName(".aider.conf.yml", "Aider", "", True),  # lint-cmd
    # Workflows run elsewhere, and changing them is ordinary work: only these are guarded, where it exists.
    GuardedName(
        ".github",
        "Copilot",
        sign="",
        parts=(GuardedName("mcp.json", "Copilot", _NO_SERVERS), GuardedName("hooks", "Copilot")),
    ),
    # A shell with mise trusts a file by its path, and obeys it when somebody enters the folder.
    GuardedName("mise.toml", "mise", "", True),
    GuardedName(".mise.toml", "mise", "", True),
)
