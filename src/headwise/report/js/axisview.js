// The input itself, to point at: text as tokens, a picture as patches, sound as time. Filled: what
// the token in focus attends to. Bar below: what attends to it.

const WINDOW = 600, WHOLE = 900;

/**
 * `set(items, joined)` lays out the items; `shade({fill, bar, focus, hidden, most, numbers})` colours
 * them: fill and bar are weights by item (or null), most is the weight at the end of the ramp.
 */
function axisView(axis, options) {
  const kinds = { text: textView, image: imageView, audio: audioView };
  return kinds[axis.kind](axis, options);
}

function describe(axis, item, joined, state, i) {
  const parts = [unitText(axis, item, joined)];
  if (state.focus === i) parts.push("in focus");
  if (state.hidden && state.hidden[i]) parts.push("hidden");
  const about = state.sure && !state.sure(i) ? "about " : "";
  if (state.fill && state.focus >= 0) parts.push(`weight ${about}${weightText(state.fill[i])}`);
  if (state.bar && state.focus >= 0) parts.push(`attends with ${about}${weightText(state.bar[i])}`);
  return parts.join(", ");
}

/** Colour one element: fill, bar, ring and number. */
function colourItem(el, state, i) {
  const w = state.fill ? state.fill[i] : 0, b = state.bar ? state.bar[i] : 0;
  const c = w > 0 && !(state.hidden && state.hidden[i]) ? rgb(w, state.most) : null;
  el.style.setProperty("--fill", c ? css(c) : "transparent");
  el.style.setProperty("--on", c ? inkOn(c) : "inherit");
  el.style.setProperty("--bar", b > 0 ? place(b, state.most).toFixed(3) : "0");
  el.classList.toggle("focus", state.focus === i);
  el.classList.toggle("faded", !!(state.hidden && state.hidden[i]));
  el.dataset.weight = state.fill ? weightText(w) : "";
  el.dataset.received = state.bar ? weightText(b) : "";
}

function pointing(box, selector, { onhover, onpick }) {
  const at = (event) => { const el = event.target.closest(selector); return el ? Number(el.dataset.i) : -1; };
  box.addEventListener("pointerover", (event) => { if (event.pointerType !== "touch" && at(event) >= 0) onhover(at(event)); });
  box.addEventListener("pointerleave", () => onhover(-1));
  box.addEventListener("focusin", (event) => { if (at(event) >= 0) onhover(at(event)); });
  box.addEventListener("focusout", (event) => { if (!box.contains(event.relatedTarget)) onhover(-1); });
  box.addEventListener("click", (event) => { if (at(event) >= 0) onpick(at(event)); });
  box.addEventListener("keydown", (event) => {
    if ((event.key === "Enter" || event.key === " ") && at(event) >= 0) { event.preventDefault(); onpick(at(event)); }
  });
}

