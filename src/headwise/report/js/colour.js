// Weight to colour. One ramp with even steps of lightness ("mako"): its order survives every kind
// of colour blindness and print. On paper it runs from light to dark, on black from dark to light,
// so that in both nothing looks like nothing.

const MAKO = ["#0b0405", "#2e1e3b", "#413d7b", "#37659e", "#348fa7", "#40b7ad", "#8bdab2", "#def5e5"]
  .map((hex) => [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16)));
const PAPER = [...MAKO, [247, 251, 247]];
const RAMP_STEPS = 256;
const ramps = {};

function isDark() {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

function ramp() {
  const dark = isDark();
  const name = dark ? "dark" : "light";
  if (ramps[name]) return ramps[name];
  const table = new Uint8Array(RAMP_STEPS * 3);
  for (let i = 0; i < RAMP_STEPS; i++) {
    const t = i / (RAMP_STEPS - 1);
    const anchors = dark ? MAKO : PAPER;
    const at = (dark ? 0.06 + 0.94 * t : 1 - 0.86 * t) * (anchors.length - 1);
    const low = Math.min(anchors.length - 2, Math.floor(at)), part = at - low;
    for (let c = 0; c < 3; c++) {
      table[3 * i + c] = Math.round(anchors[low][c] * (1 - part) + anchors[low + 1][c] * part);
    }
  }
  return (ramps[name] = table);
}

/** Where a weight stands on the ramp: the square root, so that small weights can be told apart. */
const place = (weight, most) => Math.sqrt(Math.max(0, Math.min(1, weight / (most || 1))));

function rgb(weight, most) {
  const table = ramp();
  const i = 3 * Math.round(place(weight, most) * (RAMP_STEPS - 1));
  return [table[i], table[i + 1], table[i + 2]];
}

const css = (c) => `rgb(${c[0]} ${c[1]} ${c[2]})`;

/** Black or white, whichever reads better: never under 4.5 to 1. */
function inkOn([r, g, b]) {
  const lin = (v) => { v /= 255; return v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; };
  const light = 0.2126 * lin(r) + 0.7152 * lin(g) + 0.0722 * lin(b);
  return 1.05 / (light + 0.05) > (light + 0.05) / 0.05 ? "#ffffff" : "#000000";
}

/** Paint (rows × cols) weights into image data. Exact zeros stay clear: there is nothing there. */
function paint(image, values, rows, cols, most, hiddenCols) {
  const table = ramp(), out = image.data;
  for (let i = 0; i < rows * cols; i++) {
    const w = values[i], o = 4 * i;
    if (hiddenCols && hiddenCols[i % cols]) { out[o + 3] = 0; continue; }
    if (w !== w) { out[o] = 214; out[o + 1] = 39; out[o + 2] = 90; out[o + 3] = 255; continue; }
    if (w === 0) { out[o + 3] = 0; continue; }
    const c = 3 * Math.round(place(w, most) * (RAMP_STEPS - 1));
    out[o] = table[c]; out[o + 1] = table[c + 1]; out[o + 2] = table[c + 2]; out[o + 3] = 255;
  }
}

/** The key to the colours, with numbers at even places of the ramp. */
function legend(most, label) {
  const canvas = h("canvas", { width: 256, height: 1, class: "ramp", "aria-hidden": "true" });
  const draw = canvas.getContext("2d"), image = draw.createImageData(256, 1);
  for (let i = 0; i < 256; i++) for (let c = 0; c < 4; c++) image.data[4 * i + c] = c < 3 ? ramp()[3 * i + c] : 255;
  draw.putImageData(image, 0, 0);
  const ticks = [0, 0.25, 0.5, 0.75, 1].map((t) => h("span", {}, weightText(most * t * t)));
  return h("div", { class: "legend" }, h("span", { class: "legend-name" }, label),
    h("div", { class: "legend-scale" }, canvas, h("div", { class: "ticks" }, ticks)));
}
