// The page: sections over the data, one legend for all, redrawn whenever something changes.

let data = JSON.parse(document.getElementById("data").textContent);
let part = {};  // the task that is being rendered: its groups, table, metric and runs
const hidden = new Set(), off = {};  // methods switched off; layers switched off, by method
const chosen = { bytes: "both", range: "late", sort: null, down: true, open: new Set() };
const main = document.getElementById("main");
let draws = [];  // what to call when the width or the theme changes

const mine = (label) => `${part.title}: ${label}`;  // tasks may have methods of the same name
const shown = () => part.groups.map((g, i) => ({ ...g, ...groupLook(i) })).filter((g) => !hidden.has(mine(g.label)));
const look = ({ label, colour, dash, chip }) => ({ label, colour, dash, chip });  // of a series
const thousand = (n) => n.toLocaleString("en").replaceAll(",", " ");

function section(title, about, { half = false } = {}) {
  const head = make("div", { class: "head" }, make("h2", {}, title)), at = data.parts.indexOf(part);
  const id = title.toLowerCase().replace(/[^a-z]+/g, "-") + (at ? `-${at + 1}` : "");
  const node = make("section", { class: half ? "half" : "", id }, head, make("p", { class: "about" }, about));
  main.append(node);
  return node;
}

function chart(parent, draw) {
  const host = make("div", { class: "chart" });
  parent.append(host);
  draws.push(() => draw(host));
}

function choice(parent, options, key) {
  const buttons = Object.entries(options).map(([value, label]) => make("button", {
    type: "button", "aria-pressed": String(chosen[key] === value), onclick: () => { chosen[key] = value; render(); } }, label));
  parent.querySelector(".head").append(make("div", { class: "choice", role: "group" }, ...buttons));
}

function legend() {
  return part.groups.map((g, i) => {
    const key = mine(g.label);
    return make("button", { type: "button", "aria-pressed": String(!hidden.has(key)), style: { "--c": groupLook(i).chip }, title: "show or hide",
      onclick: () => { if (!hidden.delete(key)) hidden.add(key); render(); } }, g.label);
  });
}

const facts = () => part.facts.map(([name, value, more]) => make("div", {}, make("dt", {}, name), make("dd", {}, value, more ? make("small", {}, ` ${more}`) : null)));

// What stands above everything: the facts and methods of a single task, or links to each of several.
function header() {
  [part] = data.parts;
  const several = data.parts.length > 1, nav = document.getElementById("legend");
  const runs = data.parts.reduce((n, p) => n + p.runs.length, 0);
  document.getElementById("made").textContent = (runs ? `${runs} run${runs === 1 ? "" : "s"} · ` : "") + data.made;
  document.getElementById("facts").replaceChildren(...(part && !several ? facts() : []));
  nav.setAttribute("aria-label", several ? "Tasks" : "Show or hide methods");
  nav.replaceChildren(...(several ? data.parts.map((p, i) => make("a", { href: `#task-${i + 1}` }, p.title)) : part ? legend() : []));
  edges(nav);
}

// The head of one of several tasks.
function taskHead(i) {
  main.append(make("section", { class: "task", id: `task-${i + 1}` }, make("h2", {}, part.title), make("dl", { class: "facts" }, ...facts()), make("div", { class: "legend", role: "group", "aria-label": "Show or hide methods" }, ...legend())));
}

// Layers without the ending that all of them share.
const brief = (names) => names.map((name) => (names.every((n) => n.endsWith(".weight")) ? name.slice(0, -7) : name));

function problems() {
  if (!data.problems.length) return;
  main.append(make("section", { class: "warn", id: "problems" }, make("h2", {}, "Not shown"), make("ul", {}, ...data.problems.map((why) => make("li", {}, why)))));
}

// How the task's metric is shown: accuracy in percent, any other as a plain number.
function measured() {
  const { name, percent, direction } = part.metric, title = name[0].toUpperCase() + name.slice(1);
  const axis = percent ? { yTick: text.tick, yText: text.percent, yFloor: 0, yCeiling: 1 } : { yTick: text.plain, yText: text.plain };
  return { name, title, direction, axis: { yLabel: name, ...axis } };
}

