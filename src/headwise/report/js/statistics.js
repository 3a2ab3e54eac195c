// What is measured of a head, in plain words. Definitions: headwise's METRICS.

const STATISTICS = [
  ["entropy", "Entropy", "nats", "How spread a query's weight is: 0 is one key only. Mean over queries."],
  ["effective_keys", "Effective keys", "keys", "e to the power of the entropy: about how many keys share the weight."],
  ["relative_entropy", "Relative entropy", "", "Entropy divided by its largest possible value: 1 is an even spread over all visible keys."],
  ["largest_weight", "Largest weight", "", "The strongest weight of a query. Mean over queries."],
  ["distance", "Distance", "tokens", "How far from the query its weight lies. Mean over queries."],
  ["distance_ratio", "Distance ratio", "", "Distance divided by that of an even spread: below 1 is nearer than even."],
  ["sink_1", "Sink, 1st token", "", "Mean weight that later queries give to the first real token."],
  ["sink_2", "Sink, 2nd token", "", "Mean weight that later queries give to the second real token."],
  ["sink_3", "Sink, 3rd token", "", "Mean weight that later queries give to the third real token."],
  ["sink_4", "Sink, 4th token", "", "Mean weight that later queries give to the fourth real token."],
  ["previous_token", "Previous token", "", "Mean weight on the token just before the query."],
  ["own_token", "Own token", "", "Mean weight on the query's own token."],
  ["duplicate_token", "Duplicate token", "", "Mean weight on earlier copies of the query's token, over queries that have one."],
  ["induction", "Induction", "", "Weight on the token after an earlier copy of the query's token, measured on repeated random tokens."],
  ["hidden_mass", "Hidden mass", "", "Weight on keys that the declared mask hides. It must be exactly 0."],
  ["sink_logit_mass", "Sink-logit mass", "", "Weight that goes to a learned sink instead of any key."],
  ["importance", "Importance", "", "How much the next-token loss on this text leans on the head (Michel et al. 2019). The squares of a layer's heads sum to 1."],
  ["rows", "Rows", "queries", "How many queries were counted."],
].map(([key, name, unit, text]) => ({ key, name, unit, text }));

const LABEL_TEXTS = {
  "sink": "much of the weight goes to the first token",
  "previous-token": "much of the weight goes to the token before",
  "local": "the weight stays near the query",
  "broad": "the weight is spread almost evenly",
  "redundant": "another head of the layer does nearly the same",
  "induction": "finds what came after an earlier copy",
  "duplicate-token": "finds earlier copies of the token",
};

/** What a threshold of the records means; the number follows. */
const THRESHOLD_TEXTS = {
  sink: "sink: mean weight on the first token above",
  previous_token: "previous-token: mean weight on the token before above",
  duplicate_token: "duplicate-token: mean weight on earlier copies above",
  induction: "induction: mean weight after earlier copies above",
  matched_rows: "duplicate-token, induction: rows with an earlier copy, at least",
  local: "local: weight at distances below 8 above",
  local_ratio: "local: and distance ratio below",
  broad: "broad: relative entropy above",
  redundant: "redundant: overlap (Bhattacharyya) with its cluster at least",
  collapse: "entropy collapse: share above its lower bound, at most",
};

/** Statistics that at least one head has, known ones first, unknown ones under their own name. */
const presentStatistics = (() => {
  let found = null;
  return () => {
    if (found) return found;
    const seen = new Set();
    for (const module of MODULES) {
      for (const [key, column] of Object.entries(module.stats)) {
        if (column.some((v) => typeof v === "number" || v === "nan" || v === "inf" || v === "-inf")) seen.add(key);
      }
    }
    const known = STATISTICS.filter((s) => seen.delete(s.key));
    return (found = [...known, ...[...seen].map((key) => ({ key, name: key.replaceAll("_", " "), unit: "", text: "" }))]);
  };
})();

const WORDS_OF_NUMBERS = { nan: NaN, inf: Infinity, "-inf": -Infinity };
/** A head's statistic as a number; null where it was not measured. */
function statistic(module, head, key) {
  const value = (module.stats[key] || [])[head];
  if (typeof value === "number") return value;
  return value in WORDS_OF_NUMBERS ? WORDS_OF_NUMBERS[value] : null;
}
const labelsOf = (module, head) => (module.stats.labels || [])[head] || [];
const allLabels = () => [...new Set(allHeads().flatMap(({ module, head }) => labelsOf(module, head)))].sort();

function numberText(value) {
  if (value === null || value === undefined) return "–";
  if (Number.isNaN(value)) return "NaN";
  if (!Number.isFinite(value)) return value > 0 ? "∞" : "−∞";
  const size = Math.abs(value);
  if (value === 0 || (Number.isInteger(value) && size < 1e6)) return String(value);
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  if (size >= 100) return value.toFixed(1);
  return size < 0.0005 ? value.toExponential(1) : value.toFixed(3);
}

/** A weight with three decimals; what is above 0 but rounds to it is said to be small. */
function weightText(weight) {
  if (weight === null || weight === undefined) return "–";
  if (weight !== weight) return "NaN";
  if (weight > 0 && weight < 0.0005) return "<0.001";
  return weight.toFixed(3);
}

function labelChip(label) {
  const limit = (RUN.thresholds || {})[label] ?? (RUN.thresholds || {})[label.replaceAll("-", "_")];
  const hint = [LABEL_TEXTS[label], typeof limit === "number" ? `threshold ${numberText(limit)}` : null];
  return h("span", { class: "chip", title: hint.filter(Boolean).join("; "), "data-label": label }, label);
}

/** Sort: numbers first, then NaN, then what was not measured. */
function compareValues(a, b, down) {
  const rank = (v) => (v === null || v === undefined ? 2 : Number.isNaN(v) ? 1 : 0);
  if (rank(a) !== rank(b)) return rank(a) - rank(b);
  if (rank(a)) return 0;
  return (a < b ? -1 : a > b ? 1 : 0) * (down ? -1 : 1);
}