function textView(axis, options) {
  const box = h("div", { class: "tokens", role: "listbox", "aria-label": options.label, "data-axis": axis.name });
  const pager = h("div", { class: "pager" }), el = h("div", { class: "textview" }, box, pager);
  let items = [], joined = false, start = 0, end = 0, state = { focus: -1 };
  const rove = roving(box, ".token", () => 1);
  pointing(box, ".token", options);
  function lay() {
    end = items.length <= WHOLE ? items.length : Math.min(items.length, start + WINDOW);
    box.classList.toggle("prose", items.length > 200);
    const nodes = [];
    for (let i = start; i < end; i++) {
      const item = items[i], single = item.to - item.from === 1;
      const special = single && axis.special.has(item.from), pad = single && axis.padding.has(item.from);
      // A line may break before a word, not inside one.
      if (/^\s/.test(axis.tokens[item.from])) nodes.push(h("wbr"));
      nodes.push(h("span", {
        class: `token${special ? " special" : ""}${pad ? " padding" : ""}`, role: "option",
        tabindex: -1, "data-i": i, "data-token": item.from,
      }, h("span", { class: "t" }, unitNodes(axis, item, joined)), items.length <= 200 ? h("span", { class: "w", "aria-hidden": "true" }) : null));
      if (axis.tokens[item.to - 1].includes("\n")) nodes.push(h("br"));
    }
    fill(box, nodes);
    rove.refresh();
    fill(pager, items.length > WHOLE ? pageLine() : null);
    apply();
  }
  function pageLine() {
    const go = (to) => { start = Math.max(0, Math.min(items.length - WINDOW, to)); lay(); };
    const canvas = h("canvas", { class: "minimap", width: 800, height: 14, "aria-hidden": "true",
      onclick: (event) => go(Math.round((event.offsetX / canvas.clientWidth) * items.length - WINDOW / 2)) });
    return [canvas, h("div", { class: "row" },
      h("button", { type: "button", disabled: start === 0, onclick: () => go(start - WINDOW) }, "← Earlier"),
      h("span", { class: "muted" }, `Tokens ${start.toLocaleString("en")}–${(end - 1).toLocaleString("en")} of ${items.length.toLocaleString("en")}`),
      h("button", { type: "button", disabled: end === items.length, onclick: () => go(start + WINDOW) }, "Later →"))];
  }
  function drawMinimap() {
    const canvas = pager.querySelector("canvas");
    if (!canvas) return;
    const draw = canvas.getContext("2d"), n = items.length;
    draw.clearRect(0, 0, 800, 14);
    if (state.fill) for (let x = 0; x < 800; x++) {
      const w = state.fill[Math.floor((x / 800) * n)];
      if (w > 0) { draw.fillStyle = css(rgb(w, state.most)); draw.fillRect(x, 0, 1, 14); }
    }
    draw.strokeStyle = getComputedStyle(el).color;
    draw.strokeRect((start / n) * 800 + 0.5, 0.5, Math.max(3, ((end - start) / n) * 800 - 1), 13);
  }
  function apply() {
    for (const token of box.querySelectorAll(".token")) {
      const i = Number(token.dataset.i);
      colourItem(token, state, i);
      token.setAttribute("aria-selected", String(state.focus === i));
      token.setAttribute("aria-label", describe(axis, items[i], joined, state, i));
      const w = token.querySelector(".w");
      if (!w) continue;
      const shown = state.fill && state.fill[i] >= 0.0005 ? state.fill[i] : state.bar && state.bar[i] >= 0.0005 ? state.bar[i] : null;
      w.textContent = state.numbers && shown !== null && !(state.hidden && state.hidden[i] && shown === state.fill[i]) ? weightText(shown) : "";
      w.classList.toggle("in", !(state.fill && state.fill[i] >= 0.0005));
    }
    drawMinimap();
  }
  return {
    el,
    set(next, join) { items = next; joined = join; start = Math.min(start, Math.max(0, items.length - WINDOW)); if (items.length <= WHOLE) start = 0; lay(); },
    shade(next) { state = next; apply(); },
    show(i) {
      if (items.length > WHOLE && (i < start || i >= end)) { start = Math.max(0, Math.min(items.length - WINDOW, i - WINDOW / 2)); lay(); }
      const token = box.querySelector(`[data-i="${i}"]`);
      if (token) { rove.set(token); if (items.length > 200) token.scrollIntoView({ block: "nearest" }); }
      return token;
    },
  };
}

/** Two pictures: what the focus attends to, and what attends to it. Only the first takes focus. */
function imageView(axis, options) {
  const [rows, cols] = axis.grid, [width, height] = axis.size || [cols, rows];
  const layout = { "grid-template-columns": `repeat(${cols}, 1fr)`, "grid-template-rows": `repeat(${rows}, 1fr)` };
  const places = Array.from({ length: axis.count }, (_, i) => i).filter((i) => axis.patch[i] >= 0);
  const patches = places.map((i) => h("button", { type: "button", class: "patch", tabindex: -1, "data-i": i, "data-token": i }));
  const mirrors = places.map((i) => h("span", { class: "patch", "data-i": i }));
  const specials = [...axis.special].map((i) => h("button", { type: "button", class: "token special", "data-i": i, "data-token": i },
    h("span", { class: "t" }, axis.tokens[i] || "special"), h("span", { class: "w", "aria-hidden": "true" })));
  const picture = (kids, props) => h("div", { class: "picture", style: { "aspect-ratio": `${width} / ${height}` } },
    axis.image ? h("img", { src: axis.image, alt: "" }) : null, h("div", { class: "patches", style: layout, ...props }, kids));
  const grid = picture(patches, { role: "group", "aria-label": options.label });
  const to = h("figure", {}, h("figcaption", { class: "muted small" }, "What it attends to"), grid);
  const by = h("figure", { "aria-hidden": "true" }, h("figcaption", { class: "muted small" }, "What attends to it"), picture(mirrors, {}));
  const el = h("div", { class: "imageview" }, specials.length ? h("div", { class: "tokens" }, specials) : null, h("div", { class: "pictures" }, to, by),
    axis.image ? null : nothing(axis.image_left_out ? `The picture (${axis.image_left_out}) is too large for this page; its patches are still shown.` : "The records hold no picture; its patches are still shown."));
  pointing(el, "[data-i]", options);
  roving(grid, ".patch", () => cols);
  let items = tokenUnits(axis);
  const veil = (one, weights, i, most) => one.style.setProperty("--alpha", weights ? (0.12 + 0.7 * place(weights[i], most)).toFixed(3) : "0");
  return {
    el,
    set(next) { items = next; },
    shade(state) {
      by.hidden = !state.bar;
      to.classList.toggle("bare", !state.fill);
      for (const one of [...specials, ...patches]) {
        const i = Number(one.dataset.i), text = describe(axis, items[i], false, state, i);
        colourItem(one, state, i);
        veil(one, state.fill, i, state.most);
        one.setAttribute("aria-label", text);
        one.title = text;
        const w = one.querySelector(".w");
        if (w) w.textContent = state.fill && state.fill[i] !== 0 ? (state.sure && !state.sure(i) ? "≈" : "") + weightText(state.fill[i]) : "";
      }
      for (const one of state.bar ? mirrors : []) {
        const i = Number(one.dataset.i);
        colourItem(one, { ...state, fill: state.bar, bar: null, hidden: null }, i);
        veil(one, state.bar, i, state.most);
        one.title = `${placeName(axis, i)}: attends with ${weightText(state.bar[i])}`;
      }
      for (const img of el.querySelectorAll("img")) img.classList.toggle("dull", !!(state.fill || state.bar));
    },
    show(i) { return el.querySelector(`[data-i="${i}"]`); },
  };
}

