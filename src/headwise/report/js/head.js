// One head: the input to point at, its map, the strongest keys of the token in focus, its numbers.

async function headPage(module, head, ask) {
  const [first, tops, received] = await Promise.all([viewOf(module, head, state), topsOf(module), receivedOf(module)]);
  let view = first;
  const same = module.query_axis === module.key_axis;
  const queryAxis = AXES[module.query_axis], keyAxis = AXES[module.key_axis];
  const list = allHeads(), here = list.findIndex((one) => one.module === module && one.head === head);
  const beside = (step) => { const one = list[here + step]; return one ? headLink(one.module, one.head, state.query) : null; };
  const jump = (step, text) => { const to = beside(step); return to ? h("a", { class: "button", href: to, "data-step": step }, text) : h("span", { class: "button off" }, text); };
  const labels = labelsOf(module, head), similar = await similarityOf(module);
  const mates = similar ? similar.clusters.map((c, i) => [c, i]).filter(([c, i]) => c === similar.clusters[head] && i !== head).map(([, i]) => i) : [];
  const title = h("div", { class: "row spread headtitle" },
    h("div", {}, h("p", { class: "crumb" }, h("a", { href: "#/" }, "All heads"), " / ", module.section),
      h("h1", {}, `Layer ${module.layer} · Head ${head}`),
      h("div", { class: "row" }, labels.map(labelChip), mates.length ? h("span", { class: "muted small" }, "Alike in this layer: ", mates.map((m) => [h("a", { href: headLink(module, m, state.query) }, headName(module, m)), " "])) : null)),
    h("nav", { class: "row", "aria-label": "Neighbouring heads" }, jump(-1, "← Previous"), jump(1, "Next →")));
  if (!view) {
    return { el: h("div", { class: "page" }, title, h("section", { class: "panel" }, nothing("The records hold no map of this head."), numbers(module, head))), redraw() {} };
  }
  const pinned = { axis: queryAxis, item: -1 };
  let hover = null;
  const caption = h("p", { class: "caption", id: "caption" });
  const tables = h("div", { class: "columns tables", id: "tops" });
  const point = (axis) => (i) => { hover = i < 0 ? null : { axis, item: i }; update(); };
  const pinTo = (axis) => (i) => { setPin(axis, i); update(); };
  const views = [queryAxis, ...(same ? [] : [keyAxis])].map((axis, n) => ({
    axis, view: axisView(axis, { onhover: point(axis), onpick: pinTo(axis), label: same ? "The input" : n ? "Keys" : "Queries" }),
  }));
  const map = mapView({
    onpoint(r, c) { hover = r >= 0 ? { axis: queryAxis, item: itemAt(queryAxis, view.queries, r), column: c } : c >= 0 && !same ? { axis: keyAxis, item: itemAt(keyAxis, view.keys, c) } : null; update(); },
    onpick(r) { if (r >= 0) { setPin(queryAxis, itemAt(queryAxis, view.queries, r)); update(); } },
  });
  const items = (axis) => (view.single ? (axis === queryAxis ? view.queries : view.keys) : tokenUnits(axis));
  const itemAt = (axis, units, u) => (view.single ? u : units[u].from);
  function setPin(axis, i) {
    pinned.axis = axis; pinned.item = pinned.axis === axis && i === pinned.item && pinned.item >= 0 && hover === null ? -1 : i;
    if (axis === queryAxis) state.query = i >= 0 ? items(axis)[i].from : null;
    remember();
  }
  /** The address and the links to the neighbours carry the token that is kept. */
  function remember() {
    history.replaceState(null, "", address(module, head));
    for (const link of title.querySelectorAll("a[data-step]")) link.setAttribute("href", beside(Number(link.dataset.step)));
  }
  const size = h("p", { class: "muted small" });
  function lay() {
    fill(size, resolution(view));
    for (const one of views) one.view.set(items(one.axis), view.joined);
    map.set(view);
    if (state.query !== null && state.query < queryAxis.count) {
      pinned.axis = queryAxis; pinned.item = unitAt(items(queryAxis), state.query);
      views[0].view.show(pinned.item);
    }
    remember();
    update();
  }
  /** Weights by item: a block's weight is shared out evenly over its keys. */
  function spread(weights, units, axis) {
    if (view.single) return weights;
    const out = new Float32Array(axis.count);
    units.forEach((unit, u) => out.fill(weights[u] / view.block[1], unit.from, unit.to));
    return out;
  }
  /** Of a long text, blocks say too little about single queries: only exact ones are drawn. */
  function attending(item, column) {
    if (view.single || queryAxis.kind !== "text" || !tops) return spread(column, view.queries, queryAxis);
    const out = new Float32Array(queryAxis.count);
    for (let i = head * tops.count * tops.k; i < (head + 1) * tops.count * tops.k; i++) {
      if (tops.keys[i] === item.from) out[tops.rows[Math.floor(i / tops.k)]] = tops.weights[i];
    }
    return out;
  }
  function kept(query) {
    if (!tops || view.exact || state.hide || view.joined) return null;
    for (let i = head * tops.count; i < (head + 1) * tops.count; i++) {
      if (tops.rows[i] !== query) continue;
      const out = [];
      for (let j = i * tops.k; j < (i + 1) * tops.k; j++) if (tops.keys[j] >= 0) out.push([tops.keys[j], tops.weights[j]]);
      return out;
    }
    return null;
  }
  function update() {
    const now = hover || (pinned.item >= 0 ? pinned : null);
    if (!now) {
      for (const { axis, view: v } of views) v.shade({ focus: -1, hidden: hiddenItems(axis), numbers: false });
      map.mark(-1, -1);
      fill(caption, "Point at a token to see what it attends to, filled, and what attends to it, with a bar below. Click or press Enter to keep it.");
      fill(tables, receivedTable());
      return;
    }
    const asQuery = same || now.axis === queryAxis, asKey = same || now.axis === keyAxis;
    const item = items(now.axis)[now.item];
    const r = asQuery ? (view.single ? now.item : unitAt(view.queries, item.from)) : -1;
    const c = asKey ? (view.single ? now.item : unitAt(view.keys, item.from)) : -1;
    const top = asQuery ? kept(item.from) : null;
    const row = asQuery ? rowOf(view, r) : null, column = asKey ? columnOf(view, c) : null;
    const fillWeights = row ? spread(row, view.keys, keyAxis) : null, bar = column ? attending(item, column) : null;
    // Exact strongest keys, where they were kept, take the place of blocks and rounded cells.
    const exact = new Set(top ? top.map(([key]) => key) : []);
    if (top && fillWeights) for (const [key, w] of top) fillWeights[key] = w;
    let most = view.most || 1;
    if (!view.single) { most = 1e-9; for (const list of [fillWeights, bar]) if (list) for (const w of list) if (w > most) most = w; }
    const whole = queryAxis.count <= 200;
    for (const { axis, view: v } of views) {
      v.shade({ fill: axis === keyAxis ? fillWeights : null, bar: axis === queryAxis ? bar : null, most, hidden: hiddenItems(axis),
        focus: axis === now.axis ? now.item : -1, numbers: whole, sure: (i) => view.exact || exact.has(i) });
    }
    map.mark(r, now.column !== undefined && now.column >= 0 ? now.column : asQuery ? -1 : c);
    const name = h("q", { class: "tok" }, unitNodes(now.axis, item, view.joined));
    fill(caption, name, now.column >= 0 && r >= 0 ? [" → ", h("q", { class: "tok" }, unitNodes(keyAxis, view.keys[now.column], view.joined)), " ", h("b", { class: "num" }, weightText(view.values[r * view.cols + now.column]))] : null,
      asQuery ? leads(" attends most to ", strongest(row, 1), keyAxis, view.keys, top) : null,
      asKey ? leads(asQuery ? "; most attended to by " : " is most attended to by ", strongest(column, 1), queryAxis, view.queries, null) : null, ".",
      asQuery ? summary(row, top, r) : null);
    fill(tables, asQuery ? keysTable(name.cloneNode(true), row, top, r) : null, asKey ? queriesTable(name.cloneNode(true), column, c) : null);
  }
  function hiddenItems(axis) {
    if (!view.hidden || axis !== keyAxis) return null;
    return view.single ? view.hidden : Array.from({ length: axis.count }, (_, i) => view.hidden[unitAt(view.keys, i)]);
  }
  /** The one strongest, as the end of a sentence. */
  function leads(text, [best], axis, units, top) {
    if (top && top.length) return [text, h("q", { class: "tok" }, unitNodes(axis, { from: top[0][0], to: top[0][0] + 1 })), " ", h("b", { class: "num" }, weightText(top[0][1]))];
    if (!best) return [text, "nothing"];
    return [text, h("q", { class: "tok" }, unitNodes(axis, units[best[0]], view.joined)), " ", h("b", { class: "num" }, (view.exact ? "" : "≈") + weightText(best[1]))];
  }
  function summary(row, top, r) {
    if (top) return h("span", { class: "muted" }, ` The ${top.length} strongest keys, exact.`);
    if (view.hidden && !row.some((w) => w > 0)) return " Nothing is left for this query once special and first tokens are hidden.";
    if (!view.single) return h("span", { class: "muted" }, ` Mean of the queries ${unitText(queryAxis, view.queries[r])}; single keys were not kept for this one.`);
    return null;
  }
  function rows(entries, axis, units, mark) {
    const most = Math.max(...entries.map(([, w]) => w), 1e-9);
    return entries.map(([u, w]) => h("tr", { "data-unit": u }, h("td", {}, h("span", { class: "tok" }, unitNodes(axis, units[u], view.joined))),
      h("td", { class: "num" }, mark + weightText(w)), h("td", { class: "barcell" }, h("span", { class: "strength", style: { "--part": (w / most).toFixed(3), "--fill": css(rgb(w, view.most)) } }))));
  }
  const strongest = (weights, n) => Array.from(weights, (w, u) => [u, w]).filter(([, w]) => w > 0).sort((a, b) => b[1] - a[1]).slice(0, n);
  function table(kind, title, body, note) {
    return h("div", { "data-top": kind }, h("h3", {}, title), body.length ? h("div", { class: "scroll" }, h("table", { class: "data" }, h("tbody", {}, body))) : nothing("None."), note ? h("p", { class: "muted small" }, note) : null);
  }
  function keysTable(name, row, top) {
    if (top) return table("keys", [name, " attends to"], rows(top, keyAxis, tokenUnits(keyAxis), ""), "Exact.");
    return table("keys", [name, " attends to"], rows(strongest(row, 10), keyAxis, view.keys, view.exact ? "" : "≈"), precision());
  }
  function queriesTable(name, column) {
    return table("queries", ["Attends to ", name], rows(strongest(column, 10), queryAxis, view.queries, view.exact ? "" : "≈"), precision());
  }
  function precision() {
    if (!view.single) return `Blocks: sum over up to ${view.block[1]} keys, mean over up to ${view.block[0]} queries, rounded for display.`;
    return view.exact ? null : "Rounded to 254 steps of the square root; about √weight / 254 off at most.";
  }
  function receivedTable() {
    let sums = null, units = view.keys;
    if (received && !view.joined && !state.hide) {
      units = blockUnits(keyAxis, received.block);
      sums = received.values.subarray(head * received.count, (head + 1) * received.count);
    } else if (view.single) {
      sums = new Float64Array(view.cols);
      for (let i = 0; i < view.values.length; i++) sums[i % view.cols] += view.values[i];
    }
    if (!sums) return null;
    return table("received", "Keys that receive most, over all queries", rows(strongest(sums, 8), keyAxis, units, ""), null);
  }
  const canHide = Array.from({ length: keyAxis.count }, (_, i) => i).some(keyAxis.setAside);
  const canJoin = view.single && (joinable(queryAxis) || joinable(keyAxis));
  const again = async (id) => { view = await viewOf(module, head, state); remember(); notices(); hover = null; lay(); byId(id)?.focus(); };
  const switches = h("div", { class: "row options" },
    canHide ? toggle("Hide special and first tokens", state.hide, (on) => { state.hide = on; again("hide"); }, { id: "hide" }) : null,
    canJoin ? toggle("Join pieces into words", state.words, (on) => { state.words = on; again("words"); }, { id: "words" }) : null,
    canJoin ? h("span", { class: "muted small" }, "Joined: sum over a word's keys, mean over its queries.") : null);
  const el = h("div", { class: "page" }, title,
    h("section", { class: "panel", "aria-label": "The input" }, switches,
      views.map(({ view: v }, n) => [same ? null : h("h3", {}, n ? "Keys" : "Queries"), v.el]), caption),
    h("div", { class: "split" },
      h("section", { class: "panel", "aria-label": "Map" }, h("h2", {}, "Map"), size, map.el),
      h("section", { class: "panel", "aria-label": "Strongest" }, tables)),
    h("section", { class: "panel", "aria-label": "Statistics" }, h("h2", {}, "Statistics"), numbers(module, head)));
  if (ask !== null) state.query = ask;
  return { el, ready: lay, redraw() { map.redraw(); update(); }, redo: again, clear() { hover = null; pinned.item = -1; state.query = null; remember(); update(); } };
}

