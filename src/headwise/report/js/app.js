// Routes, the bar, the keys.

const PAGES = [
  ...(MODULES.length ? [["", "Overview"], ["table", "Heads"], ["similarity", "Similarity"], ["links", "Links"]] : []),
  ...(ROLLOUTS.length ? [["rollout", "Rollout"]] : []),
  ...(CHECKS.length ? [["checks", "Checks"]] : []), ...(COSTS.length ? [["cost", "Cost"]] : []), ...(STUDIES.length ? [["study", "Study"]] : []), ["about", "About"],
];
const FIRST = MODULES.length ? "" : CHECKS.length ? "checks" : COSTS.length ? "cost" : "study";
let page = {};

function bar(current) {
  const theme = h("button", { type: "button", class: "quiet", id: "theme", "aria-label": `Use ${isDark() ? "light" : "dark"} colours`, title: "Light or dark (t)", onclick: switchTheme }, isDark() ? "☀" : "☾");
  fill(byId("bar"), h("a", { class: "brand", href: "#/" }, "headwise"), h("span", { class: "model" }, String(RUN.model ?? "")),
    h("nav", { "aria-label": "Pages" }, PAGES.map(([path, name]) => h("a", { href: `#/${path}`, "aria-current": path === current ? "page" : null }, name))),
    h("span", { class: "right" }, theme, h("button", { type: "button", class: "quiet", id: "keys", "aria-label": "Show the keys", title: "Keys (?)", onclick: showKeys }, "?")));
}

function switchTheme() {
  document.documentElement.dataset.theme = isDark() ? "light" : "dark";
  repaint();
  byId("theme")?.focus();
}

/** Draw again whatever holds colours. */
function repaint() {
  bar(here());
  for (const canvas of document.querySelectorAll("canvas[data-id]")) seen.observe(canvas);
  page.redraw?.();
}

function notices() {
  fill(byId("notices"), state.hide ? h("p", { class: "banner", id: "banner", role: "status" },
    h("span", {}, "Special and first tokens are hidden in heads' maps, and what is left of each row is rescaled to sum to 1. These are not the model's own weights. "),
    h("button", { type: "button", onclick: () => { state.hide = false; if (page.redo) { const box = byId("hide"); if (box) box.checked = false; page.redo("hide"); } else notices(); } }, "Show them")) : null);
}

function parse() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  let parts;
  try { parts = path.split("/").map(decodeURIComponent); } catch { parts = ["?"]; }
  return { parts, ask: new URLSearchParams(query || "") };
}
const here = () => { const [name] = parse().parts; return name === "pick" ? "" : name === "" ? FIRST : name; };

let turn = 0;
async function route() {
  const mine = ++turn, { parts, ask } = parse(), [name, first, second] = parts;
  let made;
  if (name === "head") {
    const module = moduleById(first), head = Number(second);
    if (!module || !Number.isInteger(head) || head < 0 || head >= module.heads) made = missing("No such head in these records.");
    else {
      state.hide = ask.get("hide") === "1" || (!ask.has("hide") && state.hide);
      state.words = ask.get("words") === "1" || (!ask.has("words") && state.words);
      const q = ask.has("q") ? Number(ask.get("q")) : null;
      if (q !== null && Number.isInteger(q) && q >= 0 && q < AXES[module.query_axis].count) state.query = q;
      else if (q !== null) state.query = null;
      made = await headPage(module, head, state.query);
    }
  } else if (name === "table") made = tablePage();
  else if (name === "similarity") made = similarityPage();
  else if (name === "links") made = linksPage();
  else if (name === "rollout") made = rolloutPage();
  else if (name === "about") made = aboutPage();
  else if (name === "checks" || (name === "" && FIRST === "checks")) made = checksPage();
  else if (name === "cost" || (name === "" && FIRST === "cost")) made = costPage();
  else if (name === "study" || (name === "" && FIRST === "study")) made = studyPage();
  else if (name === "" || name === "pick") made = overviewPage(name === "pick" ? first : null, Number(second));
  else made = missing("No such page.");
  if (mine !== turn) return;
  page = made;
  bar(here());
  notices();
  fill(byId("main"), made.el);
  made.ready?.();
  if (parts.moved !== false && arrived) { window.scrollTo(0, 0); byId("main").focus({ preventScroll: true }); }
  arrived = true;
  document.documentElement.dataset.ready = "1";
}
let arrived = false;

const missing = (text) => ({ el: h("div", { class: "page" }, nothing(text, " "), h("p", {}, h("a", { href: "#/" }, "To the overview"))) });

function overviewPage(axisName, token) {
  const grid = gridPanel(), pick = pickPanel(() => grid.picked());
  const axis = AXES[axisName];
  if (axis && Number.isInteger(token) && token >= 0 && token < axis.count) state.pick = { axis: axis.name, token, best: null };
  else if (!state.pick) {
    const asked = RAW.links.find((l) => l.asked);
    if (asked) state.pick = { axis: moduleById(asked.id).query_axis, token: asked.query, best: null };
  }
  return { el: h("div", { class: "page" }, intro(), pick.el, grid.el), ready: () => pick.show(), redraw() { pick.show(); grid.draw(); } };
}

const KEYS = [["?", "show or close this list"], ["/", "find a token"], ["o", "overview"], ["[ and ]", "previous and next head"], ["h", "hide special and first tokens, or show them"],
  ["w", "join pieces into words, or part them"], ["t", "light or dark"], ["Arrows", "move inside tokens, grids and the map"], ["Enter", "keep the token in focus; open a head"],
  ["+ − 0", "on a map: zoom in, out, reset"], ["Shift + arrows", "on a map: move it"], ["Esc", "let go of the token"]];

function showKeys() {
  const open = byId("keylist");
  if (open) { open.close(); return; }
  const dialog = h("dialog", { id: "keylist", "aria-labelledby": "keylist-title", onclose: () => { dialog.remove(); } },
    h("h2", { id: "keylist-title" }, "Keys"), h("dl", {}, KEYS.map(([key, text]) => [h("dt", {}, h("kbd", {}, key)), h("dd", {}, text)])),
    h("button", { type: "button", onclick: () => dialog.close() }, "Close"));
  document.body.append(dialog);
  dialog.showModal();
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const typing = event.target.closest?.("input:not([type=checkbox]), select, textarea");
  if (event.key === "Escape" && typing) { typing.blur(); return; }
  if (typing) return;
  const step = { "[": -1, "]": 1 }[event.key];
  if (event.key === "?") showKeys();
  else if (byId("keylist")) return;
  else if (event.key === "/") {
    const go = () => { byId("search")?.focus(); };
    if (byId("search")) go(); else { location.hash = "#/"; setTimeout(go, 150); }
  } else if (event.key === "t") switchTheme();
  else if (event.key === "o") location.hash = "#/";
  else if (event.key === "h" && byId("hide")) byId("hide").click();
  else if (event.key === "w" && byId("words")) byId("words").click();
  else if (event.key === "Escape") page.clear?.();
  else if (step) { const link = document.querySelector(`[data-step="${step}"]`); if (link) location.hash = link.getAttribute("href"); else return; }
  else return;
  event.preventDefault();
});

byId("skip").addEventListener("click", (event) => { event.preventDefault(); byId("main").focus(); });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { if (!document.documentElement.dataset.theme) repaint(); });
window.addEventListener("hashchange", route);

(async () => {
  if (typeof DecompressionStream === "undefined") {
    fill(byId("main"), nothing("This browser is too old for this page: it lacks DecompressionStream. Use Chrome 80, Firefox 113, Safari 16.4 or newer."));
    return;
  }
  await readAxes();
  await route();
})();
