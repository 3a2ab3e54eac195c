// A study of designs: the answer, a chart of quality against cost, and the table with intervals.

const STUDIES = RAW.studies || [];
const STUDY_BASELINES = RAW.baselines || [];
const STUDY_ANSWERS = RAW.answers || [];

/** Places of the points that no other beats in cost without losing in quality, by cost. */
function studyFront(points, cost) {
  const sign = points[0].higher ? 1 : -1, front = [];
  for (const r of [...points].sort((a, b) => a[cost] - b[cost] || sign * (b.mean - a.mean))) {
    if (!front.length || sign * r.mean > sign * front[front.length - 1].mean) front.push(r);
  }
  return front;
}

/** Dots of one task's designs: quality over a cost; the chosen one has the second colour and its name, the front is joined. Another's name that would lie on a name, on a dot or outside is left to the dot's title. */
function studyChart(title, rows, cost, text) {
  const points = rows.filter((r) => typeof r[cost] === "number");
  if (points.length < 2) return null;
  const wide = 330, high = 230, left = 56, bottom = 34, top = 18;
  const range = (v) => { const low = Math.min(...v), up = Math.max(...v), edge = (up - low || Math.abs(up) || 1) * 0.12; return [low - edge, up + edge]; };
  const costs = points.map((r) => r[cost]), [x0, x1] = range(costs), [y0, y1] = range(points.flatMap((r) => [r.mean - (r.spread || 0), r.mean + (r.spread || 0)]));
  const px = (x) => left + (wide - left - 16) * (x - x0) / (x1 - x0), py = (y) => high - bottom - (high - bottom - top) * (y - y0) / (y1 - y0);
  const words = { fill: "currentColor", "font-size": 10 }, front = studyFront(points, cost), boxes = [];
  const name = (r) => {
    const x = px(r[cost]), y = py(r.mean) - 5, long = 5.8 * r.design.length;
    for (const [from, anchor] of [[x + 7, "start"], [x - 7 - long, "end"]]) {
      const dot = (r) => Math.abs(py(r.mean) - (y - 3)) < 8 && px(r[cost]) > from - 4 && px(r[cost]) < from + long + 4;
      if (from < left || from + long > wide || !r.chosen && points.some((other) => other !== r && dot(other)) || boxes.some((b) => Math.abs(b.y - y) < 11 && from < b.to && b.from < from + long)) continue;
      boxes.push({ from, to: from + long, y });
      return svg("text", { x: anchor === "start" ? x + 7 : x - 7, y, "text-anchor": anchor, class: "name", ...words }, r.design);
    }
    return null;
  };
  return h("figure", { style: { margin: "0" } }, h("figcaption", {}, title), svg("svg", { viewBox: `0 0 ${wide} ${high}`, width: wide, height: high, role: "img", "aria-label": `${title}; the numbers stand in the table` },
    svg("path", { d: `M${left} ${top}V${high - bottom}H${wide - 8}`, fill: "none", stroke: "currentColor", "stroke-opacity": 0.35 }),
    svg("path", { d: `M${front.map((r) => `${px(r[cost])} ${py(r.mean)}`).join("L")}`, fill: "none", stroke: "currentColor", "stroke-opacity": 0.6, "stroke-dasharray": "2 3", class: "front" }),
    [y0, (y0 + y1) / 2, y1].map((y) => svg("text", { x: left - 5, y: py(y) + 3, "text-anchor": "end", ...words }, numberText(y))),
    [...new Set([Math.min(...costs), Math.max(...costs)])].map((x) => svg("text", { x: px(x), y: high - bottom + 15, "text-anchor": "middle", ...words }, text(x))),
    points.map((r) => [r.spread ? svg("path", { d: `M${px(r[cost])} ${py(r.mean - r.spread)}V${py(r.mean + r.spread)}`, stroke: COST_COLOURS[r.chosen ? 1 : 0], "stroke-width": 1.5 }) : null,
      svg("circle", { cx: px(r[cost]), cy: py(r.mean), r: 4.5, fill: COST_COLOURS[r.chosen ? 1 : 0], class: "design" }, svg("title", {}, r.design))]),
    [...points].sort((a, b) => b.chosen - a.chosen || front.includes(b) - front.includes(a)).map(name)));
}

