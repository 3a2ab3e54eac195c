// How a token, a patch or a moment is written, so that spaces and odd signs can be seen.

const ODD = /[\u0000-\u001f\u007f-\u009f\u00ad\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]/;

/** A token's text as nodes: spaces as a thin mark, line ends as ⏎, unprintable signs by number. */
function tokenNodes(text) {
  if (text === "") return [h("span", { class: "mark" }, "(empty)")];
  const nodes = [];
  let plain = "";
  const flush = () => { if (plain) nodes.push(h("bdi", {}, plain)); plain = ""; };
  const mark = (sign) => { flush(); nodes.push(h("span", { class: "mark" }, sign)); };
  const signs = [...text];
  const lead = signs.findIndex((s) => s !== " "), body = lead < 0 ? signs.length : lead;
  signs.forEach((sign, i) => {
    if (sign === " " && (i < body || i === signs.length - 1)) mark("·");
    else if (sign === "\n") mark("⏎");
    else if (sign === "\t") mark("⇥");
    else if (ODD.test(sign)) mark(`U+${sign.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}`);
    else plain += sign;
  });
  flush();
  if (text.startsWith("##") && text.length > 2) {
    fill(nodes[0], text.slice(2));
    nodes.unshift(h("span", { class: "mark" }, "##"));
  }
  return nodes;
}

/** The same as one line of plain text, for labels on canvas and for screen readers. */
function tokenText(text) {
  if (text === "") return "(empty)";
  return [...text].map((s) => (s === "\n" ? "⏎" : s === "\t" ? "⇥" : ODD.test(s) ? "�" : s)).join("").replace(/^ +/, (s) => "·".repeat(s.length));
}

function placeName(axis, i) {
  if (axis.special.has(i) && axis.tokens[i]) return axis.tokens[i];
  if (axis.kind === "image") {
    const n = axis.patch[i], cols = axis.grid[1];
    return `row ${Math.floor(n / cols)}, column ${n % cols}`;
  }
  if (axis.kind === "audio") return `${(i * axis.step).toFixed(2)} s`;
  return axis.tokens[i];
}

/** A unit's name as text: its token, its joined pieces, or the range of its block. */
function unitText(axis, unit, joined) {
  if (axis.kind === "text") {
    if (unit.to - unit.from === 1) return tokenText(axis.tokens[unit.from]);
    if (joined) return tokenText(wordText(axis, unit));
    return `tokens ${unit.from}–${unit.to - 1}`;
  }
  if (unit.to - unit.from === 1) return placeName(axis, unit.from);
  if (axis.kind === "audio") return `${(unit.from * axis.step).toFixed(2)}–${(unit.to * axis.step).toFixed(2)} s`;
  return `${placeName(axis, unit.from)} to ${placeName(axis, unit.to - 1)}`;
}

function wordText(axis, unit) {
  return axis.tokens.slice(unit.from, unit.to).map((t, i) => (i && t.startsWith("##") ? t.slice(2) : t)).join("");
}

function unitNodes(axis, unit, joined) {
  if (axis.kind === "text" && unit.to - unit.from === 1) return tokenNodes(axis.tokens[unit.from]);
  if (axis.kind === "text" && joined) return tokenNodes(wordText(axis, unit));
  if (axis.kind === "text") {
    const words = axis.tokens.slice(unit.from, unit.from + 6).join("").trim().slice(0, 30);
    return [h("span", {}, unitText(axis, unit)), h("span", { class: "mark" }, ` ${tokenText(words)} …`)];
  }
  return [unitText(axis, unit, joined)];
}

/** Tokens whose text is, or else begins with, or else holds the words sought. */
function findTokens(axis, sought) {
  const want = sought.trim().toLowerCase();
  if (!want) return [];
  const whole = [], start = [], inside = [];
  for (let i = 0; i < axis.count && whole.length < 500; i++) {
    const text = placeName(axis, i).trim().toLowerCase().replace(/^##/, "");
    if (text === want) whole.push(i);
    else if (text.startsWith(want)) { if (start.length < 500) start.push(i); }
    else if (text.includes(want) && inside.length < 500) inside.push(i);
  }
  return whole.length ? whole : start.length ? start : inside;
}
