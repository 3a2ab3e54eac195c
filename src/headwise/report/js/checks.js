// What the checks of a model found: a row a check, and the declared mask beside the measured one.

const CHECKS = RAW.checks || [];
const STATUS = { passed: ["✓", "passed"], failed: ["✗", "failed"], "not run": ["–", "not run"] };

function checkCounts() {
  const count = (status) => CHECKS.filter((c) => c.status === status).length;
  return [["failed", count("failed")], ["passed", count("passed")], ["not run", count("not run")]];
}

/** A small grid: one cell a query and key, darker for more. */
function checkGrid(name, grid) {
  const largest = Math.max(...grid.flat().map((v) => Number(v) || 0), 1e-30);
  const cell = (value) => h("td", { title: numberText(Number(value)), style: { background: Number(value) > 0 ? `rgb(${rgb(Number(value), largest).join(" ")})` : "transparent" } });
  return h("figure", { class: "check-grid" }, h("figcaption", {}, name),
    h("table", { "aria-label": `${name} mask, rows are outputs, columns are inputs` }, h("tbody", {}, grid.map((row) => h("tr", {}, row.map(cell))))));
}

function checkRow(check) {
  const [sign, word] = STATUS[check.status], place = check.where;
  const culprit = place ? [place.module, place.layer !== undefined && place.layer !== null ? `layer ${place.layer}` : null, place.head !== undefined && place.head !== null ? `head ${place.head}` : null,
    place.query !== undefined && place.query !== null ? `query ${place.query}` : null, place.key !== undefined && place.key !== null ? `key ${place.key}` : null,
    typeof place.weight === "number" ? `weight ${numberText(place.weight)}` : null].filter(Boolean).join(", ") : null;
  const limits = [typeof check.worst === "number" ? `worst ${numberText(check.worst)}` : null, typeof check.tolerance === "number" ? `allowed ${numberText(check.tolerance)}` : null].filter(Boolean).join(", ");
  return h("tr", { class: `check ${word.replace(" ", "-")}` }, h("td", { class: "status" }, h("b", {}, `${sign} ${word}`)),
    h("th", { scope: "row" }, check.check, [check.path, check.case].filter(Boolean).map((t) => h("div", { class: "muted small" }, t))),
    h("td", {}, h("p", {}, check.message), check.cause ? h("p", { class: "small" }, "Likely cause: ", h("b", {}, check.cause), check.fix ? `. Usual fix: ${check.fix}.` : "") : null,
      culprit ? h("p", { class: "small" }, "First seen in ", h("code", {}, culprit)) : null, limits ? h("p", { class: "muted small" }, limits) : null,
      check.ran ? h("p", { class: "muted small" }, `Ran: ${check.ran}`) : null,
      check.declared || check.measured ? h("div", { class: "row" }, check.declared ? checkGrid("Declared", check.declared) : null, check.measured ? checkGrid("Measured", check.measured) : null) : null));
}

function checksPage() {
  const el = h("div", { class: "page" });
  const redraw = () => fill(el, checksBody());
  redraw();
  return { el, redraw };
}

function checksBody() {
  const order = { failed: 0, "not run": 1, passed: 2 };
  const sorted = [...CHECKS].sort((a, b) => order[a.status] - order[b.status]);
  return [MODULES.length ? h("h1", {}, "Checks") : [h("h1", {}, String(RUN.model ?? "A model")), h("p", { class: "lead" }, "Checks of its attention")],
    h("p", { id: "check-counts" }, checkCounts().filter(([, n]) => n).map(([name, n], i) => [i ? ", " : "", h("b", {}, String(n)), ` ${name}`]), "."),
    h("p", { class: "muted small" }, "A check that could not run says why. It never counts as passed."),
    CHECKS.length ? h("div", { class: "scroll panel flush", tabindex: 0, role: "region", "aria-label": "Checks" }, h("table", { class: "data checks" },
      h("thead", {}, h("tr", {}, ["Result", "Check", "What was found"].map((t) => h("th", { scope: "col" }, t)))), h("tbody", {}, sorted.map(checkRow)))) : nothing("The records hold no checks.")];
}