function trends() {
  const metric = measured(), groups = shown();
  const accuracy = section(`${metric.title} by round`, `${metric.title} at each evaluation${metric.direction}; seeds as mean and standard deviation. The close-up leaves out early rounds.` + (groups.some((g) => g.paper) ? " Diamonds: the paper's final figure." : ""), { half: true });
  choice(accuracy, { late: "close-up", all: "all rounds" }, "range");
  chart(accuracy, (host) => lineChart(host, { xLabel: "round", ...metric.axis, whole: true, late: chosen.range === "late", series: groups.map((g) => ({
    ...look(g), x: g.accuracy.round, y: g.accuracy.mean, spread: g.accuracy.std, dots: g.accuracy.round.length < 25, mark: paperMark(g) })) }));
  const bytes = section(`${metric.title} by bytes`, "The same by bytes sent so far: those of encoded messages, first phase included (log scale).", { half: true });
  choice(bytes, { both: "up + down", up: "up", down: "down" }, "bytes");
  const sum = (a) => a.up.map((v, i) => (chosen.bytes === "both" ? v + a.down[i] : a[chosen.bytes][i]));
  chart(bytes, (host) => lineChart(host, { xLabel: "bytes", ...metric.axis, xType: "log", xTick: text.bytes, nearest: true, late: chosen.range === "late",
    title: (v, s, i) => `${text.bytes(v)} after round ${s.rounds[i]}`,
    series: groups.map((g) => ({ ...look(g), x: sum(g.accuracy), y: g.accuracy.mean, spread: g.accuracy.std, rounds: g.accuracy.round, dots: g.accuracy.round.length < 25 })) }));
}

function paperMark(g) {
  if (!g.paper) return null;
  const spread = g.paper.std === null ? "" : ` ± ${g.paper.std.toFixed(2)}`;
  const words = `${g.paper.mean.toFixed(2)}${spread} %${g.paper.differs.length ? " †" : ""}`;
  return { y: g.paper.mean / 100, spread: (g.paper.std || 0) / 100, text: words, label: `paper: ${words}` };
}

function masks() {
  const groups = shown().filter((g) => g.mismatch.round.length);
  if (!groups.length) return;
  const whole = section("Mask mismatch between rounds", "SM = 1 − |A∩B| / |A∪B| between the server's masks of consecutive rounds: 0 is full consensus.", { half: true });
  const top = Math.max(0.1, ...groups.flatMap((g) => g.mismatch.mean.map((v, i) => v + g.mismatch.std[i]))) * 1.05;
  chart(whole, (host) => lineChart(host, { xLabel: "round", yLabel: "mismatch", yTick: text.plain, yText: text.sm, whole: true, yDomain: [-0.03 * top, top],
    series: groups.map((g) => ({ ...look(g), x: g.mismatch.round, y: g.mismatch.mean, spread: g.mismatch.std })) }));
}

function heats() {
  const kept = shown().filter((g) => g.heat.round.length), moves = (g) => g.heat.sm.some((row) => row.some((v) => v > 0));
  const groups = kept.filter(moves), still = kept.filter((g) => !moves(g)).map((g) => g.label);
  if (!kept.length) return;
  const node = section("Mask mismatch, round by round", "SM between the server's masks of any two recorded rounds. Where masks converge, the upper right corner fades; one common scale." + (still.length ? ` Not drawn, because all their recorded masks are the same (dense rounds record none): ${still.join(", ")}.` : ""), { half: groups.length < 3 });
  if (!groups.length) return;
  const most = Math.max(0.1, ...groups.flatMap((g) => g.heat.sm.flat())), many = make("div", { class: "many", style: { "--least": "250px" } });
  node.append(many, ramp(most.toFixed(2)));
  for (const g of groups) {
    const cell = make("div", {}, make("h3", { style: { "--c": g.chip } }, g.label));
    many.append(cell);
    const r = g.heat.round;
    chart(cell, (host) => heatmap(host, { square: true, columns: r, rows: r, values: g.heat.sm, most, xLabel: "round", yLabel: "round", what: "SM", text: text.sm, label: `mismatch of ${g.label}`, title: (a, b) => `${g.label}: rounds ${r[a]} and ${r[b]}` }));
  }
}

