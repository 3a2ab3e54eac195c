// What the page was made from, what a reader must know, and what could not be caught.

const FACTS = [["model", "Model"], ["source", "Source"], ["about", "What it is"], ["licence", "Licence"], ["input_kind", "Input"], ["note", "Note"], ["dtype", "Data type"], ["device", "Device"],
  ["backend", "Attention backend"], ["created", "Made"], ["seconds", "Seconds it took"], ["headwise", "headwise"], ["torch", "torch"],
  ["transformers", "transformers"], ["python", "Python"], ["command", "Command"]];

const dateText = (text) => { const d = new Date(text); return Number.isNaN(d.getTime()) ? String(text) : d.toISOString().replace("T", " ").slice(0, 16) + " UTC"; };
const factText = (key, value) => (key === "created" ? dateText(value) : typeof value === "number" ? numberText(value) : String(value));

function intro() {
  const heads = allHeads().length, layers = new Set(MODULES.map((m) => m.layer)).size;
  const texts = Object.values(AXES).filter((a) => a.kind === "text" && a.text);
  const sizes = Object.values(AXES).map((a) => `${a.count.toLocaleString("en")} ${{ text: "tokens", image: "patches and special tokens", audio: "steps of sound" }[a.kind]}`);
  const facts = [["dtype", RUN.dtype], ["backend", RUN.backend], ["device", RUN.device], ["headwise", RUN.headwise && `headwise ${RUN.headwise}`], ["torch", RUN.torch && `torch ${RUN.torch}`],
    ["transformers", RUN.transformers && `transformers ${RUN.transformers}`], ["created", RUN.created && dateText(RUN.created)]].filter(([, v]) => v);
  return h("div", { class: "intro" }, h("h1", {}, String(RUN.model ?? "A model")),
    h("p", { class: "lead" }, `${heads} attention heads in ${layers} layers, on ${sizes.join(" and ")}.`),
    RUN.note ? h("p", { class: "muted" }, String(RUN.note)) : null,
    texts.map((axis) => (axis.count > 400 ? h("blockquote", {}, axis.text) : null)),
    h("p", { class: "facts muted small" }, facts.map(([, v]) => h("span", {}, String(v)))),
    RUN.command ? h("p", { class: "muted small" }, "Made by ", h("code", {}, String(RUN.command))) : null,
    h("p", { class: "caution small" }, "Attention maps are clues, not explanations: a weight says where a head looks, not what the model does with it."),
    (RUN.not_caught || []).length ? h("p", { class: "warning small", id: "not-caught" }, h("b", {}, "What could not be caught: "), RUN.not_caught.map(String).join("; "), ".") : null,
    MODULES.filter((m) => m.summary && m.summary.collapse).map((m) => h("p", { class: "warning small" }, h("b", {}, `Layer ${m.layer}, ${m.section}: `), "entropy is near its lower bound (entropy collapse): ",
      Object.entries(m.summary.collapse).map(([k, v]) => `${k.replaceAll("_", " ")} ${typeof v === "number" ? numberText(v) : v}`).join(", "), ".")));
}

function aboutPage() {
  const fact = (name, value) => h("tr", {}, h("th", { scope: "row" }, name), h("td", {}, value));
  const forms = { f32: "as recorded (32-bit floats)", u16: "to 3 decimals exactly (16 bits)", u8: "rounded to 254 steps of the square root (8 bits); tables of strongest keys are exact" };
  const shapes = sections().map((name) => {
    const m = MODULES.find((one) => one.section === name && one.map);
    return fact(`Maps, ${name}`, m ? `${m.map.rows} × ${m.map.cols} cells of ${m.map.block[0]} × ${m.map.block[1]} weights, ${forms[m.map.bits]}` : "none recorded");
  });
  return { el: h("div", { class: "page prose-page" }, h("h1", {}, "About this page"),
    h("section", { class: "panel" }, h("h2", {}, "Made from"), h("div", { class: "scroll" }, h("table", { class: "data facts" }, h("tbody", {},
      FACTS.filter(([key]) => RUN[key] !== undefined && RUN[key] !== null && RUN[key] !== "").map(([key, name]) => fact(name, factText(key, RUN[key]))), shapes,
      RAW.top ? fact("Strongest keys", `${RAW.top.keys} a query${RAW.top.step > 1 ? `, of every ${RAW.top.step}th query recorded` : ""}`) : null,
      fact("Could not be caught", (RUN.not_caught || []).length ? RUN.not_caught.map(String).join("; ") : "nothing that was seen"))))),
    h("section", { class: "panel" }, h("h2", {}, "How to read it"),
      h("p", {}, "A head's map has a row for each query and a column for each key. A weight is the share of its attention that the query gives to the key; a row sums to 1, or to less where a learned sink takes part of it."),
      h("p", {}, "Maps are clues, not explanations. A strong weight on a token that carries little (the first token, a separator) is often a resting place, not a finding. The same head may behave differently on the next sentence. To learn what a head does, change it and measure the model."),
      h("p", {}, "Colours follow the square root of the weight, from light to dark on light ground and from dark to light on dark ground. Cells without colour are exactly 0, as under a causal mask."),
      h("p", {}, "Names such as sink or local are given to heads by these thresholds. A name is a clue too."),
      h("div", { class: "scroll" }, h("table", { class: "data facts" }, h("tbody", {}, Object.entries(RUN.thresholds || {}).map(([name, value]) =>
        fact(THRESHOLD_TEXTS[name] ?? name, h("b", { class: "num" }, typeof value === "number" ? numberText(value) : String(value)))))))),
    h("section", { class: "panel" }, h("h2", {}, "Statistics"), h("div", { class: "scroll" }, h("table", { class: "data facts" }, h("tbody", {}, presentStatistics().map((s) => fact(s.name, [s.text, s.unit ? h("span", { class: "muted" }, ` (${s.unit})`) : null])))))),
    h("section", { class: "panel" }, h("h2", {}, "Attention modules"), h("div", { class: "scroll" }, h("table", { class: "data" },
      h("thead", {}, h("tr", {}, ["Layer", "Kind", "Module", "Heads", "Key/value heads", "Head size", "Queries × keys", "Mask"].map((t) => h("th", { scope: "col" }, t)))),
      h("tbody", {}, MODULES.map((m) => h("tr", {}, [m.layer, m.section, h("code", {}, m.module ?? m.id), m.heads, m.kv_heads ?? "–", m.head_dim ?? "–", `${m.queries} × ${m.keys}`, m.mask ?? "–"].map((v) => h("td", {}, v instanceof Node ? v : String(v)))))))))) };
}
