// From a head's map to what is shown: special and first tokens set aside, pieces joined into words.

/** A unit is what one row or column stands for: a token, a word, or a block of tokens. */
function tokenUnits(axis) {
  return once(`units ${axis.name}`, () => Array.from({ length: axis.count }, (_, i) => ({ from: i, to: i + 1 })));
}

function blockUnits(axis, size) {
  if (size === 1) return tokenUnits(axis);
  const units = [];
  for (let i = 0; i < axis.count; i += size) units.push({ from: i, to: Math.min(axis.count, i + size) });
  return units;
}

function wordUnits(axis) {
  const units = [];
  for (let i = 0; i < axis.count; i++) {
    const last = units[units.length - 1], word = axis.words ? axis.words[i] : -1;
    if (last && word >= 0 && last.word === word) last.to = i + 1;
    else units.push({ from: i, to: i + 1, word });
  }
  return units;
}

const joinable = (axis) => !!axis.words && wordUnits(axis).length < axis.count;

/** Zero the marked columns and rescale each row to sum to 1. A row with nothing left stays 0. */
function renormalise(values, rows, cols, hidden) {
  const out = new Float64Array(values.length);
  for (let r = 0; r < rows; r++) {
    let sum = 0;
    for (let c = 0; c < cols; c++) if (!hidden[c]) sum += values[r * cols + c];
    // Rounding of what is left of a row that held nothing else must not be blown up to 1.
    if (!(sum > 1e-6) && sum === sum) continue;
    for (let c = 0; c < cols; c++) if (!hidden[c]) out[r * cols + c] = values[r * cols + c] / sum;
  }
  return out;
}

/** Sum over a word's key pieces, mean over its query pieces. */
function joinWords(values, cols, queryUnits, keyUnits) {
  const out = new Float64Array(queryUnits.length * keyUnits.length);
  queryUnits.forEach((q, r) => keyUnits.forEach((k, c) => {
    let sum = 0;
    for (let i = q.from; i < q.to; i++) for (let j = k.from; j < k.to; j++) sum += values[i * cols + j];
    out[r * keyUnits.length + c] = sum / (q.to - q.from);
  }));
  return out;
}

/** What a head's page draws. Null where the head has no map. */
async function viewOf(module, head, { hide, words }) {
  const map = await mapOf(module, head);
  if (!map) return null;
  const queryAxis = AXES[module.query_axis], keyAxis = AXES[module.key_axis];
  const single = isSingle(module);
  let { rows, cols, values } = map;
  let queries = blockUnits(queryAxis, map.block[0]), keys = blockUnits(keyAxis, map.block[1]);
  let hidden = null;
  if (hide) {
    hidden = keys.map((unit) => { for (let i = unit.from; i < unit.to; i++) if (keyAxis.setAside(i)) return true; return false; });
    values = renormalise(values, rows, cols, hidden);
  }
  const joined = words && single && (joinable(queryAxis) || joinable(keyAxis));
  if (joined) {
    const q = wordUnits(queryAxis), k = wordUnits(keyAxis);
    values = joinWords(values, cols, q, k);
    if (hidden) hidden = k.map((unit) => { for (let i = unit.from; i < unit.to; i++) if (!hidden[i]) return false; return true; });
    [queries, keys, rows, cols] = [q, k, q.length, k.length];
  }
  let most = 0;
  for (const w of values) if (w > most) most = w;
  return { module, head, queryAxis, keyAxis, queries, keys, rows, cols, values, hidden, most, single, joined,
    block: map.block, exact: isExact(module) };
}

const rowOf = (view, r) => view.values.slice(r * view.cols, (r + 1) * view.cols);
const columnOf = (view, c) => Float64Array.from({ length: view.rows }, (_, r) => view.values[r * view.cols + c]);

function unitAt(units, token) {
  let low = 0, high = units.length - 1;
  while (low < high) {
    const mid = (low + high + 1) >> 1;
    if (units[mid].from <= token) low = mid; else high = mid - 1;
  }
  return low;
}

/** The exact strongest keys of a query, where they were kept: [[key, weight], …], else null. */
async function topOf(module, head, query) {
  const top = await topsOf(module);
  if (!top) return null;
  for (let i = head * top.count; i < (head + 1) * top.count; i++) {
    if (top.rows[i] !== query) continue;
    const found = [];
    for (let j = i * top.k; j < (i + 1) * top.k; j++) if (top.keys[j] >= 0) found.push([top.keys[j], top.weights[j]]);
    return found;
  }
  return null;
}

/** Queries that have this key among their kept strongest: [[query, weight], …]. */
async function topTo(module, head, key) {
  const top = await topsOf(module), found = [];
  if (!top) return found;
  for (let i = head * top.count * top.k; i < (head + 1) * top.count * top.k; i++) {
    if (top.keys[i] === key) found.push([top.rows[Math.floor(i / top.k)], top.weights[i]]);
  }
  return found.sort((a, b) => b[1] - a[1]);
}

/** Queries of an axis whose exact strongest keys were kept; null where every weight is there. */
async function keptQueries(axis) {
  const modules = MODULES.filter((m) => m.query_axis === axis.name);
  if (modules.some(isSingle)) return null;
  const kept = new Set();
  for (const module of modules) {
    const top = await topsOf(module);
    if (top) for (const row of top.rows) if (row >= 0) kept.add(row);
  }
  return [...kept].sort((a, b) => a - b);
}

/**
 * Links of a token over all heads: {from: token as query, to: token as key}, each a list of
 * {module, head, other, weight, exact} with weights above `least`.
 */
async function linksOf(axis, token, least) {
  const from = [], to = [];
  for (const module of MODULES) {
    const asQuery = module.query_axis === axis.name, asKey = module.key_axis === axis.name;
    if (!asQuery && !asKey) continue;
    const maps = isSingle(module) ? await mapsOf(module) : null;
    for (let head = 0; head < module.heads; head++) {
      if (maps) {
        if (maps.missing.has(head)) continue;
        const start = head * maps.rows * maps.cols, exact = isExact(module);
        if (asQuery) {
          // Coarse cells are for colour; where exact strongest keys were kept, they are the numbers.
          const top = exact ? null : await topOf(module, head, token);
          if (top) { for (const [other, weight] of top) if (weight > least) from.push({ module, head, other, weight, exact: true }); }
          else for (let c = 0; c < maps.cols; c++) {
            const weight = maps.values[start + token * maps.cols + c];
            if (weight > least) from.push({ module, head, other: c, weight, exact });
          }
        }
        if (asKey) {
          for (let r = 0; r < maps.rows; r++) {
            const weight = maps.values[start + r * maps.cols + token];
            if (weight > least) to.push({ module, head, other: r, weight, exact });
          }
        }
      } else {
        if (asQuery) for (const [other, weight] of (await topOf(module, head, token)) || []) {
          if (weight > least) from.push({ module, head, other, weight, exact: true });
        }
        if (asKey) for (const [other, weight] of await topTo(module, head, token)) {
          if (weight > least) to.push({ module, head, other, weight, exact: true });
        }
      }
    }
  }
  const order = (a, b) => b.weight - a.weight;
  return { from: from.sort(order), to: to.sort(order) };
}
