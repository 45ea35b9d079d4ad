"""Which modules are in which bundle (sandbox/speed/bundle.py). Each part is a file of its own.

Each module stands behind those that it imports. A part may need modules of another one, which are imported
as usual if they are not there yet. tests/sandbox/speed/test_bundle.py says what is missing.
"""

_NAMES = {
    # What a launch from a stored plan loads: all that carries out a plan.
    "launch": """
        runner sandbox.speed.late_site sandbox.speed.typed runner.cli sandbox.speed.plain runner.launch
        runner.launch.stored sandbox.speed.value sandbox.cache sandbox.facts runner.launch.stored.entry
        runner.cli.shared sandbox.speed.scopes runner.outcome sandbox.identity sandbox.identity.owner
        sandbox.limits sandbox.files sandbox.limits.meter sandbox.limits.site sandbox.spawn
        sandbox.spawn.order sandbox.spec
        sandbox.speed.signals sandbox.limits.cgroup sandbox.plan sandbox.plan.layers sandbox.network
        sandbox.network.ssh sandbox.plan.plan runner.launch.sources runner.launch.acquire
        sandbox.limits.assigned runner.launch.stages sandbox.streams sandbox.streams.handover
        runner.launch.stdio sandbox.cell sandbox.limits.rlimits sandbox.spawn.machine_code
        sandbox.spawn.launcher sandbox.spawn.reaper sandbox.cell.cell runner.launch.wait sandbox.plan.bwrap
        sandbox.speed.libc sandbox.spawn.priority sandbox.spawn.init sandbox.spawn.spawner
        sandbox.spawn.network sandbox.cell.name_lookups sandbox.cell.launch runner.launch.start
        runner.launch.finish runner.launch.carry_out runner.launch.orders runner.cli.shared.launching
        sandbox.speed.codec runner.launch.stored.run runner.cli.shared.stored_plan sandbox.paths
        sandbox.paths.file_identity sandbox.identity.uid_range sandbox.identity.leases
        sandbox.limits.socket_meter
    """,
    # What it loads besides for a plugin with a state directory.
    "state": """
        sandbox.look sandbox.identity.removal sandbox.identity.reservations sandbox.identity.uids
        sandbox.paths.walk sandbox.identity.state sandbox.paths.mounts sandbox.paths.access
    """,
    # What `runner run` loads besides, if its stderr is a pipe or a file.
    "run": """
        sandbox.streams.endpoints sandbox.streams.pump sandbox.streams.relay
    """,
    # What it loads besides for a plugin that may write files of the host.
    "write": """
        sandbox.look sandbox.paths.walk sandbox.paths.mounts sandbox.paths.denied_paths sandbox.paths.guarded
        sandbox.paths.denied_places sandbox.paths.scan sandbox.paths.source sandbox.plan.guards
        sandbox.plan.sources sandbox.paths.stand_in sandbox.paths.end_search sandbox.spawn.guards
    """,
    # And if the runner is root.
    "owners": """
        sandbox.identity.accounts sandbox.identity.idmap sandbox.plan.owners
    """,
    # What it loads besides for a plugin that may reach hosts, and what its gate loads.
    "hosts": """
        sandbox.network.credentials sandbox.network.egress sandbox.network.audit sandbox.cell.beside
        sandbox.network.wire sandbox.network.redirect sandbox.network.recipe sandbox.cell.egress
    """,
    "gate": """
        sandbox.gate sandbox.gate.loop sandbox.gate.audit sandbox.network.hosts sandbox.network.rules
        sandbox.gate.broker_channel sandbox.seccomp sandbox.seccomp.bpf sandbox.look sandbox.seccomp.filter
        sandbox.gate.calls sandbox.gate.confine sandbox.gate.cpu_limiter sandbox.gate.closed_ports
        sandbox.gate.dial sandbox.gate.names sandbox.gate.peek sandbox.gate.pump sandbox.gate.dns
        sandbox.gate.upstream sandbox.gate.resolver sandbox.network.addresses sandbox.gate.flows
        sandbox.gate.name_server sandbox.network.sockets sandbox.gate.gate
    """,
    # What `runner exec` loads besides if no plan holds, for a manifest and a policy that it knows.
    "decide": """
        runner.contracts runner.plugin runner.contracts.contract sandbox.look sandbox.surroundings
        runner.contracts.registry
        runner.contracts.configurations sandbox.document sandbox.document.diagnostic runner.cli.shared.hiding
        runner.cli.shared.logging_in runner.cli.shared.options sandbox.paths.walk
        runner.cli.shared.report_file runner.launch.failures runner.approvals sandbox.paths.executable
        sandbox.paths.installation sandbox.paths.mounts sandbox.paths.packages sandbox.paths.shims
        sandbox.paths.denied_paths sandbox.paths.program sandbox.policy sandbox.network.credentials
        sandbox.network.egress sandbox.paths.guarded sandbox.paths.denied_places sandbox.paths.denylist
        sandbox.paths.scan
        sandbox.policy.policy sandbox.policy.approval runner.approvals.marks runner.approvals.record
        runner.approvals.store runner.launch.command sandbox.document.read sandbox.policy.load
        runner.launch.approve sandbox.identity.removal sandbox.identity.host_side
        sandbox.identity.reservations sandbox.identity.uids sandbox.identity.state sandbox.paths.homes
        runner.install runner.install.roots runner.launch.denylist sandbox.policy.grant
        runner.launch.own_folders runner.launch.prepare sandbox.limits.cgroup_survey sandbox.limits.shares
        sandbox.limits.assign sandbox.seccomp sandbox.seccomp.filter sandbox.plan.available_layers
        sandbox.paths.access sandbox.paths.source sandbox.plan.mentions sandbox.plan.ssh
        sandbox.plan.operations sandbox.plan.relocation sandbox.plan.places sandbox.plan.compile
        sandbox.plan.find_bwrap runner.launch.plan runner.manifest runner.manifest.cache runner.manifest.load
        runner.launch.read runner.launch.run runner.cli.exec runner.launch.stored.unit
        runner.launch.stored.store sandbox.plan.sources
    """,
    # What `runner explain` loads for a manifest and a policy that it knows, and for usual words.
    "explain": """
        runner sandbox.speed.late_site sandbox.speed.typed runner.cli runner.cli.shared sandbox.document
        sandbox.speed.value sandbox.document.diagnostic sandbox.spec sandbox.speed.scopes
        runner.cli.shared.text runner.contracts runner.contracts.contract sandbox.facts sandbox.look
        sandbox.surroundings
        runner.contracts.registry runner.contracts.configurations runner.launch sandbox.limits
        sandbox.limits.assigned runner.launch.stages runner.cli.shared.hiding runner.cli.shared.logging_in
        runner.cli.shared.options sandbox.plan sandbox.network sandbox.network.ssh sandbox.plan.plan
        runner.launch.sources runner.outcome sandbox.identity sandbox.identity.owner sandbox.files
        sandbox.limits.meter sandbox.limits.site sandbox.spawn sandbox.spawn.order sandbox.speed.signals
        sandbox.limits.cgroup sandbox.plan.layers runner.launch.acquire runner.launch.failures
        runner.approvals runner.plugin sandbox.cache sandbox.policy sandbox.identity.uid_range
        sandbox.network.credentials sandbox.network.egress sandbox.paths sandbox.paths.mounts
        sandbox.paths.denied_paths sandbox.paths.guarded sandbox.paths.denied_places sandbox.paths.denylist
        sandbox.paths.scan
        sandbox.policy.policy runner.approvals.marks sandbox.paths.walk sandbox.paths.executable
        sandbox.paths.installation sandbox.paths.packages sandbox.paths.shims sandbox.paths.program
        sandbox.policy.approval runner.approvals.record runner.approvals.store runner.launch.command
        sandbox.document.read sandbox.speed.codec sandbox.policy.load runner.launch.approve runner.install
        sandbox.paths.homes runner.install.roots sandbox.identity.removal sandbox.identity.host_side
        sandbox.identity.leases sandbox.identity.reservations sandbox.identity.uids sandbox.identity.state
        runner.launch.denylist runner.launch.own_folders sandbox.limits.cgroup_survey sandbox.limits.rlimits
        sandbox.limits.shares sandbox.limits.assign sandbox.seccomp sandbox.seccomp.filter
        sandbox.plan.available_layers sandbox.paths.access sandbox.paths.file_identity sandbox.paths.source
        sandbox.plan.mentions sandbox.plan.ssh sandbox.plan.operations sandbox.plan.relocation
        sandbox.plan.places sandbox.plan.compile sandbox.plan.find_bwrap sandbox.spawn.machine_code
        sandbox.spawn.reaper sandbox.speed.libc sandbox.spawn.priority sandbox.spawn.init
        sandbox.spawn.spawner runner.launch.plan sandbox.policy.grant runner.launch.prepare runner.manifest
        runner.manifest.cache runner.manifest.load runner.launch.read runner.launch.rehearse sandbox.streams
        sandbox.streams.handover runner.launch.stdio runner.launch.verdict runner.launch.report
        sandbox.speed.plain sandbox.units runner.cli.explain
    """,
    # What `runner call` loads until it forks, for usual words.
    "call": """
        runner sandbox.speed.late_site sandbox.speed.typed runner.cli runner.cli.shared
        runner.cli.shared.json_option runner.contracts sandbox.speed.value sandbox.spec runner.plugin
        runner.contracts.contract sandbox.facts sandbox.speed.scopes sandbox.look sandbox.surroundings
        runner.contracts.registry
        runner.launch runner.outcome sandbox.limits sandbox.limits.assigned runner.launch.stages
        sandbox.document sandbox.document.diagnostic runner.cli.shared.hiding runner.cli.shared.logging_in
        runner.cli.shared.options sandbox.speed.plain sandbox.files sandbox.paths sandbox.paths.walk
        runner.cli.shared.report_file runner.cli.shared.text runner.cli.call runner.manifest sandbox.cache
        sandbox.speed.codec runner.manifest.cache sandbox.document.read sandbox.paths.mounts
        runner.manifest.load runner.protocol runner.protocol.wire runner.launch.remote
        runner.launch.remote.descriptors runner.launch.command sandbox.network sandbox.network.credentials
        sandbox.network.egress runner.launch.remote.messages sandbox.cell sandbox.cell.contents
        runner.launch.remote.forkserver
    """,
    # What it loads after that, with trio.
    "session": """
        runner.cli.live runner.protocol.frames runner.protocol.dialect runner.exceptions sandbox.streams
        sandbox.streams.endpoints runner.cli.live.output sandbox.plan sandbox.plan.layers sandbox.network.ssh
        sandbox.plan.plan runner.launch.failures runner.launch.verdict runner.session runner.session.verdict
        runner.protocol.secrets runner.session.record runner.protocol.memory runner.session.outbox
        runner.protocol.calls runner.session.pending runner.protocol.bus runner.protocol.host_services
        runner.protocol.service_guard runner.launch.remote.pipe runner.launch.remote.remote_cell
        runner.protocol.ambiguity runner.protocol.jsonrpc runner.protocol.trace
        runner.protocol.rpc_dialect runner.session.backlog
        runner.session.subscriber_lag runner.session.state runner.session.tasks runner.session.prepared
        runner.session.account runner.session.shutdown runner.session.session runner.session.open
        runner.cli.live.session runner.cli.live.call_once
    """,
}

PARTS = {part: tuple(names.split()) for part, names in _NAMES.items()}
