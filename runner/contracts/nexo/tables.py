"""The tables of a nexo manifest (manifest_version 2), all of the newest schema.

Tables that the runner makes no use of are modelled too: their keys are checked, and an editor can complete
them.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field

from runner.contracts.nexo import rules
from runner.manifest import sandbox_request
from sandbox.document import model


class _Table(BaseModel):
    model_config = model.TABLE


def _text(description: str) -> Any:
    return Field(default=None, description=description)


def _list(description: str) -> Any:
    return Field(default=[], description=description)


class EntrypointTable(_Table):
    """How the plugin is started."""

    command: str | None = _text("Program: on PATH, absolute, or relative to the manifest's folder (./bin/x).")
    args: list[str] = _list("Arguments.")
    env: dict[str, str] = Field(
        default={}, description="Variables to set. Names starting with NEXO_ are reserved."
    )


class RequiresTable(_Table):
    """What the plugin needs from its surroundings."""

    bins: list[str] = _list("Programs the plugin runs.")
    env: list[str] = _list("Variables the plugin would like passed on from the host.")
    features: list[str] = _list("Build features.")
    nexo_capabilities: list[str] = _list("Services of the host: broker, memory, …")


class AdminCapabilityTable(_Table):
    """Admin calls the plugin makes."""

    required: list[str] = _list("It cannot run without these.")
    optional: list[str] = _list("It can run without these.")


class HttpServerCapabilityTable(_Table):
    """A port the plugin itself listens on."""

    port: int | None = Field(default=None, description="TCP port.")
    bind: str | None = _text("Address.")
    token_env: str | None = _text("Variable with the bearer token.")
    health_path: str | None = _text("Path that answers 200 when ready.")
    extra_env_passthrough: list[str] = _list("Further variables passed on.")


class BrokerTable(_Table):
    """Topics beyond those of the plugin's channels."""

    subscribe: list[str] = _list("Topic patterns delivered to the plugin.")
    publish: list[str] = _list("Topic patterns the plugin may publish to.")


Provided = Literal[
    "tools",
    "advisors",
    "agents",
    "skills",
    "channels",
    "hooks",
    "mcp_servers",
    "webhooks",
    "poller_drivers",
    "llm_providers",
]


class CapabilitiesTable(_Table):
    """What the plugin contributes."""

    provides: list[Provided] = _list("Kinds of contribution; each needs its section filled.")
    admin: AdminCapabilityTable | None = None
    http_server: HttpServerCapabilityTable | None = None
    skills: list[str] = _list("Skills shipped below skills/.")
    broker: BrokerTable | None = None


class ChannelTable(_Table):
    """One channel kind."""

    kind: str = Field(description="Identifier, unique among all plugins.")
    adapter: str | None = _text("Name of the implementation, for people.")


class ChannelsTable(_Table):
    """Channel kinds; they decide which topics the plugin gets."""

    register_: list[ChannelTable] = Field(default=[], alias="register")


class ExtendsTable(_Table):
    """Identifiers contributed to the host's registries."""

    channels: list[str] = _list("Channel kinds.")
    llm_providers: list[str] = _list("LLM providers.")
    memory_backends: list[str] = _list("Vector stores.")
    hooks: list[str] = _list("Hooks.")
    tools: list[str] = _list("Tools the plugin may advertise in its handshake.")


class OutboundToolTable(_Table):
    """A tool described here instead of in the handshake."""

    name: str = Field(description="Has to be in tools.expose.")
    description: str | None = _text("For the model that calls it.")
    input_schema: str = Field(description='JSON Schema as text; its root has "type": "object".')
    rpc_method: str | None = _text("Method called for it (outbound_tool.invoke).")
    timeout_ms: int | None = Field(default=None, description="Time limit of one call.")


class ToolsTable(_Table):
    """Tools by name."""

    expose: list[str] = _list("Names; each starts with <id>_ or ext_<id>_.")
    deferred: list[str] = _list("Those of expose that only show up in a search.")
    outbound: list[OutboundToolTable] = _list("Tools with their description.")


class SupervisorTable(_Table):
    """What happens after a crash."""

    stderr_tail_lines: int | None = Field(default=None, description="Lines kept for the report, 512 at most.")
    respawn: bool | None = Field(default=None, description="Start again after a crash.")
    max_attempts: int | None = Field(default=None, description="Attempts before giving up, at least 1.")
    backoff_ms: int | None = Field(default=None, description="First wait, 100 to 300000.")


