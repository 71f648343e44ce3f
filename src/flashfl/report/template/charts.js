// The charts. Each draws itself into a host for the width it finds there, and answers hovering with values.

function frame(host, o, xs, ys) {
  const width = Math.max(240, host.clientWidth);
  const names = o.names || [], tallest = Math.max(0, ...names.map((name) => name.length)) * 6.3;
  const upright = names.length * (tallest + 12) < width - 70, below = names.length && !upright ? Math.min(118, tallest * 0.77 + 12) : 15;
  const named = o.series.reduce((sum, s) => sum + (s.name ? wrapped(s.name, 24).length * LINE + 8 : 0), 60);  // room for names, if they must stand in one column
  const height = Math.round(Math.max(Math.min(340, Math.max(210, width * 0.52)), Math.min(named, 640))) + below - 15;
  const inner = { top: 12, bottom: height - 23 - below, right: width - 12 };
  const yCount = Math.max(3, Math.floor(height / 55));
  const ySpan = [inner.bottom, inner.top];
  const y = o.yType === "log" ? logarithmic(ys, ySpan, yCount) : linear(ys, ySpan, yCount);
  const yTick = [undefined, 5, 7, 9].map((digits) => (t) => o.yTick(t, digits)).find((form, i) => i === 3 || new Set(y.ticks.map(form)).size === y.ticks.length);  // no two alike
  const widest = Math.max(...y.ticks.map((t) => yTick(t).length), 3);
  inner.left = widest * 6.9 + 26;
  const xSpan = [inner.left, inner.right], xCount = Math.max(3, Math.floor((inner.right - inner.left) / 85));
  const x = o.xType === "log" ? logarithmic(xs, xSpan, xCount) : linear(xs, xSpan, xCount);
  if (o.whole) x.ticks = x.ticks.filter(Number.isInteger);
  if (names.length) { // as many as fit beside one another
    const every = upright ? 1 : Math.ceil((names.length * 15) / (inner.right - inner.left));
    x.ticks = names.map((_, i) => i + 1).filter((_, i) => i % every === 0);
  }
  const name = (t) => { const whole = names[t - 1] || ""; return whole.length > 22 && !upright ? `…${whole.slice(-21)}` : whole; };
  const svg = shape("svg", { height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${o.yLabel} against ${o.xLabel}` });
  for (const t of y.ticks) {
    svg.append(shape("line", { class: "grid", x1: inner.left, x2: inner.right, y1: y(t), y2: y(t) }));
    svg.append(shape("text", { x: inner.left - 7, y: y(t) + 4, "text-anchor": "end" }, yTick(t)));
  }
  for (const t of x.ticks) {
    svg.append(shape("line", { class: "axis", x1: x(t), x2: x(t), y1: inner.bottom, y2: inner.bottom + 4 }));
    const slant = names.length && !upright ? { "text-anchor": "end", x: x(t) + 4, transform: `rotate(-50 ${x(t) + 4} ${inner.bottom + 17})` } : { "text-anchor": "middle", x: x(t) };
    svg.append(shape("text", { class: "tick", y: inner.bottom + 17, ...slant }, names.length ? name(t) : o.xTick(t)));
  }
  svg.append(shape("line", { class: "axis", x1: inner.left, x2: inner.right, y1: inner.bottom, y2: inner.bottom }));
  svg.append(shape("text", { x: (inner.left + inner.right) / 2, y: height - 3, "text-anchor": "middle" }, o.xLabel));
  const middle = (inner.top + inner.bottom) / 2;
  svg.append(shape("text", { x: 11, y: middle, "text-anchor": "middle", transform: `rotate(-90 11 ${middle})` }, o.yLabel));
  host.replaceChildren(svg);
  return { svg, x, y, inner };
}

const spot = (a, b) => `${Math.round(a / 2)} ${Math.round(b / 2)}`;

function path(points) {
  return points.map(([a, b], i) => `${i ? "L" : "M"}${a.toFixed(1)} ${b.toFixed(1)}`).join("");
}

// Where curves lie on one another each would hide the last. There they are drawn in turns, as dashes of all their colours.
// For each series: pieces of its curve, with all series that share the piece.
function pieces(series, x, y) {
  const points = series.map((s) => new Map(s.x.map((v, i) => [v, y(s.y[i])])));
  const close = (k, s, i) => points[k].has(s.x[i]) && Math.abs(points[k].get(s.x[i]) - y(s.y[i])) < 1.2;
  return series.map((s, own) => {
    const found = [];
    for (let i = 1; i < s.x.length; i += 1) {
      const sharing = series.map((_, k) => k).filter((k) => k === own || (series[k].line !== false && close(k, s, i - 1) && close(k, s, i)));
      const last = found[found.length - 1], to = [x(s.x[i]), y(s.y[i])];
      if (last && last.sharing.join() === sharing.join()) last.points.push(to);
      else found.push({ sharing, turn: sharing.indexOf(own), points: [[x(s.x[i - 1]), y(s.y[i - 1])], to] });
    }
    return found;
  });
}

const DASH = 9;

function drawCurve(svg, s, found) {
  const curve = shape("g", { class: "line", style: { fill: "none", stroke: s.colour, "stroke-width": s.width || 2, "stroke-linejoin": "round" } });
  for (const { sharing, turn, points } of found) {
    const turns = sharing.length > 1 ? { "stroke-dasharray": `${DASH} ${DASH * (sharing.length - 1)}`, "stroke-dashoffset": -DASH * turn } : { "stroke-dasharray": s.dash };
    curve.append(shape("path", { d: path(points), ...turns }));
  }
  svg.append(curve);
}

// A text on lines of at most so many letters, broken at spaces where it can be.
function wrapped(words, letters) {
  const lines = [""];
  for (const word of words.split(" ").flatMap((w) => w.match(new RegExp(`.{1,${letters}}`, "g")) || [])) {
    const last = lines[lines.length - 1];
    if (last && last.length + 1 + word.length > letters) lines.push(word);
    else lines[lines.length - 1] = last ? `${last} ${word}` : word;
  }
  return lines;
}

const LETTER = 7.6, LINE = 13;  // width and height of what names are written with

// Names beside the middle of each cloud of points. Where others stand there, a name moves up or down, tied to its points by a line.
function nameClouds(svg, series, x, y, inner) {
  const mean = (values) => values.reduce((a, b) => a + b, 0) / values.length;
  const at = series.map((s) => ({ s, a: mean(s.x.map(x)), b: mean(s.y.map(y)) }));
  const taken = at.map(({ a, b }) => [a - 7, b - 7, a + 7, b + 7]);
  for (const { s, a, b } of at) {
    const lines = wrapped(s.name, 24), w = Math.max(...lines.map((line) => line.length)) * LETTER, h = lines.length * LINE;
    const free = ([l, t, r, u]) => l > inner.left && r < inner.right + 8 && t > inner.top - 8 && u < inner.bottom && taken.every(([k, m, n, p]) => r < k || l > n || u < m || t > p);
    const right = a + 9, left = a - 9 - w, high = b - h / 2, places = [[right, high], [left, high]];
    const over = Math.max(inner.left + 1, Math.min(inner.right + 7 - w, a - w / 2));
    for (let step = 8 + h / 2; step < inner.bottom - inner.top; step += 4) for (const l of [over, right, left]) places.push([l, high - step], [l, high + step]);
    const boxes = places.map(([l, t]) => [l, t, l + w, t + h]);
    const box = boxes.find(free) || boxes[a + w < inner.right ? 0 : 1];
    taken.push(box);
    const far = box[1] > b ? box[1] : box[3] < b ? box[3] : b;
    if (Math.abs(far - b) > 16) svg.prepend(shape("line", { x1: a, y1: b, x2: Math.max(box[0], Math.min(box[2], a)), y2: far, style: { stroke: s.colour, opacity: 0.5 } }));
    svg.append(shape("text", { class: "point", y: box[1], style: { fill: s.colour } }, ...lines.map((line) => shape("tspan", { x: box[0], dy: LINE - 2 }, line))));
  }
}

// Curves without their beginnings, so that they fill the height with what they do in the second half of their rounds.
function lateParts(series) {
  const late = (s) => s.x.map((_, i) => i).filter((i) => s.x[i] > s.x[s.x.length - 1] / 2);
  const low = (s, i) => s.y[i] - (s.spread ? s.spread[i] : 0), high = (s, i) => s.y[i] + (s.spread ? s.spread[i] : 0);
  const least = Math.min(...series.flatMap((s) => late(s).map((i) => low(s, i)))), most = Math.max(...series.flatMap((s) => late(s).map((i) => high(s, i))));
  return series.map((s) => {
    const from = s.y.findLastIndex((_, i) => low(s, i) < least || high(s, i) > most) + 1, cut = (values) => values && values.slice(from);
    return { ...s, x: cut(s.x), y: cut(s.y), spread: cut(s.spread), rounds: cut(s.rounds) };
  });
}

// series: [{label, colour, dash, chip, x, y, spread, dots, line, name, mark: {y, spread, label}}]
function lineChart(host, options) {
  const o = { xTick: text.plain, yTick: text.plain, xText: options.xTick || text.plain, yText: options.yTick || text.plain, ...options };
  const given = o.series.filter((s) => s.x.length), series = o.late ? lateParts(given) : given;
  if (!series.length) { host.replaceChildren(make("p", { class: "about" }, o.empty || "Nothing to show yet.")); return; }
  const reach = (s, sign) => s.y.map((v, i) => v + sign * (s.spread ? s.spread[i] : 0));
  const ys = o.yDomain || extent(series.flatMap((s) => [...reach(s, 1), ...reach(s, -1), ...(s.mark ? [s.mark.y] : [])]), o.yType === "log" ? 0 : 0.06);
  if (o.yFloor !== undefined) ys[0] = Math.max(o.yFloor, ys[0]);
  if (o.yCeiling !== undefined) ys[1] = Math.min(o.yCeiling, ys[1]);
  const xs = o.xDomain || extent(given.flatMap((s) => s.x), o.xType === "log" ? 0 : 0.015);
  const { svg, x, y, inner } = frame(host, o, xs, ys);
  const clip = (v) => Math.max(inner.top, Math.min(inner.bottom, v));
  const curves = pieces(series, x, y), stacked = new Map();
  for (const s of series) for (const [i, v] of s.x.entries()) { const key = spot(x(v), y(s.y[i])); stacked.set(key, (stacked.get(key) || 0) + 1); }
  const together = new Map(stacked);
  series.forEach((s, own) => {
    const points = s.x.map((v, i) => [x(v), y(s.y[i])]);
    if (s.spread && s.spread.some((v) => v > 0)) {
      const edge = (sign) => s.x.map((v, i) => [x(v), clip(y(s.y[i] + sign * s.spread[i]))]);
      svg.append(shape("path", { class: "band", d: `${path([...edge(1), ...edge(-1).reverse()])}Z`, style: { fill: s.colour, opacity: 0.16 } }));
    }
    if (s.line !== false) drawCurve(svg, s, curves[own]);
    if (s.dots || points.length === 1) for (const [a, b] of points) {
      const key = spot(a, b), rings = stacked.get(key) - 1;  // dots at one place become rings around one another
      stacked.set(key, rings);
      const wide = s.line === false ? 0 : rings * Math.min(1.7, 6.8 / (together.get(key) - 1 || 1));  // many are narrow
      svg.append(shape("circle", { class: "dot", cx: a, cy: b, r: (s.radius || 3) + wide, style: { fill: s.colour } }));
    }
    if (s.mark) drawMark(svg, s, x(s.x[s.x.length - 1]), y, clip);
  });
  nameClouds(svg, series.filter((s) => s.name), x, y, inner);
  hover(svg, series, { x, y, inner }, o);
}

// The paper's figure: an open diamond with its spread, at the end of our line.
function drawMark(svg, s, at, y, clip) {
  const to = clip(y(s.mark.y)), low = clip(y(s.mark.y - (s.mark.spread || 0))), high = clip(y(s.mark.y + (s.mark.spread || 0)));
  svg.append(shape("line", { x1: at, x2: at, y1: low, y2: high, style: { stroke: s.colour, "stroke-width": 1.5 } }));
  svg.append(shape("path", { class: "mark", d: `M${at - 6} ${to}L${at} ${to - 6}L${at + 6} ${to}L${at} ${to + 6}Z`, style: { fill: "var(--card)", stroke: s.colour, "stroke-width": 2 } },
    shape("title", {}, s.mark.label)));
}

function hover(svg, series, { x, y, inner }, o) {
  const rule = shape("line", { class: "rule", y1: inner.top, y2: inner.bottom, visibility: "hidden" });
  const dots = series.map((s) => shape("circle", { r: 4.5, visibility: "hidden", style: { fill: s.colour, stroke: "var(--card)", "stroke-width": 2 } }));
  const area = shape("rect", { class: "catch", x: inner.left - 6, y: inner.top, width: inner.right - inner.left + 12, height: inner.bottom - inner.top, fill: "transparent" });
  svg.append(rule, ...dots, area);
  const clear = () => { hideTip(); for (const node of [rule, ...dots]) node.setAttribute("visibility", "hidden"); };
  const move = (event) => {
    const box = svg.getBoundingClientRect(), ratio = box.width / svg.viewBox.baseVal.width;
    const px = (event.clientX - box.left) / ratio, py = (event.clientY - box.top) / ratio;
    const all = series.flatMap((s, k) => s.x.map((v, i) => ({ s, k, i, at: x(v), high: y(s.y[i]) })));
    const weight = o.nearest ? 1 : 0.0001;
    const best = all.reduce((a, b) => (Math.hypot(a.at - px, (a.high - py) * weight) <= Math.hypot(b.at - px, (b.high - py) * weight) ? a : b));
    const same = o.nearest ? [best] : series.map((s, k) => all.filter((p) => p.k === k).find((p) => p.s.x[p.i] === best.s.x[best.i])).filter(Boolean);
    rule.setAttribute("x1", best.at); rule.setAttribute("x2", best.at); rule.setAttribute("visibility", "visible");
    dots.forEach((dot, k) => {
      const p = same.find((q) => q.k === k);
      dot.setAttribute("visibility", p ? "visible" : "hidden");
      if (p) { dot.setAttribute("cx", p.at); dot.setAttribute("cy", p.high); }
    });
    const value = (p) => o.yText(p.s.y[p.i]) + (p.s.spread && p.s.spread[p.i] > 0 ? ` ± ${o.yText(p.s.spread[p.i])}` : "");
    // Of very many lines only those next to the pointer are told.
    const near = same.length <= 10 ? same : [...same].sort((a, b) => Math.abs(a.high - py) - Math.abs(b.high - py)).slice(0, 9);
    const rest = same.length > near.length ? [["", `and ${same.length - near.length} more`, ""]] : [];
    const rows = near.sort((a, b) => a.high - b.high).flatMap((p) => [[p.s.chip || p.s.colour, p.s.label, value(p)], ...(p.s.more ? p.s.more(p.i) : [])]);
    const marks = same.filter((p) => p.s.mark && p.i === p.s.x.length - 1).map((p) => [p.s.chip || p.s.colour, `${p.s.label}, paper`, p.s.mark.text]);
    showTip(event, o.title ? o.title(best.s.x[best.i], best.s, best.i) : `${o.xLabel} ${o.xText(best.s.x[best.i])}`, [...rows, ...rest, ...marks]);
  };
  area.addEventListener("pointermove", move);
  area.addEventListener("pointerdown", move);
  area.addEventListener("pointerleave", clear);
}

// values: [row][column]; columns run to the right, rows upwards
function heatmap(host, o) {
  const width = Math.max(180, host.clientWidth), left = 40, bottom = 34;
  const size = [o.columns.length, o.rows.length];
  const w = (width - left - 6) / size[0], h = o.square ? w : Math.max(7, Math.min(24, 260 / size[1])), height = h * size[1] + bottom + 4;
  const svg = shape("svg", { height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": o.label });
  const most = o.most || Math.max(1e-9, ...o.values.flat());
  const top = (r) => 4 + (size[1] - 1 - r) * h;
  o.values.forEach((row, r) => row.forEach((v, c) => svg.append(shape("rect", {
    class: "cell", x: (left + c * w).toFixed(2), y: top(r).toFixed(2), width: (w - (w > 5 ? 0.5 : 0)).toFixed(2), height: (h - (h > 5 ? 0.5 : 0)).toFixed(2), fill: heatColour(v / most) }))));
  const every = (n, span, room) => Math.max(1, Math.ceil(n / Math.max(1, Math.floor(span / room))));
  const ex = every(size[0], width - left, 44), ey = every(size[1], h * size[1], 26);
  o.columns.forEach((name, c) => { if (c % ex === 0) svg.append(shape("text", { x: left + (c + 0.5) * w, y: height - 20, "text-anchor": "middle" }, name)); });
  o.rows.forEach((name, r) => { if (r % ey === 0) svg.append(shape("text", { x: left - 5, y: top(r) + h / 2 + 4, "text-anchor": "end" }, name)); });
  svg.append(shape("text", { x: left + (width - left) / 2, y: height - 4, "text-anchor": "middle" }, o.xLabel));
  const middle = (height - bottom) / 2;
  svg.append(shape("text", { x: 9, y: middle, "text-anchor": "middle", transform: `rotate(-90 9 ${middle})` }, o.yLabel));
  let on = null;
  const clear = () => { if (on) on.classList.remove("on"); on = null; hideTip(); };
  const move = (event) => {
    const box = svg.getBoundingClientRect(), ratio = box.width / width;
    const c = Math.floor(((event.clientX - box.left) / ratio - left) / w), r = size[1] - 1 - Math.floor(((event.clientY - box.top) / ratio - 4) / h);
    if (c < 0 || r < 0 || c >= size[0] || r >= size[1]) { clear(); return; }
    if (on) on.classList.remove("on");
    on = svg.querySelectorAll(".cell")[r * size[0] + c];
    on.classList.add("on");
    showTip(event, o.title(r, c), [[heatColour(o.values[r][c] / most), o.what, o.text(o.values[r][c])]]);
  };
  svg.addEventListener("pointermove", move);
  svg.addEventListener("pointerdown", move);
  svg.addEventListener("pointerleave", clear);
  host.replaceChildren(svg);
}

// rows: [{label, parts: [[name, value]], mark}]
function bars(host, o) {
  const width = Math.max(240, host.clientWidth), top = 4, beside = Math.max(...o.rows.map((r) => r.label.length)) * LETTER + 12;
  // Labels stand beside the bars, or above them in full if they are too long for that.
  const above = beside > width * 0.38, room = above ? 0 : beside, labels = o.rows.map((r) => (above ? wrapped(r.label, Math.floor(width / LETTER)) : []));
  const highs = labels.map((lines) => 34 + lines.length * LINE), tops = highs.map((_, i) => highs.slice(0, i).reduce((a, b) => a + b, top));
  const sums = o.rows.map((r) => Math.max(r.mark || 0, r.parts.reduce((a, [, v]) => a + v, 0))).sort((a, b) => b - a);
  // A bar far longer than all others would flatten them: it is cut, and says so.
  const most = Math.max((sums.length > 1 && sums[0] > 4 * sums[1] ? 1.35 * sums[1] : sums[0]) || 0, 1e-12);
  const scale = linear([0, most], [room, width - 78], Math.max(2, Math.floor((width - room) / 110))), height = highs.reduce((a, b) => a + b, top) + 24;
  const svg = shape("svg", { height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": o.label });
  for (const t of scale.ticks) {
    svg.append(shape("line", { class: "grid", x1: scale(t), x2: scale(t), y1: top, y2: height - 22 }));
    svg.append(shape("text", { x: scale(t), y: height - 8, "text-anchor": scale(t) < 12 ? "start" : "middle" }, o.text(t)));
  }
  o.rows.forEach((row, i) => {
    const y = tops[i] + 7 + labels[i].length * LINE, total = row.parts.reduce((a, [, v]) => a + v, 0);
    if (above) labels[i].forEach((words, k) => svg.append(shape("text", { x: 0, y: tops[i] + 12 + k * LINE, class: "strong" }, words)));
    else svg.append(shape("text", { x: room - 8, y: y + 14, "text-anchor": "end", class: "strong" }, row.label));
    let at = 0;
    const to = (v) => scale(Math.min(v, most));
    row.parts.forEach(([, v], k) => {
      svg.append(shape("rect", { class: "bar", x: to(at), y, width: Math.max(0, to(at + v) - to(at)), height: 20, style: { fill: `var(--p${k})` } }));
      at += v;
    });
    if (total > most) for (const k of [0, 7]) svg.append(shape("path", { d: `M${scale(most) - 26 + k} ${y + 23}l6 -26`, style: { stroke: "var(--card)", "stroke-width": 3 } }));
    // The total stands at the bar's end, behind a mark that it would lie over.
    const words = o.text(total), end = to(total) + 8, mark = to(row.mark || 0);
    svg.append(shape("text", { class: "total", x: mark > end - 12 && mark < end + words.length * 6.7 + 4 ? mark + 8 : end, y: y + 14 }, words));
    if (row.mark && row.mark <= most) svg.append(shape("line", { class: "mark", x1: scale(row.mark), x2: scale(row.mark), y1: y - 4, y2: y + 24, style: { stroke: "var(--ink)", "stroke-width": 2 } }));
    const area = shape("rect", { class: "catch", x: 0, y: tops[i], width, height: highs[i], fill: "transparent" });
    const show = (event) => showTip(event, row.label, [...row.parts.map(([n, v], k) => [`var(--p${k})`, n, o.text(v)]), ["", "in all", o.text(total)], ...(row.mark ? [["var(--ink)", o.markName, o.text(row.mark)]] : [])]);
    area.addEventListener("pointermove", show);
    area.addEventListener("pointerdown", show);
    area.addEventListener("pointerleave", hideTip);
    svg.append(area);
  });
  host.replaceChildren(svg, make("div", { class: "keys" }, ...o.parts.map((n, k) => make("span", {}, make("i", { style: { "--c": `var(--p${k})` } }), n)),
    ...(o.rows.some((r) => r.mark) ? [make("span", {}, make("i", { style: { "--c": "var(--ink)", width: "2px" } }), o.markName)] : [])));
}
