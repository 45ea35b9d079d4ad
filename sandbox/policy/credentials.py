"""Which credentials a plugin uses without getting them: who asked for it, and for which hosts each one is.

A person or the operator hides a variable (NAME@HOST), or a credential of the policy by its name. That gives
the plugin nothing but the use at hosts that it may reach anyway, so only the hosts are judged here.
"""

from __future__ import annotations

from sandbox.network.credentials import Credential, Hiding, HostAuthorities, parse_hiding, signs
from sandbox.network.rules import EVERY_PORT, HostRule, Ports, covers, parse_rule
from sandbox.policy.policy import CredentialRule, Policy, matches, steers
from sandbox.spec import LITERAL, SLOT, Denial, Network, Place, is_variable_name
from sandbox.speed.typed import Collection, Iterator, Sequence

_MOST = 64  # entries: the broker searches each answer for each value
_HTTP, _HTTPS = 80, ((443, 443),)


def find_credentials(
    asked: Sequence[tuple[str, str]],
    policy: Policy,
    network: Network,
    denials: list[Denial],
    *,
    caged: bool,
    literals: Collection[str] = (),
    slots: Collection[str] = (),
) -> tuple[tuple[Credential, ...], tuple[HostAuthorities, ...]]:
    """The credentials, and the roots that their hosts may have. `asked`: entries as
    sandbox/network/credentials.py reads them, and who asks: "" for the manifest, which gets no more by them
    than it could have as variables. `literals`: variables whose values are in the manifest, or on the command
    line. `slots`: secrets that files in memory have."""
    found: dict[str, Credential] = {}
    authorities: dict[HostAuthorities, None] = {}
    granted = [parse_rule(host, ranges=True).without_requests() for host in network.hosts]
    for number, (text, origin) in enumerate(dict(asked).items()):  # the last who asks counts
        if number == _MOST:
            reason = f"at most {_MOST} credentials can be hidden"
            denials.append(Denial("credential", "hide", reason, origin=origin))
            break
        try:
            hiding = parse_hiding(text)
        except ValueError as error:
            denials.append(Denial("credential", text, f"it {error}", origin=origin))
            continue
        rule = None if hiding.name in slots else policy.credential(hiding.name)
        variable = hiding.name if rule is None else rule.variable
        hosts = _hosts(hiding, rule, granted)
        denial = None if hiding.name in slots else _name_denial(hiding, variable, rule, policy)
        denial = denial or _denial(hiding, rule, hosts, policy, network, granted, caged)
        if denial is None and not origin and not (rule is None and variable in literals):
            denial = _ceiling_denial(hiding, policy)
        if denial is not None:
            denials.append(denial._replace(origin=origin))
            # It is hidden all the same, so that no other request passes the value on.
        where: tuple[Place, ...] = ("header", "query") if hiding.query else ("header",)
        source: tuple[str, ...] = SLOT if variable in slots else LITERAL if variable in literals else ()
        if rule is not None:
            where, source = rule.where, rule.source
        old = found.get(variable, Credential(variable, (), (), source))
        if old.source != source:
            reason = f"{variable} would have two values: one of the policy's, and another"
            denials.append(Denial("credential_hosts", f"hide {hiding}", reason, origin=origin))
        found[variable] = Credential(
            variable,
            tuple(dict.fromkeys((*old.hosts, *map(str, hosts)))),
            tuple(dict.fromkeys((*old.where, *where))),
            source,
            0.0 if rule is None else rule.keep,
        )
        if rule is not None and rule.authorities:
            authorities[HostAuthorities(rule.hosts, rule.authorities)] = None
    credentials = tuple(found.values())
    denials += _mixed(credentials)
    denials += _disagreeing(tuple(authorities))
    return credentials, tuple(authorities)


def _mixed(credentials: Sequence[Credential]) -> Iterator[Denial]:
    """A manifest's own value beside one from outside, for one host: by what becomes of its own in the answers
    the author would learn how the other begins."""
    for own in credentials:
        for other in credentials:
            if own.source == LITERAL != other.source and _share_a_host(own, other):
                reason = (
                    f"its value stands in the manifest, and that of {other.name}, for the same host, does not"
                )
                yield Denial("credential_hosts", f"hide {own.name}", reason, "hide only one of the two there")
                return