function layers() {
  const groups = shown().filter((g) => g.layer_mismatch.round.length && g.layer_mismatch.layers.some((row) => row.some((v) => v > 0)));
  if (groups.length) {
    const node = section("Mask mismatch by layer", "SM between consecutive rounds for each prunable layer, from the first (blue) to the last (red). Methods whose masks never move are not drawn.", { half: groups.length < 3 });
    const many = make("div", { class: "many", style: { "--least": groups.length < 3 ? "260px" : "340px" } });
    node.append(many);
    const top = Math.max(0.1, ...groups.flatMap((g) => g.layer_mismatch.layers.flat())) * 1.05;
    for (const g of groups) {
      const cell = make("div", {}, make("h3", { style: { "--c": g.chip } }, g.label)), gone = (off[mine(g.label)] ||= new Set()), n = g.layers.length;
      many.append(cell);
      chart(cell, (host) => lineChart(host, { xLabel: "round", yLabel: "mismatch", yText: text.sm, whole: true, yDomain: [-0.03 * top, top], series: g.layer_mismatch.layers.map((row, i) => ({
        label: g.layers[i], colour: depthColour(i, n), width: n > 8 ? 1.4 : 2, x: gone.has(i) ? [] : g.layer_mismatch.round, y: row })), empty: "Every layer is switched off." }));
      cell.append(make("div", { class: "legend layers" }, ...brief(g.layers).map((name, i) => make("button", { type: "button", title: "show or hide", "aria-pressed": String(!gone.has(i)), style: { "--c": depthColour(i, n) },
        onclick: () => { if (!gone.delete(i)) gone.add(i); render(); } }, name))));
    }
  }
}

function densities() {
  const dense = section("Layer densities", "The share of each prunable layer's weights that the final server mask keeps (log scale); for NST the union over its last cohort.", { half: true });
  const groups = shown(), names = part.groups.length ? part.groups.reduce((a, b) => (a.layers.length > b.layers.length ? a : b)).layers : [];
  chart(dense, (host) => lineChart(host, { xLabel: "layer", yLabel: "density", yType: "log", yTick: text.tick, yText: text.share, names: brief(names), title: (v) => `layer ${v}: ${names[v - 1]}`,
    series: groups.filter((g) => g.densities.length).map((g) => ({ ...look(g), dots: true, x: g.densities.map((_, i) => i + 1), y: g.densities.map((v) => Math.max(v, 1e-6)) })) }));
}

const MANY = 9; // points with names that need the whole width

function costs() {
  const points = shown().filter((g) => g.points.some((p) => p.flops)), metric = measured();
  if (points.length) {
    const node = section("FLOPs and bytes", "What each run cost in all, a point for each seed: training FLOPs on hardware that skips zeros, against bytes both ways. Lower left is cheaper.", { half: points.length < MANY });
    chart(node, (host) => lineChart(host, { xLabel: "bytes", yLabel: "FLOPs", xType: "log", yType: "log", xTick: text.bytes, yTick: text.flops, nearest: true, xDomain: padded(points, "bytes"), yDomain: padded(points, "flops"), title: (v, s) => s.label,
      series: points.map((g) => ({ ...look(g), line: false, dots: true, radius: 5, name: g.label, x: g.points.map((p) => p.bytes), y: g.points.map((p) => p.flops),
        more: (i) => [["", "bytes", text.bytes(g.points[i].bytes)], ["", metric.name, g.points[i].accuracy === null ? "–" : metric.axis.yText(g.points[i].accuracy)], ["", "seed", String(g.points[i].seed)]] })) }));
  }
  const counted = shown().filter((g) => g.share.values !== undefined);
  if (counted.length) {
    const node = section("Bytes per client and round", "Encoded order and update together, by what they carry, beside the paper's formula (fp32 values, with CSR indices where the mask moves, no BatchNorm statistics). Without the first phase.", { half: true });
    chart(node, (host) => bars(host, { label: "bytes by part", parts: ["values", "mask", "overhead"], text: text.bytes, markName: "paper's formula",
      rows: counted.map((g) => ({ label: g.label, parts: ["values", "mask", "overhead"].map((k) => [k, g.share[k]]), mark: g.share.paper })) }));
  }
}