class SandboxTable(_Table):
    """What the plugin asks of the cage."""

    enabled: bool | None = Field(default=None, description="false asks for nothing beyond the default cage.")
    network: Literal["deny", "host", "allowlist"] | None = Field(
        default=None, description="deny (default), allowlist (with network_allowlist), host."
    )
    network_allowlist: list[str] = _list('Reachable hosts as "name:port".')
    fs_read_paths: list[str] = _list("Absolute paths to read; those that do not exist are skipped.")
    fs_write_paths: list[str] = _list("Absolute paths to write; ${state_dir} is the plugin's own folder.")
    drop_user: bool | None = Field(default=None, description="Has no effect: the user is always dropped.")
    seccomp: model.Seccomp | None = Field(default=None, description="System calls: strict, default, compat.")


class ConfigTable(_Table):
    """The plugin's own configuration files."""

    schema_path: str | None = _text("JSON Schema, relative to the plugin's folder.")
    hot_reload: bool | None = Field(default=None, description="Changes apply without a restart.")


class ConfigSchemaTable(_Table):
    """Configuration delivered by plugin.configure."""

    schema_: str = Field(alias="schema", description='JSON Schema as text; its root has "type": "object".')
    shape: Literal["object", "array"] | None = None
    hot_reload: bool | None = None


class CredentialsSchemaTable(_Table):
    """A store of credentials the plugin offers."""

    enabled: bool | None = None
    accounts_shape: Literal["object", "array"] | None = None


class SubscriptionsTable(_Table):
    """Topics forwarded to the plugin."""

    broker_topics: list[str] = _list("Topic patterns.")


class PairingFieldTable(_Table):
    """One input of a pairing form."""

    name: str | None = None
    label: str | None = None
    help: str | None = None
    sensitive: bool | None = None
    placeholder: str | None = None
    required: bool | None = None


class PairingAdapterTable(_Table):
    """Where pairing calls are sent."""

    channel_id: str | None = None
    broker_topic_prefix: str | None = None
    format_challenge_text_kind: str | None = None
    normalize_cache_ttl_seconds: int | None = None


class PairingTriggerTable(_Table):
    """Calls that start and cancel pairing by QR code."""

    start_method: str | None = None
    cancel_method: str | None = None
    timeout_seconds: int | None = None


class PairingTable(_Table):
    """How a channel is linked."""

    kind: Literal["qr", "form", "info", "custom"] | None = None
    label: str | None = None
    instructions: dict[str, str] = Field(default={}, description="By locale.")
    fields_: list[PairingFieldTable] = Field(default=[], alias="fields")
    rpc_namespace: str | None = None
    instance_field: str | None = None
    adapter: PairingAdapterTable | None = None
    trigger: PairingTriggerTable | None = None


class HttpTable(_Table):
    """Routes the host forwards."""

    mount_prefix: str | None = None
    timeout_seconds: int | None = None


class AdminTable(_Table):
    """Admin calls the host forwards."""

    method_prefix: str | None = None
    broker_topic_prefix: str | None = None
    timeout_seconds: int | None = None


class ContributionTable(_Table):
    """A menu entry."""

    id: str | None = None
    slot: str | None = None
    parent: str | None = None
    label: Any = Field(default=None, description="Text, or texts by locale.")
    icon: str | None = None
    order: int | None = None
    screen: str | None = None
    visible_when: str | None = None


class FormFieldTable(_Table):
    """One input of a screen."""

    key: str | None = None
    type: str | None = None
    label: Any = None
    required: bool | None = None
    help: Any = None
    placeholder: str | None = None
    visible_when: str | None = None
    options: list[Any] = []
    options_source: dict[str, Any] | None = None


class ActionTable(_Table):
    """A button of a screen."""

    id: str | None = None
    label: Any = None
    method: str | None = None
    confirm: Any = None
    prompt_fields: list[FormFieldTable] = []
    on_success: str | None = None


class ScreenTable(_Table):
    """A form in the admin interface."""

    id: str | None = None
    title: Any = None
    load: str | None = None
    fields_: list[FormFieldTable] = Field(default=[], alias="fields")
    actions: list[ActionTable] = []
    refresh: dict[str, Any] | None = None


