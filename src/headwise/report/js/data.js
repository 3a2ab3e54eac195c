// The embedded records: texts at once, arrays when somebody looks at them.

const RAW = JSON.parse(byId("data").textContent);
const RUN = RAW.run;
const AXES = RAW.axes;
const MODULES = RAW.modules;
const cache = new Map();

async function inflate(base64) {
  const bytes = Uint8Array.from(atob(base64), (c) => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

function once(key, make) {
  if (!cache.has(key)) cache.set(key, make());
  return cache.get(key);
}

// 60 steps to a thousandth, edges where a third decimal rounds up: three decimals are exact.
function decode16(code) {
  if (code === 65535) return NaN;
  return code === 0 ? 0 : Math.max(1e-6, (code - 0.5) / 60000 - 0.0005);
}
const decode8 = (code) => (code === 255 ? NaN : (code / 254) ** 2);

function decodeWeights(bytes, bits) {
  if (bits === "f32") return new Float32Array(bytes.buffer);
  if (bits === "u16") return Float32Array.from(new Uint16Array(bytes.buffer), decode16);
  const table = Float32Array.from({ length: 256 }, (_, code) => decode8(code));
  const out = new Float32Array(bytes.length);
  for (let i = 0; i < bytes.length; i++) out[i] = table[bytes[i]];
  return out;
}

/** All maps of a module: weights (heads, rows, cols), each a key block's share of a query's weight. */
function mapsOf(module) {
  return once(`map ${module.id}`, async () => {
    if (!module.map) return null;
    const { bits, rows, cols, block, missing, data } = module.map;
    const values = decodeWeights(await inflate(data), bits);
    return { bits, rows, cols, block, values, missing: new Set(missing), ready: true };
  });
}

async function mapOf(module, head) {
  const all = await mapsOf(module);
  if (!all || all.missing.has(head)) return null;
  const size = all.rows * all.cols;
  return { ...all, values: all.values.subarray(head * size, (head + 1) * size) };
}

const isSingle = (module) => !!module.map && module.map.block[0] === 1 && module.map.block[1] === 1;
/** Every weight is there, to three decimals. */
const isExact = (module) => isSingle(module) && module.map.bits !== "u8";

/** Exact strongest keys of chosen queries. */
function topsOf(module) {
  return once(`top ${module.id}`, async () => {
    if (!module.top) return null;
    const [a, b, c] = await Promise.all(module.top.data.map(inflate));
    const rows = new Int32Array(a.buffer), keys = new Int32Array(b.buffer), { k } = module.top;
    for (let i = 0; i < keys.length; i++) {
      keys[i] = keys[i] === 2147483647 ? -1 : rows[Math.floor(i / k)] - keys[i];
    }
    return { count: module.top.rows, k, rows, keys, weights: decodeWeights(c, "u16") };
  });
}

function receivedOf(module) {
  return once(`received ${module.id}`, async () => {
    if (!module.received) return null;
    const codes = new Uint16Array((await inflate(module.received.data)).buffer);
    const { count, scale, block } = module.received;
    return { count, block, values: Float32Array.from(codes, (c, i) => (c / 65535) * scale[Math.floor(i / count)]) };
  });
}

function similarityOf(module) {
  return once(`similarity ${module.id}`, async () => {
    if (!module.similarity) return null;
    const out = { clusters: module.similarity.clusters };
    for (const name of ["cosine", "bhattacharyya"]) {
      if (module.similarity[name]) out[name] = decodeWeights(await inflate(module.similarity[name]), "u16");
    }
    return out;
  });
}

/** Fill in each axis: its texts, and which of its tokens are special, padding or first. */
async function readAxes() {
  for (const [name, axis] of Object.entries(AXES)) {
    axis.name = name;
    if (axis.tokens_deflated) {
      axis.tokens = JSON.parse(new TextDecoder().decode(await inflate(axis.tokens_deflated)));
    }
    if (axis.words) axis.words = new Int32Array((await inflate(axis.words)).buffer);
    axis.special = new Set(axis.special);
    axis.padding = new Set(axis.padding);
    axis.first = 0;
    while (axis.padding.has(axis.first)) axis.first++;
    // A picture's or a sound's first place is a place like any other; a text's first token is a
    // common sink.
    axis.setAside = (i) => axis.special.has(i) || axis.padding.has(i) || (axis.kind === "text" && i === axis.first);
    if (axis.kind === "image") {
      axis.patch = new Int32Array(axis.count).fill(-1);
      let n = 0;
      for (let i = 0; i < axis.count; i++) if (!axis.special.has(i)) axis.patch[i] = n++;
    }
  }
}

const moduleById = (id) => MODULES.find((module) => module.id === id);
const sections = () => [...new Set(MODULES.map((module) => module.section))];
const headName = (module, head) => `L${module.layer}H${head}`;
const headLink = (module, head, query) =>
  `#/head/${encodeURIComponent(module.id)}/${head}${query === undefined || query === null ? "" : `?q=${query}`}`;
const headTitle = (module, head) => `Layer ${module.layer}, head ${head}`;
/** Every head in the order of the grid. */
const allHeads = () => MODULES.flatMap((module) => Array.from({ length: module.heads }, (_, head) => ({ module, head })));

/** What the person has chosen; the address holds what is worth linking to. */
const state = {
  hide: false, words: false, query: null,
  pick: null, // {axis, token}
  include: { aside: false, own: false, before: false }, flat: false,
  grid: { section: null, key: "entropy", order: "layer", down: true, low: null, high: null, label: "" },
  table: { section: null, key: null, down: true, all: false },
  similarity: { section: null, measure: "bhattacharyya", grouped: true },
};
