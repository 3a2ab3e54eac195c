// All heads at once: layers × heads of small maps, or one ranked list, by any statistic.

const THUMB = 40;
const LINK_KEY = "@link";

/** Sums over keys, means over queries, down to at most THUMB cells a side. */
function thumbnail(values, rows, cols) {
  const r = Math.min(rows, THUMB), c = Math.min(cols, THUMB), out = new Float32Array(r * c), count = new Float32Array(r);
  for (let i = 0; i < rows; i++) {
    const y = Math.floor((i * r) / rows);
    count[y] += 1;
    for (let j = 0; j < cols; j++) out[y * c + Math.floor((j * c) / cols)] += values[i * cols + j];
  }
  for (let i = 0; i < r * c; i++) out[i] /= count[Math.floor(i / c)];
  return { values: out, rows: r, cols: c };
}

function drawThumbnail(canvas, map) {
  const small = thumbnail(map.values, map.rows, map.cols);
  canvas.width = small.cols; canvas.height = small.rows;
  const pen = canvas.getContext("2d"), image = pen.createImageData(small.cols, small.rows);
  paint(image, small.values, small.rows, small.cols, 1, null);
  pen.putImageData(image, 0, 0);
}

/** Draws a head's thumbnail when it comes into sight, and the others when there is time: print them too. */
const waiting = new Set();
let idle = false;

function drawNow(canvas) {
  waiting.delete(canvas);
  sight.unobserve(canvas);
  if (!canvas.isConnected) return;
  mapOf(moduleById(canvas.dataset.id), Number(canvas.dataset.head)).then((map) => {
    if (map) drawThumbnail(canvas, map); else canvas.classList.add("missing");
  });
}

const sight = new IntersectionObserver((entries) => {
  for (const entry of entries) if (entry.isIntersecting) drawNow(entry.target);
}, { rootMargin: "300px" });

function drawRest(deadline) {
  idle = false;
  for (const canvas of waiting) {
    if (deadline.timeRemaining() < 4) break;
    drawNow(canvas);
  }
  if (waiting.size) soon();
}

function soon() {
  if (idle) return;
  idle = true;
  if (window.requestIdleCallback) requestIdleCallback(drawRest);
  else setTimeout(() => drawRest({ timeRemaining: () => 50 }), 200);
}

const seen = {
  observe(canvas) {
    waiting.add(canvas);
    sight.observe(canvas);
    soon();
  },
};

function sectionTabs(value, onchange) {
  const all = sections();
  if (all.length < 2) return null;
  return h("div", { class: "segments", role: "group", "aria-label": "Kind of attention" },
    all.map((name) => h("button", { type: "button", "aria-pressed": String(name === value), "data-section": name, onclick: () => onchange(name) }, name)));
}

/** The grid's statistics: those of the records, and the strongest link of the token picked. */
function gridValue(module, head, key) {
  if (key !== LINK_KEY) return statistic(module, head, key);
  return (state.pick && state.pick.best && state.pick.best.get(`${module.id} ${head}`)) ?? null;
}

function gridStatistics() {
  const list = presentStatistics().map((s) => [s.key, s.name]);
  if (state.pick && state.pick.best) {
    const axis = AXES[state.pick.axis];
    list.unshift([LINK_KEY, `Strongest link from ${unitText(axis, { from: state.pick.token, to: state.pick.token + 1 })}`]);
  }
  return list;
}

function blocksFor(width, heads, layers) {
  const fit = Math.floor((width - 20) / (heads * 52 + 62));
  return Math.max(1, Math.min(3, fit, Math.ceil(layers / 8)));
}

