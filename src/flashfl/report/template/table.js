// The table, the runs' settings, and what starts it all: theme, width, live updates.

const known = (v) => v !== null && v !== undefined && !Number.isNaN(v);

// A long name may be broken behind its underscores, and a number before its standard deviation, but nowhere else.
const broken = (name) => name.split(/(?<=_)/).flatMap((word) => [word, make("wbr", {})]);
const unbroken = (words) => words.split(/ (?=±)/).flatMap((word) => [make("span", {}, word), " "]);

// The first cell of a row names it. If the page shows groups of runs, row i is group i.
function table() {
  const { title, head, rows, notes } = part.table;
  const node = section(title || "Summary", part.about);
  const order = rows.map((_, i) => i), by = head.indexOf(chosen.sort);
  if (by >= 0) order.sort((a, b) => compare(rows[a][by].value, rows[b][by].value) * (chosen.down ? -1 : 1));
  const pick = (name) => { chosen.down = chosen.sort === name ? !chosen.down : name !== head[0]; chosen.sort = name; render(); };
  const headings = head.map((name) => make("th", {
    scope: "col", tabindex: "0", "aria-sort": chosen.sort === name ? (chosen.down ? "descending" : "ascending") : "none",
    onclick: () => pick(name), onkeydown: (e) => { if (e.key === "Enter" || e.key === " ") { e.preventDefault(); pick(name); } } }, ...broken(name)));
  const first = (i) => {
    const g = part.groups[i], mark = g ? [make("i", {})] : [];
    return make("td", { style: g ? { "--c": groupLook(i).chip } : {} }, make("div", {}, ...mark, rows[i][0].text));
  };
  const lines = order.map((i) => make("tr", { class: part.groups[i] && hidden.has(mine(part.groups[i].label)) ? "off" : "" },
    first(i), ...rows[i].slice(1).map((entry, c) => make("td", { "data-column": head[c + 1] }, ...unbroken(entry.text)))));
  const scroll = make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "table, scrolls sideways" }, make("table", { class: "sum" }, make("thead", {}, make("tr", {}, ...headings)), make("tbody", {}, ...lines)));
  node.append(make("div", { class: "edge" }, scroll), make("button", { class: "hint", type: "button", onclick: () => scroll.scrollBy({ left: scroll.clientWidth * 0.6, behavior: "smooth" }) }, "More columns →"));
  edges(scroll);
  if (notes.length) node.append(make("ul", { class: "notes" }, ...notes.map((note) => make("li", {}, note))));
}

function compare(a, b) {
  if (!known(a) || !known(b)) return known(a) - known(b);
  return typeof a === "string" ? a.localeCompare(b) : a - b;
}

function settings() {
  const node = section("Settings", "Every setting of every run; those in which runs differ are marked.");
  const keys = [...new Set(part.runs.flatMap((r) => Object.keys(r.settings)))];
  const differ = new Set(keys.filter((k) => new Set(part.runs.map((r) => JSON.stringify(r.settings[k]))).size > 1));
  for (const run of part.runs) {
    const own = Object.entries(run.settings).sort(([a], [b]) => differ.has(b) - differ.has(a));
    const rows = own.map(([k, v]) => make("tr", { class: differ.has(k) ? "own" : "" }, make("td", {}, k), make("td", {}, Array.isArray(v) ? v.join(", ") : v === "" ? "–" : String(v))));
    const more = { ...run.versions, ...(run.checksum ? { checksum: run.checksum } : {}) };
    rows.push(...Object.entries(more).map(([k, v]) => make("tr", {}, make("td", {}, k), make("td", {}, String(v)))));
    const id = mine(`${run.folder} ${run.label} ${run.seed}`);
    node.append(make("details", { open: chosen.open.has(id), ontoggle: (e) => { if (e.target.open) chosen.open.add(id); else chosen.open.delete(id); } },
      make("summary", {}, `${run.label}, seed ${run.seed} `, make("small", {}, `${run.folder} · ${run.state}, ${run.rounds} ${run.rounds === 1 ? "round" : "rounds"}`)),
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
