// The page of `runner serve`. Every text goes through `shown` into a text node: what a plugin or a client wrote
// is never markup, and characters that change how others are displayed are visible as escapes.
"use strict";

const KEY = "runner-page"; // where the session's key is: storage that belongs to this port
const SILENCE_SECONDS = 25; // the daemon sends something every 10 at least
const MOST_LINES = 2000, SHOWN_LINES = 500, MOST_LINE = 4000, MOST_CELL = 300, MOST_SAMPLES = 360;
const MOST_CALLS = 1000, SHOWN_CALLS = 200, LATEST_CALLS = 50, STDERR_LINES = 15;
const SVG = "http://www.w3.org/2000/svg";
const STATES = { ready: "good", starting: "work", draining: "work", backoff: "warn", pending: "warn", quarantined: "bad" };
const TAKING = ["ready", "idle", "starting"]; // a plugin that is idle starts when it is called
const FAILED = "!ok"; // a choice of outcomes
// Who holds a plugin of a fleet: what a person can do.
const HOLDS = {
  operator: "runner ctl release --fleet URL ends it",
  quarantined: "runner logs --fleet URL shows its stderr, and runner ctl reset --fleet URL ends it",
  pending: "runner allow on those machines, if you trust it",
};
const LIMITS = { memory: "Memory", pids: "Processes", calls: "Calls", queue: "Waiting" };
const SIZES = ["memory", "io", "file_size", "locked_memory", "message_queues", "disk", "tmp", "shm", "output"];
const TIMES = ["cpu_time", "launch", "handshake", "call", "idle", "teardown", "deadline"];

const at = (id) => document.getElementById(id);
const board = { plugins: [], refusals: [], connections: [], questions: [], daemon: null, fleet: null, dead: null };
const known = new Set(); // sections that have come
let samples = [];
let seen = []; // calls, the newest first: what the daemon has sent since the page connected
let paused = null; // the calls that stay on the page

// --- text ---------------------------------------------------------------------------------------------------

// Controls, formats (bidirectional overrides, joiners, tags), separators, lone surrogates, private and unassigned.
const HIDDEN = /[\p{Cc}\p{Cf}\p{Zl}\p{Zp}\p{Cs}\p{Co}\p{Cn}]/gu;
const NAMED = { "\n": "\\n", "\r": "\\r", "\t": "\\t" };

function shown(text, most = Infinity) {
  const cut = text.length > most ? text.slice(0, most) : text;
  const escaped = cut.replace(HIDDEN, (c) => NAMED[c] ?? "\\u{" + c.codePointAt(0).toString(16) + "}");
  return cut === text ? escaped : `${escaped} … and ${text.length - most} more characters`;
}

function bytes(count) {
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (count < 1024 || unit === "GiB") return `${count < 10 && unit !== "B" ? count.toFixed(1) : Math.round(count)} ${unit}`;
    count /= 1024;
  }
}