def _disagreeing(named: Sequence[HostAuthorities]) -> Iterator[Denial]:
    """Two that name one host: the broker would take the first."""
    for place, own in enumerate(named):
        for other in named[:place]:
            if own.files != other.files and _share_a_host(own, other):
                reason = "two credentials of the policy have different authorities for one host"
                hint = "the operator can name the same authorities under both"
                yield Denial("credential_hosts", f"hide for {', '.join(own.hosts)}", reason, hint)


def _share_a_host(one: Credential | HostAuthorities, other: Credential | HostAuthorities) -> bool:
    hosts, others = ([parse_rule(host) for host in each.hosts] for each in (one, other))
    return any(covers(a, b) or covers(b, a) for a in hosts for b in others)


def _ceiling_denial(hiding: Hiding, policy: Policy) -> Denial | None:
    if hiding.name in policy.env.passed or matches(policy.env.ceiling, hiding.name):
        return None
    reason = f"policy {policy.name} lets it use this credential only if you allow it"
    hint = f'the operator can add "{hiding.name}" to ceiling under [env] in the policy'
    return Denial("credential_ceiling", f"hide {hiding}", reason, hint)


def _hosts(hiding: Hiding, rule: CredentialRule | None, granted: Sequence[HostRule]) -> list[HostRule]:
    if hiding.host:
        return [parse_rule(hiding.host)]
    if rule is not None:
        return [parse_rule(host) for host in rule.hosts]
    # Who names no host means those that speak TLS.
    named = (each._replace(ports=_without_http(each.ports)) for each in granted)
    return [each for each in dict.fromkeys(named) if each.kind in ("name", "below") and each.ports]


def _without_http(ports: Ports) -> Ports:
    if ports == EVERY_PORT:
        return _HTTPS
    found = []
    for first, last in ports:
        if first <= _HTTP <= last:
            found += [pair for pair in ((first, _HTTP - 1), (_HTTP + 1, last)) if pair[0] <= pair[1]]
        else:
            found.append((first, last))
    return tuple(found)


def _name_denial(hiding: Hiding, variable: str, rule: CredentialRule | None, policy: Policy) -> Denial | None:
    asked = f"hide {hiding}"
    if not is_variable_name(variable):
        hint = f"name a variable, or a credential of policy {policy.name} (its table [credentials])"
        return Denial("credential", asked, f"{variable} is neither of the two", hint)
    if steers(variable):
        return Denial("credential", asked, "it decides which code runs, and is no credential")
    if rule is None and signs(variable):
        reason = "such a secret makes signatures and does not travel: with a placeholder all would be wrong"
        return Denial("credential_signs", asked, reason, f"pass it on (--env {variable}), or leave it out")
    operators = next((each for each in policy.credentials if each.variable == variable), None)
    if rule is None and operators is not None:
        reason = f"policy {policy.name} has a value of its own for {variable}"
        return Denial("credential_hosts", asked, reason, f"hide that one by its name: {operators.name}")
    return None


def _denial(
    hiding: Hiding,
    rule: CredentialRule | None,
    hosts: Sequence[HostRule],
    policy: Policy,
    network: Network,
    granted: Sequence[HostRule],
    caged: bool,
) -> Denial | None:
    asked = f"hide {hiding}"
    if not caged:
        return Denial("credential", asked, "it would run without a cage", "let the manifest ask for one")
    if network.mode == "host":
        reason = "with the whole network of this machine nothing can be put in on the way"
        return Denial("credential_network", asked, reason, "name the hosts in place of network host")
    if not hosts:
        reason = "no host is named that its value is for"
        hint = f"write the host, as in {hiding.name}@api.example.com, and let the plugin reach it"
        return Denial("credential_network", asked, reason, hint)
    if rule is not None:
        own = [parse_rule(host) for host in rule.hosts]
        if stray := next((each for each in hosts if not any(covers(one, each) for one in own)), None):
            reason = f"policy {policy.name} has it for other hosts than {stray}"
            return Denial(
                "credential_hosts", asked, reason, f'the hosts are under [credentials."{rule.name}"]'
            )
    lacking = [each for each in hosts if not any(covers(one, each) for one in granted)]
    if network.mode != "open" and lacking:
        reason = f"the plugin may not reach {lacking[0]}"
        return Denial(
            "credential_network", asked, reason, f"allow the host as well: runner allow --net {lacking[0]}"
        )
    return None
