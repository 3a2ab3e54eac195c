// Every head with every statistic, and the links that were found.

function tablePage() {
  const chosen = state.table, el = h("div", { class: "page" });
  if (!sections().includes(chosen.section)) chosen.section = "";
  const columns = presentStatistics();
  function draw(focus) {
    const heads = allHeads().filter(({ module }) => !chosen.section || module.section === chosen.section);
    const value = ({ module, head }) => chosen.key === "labels" ? labelsOf(module, head).join(" ") || null : statistic(module, head, chosen.key);
    if (chosen.key === "@head") { if (chosen.down) heads.reverse(); }
    else if (chosen.key) {
      for (const one of heads) one.value = value(one);
      heads.sort((a, b) => compareValues(a.value, b.value, chosen.down));
    }
    const shown = chosen.all ? heads : heads.slice(0, 400);
    const head = (key, name, text, extra) => sortHeader(name, text, chosen, key, draw, extra);
    const table = h("table", { class: "data heads" },
      h("caption", { class: "visually-hidden" }, "All heads with their statistics; activate a column's header to sort"),
      h("thead", {}, h("tr", {}, head("@head", "Head", "Layer and head, counted from 0", { class: "pin" }), sections().length > 1 ? h("th", { scope: "col" }, "Kind") : null,
        head("labels", "Labels", "Names given by the thresholds"), columns.map((s) => head(s.key, s.name, s.text, { class: "num" })))),
      h("tbody", {}, shown.map(({ module, head: n }) => h("tr", {}, h("th", { scope: "row", class: "pin" }, h("a", { href: headLink(module, n) }, headName(module, n))),
        sections().length > 1 ? h("td", {}, module.section) : null, h("td", { class: "labels" }, labelsOf(module, n).map(labelChip)),
        columns.map((s) => h("td", { class: "num" }, numberText(statistic(module, n, s.key))))))));
    fill(el, h("div", { class: "row spread" }, h("h1", {}, "Heads"),
      sections().length > 1 ? choice("Kind", [["", "all"], ...sections().map((s) => [s, s])], chosen.section, (v) => { chosen.section = v; draw(); }) : null),
    thresholds(),
    columns.length ? h("div", { class: "scroll tall panel flush", tabindex: 0, role: "region", "aria-label": "Head table" }, table) : nothing("The records hold no statistics."),
    shown.length < heads.length ? h("button", { type: "button", onclick: () => { chosen.all = true; draw(); } }, `Show all ${heads.length} heads`) : null);
    if (focus) el.querySelector(`[data-key="${CSS.escape(focus)}"]`)?.focus();
  }
  draw();
  return { el };
}

function thresholds() {
  const list = Object.entries(RUN.thresholds || {});
  if (!list.length) return h("p", { class: "muted small" }, "The records state no thresholds for labels.");
  return h("p", { class: "small thresholds" }, h("span", { class: "muted" }, "Labels are given by these thresholds: "),
    list.map(([name, value]) => h("span", { class: "threshold", title: THRESHOLD_TEXTS[name] ?? null }, name.replaceAll("_", " "), " ", h("b", { class: "num" }, typeof value === "number" ? numberText(value) : String(value)))));
}

function linksPage() {
  const rows = (list) => h("div", { class: "scroll panel flush" }, h("table", { class: "data links" },
    h("thead", {}, h("tr", {}, ["Weight", "Query", "Key", "Head", sections().length > 1 ? "Kind" : null].filter(Boolean).map((t, i) => h("th", { scope: "col", class: i ? null : "num" }, t)))),
    h("tbody", {}, list.map((l) => {
      const module = moduleById(l.id), q = AXES[module.query_axis], k = AXES[module.key_axis];
      const at = (axis, i) => [h("span", { class: "tok" }, unitNodes(axis, { from: i, to: i + 1 })), h("span", { class: "muted small" }, ` ${i}`)];
      return h("tr", {}, h("td", { class: "num" }, weightText(l.weight in WORDS_OF_NUMBERS ? WORDS_OF_NUMBERS[l.weight] : l.weight)), h("td", {}, at(q, l.query)), h("td", {}, at(k, l.key)),
        h("td", {}, h("a", { href: headLink(module, l.head, l.query) }, headName(module, l.head))), sections().length > 1 ? h("td", {}, module.section) : null);
    }))));
  const asked = RAW.links.filter((l) => l.asked), rest = RAW.links.filter((l) => !l.asked);
  return { el: h("div", { class: "page" }, h("h1", {}, "Strongest links"),
    h("p", { class: "muted" }, "One query, one key, one head, strongest first. A strong link is a clue to what a head does, not an explanation."),
    asked.length ? [h("h2", {}, "Asked for"), rows(asked)] : null,
    rest.length ? [h("h2", {}, "Found"), rows(rest)] : null,
    RAW.links.length ? null : nothing("The records list no links. Pick a token on the overview to rank its links.")) };
}