function address(module, head) {
  const parts = [state.query !== null ? `q=${state.query}` : null, state.hide ? "hide=1" : null, state.words ? "words=1" : null].filter(Boolean);
  return headLink(module, head) + (parts.length ? `?${parts.join("&")}` : "");
}

/** What one cell stands for. */
function resolution(view) {
  const { module, block } = view, all = `${module.queries.toLocaleString("en")} × ${module.keys.toLocaleString("en")} weights`;
  const mask = module.mask ? ` Mask: ${module.mask}.` : "";
  if (view.joined) return `${all}, joined into ${view.rows} × ${view.cols} words.${mask}`;
  if (view.single) return `${all}, one cell each${view.exact ? "" : ", rounded to 254 steps"}.${mask}`;
  return `${all}, pooled: a cell is ${block[0]} queries × ${block[1]} keys.${mask}`;
}

function numbers(module, head) {
  const list = presentStatistics().map((s) => [s, statistic(module, head, s.key)]).filter(([, v]) => v !== null);
  if (!list.length) return nothing("The records hold no statistics of this head.");
  const bins = (module.stats.distance_histogram || [])[head];
  return h("div", { class: "split stats" },
    h("div", { class: "scroll" }, h("table", { class: "data facts" }, h("tbody", {}, list.map(([s, v]) => h("tr", { "data-stat": s.key },
      h("th", { scope: "row" }, s.name), h("td", { class: "num" }, numberText(v), s.unit ? h("span", { class: "muted" }, ` ${s.unit}`) : null), h("td", { class: "muted small" }, s.text)))))),
    Array.isArray(bins) && bins.length ? histogram(bins) : null);
}

/** Weight by distance, in bins 0, 1, 2–3, 4–7, … */
function histogram(bins) {
  const values = bins.map(Number), sum = values.reduce((a, b) => a + b, 0) || 1, most = Math.max(...values) / sum || 1;
  const name = (i) => (i < 2 ? String(i) : `${2 ** (i - 1)}–${2 ** i - 1}`);
  return h("figure", { class: "histogram" }, h("figcaption", {}, "Where the weight lies, by distance in tokens"),
    h("div", { class: "bins", role: "img", "aria-label": values.map((v, i) => `distance ${name(i)}: ${((100 * v) / sum).toFixed(1)} %`).join("; ") },
      values.map((v, i) => h("div", { class: "bin" }, h("span", { class: "num small" }, `${((100 * v) / sum).toFixed(0)} %`),
        h("span", { class: "column", style: { "--part": (v / sum / most).toFixed(3) } }), h("span", { class: "small muted" }, name(i))))));
}
