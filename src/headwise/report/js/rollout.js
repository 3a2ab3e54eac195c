// Where a token's last vector comes from, through all layers of an encoder.

const ROLLOUTS = RAW.rollouts || [];

function rolloutPage() {
  return { el: h("div", { class: "page" }, h("h1", {}, "Rollout"),
    h("p", { class: "muted" }, "How much of a token's last vector rolls back to each input token, if every layer passed on half of its input and half of what its heads read, on average (Abnar & Zuidema 2020). The shares sum to 1. A clue to where to look, not an explanation."),
    ROLLOUTS.map(rolloutPanel)) };
}

function rolloutPanel(one) {
  const axis = AXES[one.axis], items = tokenUnits(axis), fills = Float32Array.from(one.shares);
  const view = axisView(axis, { label: `What ${one.text} rolls back to`, onhover() {}, onpick() {} });
  view.set(items, false);
  // The token itself keeps most of its own vector: the ramp ends at the largest share of another.
  const own = (i) => i >= one.query && i < one.query + one.tokens;
  const most = Math.max(...fills.filter((_, i) => !own(i)), 0.001);
  view.shade({ fill: fills, bar: null, focus: one.query, most, numbers: true, hidden: null });
  const best = one.shares.map((share, i) => [share, i]).filter(([, i]) => !own(i)).sort((a, b) => b[0] - a[0]).slice(0, 12);
  return h("section", { class: "panel", "aria-label": `Rollout of ${one.text}` },
    h("h2", {}, h("q", { class: "tok" }, one.text), h("span", { class: "muted small" }, ` token ${one.query}${one.tokens > 1 ? ` and ${one.tokens - 1} more` : ""}, ${one.layers} layers`)),
    view.el,
    h("div", { class: "scroll" }, h("table", { class: "data" }, h("caption", { class: "visually-hidden" }, `The largest shares of ${one.text}`),
      h("thead", {}, h("tr", {}, h("th", { scope: "col", class: "num" }, "Share"), h("th", { scope: "col" }, "Token"))),
      h("tbody", {}, best.map(([share, i]) => h("tr", {}, h("td", { class: "num" }, weightText(share)),
        h("td", {}, h("span", { class: "tok" }, unitNodes(axis, { from: i, to: i + 1 })), h("span", { class: "muted small" }, ` ${i}`))))))));
}