function ends() {
  const groups = shown().filter((g) => g.points.some((p) => p.accuracy !== null)), metric = measured();
  if (!groups.length) return;
  const node = section(`${metric.title} by all bytes`, "Where each run ends: its last evaluation against all bytes both ways, a point for each seed. " + (metric.direction.includes("lower") ? "Lower" : "Upper") + " left is better.", { half: groups.length < MANY });
  chart(node, (host) => lineChart(host, { xLabel: "bytes", yLabel: metric.name, xType: "log", xTick: text.bytes, nearest: true, ...metric.axis, xDomain: padded(groups, "bytes"), title: (v, s) => s.label,
    series: groups.map((g) => ({ ...look(g), line: false, dots: true, radius: 5, name: g.label, x: g.points.map((p) => p.bytes), y: g.points.map((p) => p.accuracy),
      more: (i) => [["", "bytes", text.bytes(g.points[i].bytes)], ["", "seed", String(g.points[i].seed)]] })) }));
}

function times() {
  const groups = shown();
  if (!groups.length) return;
  const node = section("Wall time by work", "Seconds a run spent on each kind of work on the machine it ran on, mean over seeds.", { half: true });
  const kinds = Object.keys(groups[0].work);
  chart(node, (host) => bars(host, { label: "seconds by work", parts: kinds, text: text.seconds, rows: groups.map((g) => ({ label: g.label, parts: kinds.map((k) => [k, g.work[k]]) })) }));
}

function padded(groups, key) {
  const values = groups.flatMap((g) => g.points.map((p) => p[key])).filter((v) => v > 0);
  return [Math.min(...values) / 1.6, Math.max(...values) * 1.6];
}

function clients() {
  if (!part.splits.length) return;
  const node = section("Who holds what", "Samples of each class at each client, as the first seed split them.", { half: true });
  const many = make("div", { class: "many", style: { "--least": part.splits.length > 1 ? "250px" : "100%" } });
  node.append(many);
  for (const t of part.splits) {
    const left = t.clients > t.columns.length ? ` (${t.columns.length} of ${thousand(t.clients)} clients shown)` : "";
    const cell = make("div", {}, make("h3", { class: "plain" }, t.title + left));
    many.append(cell);
    chart(cell, (host) => heatmap(host, { columns: t.columns, rows: t.rows, values: t.counts, xLabel: "client", yLabel: "class", what: "samples", text: String, label: `class histogram of ${t.title}`, title: (r, c) => `client ${t.columns[c]}, class ${t.rows[r]}` }));
    cell.append(ramp(Math.max(...t.counts.flat()), "samples"));
  }
}

function render() {
  const at = scrollY;
  draws = [];
  hideTip();
  main.replaceChildren();
  header();
  problems();
  if (!data.parts.length) main.append(make("section", {}, make("h2", {}, "No runs to show"), make("p", { class: "about" }, "A run appears here after its first round.")));
  data.parts.forEach((each, i) => {
    part = each;
    if (data.parts.length > 1) taskHead(i);
    table();
    if (part.groups.length) for (const piece of [trends, masks, densities, heats, layers, costs, ends, times, clients, settings]) piece();
  });
  for (const draw of draws) draw();
  scrollTo(0, at);
}