class AdminUiTable(_Table):
    """Menu entries and screens of the admin interface."""

    schema_version: int | None = None
    mode: str | None = None
    describe: bool | None = None
    contributions: list[ContributionTable] = []
    screens: list[ScreenTable] = []


class MetricsTable(_Table):
    """Prometheus metrics the plugin offers."""

    prometheus: bool | None = None
    broker_topic_prefix: str | None = None
    timeout_seconds: int | None = None


class DashboardTable(_Table):
    """How the set-up wizard finds instances and their state."""

    layout: dict[str, Any] | None = None
    auth_check: dict[str, Any] | None = None


class PollerTable(_Table):
    """Polling jobs."""

    kinds: list[str] = []
    broker_topic_prefix: str | None = None
    lifecycle: Literal["long_lived", "ephemeral"] | None = None
    max_concurrent_ticks: int | None = Field(default=None, description="1 to 64.")
    tick_timeout_secs: int | None = Field(default=None, description="1 to 3600.")


class PublicTunnelTable(_Table):
    """A tunnel from the internet to the plugin's routes."""

    enabled: bool | None = None
    close_on_event: str | None = None


class AgentsTable(_Table):
    """Agents the plugin ships."""

    contributes_dir: str | None = None
    allow_override: bool | None = None


class SkillsTable(_Table):
    """Skills the plugin ships."""

    contributes_dir: str | None = None


class AdvisorsTable(_Table):
    """Advisors the plugin registers."""

    register_: list[str] = Field(default=[], alias="register")


class GateTable(_Table):
    """A switch the operator sets by a variable."""

    extension: str | None = None
    env_var: str = Field(description="Variable; unique among the gates.")
    kind: str | None = None
    risk: str | None = None
    effect: str | None = None
    hint: str | None = None


class CapabilityGatesTable(_Table):
    """Switches the operator sets."""

    gate: list[GateTable] = []


class UiHintTable(_Table):
    """How one configuration field is shown."""

    label: str | None = None
    help: str | None = None
    tags: list[str] = []
    advanced: bool | None = None
    sensitive: bool | None = None
    placeholder: str | None = None


class UiTable(_Table):
    """How configuration fields are shown."""

    fields_: dict[str, UiHintTable] = Field(default={}, alias="fields")


class ContractsTable(_Table):
    """Agreements between plugins."""

    provides: list[str] = []
    consumes: list[str] = []


class MetaTable(_Table):
    """About the plugin."""

    author: str | None = None
    license: str | None = None
    homepage: str | None = None
    repository: str | None = None


class PluginTable(_Table):
    """The plugin."""

    id: str = Field(description=rules.ID_PATTERN)
    version: str = Field(description="Semantic version.")
    name: str = Field(description="For people.")
    description: str = Field(description="One line.")
    min_nexo_version: str = Field(description='Requirement such as ">=0.1.0".')
    enabled_by_default: bool | None = None
    entrypoint: EntrypointTable | None = None
    requires: RequiresTable | None = None
    capabilities: CapabilitiesTable | None = None
    channels: ChannelsTable | None = None
    extends: ExtendsTable | None = None
    tools: ToolsTable | None = None
    supervisor: SupervisorTable | None = None
    sandbox: SandboxTable | None = None
    limits: Any = Field(default=None, json_schema_extra=sandbox_request.limits_schema(rules.LIMIT_WORDS))
    config: ConfigTable | None = None
    config_schema: ConfigSchemaTable | None = None
    credentials_schema: CredentialsSchemaTable | None = None
    subscriptions: SubscriptionsTable | None = None
    pairing: PairingTable | None = None
    http: HttpTable | None = None
    http_server: dict[str, Any] | None = Field(default=None, description="The plugin's own port; free form.")
    admin: AdminTable | None = None
    admin_ui: AdminUiTable | None = None
    metrics: MetricsTable | None = None
    dashboard: DashboardTable | None = None
    poller: PollerTable | None = None
    public_tunnel: PublicTunnelTable | None = None
    agents: AgentsTable | None = None
    skills: SkillsTable | None = None
    advisors: AdvisorsTable | None = None
    capability_gates: CapabilityGatesTable | None = None
    ui: UiTable | None = None
    contracts: ContractsTable | None = None
    meta: MetaTable | None = None


class Manifest(_Table):
    """nexo-plugin.toml"""

    manifest_version: int | None = Field(default=None, description="2")
    plugin: PluginTable