function duration(seconds) {
  if (seconds < 1) return `${(seconds * 1000).toFixed(seconds < 0.01 ? 1 : 0)} ms`;
  if (seconds < 90) return `${seconds.toFixed(seconds < 10 ? 1 : 0)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  return seconds < 129600 ? `${Math.round(seconds / 3600)} h` : `${Math.round(seconds / 86400)} days`;
}

function age(since) {
  const seconds = Math.max(1, Math.round(Date.now() / 1000 - since));
  return seconds < 90 ? `${seconds} s` : duration(seconds);
}

function clock(seconds) {
  const when = new Date(seconds * 1000);
  const today = when.toDateString() === new Date().toDateString();
  return today ? when.toLocaleTimeString([], { hourCycle: "h23" }) : when.toLocaleString([], { dateStyle: "short", timeStyle: "short", hourCycle: "h23" });
}

const count = (number, word) => `${number} ${word}${number === 1 ? "" : "s"}`;
const amount = (name, value) => SIZES.includes(name) ? bytes(value) : TIMES.includes(name) ? duration(value) : String(value);

// --- elements -----------------------------------------------------------------------------------------------

function make(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "click") node.addEventListener("click", value);
    else node.setAttribute(name, value);
  }
  node.append(...children.flat().map((child) => (child instanceof Node ? child : shown(String(child), MOST_CELL))));
  return node;
}

// Keep a list of elements in step with rows. An element whose row is as before stays, with its focus.
function keep(parent, rows, build) {
  const old = new Map([...parent.children].map((node) => [node.dataset.row, node]));
  const wanted = rows.map((row) => {
    const key = JSON.stringify(row);
    const node = old.get(key) ?? build(row);
    old.delete(key);
    node.dataset.row = key;
    return node;
  });
  for (const node of old.values()) node.remove();
  wanted.forEach((node, index) => parent.children[index] === node || parent.insertBefore(node, parent.children[index] ?? null));
  const section = parent.closest("section");
  section.querySelector(".empty").hidden = rows.length > 0;
  (section.querySelector(".scroll") ?? section.querySelector("table") ?? parent).hidden = rows.length === 0;
}

function put(node, ...children) {
  const made = children.flat().map((child) => (child instanceof Node ? child : shown(String(child), MOST_CELL)));
  node.replaceChildren(...made);
}

function command(text) {
  const code = make("code");
  code.textContent = shown(text); // whole: it is what the button copies
  const button = make("button", { type: "button", "aria-label": `Copy the command ${shown(text)}`, click: () => copy(text, code, button) }, "Copy");
  return make("div", { class: "command" }, code, button);
}

async function copy(text, code, button) {
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
    say("Copied. Nothing was run.");
    setTimeout(() => (button.textContent = "Copy"), 2000);
  } catch {
    getSelection().selectAllChildren(code); // the browser gives no clipboard here
    say("Selected: copy it with Ctrl+C.");
  }
}

let saying;
function say(text) {
  clearTimeout(saying);
  at("said").textContent = shown(text, 1000);
  saying = setTimeout(() => (at("said").textContent = ""), 8000);
}

function plot(values, label) {
  const most = Math.max(...values, 1), step = 100 / Math.max(values.length - 1, 1);
  const points = values.map((value, index) => `${(index * step).toFixed(2)},${(28 - (value / most) * 26).toFixed(2)}`);
  const svg = document.createElementNS(SVG, "svg");
  const set = (node, attributes) => { for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value); return node; };
  set(svg, { viewBox: "0 0 100 30", preserveAspectRatio: "none", role: "img", "aria-label": label });
  if (values.length > 1) {
    const shape = (kind, d) => svg.append(set(document.createElementNS(SVG, "path"), { class: kind, d }));
    shape("area", `M0,29 L${points.join(" L")} L100,29 Z`);
    shape("line", `M${points.join(" L")}`);
  }
  return svg;
}

// A plot that is as before stays: what reads the page aloud may be at it.
function draw(node, values, label) {
  const drawn = JSON.stringify([values, label]);
  if (node.dataset.drawn !== drawn) { node.dataset.drawn = drawn; put(node, plot(values, label)); }
}

// --- what is shown ------------------------------------------------------------------------------------------

function showOverview() {
  const { plugins, daemon, fleet } = board, states = new Map();
  for (const { state } of plugins) states.set(state, (states.get(state) ?? 0) + 1);
  const taking = TAKING.reduce((total, state) => total + (states.get(state) ?? 0), 0);
  put(at("ready"), `${taking} of ${plugins.length}`);
  put(at("states"), [...states].map(([state, number]) => `${number} ${state}`).join(", "));
  if (daemon) {
    const degraded = daemon.status === "ok" ? "" : `${daemon.status}: ${daemon.fault || "it ends"}; `;
    put(at("daemon"), `${degraded}runner ${daemon.version}, up ${age(daemon.began)}`);
  }
  // A refusal takes no time. Among the calls it would make a plugin look fast that answers nobody.
  const took = seen.filter((each) => each.ran).slice(0, LATEST_CALLS).map((each) => each.seconds).sort((a, b) => a - b);
  put(at("latency"), took.length ? duration(took[took.length >> 1]) : "–");
  put(at("latency-note"), took.length ? `median of ${took.length}, slowest ${duration(took[took.length - 1])}` : seen.length ? "no call has reached a plugin" : "no calls yet");
  const sum = (of) => Object.values(of).reduce((total, each) => total + each, 0);
  put(at("memory-title"), fleet ? "Workers that take calls" : "Memory");
  if (fleet) {
    put(at("memory"), fleet.known ? `${fleet.workers.filter((each) => each.state === "ready").length} of ${fleet.workers.length}` : "not known");
    at("memory-plot").hidden = true;
  } else {
    const memory = samples.map((each) => sum(each.memory)), now = memory.at(-1) ?? 0;
    put(at("memory"), bytes(now));
    at("memory-plot").hidden = false;
    draw(at("memory-plot"), memory, `Memory of all plugins: now ${bytes(now)}, most ${bytes(Math.max(...memory, 0))}`);
  }
  for (const [id, word, of] of [["rate", "Calls", "calls"], ["errors", "Errors", "failed"]]) {
    const rates = perMinute(samples.map((each) => sum(each[of]))), rate = rates.at(-1) ?? 0;
    put(at(id), String(rate));
    draw(at(`${id}-plot`), rates, `${word} a minute: now ${rate}, most ${Math.max(...rates, 0)}`);
  }
}

// Calls of the last minute before each sample: samples are 5 seconds apart.
function perMinute(counts) {
  let sum = 0;
  return counts.map((count, index) => (sum += count - (counts[index - 12] ?? 0)));
}

function showAttention() {
  if (!["daemon", "plugins", "fleet", "dead"].every((name) => known.has(name))) return; // nobody knows yet that all is well
  const { daemon, plugins, fleet, dead, questions } = board, rows = [];
  const add = (kind, name, text, more = {}) => rows.push({ kind, name, text, ...more });
  const bad = true, can = daemon.can.includes("reset");
  if (daemon.fault) add("degraded", "the ledger", daemon.fault, { bad });
  if (fleet) addFleet(add, fleet, daemon.configuration);
  else for (const { path, message } of daemon.configuration) add("fault", path, message);
  for (const each of fleet ? [] : plugins) {
    if (each.state === "quarantined") add("quarantined", each.name, each.reason, { bad, stderr: each.stderr || "Nothing on stderr since the daemon began.", reset: can });
    if (each.state === "pending") add("pending", each.name, each.reason, { command: each.allow });
  }
  for (const each of dead?.hooks ?? []) add("dead letters", each.plugin, `${dead.all ? "" : "at least "}${count(each.letters, "event")} for its hook ${shown(each.hook, 80)}; runner ctl dead lists them. The last, at ${clock(each.at)}: ${each.reason}`, { bad });
  if (!dead) add("not known", "dead letters", "The ledger cannot be read, so that nobody knows whether there are some.");
  else if (!dead.all) add("not known", "dead letters", "There may be more than are looked at here. runner ctl dead lists them.");
  for (const each of questions) add("changed", each.plugin, `${each.tool}: ${each.change}`, { command: each.command });
  keep(at("cards"), rows, (row) => {
    const title = make("p", {}, make("span", { class: `pill ${row.bad ? "bad" : "warn"}` }, row.kind), " ", make("span", { class: "name" }, row.name));
    const card = make("li", { class: `card ${row.bad ? "bad" : ""}` }, title, make("p", { class: "why" }, row.text));
    if (row.stderr) card.append(make("div", { class: "stderr", role: "group", "aria-label": `The end of the stderr of ${shown(row.name, 100)}` }, row.stderr.trimEnd().split("\n").slice(-STDERR_LINES).map((line) => make("div", {}, line))));
    if (row.reset) card.append(make("div", { class: "actions" }, action("reset", row.name)));
    if (row.command) card.append(command(row.command));
    return card;
  });
}

// A fleet's workers tell what is wrong. The faults say why they cannot be asked.
function addFleet(add, { known, workers, queues, held, dead }, faults) {
  const bad = true;
  if (!known) return add("not known", "the fleet", `Nobody tells what workers, quarantines and dead letters there are, and what is below is old: ${faults.map((each) => each.message).join("; ")}`, { bad });
  if (!workers.length) add("no worker", "the fleet", "Nobody takes calls: start one with runner worker.", { bad });
  for (const each of workers) {
    if (!["ready", "draining", "drained"].includes(each.state)) add(`worker ${each.state}`, each.worker, each.reason, { bad });
    else if (each.reason && each.state === "ready") add("worker", each.worker, each.reason);
  }
  for (const each of held) {
    const what = own(HOLDS, each.hold) || HOLDS.operator, where = `on ${count(each.count, "worker")} (${shown(each.workers.join(", "), 100)})`;
    add(what === HOLDS.pending ? "pending" : "quarantined", each.plugin, `${where}; ${what}. ${each.reason}`, { bad: what !== HOLDS.pending, stderr: each.stderr });
  }
  for (const each of queues) if (each.waiting && !each.workers.length && !each.held) add("waiting", each.plugin || each.digest.slice(0, 12), `${count(each.waiting, "call")} for it, and no worker takes them.`);
  if (dead === null) add("not known", "dead letters", "No worker tells how many the fleet has. runner ctl dead --fleet URL lists them.");
  else if (dead) add("dead letters", "the fleet", `${count(dead, "call")} that somebody has to decide about. runner ctl dead --fleet URL lists them.`, { bad });
}

function action(verb, name) {
  const word = verb[0].toUpperCase() + verb.slice(1);
  const button = make("button", { type: "button", "data-verb": verb, "aria-label": `${word} ${shown(name, MOST_CELL)}` }, word);
  button.addEventListener("click", async () => {
    button.disabled = true;
    say(`${word} ${name} …`);
    try {
      const answer = await ask("POST", `/plugins/${encodeURIComponent(name)}/${verb}`);
      const found = await answer.json();
      say(answer.ok ? `${name} is ${found.state}` : `${found.error.message}${found.error.hint ? "; " + found.error.hint : ""}`);
    } catch (error) {
      say(`${word} ${name}: the daemon does not answer`);
    }
    button.disabled = false;
  });
  return button;
}

const pluginRows = new Map();

function showPlugins() {
  const body = at("plugin-rows"), names = board.plugins.map((each) => each.name);
  for (const [name, row] of pluginRows) if (!names.includes(name)) { row.remove(); pluginRows.delete(name); }
  board.plugins.forEach((plugin, index) => {
    let row = pluginRows.get(plugin.name);
    if (!row) {
      const cell = () => make("td", { role: "cell" });
      row = make("tr", { role: "row" }, make("th", { scope: "row", role: "rowheader" }), cell(), cell(), cell(), cell());
      row.parts = [];
      for (const verb of ["start", "stop", "reset", "reload"]) row.cells[4].append(action(verb, plugin.name));
      row.cells[4].replaceChildren(make("div", { class: "actions" }, ...row.cells[4].children));
      pluginRows.set(plugin.name, row);
    }
    if (body.children[index] !== row) body.insertBefore(row, body.children[index] ?? null);
    fillPlugin(row, plugin);
  });
  const can = board.daemon?.can ?? [];
  at("plugins").classList.toggle("unmanaged", !can.includes("start"));
  at("plugins").querySelector(".empty").hidden = names.length > 0;
  at("logs").hidden = document.querySelector("nav [href='#logs']").hidden = !can.includes("logs");
  const chosen = at("log-plugin"), before = chosen.value;
  if (offer(chosen, at("logs").hidden ? [] : names.map((name) => [name, name]))) {
    const first = board.plugins.find((each) => each.state === "ready") ?? board.plugins[0];
    if (!names.includes(before)) chosen.value = first?.name ?? "";
    if (chosen.value !== before) followLog();
  }
}

// Returns whether there are other options than before. What is chosen stays, if it is among them.
function offer(select, pairs) {
  const offered = JSON.stringify(pairs), before = select.value;
  if (offered === select.dataset.offered) return false;
  select.dataset.offered = offered;
  select.replaceChildren(...pairs.map(([value, text]) => make("option", { value }, text)));
  select.value = before;
  return true;
}

function fillPlugin(row, plugin) {
  const cells = row.cells;
  // A part that is as before is left alone, so that a selection or an open list survives.
  const part = (index, value, build) => {
    const key = JSON.stringify(value);
    if (row.parts[index] !== key) { row.parts[index] = key; put(cells[index], build()); }
  };
  const { name, id, version, contract, manifest, state, reason, since, restarts, used, limits } = plugin;
  part(0, [name, id, version, contract, manifest, limits], () => [
    make("div", { class: "name" }, name),
    make("div", { class: "why brief" }, [contract || "no contract", version].filter(Boolean).join(" · ")),
    make("details", {}, make("summary", {}, "Details"), make("div", {}, manifest), ...Object.entries(limits).map(([limit, value]) => make("div", {}, `${limit.replaceAll("_", " ")}: ${amount(limit, value)}`))),
  ]);
  const lasted = age(since);
  part(1, [state, reason, restarts, lasted, plugin.calls, plugin.failed], () => [
    make("span", { class: `pill ${STATES[state] ?? ""}` }, state), make("span", { class: "why when" }, ` for ${lasted}`),
    make("div", { class: "why brief", title: shown(reason, MOST_CELL) }, state === "ready" || state === "idle" ? "" : reason),
    make("div", { class: "why" }, [plugin.calls && count(plugin.calls, "call"), plugin.failed && `${plugin.failed} failed`, restarts && count(restarts, "restart")].filter(Boolean).join(", ")),
  ]);
  const runs = !["idle", "stopped", "pending", "quarantined", "backoff"].includes(state);
  part(2, [runs, used, plugin.workers], () => plugin.workers !== null ? make("span", { class: "why" }, `on ${count(plugin.workers, "worker")}`) : !runs ? make("span", { class: "why" }, "not running") : used.filter((each) => each.name !== "queue" || each.used).map((each) => {
    const [now, most] = [amount(each.name, each.used), amount(each.name, each.most)], label = LIMITS[each.name] ?? each.name;
    const said = now.split(" ")[1] === most.split(" ")[1] ? `${now.split(" ")[0]} of ${most}` : `${now} of ${most}`;
    const meter = make("meter", { min: 0, max: each.most, low: each.most * 0.7, high: each.most * 0.9, optimum: 0, value: Math.min(each.used, each.most), "aria-label": `${label} of ${shown(name, 100)}: ${said}` });
    return make("div", { class: "use" }, make("span", {}, label), meter, make("span", { class: "figure" }, said));
  }));
  part(4, state, () => cells[4].firstChild);
  for (const button of cells[4].querySelectorAll("button")) button.hidden = !suits(button.dataset.verb, state) || !board.daemon?.can.includes(button.dataset.verb);
}

function suits(verb, state) {
  if (verb === "start") return ["idle", "stopped", "backoff"].includes(state);
  if (verb === "stop") return ["ready", "starting", "backoff", "idle"].includes(state);
  return verb === "reload" || ["quarantined", "backoff"].includes(state);
}

// A plugin may be called "constructor", which every object has.
const own = (values, name) => (Object.hasOwn(values, name) ? values[name] : 0);

function showSparks() {
  for (const [name, row] of pluginRows) {
    const memory = samples.map((each) => own(each.memory, name)), rates = perMinute(samples.map((each) => own(each.calls, name)));
    const errors = perMinute(samples.map((each) => own(each.failed, name)));
    const quiet = Math.max(...memory, ...rates, 0) === 0;
    const spark = (title, values, text, look = "") => make("div", {}, title, make("div", { class: `plot ${look}` }, plot(values, `${title} of ${shown(name, 100)}: now ${text}`)));
    put(row.cells[3], quiet ? make("span", { class: "why" }, "quiet") : make("div", { class: "sparks" }, Math.max(...memory, 0) ? spark("memory", memory, bytes(memory.at(-1) ?? 0)) : "", spark("calls", rates, `${rates.at(-1) ?? 0} a minute`),
      Math.max(...errors, 0) ? spark("errors", errors, `${errors.at(-1) ?? 0} a minute`, "bad") : ""));
  }
}

const when = (row) => make("td", { class: "when" }, row.at === null || row.at === undefined ? "now" : clock(row.at));

function takeCalls(rows) {
  const fresh = new Set(rows.map((row) => row.id));
  // The daemon sends the last ones. An older one that had not ended is dropped: nobody tells how it ends.
  seen = rows.concat(seen.filter((row) => row.code !== null && !fresh.has(row.id))).slice(0, MOST_CALLS);
}

function showCalls() {
  const all = paused ?? seen, plugin = at("call-plugin").value, outcome = at("call-outcome").value;
  const names = (values, chosen) => [...new Set([...values, chosen])].filter(Boolean).sort().map((name) => [name, name]);
  offer(at("call-plugin"), [["", "All"], ...names(all.map((row) => row.plugin), plugin)]);
  offer(at("call-outcome"), [["", "All"], [FAILED, "not ok"], ...names(all.map((row) => row.code ?? "running"), outcome === FAILED ? "" : outcome)]);
  const fits = (row) => (!plugin || row.plugin === plugin) && (!outcome || (outcome === FAILED ? ![null, "ok"].includes(row.code) : (row.code ?? "running") === outcome));
  const found = all.filter(fits);
  at("call-count").textContent = (paused ? "paused; " : "") + (found.length === all.length ? "" : `${found.length} of `) + `the last ${count(all.length, "call")}` + (found.length > SHOWN_CALLS ? `, of which ${SHOWN_CALLS} are shown` : "");
  at("call-pause").setAttribute("aria-pressed", String(paused !== null));
  at("call-pause").textContent = paused ? "Go on" : "Pause";
  at("calls").querySelector(".empty").textContent = all.length ? "No call is like that." : "No calls yet.";
  keep(at("call-rows"), found.slice(0, SHOWN_CALLS), (row) => {
    const code = row.code ?? "running";
    const pill = make("span", { class: `pill ${row.code === null ? "work" : code === "ok" ? "good" : code === "cancelled" ? "" : "bad"}` }, code);
    const why = row.message ? make("div", { class: "why brief" }, row.message + (row.hint ? "; " + row.hint : "")) : "";
    return make("tr", {}, when(row), make("td", {}, row.plugin), make("td", {}, make("code", {}, row.tool)), make("td", { class: "why" }, row.caller),
      make("td", { class: "number-cell right" }, row.seconds === null ? "…" : duration(row.seconds)), make("td", {}, pill, why));
  });
}

function showRefusals() {
  keep(at("refusal-rows"), board.refusals, (row) => {
    const door = row.detail !== undefined; // a request that the door refused
    const asked = door ? `a request to the door: ${row.detail.code ?? ""}` : row.what;
    const why = door ? (row.detail.message ?? "") + (row.times > 1 ? ` (${row.times} times)` : "") : [row.why, row.command ? "" : row.hint].filter(Boolean).join("; ");
    return make("tr", {}, when(row), make("td", {}, row.plugin || row.caller), make("td", {}, asked, row.required ? make("div", { class: "why" }, "it does not start without") : ""),
      make("td", { class: "why" }, why), make("td", {}, row.command ? command(row.command) : make("span", { class: "why" }, door ? "" : "nothing allows it from here")));
  });
}

function showConnections() {
  keep(at("connection-rows"), board.connections, (row) => {
    const door = row.detail !== undefined;
    const what = door ? (row.detail.message ?? "connected to the door") + (row.times > 1 ? `, ${row.times} times` : "") : `${row.kind} ${row.name}${row.port ? ":" + row.port : ""}`;
    const verdict = door ? "" : make("span", { class: `pill ${row.verdict === "allowed" ? "good" : "warn"}` }, row.verdict);
    return make("tr", {}, when(row), make("td", {}, row.plugin || row.caller), make("td", {}, what, row.reason ? make("div", { class: "why" }, row.reason) : ""), make("td", {}, verdict),
      make("td", { class: "number-cell right" }, door ? "" : bytes(row.sent)), make("td", { class: "number-cell right" }, door ? "" : bytes(row.received)));
  });
}

function showFleet() {
  const right = (label, value) => make("td", { class: "number-cell right", "data-label": label }, String(value));
  at("fleet").hidden = at("queues").hidden = document.querySelector("nav [href='#fleet']").hidden = board.fleet === null;
  keep(at("worker-rows"), board.fleet?.workers ?? [], (row) => make("tr", {}, make("td", { class: "name" }, row.worker),
    make("td", {}, make("span", { class: `pill ${{ ready: "good", bad: "bad" }[row.state] ?? "warn"}` }, row.state), make("div", { class: "why brief" }, row.reason)),
    right("runs", `${row.running} of ${row.slots}`), right("plugins", row.plugins), right("done", row.done)));
  keep(at("queue-rows"), board.fleet?.queues ?? [], (row) => make("tr", {}, make("td", { class: "name" }, row.plugin || "nobody has it", make("div", { class: "why brief" }, row.held)),
    make("td", {}, make("code", {}, row.digest.slice(0, 12))), right("workers", row.workers.length), right("waiting", row.waiting), right("begun", row.begun)));
}

const SHOW = {
  daemon: [showOverview, showAttention, showPlugins], plugins: [showOverview, showAttention, showPlugins, showSparks], questions: [showAttention],
  calls: [showOverview, showCalls], refusals: [showRefusals], connections: [showConnections], fleet: [showOverview, showAttention, showFleet], dead: [showAttention],
};

function take(name, value) {
  if (name === "samples") {
    if (value[0].number === 0) samples = []; // the daemon has started again
    samples = samples.concat(value).slice(-MOST_SAMPLES);
    showOverview();
    showSparks();
  } else if (name in SHOW) {
    known.add(name);
    if (name === "calls") takeCalls(value);
    else board[name] = value;
    for (const show of SHOW[name]) show();
  }
}

// --- logs ---------------------------------------------------------------------------------------------------

const log = { lines: [], rest: "", abort: null, drawing: null };

async function followLog() {
  log.abort?.abort();
  const name = at("log-plugin").value;
  Object.assign(log, { lines: [], rest: "", abort: new AbortController() });
  drawLog();
  if (!name) return;
  const mine = log.abort;
  try {
    const answer = await ask("GET", `/plugins/${encodeURIComponent(name)}/logs?follow=1`, undefined, mine.signal);
    if (answer.ok) for await (const [, data] of events(answer)) addLog(data.text);
  } catch { /* the page's own stream says that the connection is lost, and begins again */ }
}

function addLog(text) {
  const parts = (log.rest + text).split("\n");
  log.rest = parts.pop().slice(-(1 << 20)); // a line without an end
  log.lines = log.lines.concat(parts).slice(-MOST_LINES);
  log.drawing ??= setTimeout(drawLog, 50);
}

function drawLog() {
  clearTimeout(log.drawing);
  log.drawing = null;
  const sought = at("log-search").value.toLowerCase(), all = log.rest ? [...log.lines, log.rest] : log.lines;
  const found = sought ? all.filter((line) => line.toLowerCase().includes(sought)) : all;
  const rows = found.slice(-SHOWN_LINES).map((line) => {
    const text = shown(line, MOST_LINE), node = document.createElement("div");
    let from = 0;
    for (let hit; sought && (hit = text.toLowerCase().indexOf(sought, from)) >= 0; from = hit + sought.length) {
      const mark = document.createElement("mark");
      mark.textContent = text.slice(hit, hit + sought.length);
      node.append(text.slice(from, hit), mark);
    }
    node.append(text.slice(from));
    return node;
  });
  const box = at("log");
  box.replaceChildren(...(rows.length ? rows : [make("div", { class: "none" }, sought ? "No line has that." : "It has written nothing to stderr.")]));
  if (at("log-follow").checked) box.scrollTop = box.scrollHeight;
  at("log-count").textContent = sought ? `${found.length} of ${count(all.length, "line")}` : count(all.length, "line");
}

// --- the connection -----------------------------------------------------------------------------------------

function ask(method, path, body, signal) {
  const headers = { "Runner-Page": localStorage.getItem(KEY) ?? "" };
  if (body !== undefined) headers["Content-Type"] = "application/json";
  return fetch(path, { method, headers, signal, body: body === undefined ? undefined : JSON.stringify(body), credentials: "same-origin", cache: "no-store", redirect: "error" });
}

// Server-sent events by fetch: EventSource cannot send the header that a session needs.
async function* events(answer, heard = () => {}) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    heard();
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      const fields = Object.fromEntries(block.split("\n").map((line) => [line.slice(0, line.indexOf(":")), line.slice(line.indexOf(":") + 2)]));
      if ("data" in fields) yield [fields.event, JSON.parse(fields.data)];
    }
  }
}

function tell(state, text) {
  const link = at("link");
  if (link.textContent !== text) link.textContent = text;
  link.dataset.state = state;
  at("main").classList.toggle("stale", state === "lost");
}

function showGate(why) {
  localStorage.removeItem(KEY);
  log.abort?.abort();
  at("main").hidden = at("leave").hidden = document.querySelector("nav").hidden = true;
  at("gate").hidden = false;
  at("why").textContent = why;
  tell("waiting", "No session");
}

let nudge = () => {};
const pause = (seconds) => new Promise((go) => { nudge = go; setTimeout(go, seconds * 1000); });
addEventListener("online", () => nudge());
document.addEventListener("visibilitychange", () => document.hidden || nudge());

async function live() {
  for (let failures = 0; ; ) {
    const abort = new AbortController();
    let silence = setTimeout(() => abort.abort(), SILENCE_SECONDS * 1000);
    const heard = () => { clearTimeout(silence); silence = setTimeout(() => abort.abort(), SILENCE_SECONDS * 1000); };
    try {
      const answer = await ask("GET", "/page/stream", undefined, abort.signal);
      if (answer.status === 401 || answer.status === 403) return showGate("The session has ended.");
      if (answer.ok) {
        failures = 0;
        at("main").hidden = at("leave").hidden = document.querySelector("nav").hidden = false;
        at("gate").hidden = true;
        tell("live", "Live");
        samples = seen = [];
        if (at("log-plugin").value) followLog();
        for await (const [name, data] of events(answer, heard)) take(name, data);
      }
    } catch { /* told below */ }
    clearTimeout(silence);
    abort.abort();
    known.clear();
    at("attention").querySelector(".empty").hidden = true; // nobody knows that all is well
    tell("lost", "Connection lost, trying again");
    await pause(Math.min(15, 0.5 * 2 ** failures++));
  }
}

async function begin() {
  const code = new URLSearchParams(location.hash.slice(1)).get("code");
  if (code !== null) {
    history.replaceState(null, "", location.pathname); // not in the history, not in a copied address
    try {
      const answer = await ask("POST", "/session", { code });
      const found = await answer.json();
      if (answer.ok) localStorage.setItem(KEY, found.key);
      else if (!localStorage.getItem(KEY)) return showGate(`${found.error.message}.`);
      else say(found.error.message);
    } catch {
      return showGate("The daemon does not answer. Load the page again.");
    }
  }
  if (!localStorage.getItem(KEY)) return showGate("");
  live();
}

at("leave").addEventListener("click", async () => {
  await ask("DELETE", "/session").catch(() => {});
  location.reload();
  localStorage.removeItem(KEY);
});
addEventListener("hashchange", () => location.hash.startsWith("#code=") && location.reload());
at("call-pause").addEventListener("click", () => { paused = paused ? null : seen; showCalls(); });
for (const id of ["call-plugin", "call-outcome"]) at(id).addEventListener("change", showCalls);
at("log-plugin").addEventListener("change", followLog);
at("log-search").addEventListener("input", drawLog);
at("log-follow").addEventListener("change", drawLog);
setInterval(() => { if (at("link").dataset.state === "live") { showOverview(); showPlugins(); } }, 15000);
begin();