function audioView(axis, options) {
  const wide = 1200, high = 96;
  const canvas = h("canvas", { width: wide, height: high, "aria-hidden": "true" });
  const el = h("div", { class: "audioview", role: "slider", tabindex: 0, "aria-label": options.label, "aria-valuemin": 0,
    "aria-valuemax": axis.seconds, "data-axis": axis.name }, canvas,
    h("div", { class: "ticks", "aria-hidden": "true" }, [0, 0.25, 0.5, 0.75, 1].map((t) => h("span", {}, `${(t * axis.seconds).toFixed(1)} s`))));
  let state = { focus: -1 }, own = -1, items = tokenUnits(axis);
  const n = axis.count;
  const at = (event) => Math.max(0, Math.min(n - 1, Math.floor(((event.clientX - canvas.getBoundingClientRect().left) / canvas.clientWidth) * n)));
  canvas.addEventListener("pointermove", (event) => options.onhover(at(event)));
  canvas.addEventListener("pointerleave", () => options.onhover(-1));
  canvas.addEventListener("click", (event) => { own = at(event); options.onpick(own); });
  el.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowDown: -1, ArrowRight: 1, ArrowUp: 1, PageUp: 10, PageDown: -10 }[event.key];
    if (event.key === "Home") own = 0;
    else if (event.key === "End") own = n - 1;
    else if (step) own = Math.max(0, Math.min(n - 1, Math.max(own, state.focus, 0) + step));
    else if (event.key === "Enter" || event.key === " ") { if (own >= 0) options.onpick(own); }
    else return;
    event.preventDefault();
    options.onhover(own);
  });
  function draw() {
    const pen = canvas.getContext("2d"), ink = getComputedStyle(el);
    pen.clearRect(0, 0, wide, high);
    for (let x = 0; state.fill && x < wide; x++) {
      const from = Math.floor((x / wide) * n), to = Math.max(from + 1, Math.floor(((x + 1) / wide) * n));
      let w = 0;
      for (let i = from; i < to; i++) w = Math.max(w, state.fill[i] || 0);
      if (w > 0) { pen.fillStyle = css(rgb(w, state.most)); pen.fillRect(x, 0, 1, high - 10); }
    }
    pen.fillStyle = ink.getPropertyValue("--amber");
    for (let x = 0; state.bar && x < wide; x++) {
      const w = place(state.bar[Math.floor((x / wide) * n)] || 0, state.most);
      pen.fillRect(x, high - 8 * w, 1, 8 * w);
    }
    pen.fillStyle = ink.color;
    pen.globalAlpha = 0.55;
    axis.envelope.forEach((v, i) => {
      const x = (i / axis.envelope.length) * wide, tall = Math.max(1, v * (high - 16));
      pen.fillRect(x, (high - 10 - tall) / 2, Math.max(1, wide / axis.envelope.length - 1), tall);
    });
    pen.globalAlpha = 1;
    if (state.focus >= 0) {
      pen.fillStyle = ink.getPropertyValue("--accent");
      pen.fillRect((state.focus / n) * wide - 1, 0, Math.max(3, wide / n), high);
    }
    el.setAttribute("aria-valuenow", ((Math.max(state.focus, 0)) * axis.step).toFixed(2));
    el.setAttribute("aria-valuetext", state.focus >= 0 ? describe(axis, items[state.focus], false, state, state.focus) : "no moment in focus");
  }
  draw();
  return { el, set(next) { items = next; }, shade(next) { state = next; draw(); }, show(i) { own = i; return el; } };
}
