// Which heads of a layer do the same: a heatmap a layer, heads of one cluster side by side.

function similarityPage() {
  const chosen = state.similarity, el = h("div", { class: "page" });
  if (!sections().includes(chosen.section)) chosen.section = sections()[0];
  function draw(focus) {
    const modules = MODULES.filter((m) => m.section === chosen.section);
    const any = modules.some((m) => m.similarity);
    fill(el, h("div", { class: "row spread" }, h("h1", {}, "Similarity of heads"), sectionTabs(chosen.section, (name) => { chosen.section = name; draw('[aria-pressed="true"]'); })),
      h("p", { class: "muted" }, "Each square compares two heads of one layer on this input: 1 is the same attention, 0 is none in common. Outlined blocks are clusters."),
      any ? h("div", { class: "row tools" },
        choice("Measure", [["bhattacharyya", "Bhattacharyya (overlap of rows)"], ["cosine", "Cosine (of whole maps)"]], chosen.measure, (v) => { chosen.measure = v; draw("#measure"); }, { id: "measure" }),
        toggle("Order heads by cluster", chosen.grouped, (on) => { chosen.grouped = on; draw("#grouped"); }, { id: "grouped" })) : nothing("The records hold no similarity of heads here."),
      any ? legend01() : null,
      h("div", { class: "matrices" }, modules.map((module) => (module.similarity ? matrix(module) : null))));
    if (focus) el.querySelector(focus)?.focus();
  }
  function matrix(module) {
    const size = module.heads, box = h("figure", { class: "matrix panel" });
    similarityOf(module).then((data) => {
      const values = data[chosen.measure], clusters = new Map();
      data.clusters.forEach((c, i) => clusters.set(c, [...(clusters.get(c) || []), i]));
      const groups = [...clusters.values()].sort((a, b) => b.length - a.length || a[0] - b[0]);
      const order = chosen.grouped ? groups.flat() : Array.from({ length: size }, (_, i) => i);
      const read = h("span", { class: "muted small read" }, "\u00a0");
      const title = h("figcaption", {}, h("b", {}, `Layer ${module.layer}`), read);
      if (!values) { fill(box, title, nothing("This measure was not recorded.")); return; }
      const canvas = heat(values, size, order, chosen.grouped ? groups : [], (i, j) => {
        return (read.textContent = i < 0 ? "\u00a0" : `${headName(module, i)} and ${headName(module, j)}: ${weightText(values[i * size + j])}`);
      });
      canvas.setAttribute("aria-label", `Layer ${module.layer}: ${groups.length} clusters of ${size} heads`);
      fill(box, title, canvas, h("div", { class: "clusters small" }, groups.filter((g) => g.length > 1).map((g) => h("span", { class: "cluster" }, g.map((i) => h("a", { href: headLink(module, i) }, `H${i}`)))),
        groups.every((g) => g.length === 1) ? h("span", { class: "muted" }, "No two heads are in one cluster.") : null));
    });
    return box;
  }
  draw();
  return { el, redraw: () => draw() };
}

function heat(values, size, order, groups, onpoint) {
  const px = 240, step = px / size, canvas = h("canvas", { width: 2 * px, height: 2 * px, role: "application", "aria-roledescription": "heatmap", tabindex: 0, class: "heat" });
  const pen = canvas.getContext("2d");
  pen.scale(2, 2);
  order.forEach((i, r) => order.forEach((j, c) => {
    const v = values[i * size + j];
    pen.fillStyle = v !== v ? "rgb(214 39 90)" : css(rgb(v * v, 1)); // the ramp's place is a root
    pen.fillRect(c * step, r * step, step - (step > 6 ? 1 : 0), step - (step > 6 ? 1 : 0));
  }));
  let at = 0;
  pen.strokeStyle = getComputedStyle(document.body).getPropertyValue("--amber");
  pen.lineWidth = 2;
  for (const g of groups) {
    if (g.length > 1) pen.strokeRect(at * step + 0.5, at * step + 0.5, g.length * step - 1.5, g.length * step - 1.5);
    at += g.length;
  }
  canvas.addEventListener("pointermove", (event) => {
    const c = Math.floor((event.offsetX / canvas.clientWidth) * size), r = Math.floor((event.offsetY / canvas.clientHeight) * size);
    if (order[r] !== undefined && order[c] !== undefined) onpoint(order[r], order[c]);
  });
  canvas.addEventListener("pointerleave", () => onpoint(-1, -1));
  let row = 0, col = -1;
  canvas.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
    if (!move || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    row = Math.max(0, Math.min(size - 1, row + move[0]));
    col = Math.max(0, Math.min(size - 1, col + move[1]));
    say(onpoint(order[row], order[col]));
  });
  return canvas;
}

function legend01() {
  const box = legend(1, "Similarity");
  [...box.querySelectorAll(".ticks span")].forEach((span, i) => { span.textContent = (i / 4).toFixed(2); });
  return box;
}
