// The DOM is built here only. Texts go in as text nodes, never as markup.

function h(tag, props, ...kids) {
  const el = document.createElement(tag);
  for (const [name, value] of Object.entries(props || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) el.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [k, v] of Object.entries(value)) el.style.setProperty(k, v);
    else el.setAttribute(name, value === true ? "" : String(value));
  }
  append(el, kids);
  return el;
}

function append(el, kids) {
  for (const kid of kids.flat(Infinity)) {
    if (kid === null || kid === undefined || kid === false) continue;
    el.append(kid instanceof Node ? kid : document.createTextNode(String(kid)));
  }
  return el;
}

function fill(el, ...kids) {
  el.replaceChildren();
  return append(el, kids);
}

const byId = (id) => document.getElementById(id);

/** Tell screen readers; the eye sees it elsewhere. */
let spoken = 0;
function say(text) {
  clearTimeout(spoken);
  spoken = setTimeout(() => { byId("live").textContent = text; }, 120);
}

/**
 * One tab stop for a group; arrows, Home and End move inside it.
 * `columns()` gives the cells in a row (1: a list; Infinity: a line).
 */
function roving(box, selector, columns) {
  const items = () => [...box.querySelectorAll(selector)];
  const set = (item) => {
    for (const other of box.querySelectorAll(`${selector}[tabindex="0"]`)) other.tabIndex = -1;
    item.tabIndex = 0;
  };
  box.addEventListener("focusin", (event) => {
    const item = event.target.closest(selector);
    if (item && box.contains(item)) set(item);
  });
  box.addEventListener("keydown", (event) => {
    const item = event.target.closest(selector);
    if (!item || event.ctrlKey || event.metaKey || event.altKey || event.shiftKey) return;
    const all = items(), at = all.indexOf(item), wide = columns();
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    const jump = { ArrowUp: -1, ArrowDown: 1 }[event.key];
    let next = at;
    if (step) next = at + step;
    else if (jump) next = at + jump * (Number.isFinite(wide) ? wide : 1);
    else if (event.key === "Home") next = 0;
    else if (event.key === "End") next = all.length - 1;
    else return;
    event.preventDefault();
    next = Math.max(0, Math.min(all.length - 1, next));
    set(all[next]);
    all[next].focus();
  });
  const refresh = () => {
    const all = items();
    if (all.length && !all.some((item) => item.tabIndex === 0)) all[0].tabIndex = 0;
  };
  refresh();
  return { refresh, set };
}

/** A table header that sorts: a button inside, aria-sort outside. */
function sortHeader(label, title, state, key, redraw, extra) {
  const on = state.key === key;
  return h("th", { scope: "col", "aria-sort": on ? (state.down ? "descending" : "ascending") : "none", ...extra },
    h("button", {
      type: "button", class: "sort", title, "data-key": key,
      onclick: () => {
        if (state.key === key) state.down = !state.down;
        else { state.key = key; state.down = true; }
        redraw(key);
      },
    }, label, h("span", { class: "arrow", "aria-hidden": "true" }, on ? (state.down ? "↓" : "↑") : "")));
}

function choice(label, options, value, onchange, props) {
  const select = h("select", { onchange: () => onchange(select.value), ...props },
    options.map(([key, text]) => h("option", { value: key, selected: key === value }, text)));
  return h("label", { class: "field" }, h("span", {}, label), select);
}

function toggle(label, on, onchange, props) {
  const box = h("input", { type: "checkbox", checked: on, onchange: () => onchange(box.checked), ...props });
  return h("label", { class: "toggle" }, box, h("span", {}, label));
}

const nothing = (...text) => h("p", { class: "empty" }, ...text);
