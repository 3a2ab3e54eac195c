// What attention costs as the context grows: a chart and a table; dashes are counted, dots measured.

const COSTS = RAW.costs || [];
const GROWTHS = RAW.growths || [];
const COST_COLOURS = ["#1f77b4", "#d62728", "#2ca02c", "#9467bd"];

function sizeText(bytes) {
  let size = bytes;
  for (const unit of ["B", "KiB", "MiB", "GiB"]) { if (size < 1024) return `${Number(size.toPrecision(4))} ${unit}`; size /= 1024; }
  return `${Number(size.toPrecision(4))} TiB`;
}

// The namespace's name, put together: nothing in a page reads like an address to fetch.
const SVG = ["http:", "", "www.w3.org", "2000", "svg"].join("/");

function svg(tag, props, ...kids) {
  const el = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(props || {})) if (value !== null && value !== undefined) el.setAttribute(name, String(value));
  return append(el, kids);
}

/** Lines over the context, both axes logarithmic. lines: [{name, colour, dash, dots, points: [[x, y], …]}] */
function logChart(title, lines, text) {
  const wide = 460, high = 250, left = 70, bottom = 34, top = 22;
  const drawn = lines.map((l) => ({ ...l, points: l.points.filter(([x, y]) => x > 0 && y > 0) })).filter((l) => l.points.length);
  if (!drawn.length) return null;
  const xs = drawn.flatMap((l) => l.points.map((p) => p[0])), ys = drawn.flatMap((l) => l.points.map((p) => p[1]));
  const range = (v) => { const low = Math.log(Math.min(...v)), up = Math.log(Math.max(...v)); return up > low ? [low, up] : [low - 0.5, up + 0.5]; };
  const [x0, x1] = range(xs), [y0, y1] = range(ys);
  const px = (x) => left + (wide - left - 12) * (Math.log(x) - x0) / (x1 - x0), py = (y) => high - bottom - (high - bottom - top) * (Math.log(y) - y0) / (y1 - y0);
  const ticks = [...new Set(xs)].sort((a, b) => a - b), shown = ticks.filter((_, i) => i % Math.ceil(ticks.length / 6) === 0);
  const axis = { stroke: "currentColor", "stroke-opacity": 0.35 }, words = { fill: "currentColor", "font-size": 11 };
  return h("figure", { style: { margin: "0" } }, h("figcaption", {}, title), svg("svg", { viewBox: `0 0 ${wide} ${high}`, width: wide, height: high, role: "img", "aria-label": `${title}; the numbers stand in the table` },
    svg("path", { d: `M${left} ${top}V${high - bottom}H${wide - 12}`, fill: "none", ...axis }),
    shown.map((x) => svg("text", { x: px(x), y: high - bottom + 16, "text-anchor": "middle", ...words }, x.toLocaleString("en"))),
    [Math.exp(y0), Math.exp((y0 + y1) / 2), Math.exp(y1)].map((y) => svg("text", { x: left - 6, y: py(y) + 4, "text-anchor": "end", ...words }, text(y))),
    drawn.map((l) => [svg("polyline", { points: l.points.map(([x, y]) => `${px(x)},${py(y)}`).join(" "), fill: "none", stroke: l.colour, "stroke-width": 2, "stroke-dasharray": l.dash || null }),
      l.dots ? l.points.map(([x, y]) => svg("circle", { cx: px(x), cy: py(y), r: 3.5, fill: l.colour })) : null])),
    h("p", { class: "muted small" }, drawn.map((l, i) => [i ? "; " : "", h("span", { style: { color: l.colour } }, l.dots ? "● " : l.dash ? "┄ " : "— "), l.name])));
}

function costPage() {
  const el = h("div", { class: "page", id: "cost" });
  const redraw = () => fill(el, costBody());
  redraw();
  return { el, redraw };
}

function costBody() {
  const models = [...new Set(COSTS.map((c) => c.model))];
  const of = (model, name) => COSTS.filter((c) => c.model === model && typeof c[name] === "number").map((c) => [c.context, c[name]]);
  const colour = (i) => COST_COLOURS[i % COST_COLOURS.length];
  const seconds = models.flatMap((m, i) => [{ name: `${m}, prefill`, colour: colour(i), dots: true, points: of(m, "prefill_seconds") }, { name: `${m}, one token`, colour: colour(i), dash: "2 4", dots: true, points: of(m, "decode_seconds") }]);
  const bytes = models.flatMap((m, i) => [{ name: `${m}, peak counted`, colour: colour(i), dash: "6 4", points: of(m, "fused_peak") }, { name: `${m}, peak measured`, colour: colour(i), dots: true, points: of(m, "measured_peak") }, { name: `${m}, KV cache`, colour: colour(i), dash: "2 4", points: of(m, "kv_bytes") }]);
  const number = (v, text) => h("td", { class: "num" }, typeof v === "number" ? text(v) : "");
  const percent = (v) => `${Math.round(100 * v)} %`, flops = (v) => numberText(v / 1e9);
  const heads = ["Model", "Context", "Attention GFLOP", "Other GFLOP", "KV cache", "Peak, counted", "Peak, measured", "Prefill s", "Attention's part", "Of matrix rate", "Token ms", "Of read rate"];
  return [h("h1", {}, "Cost"), h("p", { class: "lead" }, "What attention costs as the context grows"),
    GROWTHS.map((g) => h("ul", {}, g.lines.map((line) => h("li", {}, `${g.model}: ${line}`)))),
    h("div", { style: { display: "flex", "flex-wrap": "wrap", gap: "1rem" } }, logChart("Seconds", seconds, (y) => `${numberText(y)} s`), logChart("Bytes", bytes, sizeText)),
    h("div", { class: "scroll panel flush", tabindex: 0, role: "region", "aria-label": "Cost by context" }, h("table", { class: "data" },
      h("thead", {}, h("tr", {}, heads.map((t) => h("th", { scope: "col", style: { "overflow-wrap": "normal", "word-break": "normal" } }, t)))),
      h("tbody", {}, COSTS.map((c) => h("tr", {}, h("th", { scope: "row", style: { "white-space": "nowrap" } }, c.model), h("td", { class: "num" }, c.context.toLocaleString("en"), c.beyond ? " *" : ""),
        number(c.attention_flops, flops), number(c.other_flops, flops), number(c.kv_bytes, sizeText), number(c.fused_peak, sizeText), number(c.measured_peak, sizeText),
        number(c.prefill_seconds, numberText), number(c.attention_share, percent), number(c.of_matrix_rate, percent), number(c.decode_seconds, (v) => numberText(1000 * v)), number(c.of_read_rate, percent)))))),
    COSTS.some((c) => c.beyond) ? h("p", { class: "muted small" }, "* beyond the positions that the model was made for") : null];
}
