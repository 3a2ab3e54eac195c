// Pick a token: its strongest links over all heads, as query and as key.

const LEAST = 0.005;

function pickPanel(onlinks) {
  const views = {}, ranking = h("div", { class: "ranking", id: "ranking" });
  const found = h("span", { class: "muted small", id: "found", role: "status" });
  const order = Object.values(AXES).sort((a, b) => (b.kind === "text") - (a.kind === "text"));
  const used = order.filter((axis) => MODULES.some((m) => m.query_axis === axis.name || m.key_axis === axis.name));
  let hits = [], turn = -1, sought = "";
  const search = h("input", { type: "search", id: "search", placeholder: "Find a token", "aria-label": "Find a token by its text", autocomplete: "off", spellcheck: "false",
    oninput: () => { turn = -1; next(); },
    onkeydown: (event) => { if (event.key === "Enter") { event.preventDefault(); next(); } } });
  function next() {
    if (search.value !== sought) {
      sought = search.value;
      hits = used.flatMap((axis) => findTokens(axis, sought).map((i) => [axis, i]));
      turn = -1;
    }
    if (!hits.length) { found.textContent = sought.trim() ? "No token has this text." : ""; return; }
    turn = (turn + 1) % hits.length;
    found.textContent = hits.length > 1 ? `${turn + 1} of ${hits.length}${hits.length >= 500 ? " or more" : ""}; Enter for the next` : "1 token";
    pick(...hits[turn]);
  }
  const el = h("section", { class: "panel pick", "aria-labelledby": "pick-title" },
    h("div", { class: "row spread" }, h("h2", { id: "pick-title" }, used.every((a) => a.kind === "text") ? "Pick a token" : "Pick a token or a place"),
      h("div", { class: "row" }, found, search)),
    used.map((axis) => {
      const view = views[axis.name] = axisView(axis, {
        label: { text: "Tokens of the input", image: "Patches of the picture", audio: "Time of the sound" }[axis.kind],
        onhover() {}, onpick: (i) => pick(axis, i),
      });
      view.set(tokenUnits(axis), false);
      view.shade({ focus: -1 });
      return view.el;
    }), ranking);

  let asked = 0;
  async function pick(axis, token) {
    state.pick = { axis: axis.name, token, best: null };
    history.replaceState(null, "", `#/pick/${encodeURIComponent(axis.name)}/${token}`);
    await show();
    say(`Picked ${unitText(axis, { from: token, to: token + 1 })}`);
  }
  async function show() {
    const mine = ++asked;
    if (!state.pick) {
      fill(ranking, nothing("Choose a token above, or find it by its text. Its strongest links over all heads appear here."));
      return;
    }
    const axis = AXES[state.pick.axis], { token } = state.pick;
    const links = await linksOf(axis, token, LEAST);
    if (mine !== asked) return;
    // The same as the terminal leaves out. In a picture, the patch before is no neighbour in any sense.
    const keep = (one, other, gap) => (state.include.aside || !other.setAside(one.other)) &&
      (other !== axis || ((state.include.own || gap !== 0) && (state.include.before || axis.kind !== "text" || gap !== 1)));
    const from = links.from.filter((one) => keep(one, AXES[one.module.key_axis], token - one.other));
    const to = links.to.filter((one) => keep(one, AXES[one.module.query_axis], one.other - token));
    const best = new Map();
    for (const one of from) { const k = `${one.module.id} ${one.head}`; if (!best.has(k)) best.set(k, one.weight); }
    state.pick.best = best;
    shade(axis, token, from, to);
    const name = () => h("q", { class: "tok" }, unitNodes(axis, { from: token, to: token + 1 }));
    const kept = await keptQueries(axis);
    if (mine !== asked) return;
    const asQuery = MODULES.some((m) => m.query_axis === axis.name), asKey = MODULES.some((m) => m.key_axis === axis.name);
    fill(ranking, options(),
      h("div", { class: "columns" },
        asQuery ? list(["What ", name(), " attends to"], from, "from", axis, kept && !kept.includes(token) ? () => absent(axis, token, kept) : null) : null,
        asKey ? list(["What attends to ", name()], to, "to", axis, null, kept) : null));
    onlinks();
  }
  function shade(axis, token, from, to) {
    const most = Math.max(...from.slice(0, 1).map((o) => o.weight), 0.001);
    for (const other of used) {
      const row = new Float32Array(other.count), column = new Float32Array(other.count);
      for (const one of from) if (AXES[one.module.key_axis] === other) row[one.other] = Math.max(row[one.other], one.weight);
      for (const one of to) if (AXES[one.module.query_axis] === other) column[one.other] = Math.max(column[one.other], one.weight);
      views[other.name].shade({ fill: row, bar: column, focus: other === axis ? token : -1, most, numbers: true, hidden: null });
      if (other === axis) views[other.name].show(token);
    }
  }
  function options() {
    const redraw = (key) => (on) => { state.include[key] = on; show().then(() => byId(`include-${key}`)?.focus()); };
    const out = [state.include.aside ? null : "special and first tokens", state.include.own ? null : "the token itself", state.include.before ? null : "the token just before a query"].filter(Boolean);
    return h("div", { class: "row options ruled" },
      h("p", { class: "muted small" }, AXES[state.pick.axis].kind === "image" ? "The pictures show the largest weight that any head gives, as kept in the rankings below." : "Filled: the largest weight that any head gives from the picked token. Bar: the largest that any head gives to it."),
      h("p", { class: "small", id: "left-out" }, out.length ? `Left out of this ranking: ${out.join(", ")}. ` : "Nothing is left out of this ranking. ", "Weights are the model's own, not rescaled."),
      h("div", { class: "row" }, toggle("Special and first tokens", state.include.aside, redraw("aside"), { id: "include-aside" }),
        toggle("The token itself", state.include.own, redraw("own"), { id: "include-own" }),
        toggle("The token before", state.include.before, redraw("before"), { id: "include-before" }),
        toggle("Every link on its own line", state.flat, (on) => { state.flat = on; show().then(() => byId("flat")?.focus()); }, { id: "flat" })));
  }
  const askedFor = (one, side, token) => RAW.links.some((l) => l.asked && l.id === one.module.id &&
    (side === "from" ? l.query === token && l.key === one.other : l.key === token && l.query === one.other));
  function list(title, links, side, axis, missing, kept) {
    const { token } = state.pick, groups = new Map();
    for (const one of links) {
      const other = side === "from" ? one.module.key_axis : one.module.query_axis;
      const key = state.flat ? groups.size : `${other} ${one.other}`;
      if (!groups.has(key)) groups.set(key, { other, at: one.other, all: [], asked: false });
      groups.get(key).all.push(one);
    }
    const rows = [...groups.values()];
    // A link that was asked for at the command line comes before stronger ones that were not.
    const wanted = new Set(RAW.links.filter((l) => l.asked).map((l) => `${l.id} ${l.query} ${l.key}`));
    for (const g of rows) g.asked = !state.flat && wanted.size > 0 && g.all.some((one) => askedFor(one, side, token));
    rows.sort((a, b) => b.asked - a.asked || b.all[0].weight - a.all[0].weight);
    const most = Math.max(...rows.map((g) => g.all[0].weight), 0.001);
    return h("div", { class: "linklist", "data-side": side }, h("h3", {}, title),
      kept ? h("p", { class: "muted small" }, `From the ${kept.length} queries whose strongest keys were kept.`) : null,
      missing ? missing() : rows.length ? h("ol", {}, rows.slice(0, 40).map((g, i) => item(g, side, most, i)))
        : nothing(`No head gives a weight above ${LEAST} here, apart from what is left out.`),
      rows.length > 40 ? h("p", { class: "muted small" }, `The 40 strongest of ${rows.length} are shown.`) : null);
  }
  function item(group, side, most, i) {
    const { token } = state.pick, axis = AXES[group.other], best = group.all[0];
    const go = (one) => headLink(one.module, one.head, side === "from" ? token : one.other);
    const one = (link) => h("a", { class: "headlink", href: go(link), title: `${headTitle(link.module, link.head)}, ${link.module.section}` },
      sections().length > 1 ? h("span", { class: "muted" }, `${link.module.section} `) : null, headName(link.module, link.head), " ", h("span", { class: "num" }, (link.exact ? "" : "≈") + weightText(link.weight)));
    const rest = group.all.slice(1);
    return h("li", { "data-rank": i, "data-other": group.at },
      h("span", { class: "strength", style: { "--part": (best.weight / most).toFixed(3), "--fill": css(rgb(best.weight, most)) } }),
      h("button", { type: "button", class: "tok plain", title: "Pick this one", onclick: () => pick(axis, group.at) }, unitNodes(axis, { from: group.at, to: group.at + 1 })),
      one(best), group.asked ? h("span", { class: "chip asked" }, "asked for") : null,
      rest.length ? h("div", { class: "next" }, rest.slice(0, 2).map(one),
        rest.length > 2 ? h("details", {}, h("summary", {}, `${rest.length - 2} more`),
          h("div", { class: "more" }, rest.slice(2, 42).map(one), rest.length > 42 ? h("span", { class: "muted" }, `and ${rest.length - 42} weaker`) : null)) : null) : null);
  }
  function absent(axis, token, kept) {
    if (!kept.length) return nothing("The maps are pooled and no query's strongest keys were kept, so single links cannot be listed. A head's page shows the pooled rows.");
    const near = [...kept].sort((a, b) => Math.abs(a - token) - Math.abs(b - token)).slice(0, 5).sort((a, b) => a - b);
    return h("div", { class: "empty" }, `At this length strongest keys were kept for ${kept.length} of ${axis.count.toLocaleString("en")} queries, and this is not one of them. Nearest:`,
      h("div", { class: "row" }, near.map((i) => h("button", { type: "button", class: "tok", onclick: () => pick(axis, i) },
        unitNodes(axis, { from: i, to: i + 1 }), h("span", { class: "muted" }, ` ${i.toLocaleString("en")}`)))));
  }
  return { el, show, pick };
}
