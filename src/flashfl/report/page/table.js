// The summary table, the runs' settings, and what starts it all: theme, width, live updates.

const COLUMNS = [
  ["method", (g) => g.label, (g) => g.label],
  ["seeds", (g) => g.summary.seeds, (g) => String(g.summary.seeds)],
  ["accuracy %", (g) => g.summary.accuracy, (g) => (100 * g.summary.accuracy).toFixed(2) + (g.summary.seeds > 1 ? ` ± ${(100 * g.summary.std).toFixed(2)}` : "")],
  ["best %", (g) => g.summary.best, (g) => (100 * g.summary.best).toFixed(2)],
  ["paper %", (g) => (g.paper ? g.paper.mean : null), (g) => `${g.paper.mean.toFixed(2)}${g.paper.std === null ? "" : ` ± ${g.paper.std.toFixed(2)}`}${g.paper.differs.length ? " †" : ""}`],
  ["density", (g) => g.summary.density, (g) => g.summary.density.toFixed(4)],
  ["up", (g) => g.summary.up, (g) => text.bytes(g.summary.up)],
  ["down", (g) => g.summary.down, (g) => text.bytes(g.summary.down)],
  ["saving", (g) => g.summary.saving, (g) => `${g.summary.saving.toFixed(1)}×`],
  ["paper's formula", (g) => g.summary.paper_saving, (g) => `${g.summary.paper_saving.toFixed(1)}×`],
  ["FLOPs", (g) => g.summary.flops, (g) => text.flops(g.summary.flops)],
  ["mismatch", (g) => g.summary.mismatch, (g) => g.summary.mismatch.toFixed(3)],
  ["dropouts", (g) => g.summary.dropouts, (g) => String(g.summary.dropouts)],
  ["time", (g) => g.summary.seconds, (g) => text.seconds(g.summary.seconds)],
];

const known = (v) => v !== null && v !== undefined && !Number.isNaN(v);

function table() {
  const node = section("Summary", "Means over seeds at the end of training. Saving: dense fp32 bytes over the bytes really sent, stage 1 included. Mismatch: mean over the last sixth of the rounds. Select a heading to sort.");
  const groups = data.groups.map((g, i) => ({ ...g, colour: groupColour(i) }));
  const columns = COLUMNS.filter(([name, value]) => name !== "paper %" || groups.some((g) => known(value(g))));
  const by = columns.find(([name]) => name === chosen.sort);
  if (by) groups.sort((a, b) => compare(by[1](a), by[1](b)) * (chosen.down ? -1 : 1));
  const pick = (name) => { chosen.down = chosen.sort === name ? !chosen.down : name !== "method"; chosen.sort = name; render(); };
  const head = columns.map(([name]) => make("th", {
    scope: "col", tabindex: "0", "aria-sort": chosen.sort === name ? (chosen.down ? "descending" : "ascending") : "none",
    onclick: () => pick(name), onkeydown: (e) => { if (e.key === "Enter" || e.key === " ") { e.preventDefault(); pick(name); } } }, name));
  const rows = groups.map((g) => make("tr", { class: hidden.has(g.label) ? "off" : "" }, ...columns.map(([name, value, words], i) => (i
    ? make("td", { "data-column": name }, known(value(g)) ? words(g) : "–")
    : make("td", { style: { "--c": g.colour } }, make("div", {}, make("i", {}), g.label, g.summary.state === "finished" ? null : make("small", {}, ` ${g.summary.state}, round ${g.summary.rounds}`)))))));
  node.append(make("div", { class: "scroll" }, make("table", { class: "sum" }, make("thead", {}, make("tr", {}, ...head)), make("tbody", {}, ...rows))));
  const notes = groups.filter((g) => g.paper && g.paper.differs.length).map((g) => make("li", {}, `† ${g.label}: ${g.paper.differs.join("; ")}.`));
  notes.push(...groups.filter((g) => known(g.summary.published_saving)).map((g) => make("li", {}, `${g.label}: the paper states a saving of ${g.summary.published_saving}×.`)));
  if (notes.length) node.append(make("ul", { class: "notes" }, ...notes));
}

function compare(a, b) {
  if (!known(a) || !known(b)) return known(a) - known(b);
  return typeof a === "string" ? a.localeCompare(b) : a - b;
}

function settings() {
  const node = section("Settings", "Every setting of every run; those in which runs differ are marked.");
  const keys = [...new Set(data.runs.flatMap((r) => Object.keys(r.settings)))];
  const differ = new Set(keys.filter((k) => new Set(data.runs.map((r) => JSON.stringify(r.settings[k]))).size > 1));
  for (const run of data.runs) {
    const own = Object.entries(run.settings).sort(([a], [b]) => differ.has(b) - differ.has(a));
    const rows = own.map(([k, v]) => make("tr", { class: differ.has(k) ? "own" : "" }, make("td", {}, k), make("td", {}, Array.isArray(v) ? v.join(", ") : v === "" ? "–" : String(v))));
    const more = { ...run.versions, ...(run.checksum ? { checksum: run.checksum } : {}) };
    rows.push(...Object.entries(more).map(([k, v]) => make("tr", {}, make("td", {}, k), make("td", {}, String(v)))));
    const id = `${run.folder} ${run.label} ${run.seed}`;
    node.append(make("details", { open: chosen.open.has(id), ontoggle: (e) => { if (e.target.open) chosen.open.add(id); else chosen.open.delete(id); } },
      make("summary", {}, `${run.label}, seed ${run.seed} `, make("small", {}, `${run.folder} · ${run.state}, ${run.rounds} rounds`)),
      make("table", { class: "set" }, make("tbody", {}, ...rows))));
  }
}

// --- theme, width, live -----------------------------------------------------------------------------------------------

const systemDark = matchMedia("(prefers-color-scheme: dark)");
let theme = null;  // null: as the system says

function paint() {
  document.documentElement.dataset.theme = theme || (systemDark.matches ? "dark" : "light");
  document.getElementById("theme").textContent = isDark() ? "Light" : "Dark";
  render();
}

document.getElementById("theme").addEventListener("click", () => { theme = isDark() ? "light" : "dark"; paint(); });
systemDark.addEventListener("change", paint);
addEventListener("scroll", hideTip, { passive: true });
let width = innerWidth;
addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; for (const draw of draws) draw(); } });
paint();

if (data.live) {
  const sign = document.getElementById("live");
  sign.hidden = false;
  sign.textContent = "live";
  setInterval(async () => {
    try {
      const answer = await fetch(`data.json?since=${encodeURIComponent(data.stamp)}`, { cache: "no-store" });
      sign.className = "";
      if (answer.status === 200) { data = await answer.json(); render(); }
    } catch { sign.className = "lost"; }
  }, data.live);
}