function studyPage() {
  const el = h("div", { class: "page", id: "study" });
  const redraw = () => fill(el, studyBody());
  redraw();
  return { el, redraw };
}

function studyBody() {
  const tasks = [...new Set(STUDIES.map((r) => r.task))];
  const signed = (v) => (v > 0 ? "+" : "") + numberText(v);
  return [h("h1", {}, "Study"), tasks.map((task) => {
    const rows = STUDIES.filter((r) => r.task === task), told = STUDY_ANSWERS.find((a) => a.task === task), plain = STUDY_BASELINES.filter((b) => b.task === task);
    const metric = rows[0].metric, late = rows.map((r) => ({ ...r, ms: typeof r.latency === "number" ? 1000 * r.latency : null }));
    const steps = rows.some((r) => typeof r.decode === "number"), number = (v, unit = 1) => h("td", { class: "num" }, typeof v === "number" ? numberText(unit * v) : "");
    return [h("p", { class: "lead" }, task), told ? h("p", { id: "answer" }, h("b", {}, told.answer)) : null,
      h("div", { style: { display: "flex", "flex-wrap": "wrap", gap: "1rem" } }, studyChart(`${metric} over latency, ms`, late, "ms", numberText), studyChart(`${metric} over KV bytes of a token`, late, "kv_bytes", (v) => v.toLocaleString("en")), studyChart(`${metric} over parameters`, late, "parameters", (v) => v.toLocaleString("en"))),
      h("p", { class: "muted small" }, "A dot is a mean over seeds, a line their spread; dotted, the designs that no other beats. Intervals hold for all pairs of designs together; below 0 is worse. The second colour is the smallest design that is not measurably worse than the best."),
      h("div", { class: "scroll panel flush", tabindex: 0, role: "region", "aria-label": `Designs of ${task}` }, h("table", { class: "data" },
        h("thead", {}, h("tr", {}, ["Model", `${metric} ${rows[0].higher ? "↑" : "↓"}`, "± seeds", "Seeds", "Against the best (95 %)", "Training, batches/s", "Latency, ms", ...(steps ? ["Next token, ms"] : []), "KV bytes", "Parameters"].map((t) => h("th", { scope: "col", style: { "overflow-wrap": "normal" } }, t)))),
        h("tbody", {}, late.map((r) => h("tr", {}, h("th", { scope: "row", style: { "white-space": "nowrap" } }, r.design, r.chosen ? " ◀" : ""), h("td", { class: "num" }, numberText(r.mean)), h("td", { class: "num" }, r.spread === null ? "" : numberText(r.spread)), h("td", { class: "num" }, String(r.seeds)),
          h("td", { class: "num" }, r.best ? "best" : r.difference === null ? "" : `${signed(r.difference)}${r.low === null ? "" : ` (${signed(r.low)} to ${signed(r.high)})`}`), number(r.train), number(r.ms), steps ? number(r.decode, 1000) : null, h("td", { class: "num" }, r.kv_bytes.toLocaleString("en")), h("td", { class: "num" }, r.parameters === null ? "" : r.parameters.toLocaleString("en")))),
          plain.map((b) => h("tr", {}, h("th", { scope: "row", style: { "white-space": "nowrap" } }, b.model), h("td", { class: "num" }, numberText(b.mean)), Array.from({ length: steps ? 8 : 7 }, () => h("td", {}))))))),
      told && told.cautions.length ? h("ul", {}, told.cautions.map((t) => h("li", {}, `Caution: ${t}`))) : null,
      told && told.limits.length ? h("ul", {}, told.limits.map((t) => h("li", {}, `Cannot tell: ${t}`))) : null];
  })];
}
