// Small tools every chart needs: elements, scales, ticks, numbers as text, and the one tooltip.

const NS = "http://www.w3.org/2000/svg";

function make(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  fill(node, attributes, children);
  return node;
}

function shape(tag, attributes = {}, ...children) {
  const node = document.createElementNS(NS, tag);
  fill(node, attributes, children);
  return node;
}

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "style") for (const [k, v] of Object.entries(value)) node.style.setProperty(k, v);
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
}

// --- numbers as text -------------------------------------------------------------------------------------------------

function withUnit(value, units, digits = 3) {
  let at = 0;
  while (Math.abs(value) >= 999.5 && at < units.length - 1) { value /= 1000; at += 1; }
  const text = Math.abs(value) >= 10 ** digits || Number.isInteger(value) ? value.toFixed(0) : Number(value.toPrecision(digits)).toString();
  return `${text} ${units[at]}`.trim();
}

const text = {
  percent: (v) => `${(100 * v).toFixed(2)} %`,
  tick: (v) => `${Number((100 * v).toPrecision(6))} %`,
  share: (v) => `${Number((100 * v).toPrecision(3))} %`,
  bytes: (v) => withUnit(v, ["B", "kB", "MB", "GB", "TB", "PB"]),
  flops: (v) => withUnit(v, ["", "k", "M", "G", "T", "P", "E"]),
  plain: (v, digits) => (Math.abs(v) >= 1e4 ? withUnit(v, ["", "k", "M", "G"], digits) : Number(Number(v).toPrecision(digits || 4)).toString()),
  sm: (v) => v.toFixed(3),
  seconds: (v) => (v >= 3600 ? `${Math.floor(v / 3600)} h ${Math.round((v % 3600) / 60)} min` : v >= 120 ? `${(v / 60).toFixed(1)} min` : `${Number(v.toPrecision(3))} s`),
};

// --- scales: a function from value to pixel, with its ticks ------------------------------------------------------------

function linear([low, high], [from, to], count = 5) {
  if (!(high > low)) { high = low + (Math.abs(low) || 1) * 0.1; }
  const scale = (v) => from + ((v - low) / (high - low)) * (to - from);
  const raw = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((s) => s >= raw * 0.75);
  scale.ticks = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i += 1) scale.ticks.push(Number((i * step).toPrecision(12)));
  return scale;
}

function logarithmic([low, high], [from, to], count = 5) {
  if (!(high > low)) { high = low * 1.5; low /= 1.5; }
  const a = Math.log10(low), b = Math.log10(high);
  const scale = (v) => from + ((Math.log10(v) - a) / (b - a)) * (to - from);
  const within = (steps) => {
    const found = [];
    for (let power = Math.floor(a); power <= Math.ceil(b); power += 1)
      for (const m of steps) if (m * 10 ** power >= low * 0.999 && m * 10 ** power <= high * 1.001) found.push(m * 10 ** power);
    return found;
  };
  const coarse = within([1, 2, 5]), all = coarse.length > 2 ? coarse : within([1, 1.5, 2, 3, 4, 5, 6, 8]);
  const tens = all.filter((v) => Math.abs(Math.log10(v) % 1) < 1e-9 || Math.abs((Math.log10(v) % 1) + 1) < 1e-9);
  const chosen = all.length <= count + 1 || tens.length < 2 ? all : tens;
  const every = Math.ceil(chosen.length / (count + 1));
  scale.ticks = chosen.filter((_, i) => i % every === 0);
  return scale;
}

function extent(values, pad = 0) {
  const known = values.filter(Number.isFinite);
  if (!known.length) return [0, 1];
  const low = Math.min(...known), high = Math.max(...known);
  const room = (high - low || Math.abs(high) * 0.1 || 1) * pad;
  return [low - room, high + room];
}

// --- colours ---------------------------------------------------------------------------------------------------------

const isDark = () => document.documentElement.dataset.theme === "dark";
const RAMPS = {
  light: [[239, 245, 252], [168, 202, 232], [91, 147, 201], [42, 93, 159], [16, 42, 86]],
  dark: [[24, 36, 52], [30, 76, 120], [58, 133, 196], [130, 189, 234], [230, 243, 255]],
};

function heatColour(share) {
  const ramp = RAMPS[isDark() ? "dark" : "light"];
  const at = Math.max(0, Math.min(1, share)) * (ramp.length - 1), i = Math.min(ramp.length - 2, Math.floor(at));
  return `rgb(${ramp[i].map((v, k) => Math.round(v + (ramp[i + 1][k] - v) * (at - i))).join(",")})`;
}

// A key to the colours of a heatmap.
function ramp(most, unit = "") {
  const shades = [0, .25, .5, .75, 1].map(heatColour).join(",");
  return make("div", { class: "keys" }, make("span", {}, "0", make("div", { class: "ramp", style: { background: `linear-gradient(90deg, ${shades})` } }), `${most}${unit && ` ${unit}`}`));
}

// Ten colours. Groups beyond them have dashed lines and striped chips, with shorter dashes each time the colours begin again.
function groupLook(i) {
  const colour = `var(--c${i % 10})`, cycle = Math.floor(i / 10), on = 4 / cycle;
  if (!cycle) return { colour, chip: colour };
  return { colour, dash: `${2 * on} 3`, chip: `repeating-linear-gradient(90deg, ${colour} 0 ${on}px, transparent 0 ${on + 2}px)` };
}
// Layers from the first to the last: hue turns with depth, lightness fits the theme.
const depthColour = (i, n) => `hsl(${215 - 195 * (n > 1 ? i / (n - 1) : 0)} ${isDark() ? "75% 64%" : "70% 42%"})`;

// --- what is wider than the screen -------------------------------------------------------------------------------------

// Marks the frame around a scrolling node: a shadow shows on which side more of it is hidden.
function edges(node) {
  const mark = () => {
    node.parentNode.classList.toggle("less", node.scrollLeft > 2);
    node.parentNode.classList.toggle("more", node.scrollLeft + node.clientWidth < node.scrollWidth - 2);
  };
  node.onscroll = mark;
  draws.push(mark);
}

// --- the tooltip -----------------------------------------------------------------------------------------------------

const tip = document.getElementById("tip");

function showTip(event, title, rows) {
  tip.replaceChildren(make("b", {}, title), ...rows.map(([colour, name, value]) =>
    make("div", {}, colour ? make("i", { style: { "--c": colour } }) : null, make("span", {}, name), make("span", {}, value))));
  tip.hidden = false;
  const box = tip.getBoundingClientRect(), gap = 14;
  const left = event.clientX + gap + box.width > innerWidth ? event.clientX - gap - box.width : event.clientX + gap;
  const top = event.clientY + gap + box.height > innerHeight ? event.clientY - gap - box.height : event.clientY + gap;
  tip.style.left = `${Math.max(4, left)}px`;
  tip.style.top = `${Math.max(4, top)}px`;
}

function hideTip() { tip.hidden = true; }
