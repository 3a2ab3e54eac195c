// A head's map on a canvas: wheel, pinch, drag and keys; down to single cells with their numbers.

const LABEL_CELL = 13, NUMBER_CELL = 42, LINE_CELL = 9;

/** `set(view)` draws a view; `mark(row, column)` shows the focus; `onpoint(row, column)` reports. */
function mapView({ onpoint, onpick }) {
  const canvas = h("canvas", { class: "map", tabindex: 0, role: "application", "aria-roledescription": "attention map", "aria-describedby": "map-keys" });
  const legendBox = h("div"), scaleText = h("output", { class: "zoom" });
  const button = (sign, name, act) => h("button", { type: "button", "aria-label": name, title: name, onclick: act }, sign);
  const tools = h("div", { class: "row tools" },
    button("−", "Zoom out", () => zoomBy(1 / 1.6)), scaleText, button("+", "Zoom in", () => zoomBy(1.6)),
    button("Reset", "Reset the zoom", () => reset()),
    choice("Colours to", [["head", "this head's largest"], ["one", "1, same for all"]], "head", (v) => { fixed = v === "one"; render(); showLegend(); }));
  const el = h("div", { class: "mapview" }, tools, canvas, legendBox,
    h("p", { class: "muted small", id: "map-keys" }, "Rows are queries, columns are keys. Wheel or + and − to zoom, drag to move, arrows to walk, 0 to reset."));
  let view = null, picture = null, painted = [], fixed = false, side = 0, cell = 1, base = 1, stretch = 1, x0 = 0, y0 = 0, row = -1, col = -1, cursor = false;
  // A cell is `cell` wide and `tallCell()` high: few queries on many keys are stretched.
  const tallCell = () => cell * stretch;
  const margin = () => ({ left: view && side > 300 && tallCell() >= LABEL_CELL ? 104 : 22, top: view && side > 300 && cell >= LABEL_CELL ? 84 : 22 });
  const fitCell = (left = 22, top = 22) => Math.min((side - left) / view.cols, (high() - top) / view.rows / stretch);
  const high = () => canvas.clientHeight;
  const most = () => (fixed ? 1 : view.most || 1);

  function reset() {
    if (!view) return;
    const roomy = fitCell(104, 84), half = fitCell(104, 22);
    base = cell = side <= 300 ? fitCell() : roomy >= LABEL_CELL ? roomy : half * stretch >= LABEL_CELL ? half : fitCell();
    x0 = y0 = 0;
    render();
  }
  function zoomBy(factor, px, py) {
    if (!view) return false;
    const m = margin();
    px = px ?? (side + m.left) / 2; py = py ?? (high() + m.top) / 2;
    const next = Math.max(Math.min(base, 160), Math.min(Math.max(base, 160), cell * factor));
    if (next === cell) return false;
    const u = (px - m.left) / cell + x0, v = (py - m.top) / tallCell() + y0;
    cell = next;
    const now = margin();
    x0 = u - (px - now.left) / cell; y0 = v - (py - now.top) / tallCell();
    render();
    return true;
  }
  function bound() {
    const m = margin();
    x0 = Math.max(0, Math.min(x0, view.cols - (side - m.left) / cell));
    y0 = Math.max(0, Math.min(y0, view.rows - (high() - m.top) / tallCell()));
    if (x0 < 0 || !Number.isFinite(x0)) x0 = 0;
    if (y0 < 0 || !Number.isFinite(y0)) y0 = 0;
  }
  /** Colours change with the view, the scale and the theme only, not with every move. */
  function repaint() {
    const now = [view, most(), ramp()];
    if (now.every((part, i) => part === painted[i])) return;
    painted = now;
    picture.width = view.cols; picture.height = view.rows;
    const pen = picture.getContext("2d"), image = pen.createImageData(view.cols, view.rows);
    paint(image, view.values, view.rows, view.cols, most(), view.hidden);
    pen.putImageData(image, 0, 0);
  }
  function render() {
    if (!view || !side) return;
    bound();
    const dpr = window.devicePixelRatio || 1, tall = high();
    if (canvas.width !== Math.round(side * dpr)) canvas.width = Math.round(side * dpr);
    if (canvas.height !== Math.round(tall * dpr)) canvas.height = Math.round(tall * dpr);
    const pen = canvas.getContext("2d"), m = margin(), ink = getComputedStyle(canvas);
    repaint();
    pen.setTransform(dpr, 0, 0, dpr, 0, 0);
    pen.clearRect(0, 0, side, tall);
    pen.save();
    pen.beginPath(); pen.rect(m.left, m.top, side - m.left, tall - m.top); pen.clip();
    pen.imageSmoothingEnabled = false;
    const X = (c) => m.left + (c - x0) * cell, Y = (r) => m.top + (r - y0) * tallCell(), tc = tallCell();
    pen.fillStyle = ink.getPropertyValue("--sunk");
    pen.fillRect(X(0), Y(0), view.cols * cell, view.rows * tc);
    pen.drawImage(picture, X(0), Y(0), view.cols * cell, view.rows * tc);
    const c0 = Math.floor(x0), c1 = Math.min(view.cols, Math.ceil(x0 + (side - m.left) / cell));
    const r0 = Math.floor(y0), r1 = Math.min(view.rows, Math.ceil(y0 + (tall - m.top) / tc));
    if (cell >= LINE_CELL) {
      pen.strokeStyle = ink.getPropertyValue("--panel"); pen.lineWidth = 1;
      pen.beginPath();
      for (let c = c0; c <= c1; c++) { pen.moveTo(X(c), Y(r0)); pen.lineTo(X(c), Y(r1)); }
      for (let r = r0; r <= r1; r++) { pen.moveTo(X(c0), Y(r)); pen.lineTo(X(c1), Y(r)); }
      pen.stroke();
    }
    if (cell >= NUMBER_CELL) {
      pen.font = "11px system-ui, sans-serif"; pen.textAlign = "center"; pen.textBaseline = "middle";
      for (let r = r0; r < r1; r++) for (let c = c0; c < c1; c++) {
        const w = view.values[r * view.cols + c];
        if (w === 0 || (view.hidden && view.hidden[c])) continue;
        pen.fillStyle = inkOn(rgb(w, most()));
        pen.fillText(weightText(w), X(c + 0.5), Y(r + 0.5));
      }
    }
    pen.strokeStyle = ink.getPropertyValue("--accent"); pen.lineWidth = 2;
    if (row >= 0) pen.strokeRect(X(0), Y(row), view.cols * cell, Math.max(tc, 2));
    if (col >= 0) { pen.globalAlpha = row >= 0 ? 0.6 : 1; pen.strokeRect(X(col), Y(0), Math.max(cell, 2), view.rows * tc); pen.globalAlpha = 1; }
    if (cursor && row >= 0 && col >= 0) {
      pen.strokeStyle = ink.color; pen.lineWidth = 2.5;
      pen.strokeRect(X(col), Y(row), Math.max(cell, 4), Math.max(tc, 4));
    }
    pen.restore();
    names(pen, ink, m, X, Y, c0, c1, r0, r1, tall);
    const shown = cell / base;
    scaleText.textContent = `${shown < 10 ? shown.toFixed(1) : Math.round(shown)}×`;
    canvas.style.touchAction = shown > 1.2 ? "none" : "pan-y";
    Object.assign(canvas.dataset, { cell: cell.toFixed(3), tall: tc.toFixed(3), row, col, left: m.left, top: m.top, x: x0.toFixed(3), y: y0.toFixed(3) });
  }
  function names(pen, ink, m, X, Y, c0, c1, r0, r1, tall) {
    pen.font = "12px system-ui, sans-serif"; pen.textBaseline = "middle";
    const across = m.top > 22, down = m.left > 22;
    pen.fillStyle = ink.getPropertyValue("--muted"); pen.textAlign = "left";
    if (!across) pen.fillText("keys →", m.left, 10);
    if (!down) { pen.save(); pen.translate(10, m.top); pen.rotate(Math.PI / 2); pen.fillText("queries →", 0, 0); pen.restore(); }
    const clip = (text, most) => { let t = text; while (t.length > 1 && pen.measureText(t).width > most) t = t.slice(0, -1); return t === text ? t : `${t.slice(0, -1)}…`; };
    const colour = (on) => ink.getPropertyValue(on ? "--accent" : "--ink");
    pen.save(); pen.beginPath(); pen.rect(0, m.top, m.left, tall - m.top); pen.clip(); pen.textAlign = "right";
    for (let r = r0; down && r < r1; r++) {
      pen.fillStyle = colour(r === row);
      pen.fillText(clip(unitText(view.queryAxis, view.queries[r], view.joined), m.left - 16), m.left - 8, Y(r + 0.5));
    }
    pen.restore();
    pen.save(); pen.beginPath(); pen.rect(m.left - 20, 0, side - m.left + 20, m.top); pen.clip(); pen.textAlign = "left";
    for (let c = c0; across && c < c1; c++) {
      pen.save(); pen.translate(X(c + 0.5), m.top - 7); pen.rotate(-Math.PI / 3.2);
      pen.fillStyle = view.hidden && view.hidden[c] ? ink.getPropertyValue("--muted") : colour(c === col);
      pen.fillText(clip(unitText(view.keyAxis, view.keys[c], view.joined), 82), 0, 0); pen.restore();
    }
    pen.restore();
  }
  function showLegend() {
    const odd = view.values.some((w) => w !== w);
    const block = view.block, what = view.single ? "Weight" : `Weight of a block of keys (mean of up to ${block[0]} queries, sum of up to ${block[1]} keys)`;
    fill(legendBox, legend(most(), what), odd ? h("p", { class: "small" }, h("span", { class: "nan" }), " Not a number (NaN)") : null);
  }
  const locate = (event) => {
    const box = canvas.getBoundingClientRect(), m = margin();
    const px = event.clientX - box.left, py = event.clientY - box.top;
    const c = Math.floor((px - m.left) / cell + x0), r = Math.floor((py - m.top) / tallCell() + y0);
    return { px, py, r: py >= m.top && r >= 0 && r < view.rows ? r : -1, c: px >= m.left && c >= 0 && c < view.cols ? c : -1 };
  };
  canvas.addEventListener("wheel", (event) => {
    const { px, py } = locate(event);
    if (zoomBy(Math.exp(-event.deltaY * (event.ctrlKey ? 0.01 : 0.0018)), px, py)) event.preventDefault();
  }, { passive: false });
  const pointers = new Map();
  let moved = 0;
  canvas.addEventListener("pointerdown", (event) => { canvas.setPointerCapture(event.pointerId); pointers.set(event.pointerId, event); moved = 0; });
  canvas.addEventListener("pointermove", (event) => {
    const before = pointers.get(event.pointerId);
    if (before) {
      if (pointers.size === 1) {
        x0 -= (event.clientX - before.clientX) / cell; y0 -= (event.clientY - before.clientY) / tallCell();
        moved += Math.abs(event.clientX - before.clientX) + Math.abs(event.clientY - before.clientY);
        render();
      } else {
        const other = [...pointers.entries()].find(([id]) => id !== event.pointerId)[1];
        const far = (p) => Math.hypot(p.clientX - other.clientX, p.clientY - other.clientY) || 1;
        const box = canvas.getBoundingClientRect();
        moved += 9;
        zoomBy(far(event) / far(before), (event.clientX + other.clientX) / 2 - box.left, (event.clientY + other.clientY) / 2 - box.top);
      }
      pointers.set(event.pointerId, event);
      return;
    }
    const { r, c } = locate(event);
    onpoint(r, c);
  });
  const lift = (event) => {
    const had = pointers.delete(event.pointerId);
    if (had && event.type === "pointerup" && moved < 5) { const { r, c } = locate(event); if (r >= 0 || c >= 0) onpick(r, c); }
  };
  canvas.addEventListener("pointerup", lift);
  canvas.addEventListener("pointercancel", lift);
  canvas.addEventListener("pointerleave", () => { if (!pointers.size) onpoint(-1, -1); });
  canvas.addEventListener("blur", () => { cursor = false; render(); });
  canvas.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || !view) return;
    const move = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
    if (event.key === "+" || event.key === "=") zoomBy(1.6);
    else if (event.key === "-" || event.key === "_") zoomBy(1 / 1.6);
    else if (event.key === "0") reset();
    else if (event.key === "Enter" && row >= 0) onpick(row, col);
    else if (move && event.shiftKey) { y0 += move[0] * 3; x0 += move[1] * 3; render(); }
    else if (move) {
      cursor = true;
      const r = Math.max(0, Math.min(view.rows - 1, Math.max(row, 0) + move[0]));
      const c = Math.max(0, Math.min(view.cols - 1, Math.max(col, 0) + move[1]));
      const m = margin(), wide = (side - m.left) / cell, tall = (high() - m.top) / tallCell();
      if (c < x0) x0 = c; if (c + 1 > x0 + wide) x0 = c + 1 - wide;
      if (r < y0) y0 = r; if (r + 1 > y0 + tall) y0 = r + 1 - tall;
      onpoint(r, c);
      say(`Query ${unitText(view.queryAxis, view.queries[r], view.joined)}, key ${unitText(view.keyAxis, view.keys[c], view.joined)}: ${weightText(view.values[r * view.cols + c])}`);
    } else return;
    event.preventDefault();
    event.stopPropagation();
  });
  const sized = new ResizeObserver(() => {
    const wide = canvas.clientWidth;
    if (wide === side) return;
    side = wide;
    reset();
  });
  sized.observe(canvas);
  picture = document.createElement("canvas");
  return {
    el, reset, zoomBy,
    set(next) {
      const same = view && view.rows === next.rows && view.cols === next.cols && side;
      view = next;
      canvas.setAttribute("aria-label", `Map of ${headTitle(view.module, view.head)}: ${view.rows} × ${view.cols} cells`);
      const shape = Math.max(0.35, Math.min(1, view.rows / view.cols + 0.08));
      stretch = Math.max(1, (0.3 * view.cols) / view.rows);
      canvas.style.aspectRatio = String(1 / shape);
      side = canvas.clientWidth;
      if (same) render(); else reset();
      showLegend();
    },
    mark(r, c) { row = r; col = c; render(); },
    redraw() { if (view) { render(); showLegend(); } },
    cell: () => (row >= 0 && col >= 0 ? view.values[row * view.cols + col] : null),
  };
}