function gridPanel() {
  let blocks = 1;
  const chosen = state.grid, box = h("section", { class: "panel", id: "all-heads", "aria-labelledby": "all-heads-title" });
  if (!sections().includes(chosen.section)) chosen.section = sections()[0];
  const tools = h("div", { class: "row tools" }), results = h("div", { class: "results" }), head = h("div", { class: "row spread" });
  append(box, [head, tools, results]);
  const redraw = (focus) => {
    draw();
    if (focus) box.querySelector(focus)?.focus();
  };
  const heads = () => allHeads().filter(({ module }) => module.section === chosen.section)
    .map((one) => ({ ...one, value: chosen.key ? gridValue(one.module, one.head, chosen.key) : null }));
  function draw() {
    drawTools();
    drawResults();
  }
  function drawTools() {
    const choices = gridStatistics();
    if (!choices.some(([key]) => key === chosen.key)) chosen.key = choices.length ? choices[0][0] : null;
    fill(head, h("h2", { id: "all-heads-title" }, "All heads"),
      sectionTabs(chosen.section, (name) => { chosen.section = name; chosen.low = chosen.high = null; redraw('[data-section][aria-pressed="true"]'); }));
    const finite = heads().map((one) => one.value).filter(Number.isFinite);
    fill(tools,
      choices.length ? choice("Statistic", choices, chosen.key, (v) => { chosen.key = v; chosen.low = chosen.high = null; redraw("#grid-stat"); }, { id: "grid-stat" }) : null,
      choice("Order", [["layer", "layer × head"], ["down", "largest first"], ["up", "smallest first"]], chosen.order, (v) => { chosen.order = v; drawResults(); }, { id: "grid-order" }),
      bound("From", "low", Math.min(...finite)), bound("to", "high", Math.max(...finite)),
      choice("Label", [["", "any"], ...allLabels().map((l) => [l, l])], chosen.label, (v) => { chosen.label = v; drawResults(); }, { id: "grid-label" }),
      h("button", { type: "button", class: "quiet", id: "grid-clear", onclick: () => { chosen.low = chosen.high = null; chosen.label = ""; redraw("#grid-stat"); } }, "Clear"));
    clearable();
  }
  const clearable = () => { tools.querySelector("#grid-clear").hidden = chosen.low === null && chosen.high === null && !chosen.label; };
  function drawResults() {
    const list = heads(), finite = list.map((one) => one.value).filter(Number.isFinite);
    const low = Math.min(...finite), high = Math.max(...finite);
    const passes = ({ module, head, value }) =>
      (!chosen.label || labelsOf(module, head).includes(chosen.label)) &&
      (chosen.low === null || (value !== null && value >= chosen.low)) &&
      (chosen.high === null || (value !== null && value <= chosen.high));
    const kept = list.filter(passes), about = presentStatistics().find((s) => s.key === chosen.key);
    clearable();
    fill(results,
      h("p", { class: "muted small", id: "grid-count", role: "status" },
        `${kept.length} of ${list.length} heads. `, about && about.text ? about.text : "", finite.length ? ` Here from ${numberText(low)} to ${numberText(high)}.` : ""),
      kept.length ? (chosen.order === "layer" ? byLayer(list, passes, low, high) : ranked(kept, low, high))
        : nothing("No head passes this filter. Widen the range or choose another label."),
      legend(1, "Weight in the thumbnails; rows are queries, columns are keys"));
  }
  function bound(name, key, hint) {
    const input = h("input", { type: "number", step: "any", inputmode: "decimal", id: `grid-${key}`, value: chosen[key] ?? "",
      placeholder: Number.isFinite(hint) ? numberText(hint) : "", oninput: () => {
        chosen[key] = input.value === "" ? null : Number(input.value);
        drawResults();
      } });
    return h("label", { class: "field narrow" }, h("span", {}, name), input);
  }
  function cell({ module, head, value }, low, high, named, dim) {
    const canvas = h("canvas", { width: 1, height: 1, "data-id": module.id, "data-head": head, "aria-hidden": "true" });
    seen.observe(canvas);
    const labels = labelsOf(module, head), part = high > low ? (value - low) / (high - low) : 0;
    const text = `${headTitle(module, head)}${chosen.key ? `: ${numberText(value)}` : ""}${labels.length ? `, ${labels.join(", ")}` : ""}`;
    return h("a", { class: `cell${dim ? " dim" : ""}`, tabindex: -1, href: headLink(module, head, state.pick && module.query_axis === state.pick.axis ? state.pick.token : null),
      "aria-label": text, title: text, "data-cell": headName(module, head) },
      canvas, named ? h("span", { class: "who" }, headName(module, head)) : null,
      h("span", { class: "value" }, chosen.key ? numberText(value) : ""),
      h("span", { class: "meter", style: { "--part": Number.isFinite(part) ? part.toFixed(3) : "0" } }));
  }
  function byLayer(heads, passes, low, high) {
    const modules = MODULES.filter((m) => m.section === chosen.section);
    const most = Math.max(...modules.map((m) => m.heads));
    // Deep models stand in two or three blocks side by side where there is room.
    blocks = blocksFor(box.clientWidth, most, modules.length);
    const each = Math.ceil(modules.length / blocks);
    const row = (module) => h("div", { class: "gridrow", role: "row" }, h("span", { class: "layer", role: "rowheader", title: `${module.module}; mask: ${module.mask ?? "not stated"}` }, String(module.layer)),
        heads.filter((one) => one.module === module).map((one) => h("div", { role: "gridcell" }, cell(one, low, high, false, !passes(one)))));
    const grid = h("div", { class: "grid", role: "grid", "aria-label": `${chosen.section}, layers × heads`, style: { "--heads": most, "--blocks": blocks } },
      Array.from({ length: blocks }, (_, b) => h("div", { class: "block", role: "rowgroup" },
        h("div", { class: "gridrow head", role: "row" }, h("span", { class: "corner", role: "columnheader" }, h("span", { class: "visually-hidden" }, "layer")),
          Array.from({ length: most }, (_, i) => h("span", { class: "col", role: "columnheader" }, String(i)))),
        modules.slice(b * each, (b + 1) * each).map(row))));
    roving(grid, ".cell", () => most);
    return h("div", { class: "scroll" }, grid);
  }
  function ranked(kept, low, high) {
    kept.sort((a, b) => compareValues(a.value, b.value, chosen.order === "down"));
    const list = h("div", { class: "ranked", role: "list", "aria-label": "Heads, ranked" },
      kept.slice(0, 600).map((one) => h("div", { role: "listitem" }, cell(one, low, high, true, false))));
    const wide = () => { const top = list.firstChild?.offsetTop; return [...list.children].filter((c) => c.offsetTop === top).length || 1; };
    roving(list, ".cell", wide);
    return [list, kept.length > 600 ? nothing(`The first 600 of ${kept.length} heads are shown.`) : null];
  }
  draw();
  const shape = () => { const m = MODULES.filter((one) => one.section === chosen.section); return [Math.max(...m.map((one) => one.heads)), m.length]; };
  new ResizeObserver(() => { if (chosen.order === "layer" && blocksFor(box.clientWidth, ...shape()) !== blocks) draw(); }).observe(box);
  /** A token was picked: only what shows its links is drawn again. */
  const picked = () => { drawTools(); if (chosen.key === LINK_KEY) drawResults(); };
  return { el: box, draw, picked };
}
