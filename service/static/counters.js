// Figures from the server's counters: what lies between two readings of /metrics.

const SAMPLE = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)/;
const LABEL = /(\w+)="((?:[^"\\]|\\.)*)"/g;

// Prometheus's text format, version 0.0.4.
export function samples(text) {
  return text.split("\n").flatMap((line) => {
    const found = SAMPLE.exec(line);
    if (!found) return [];
    const [, name, labels = "", value] = found;
    const pairs = [...labels.matchAll(LABEL)].map(([, key, each]) => [key, each]);
    return [{ name, labels: Object.fromEntries(pairs), value: Number(value) }];
  });
}

// What one reading holds of each backend.
export function reading(text, time_s) {
  const backends = {};
  for (const { name, labels, value } of samples(text)) {
    if (labels.backend === undefined || labels.backend === "none") continue;
    const each = (backends[labels.backend] ??= { requests: 0, seconds: [], batchRows: 0, batches: 0 });
    if (name === "mlp_requests_total") each.requests += value;
    const bound = labels.le === "+Inf" ? Infinity : Number(labels.le);
    if (name === "mlp_request_seconds_bucket") each.seconds.push([bound, value]);
    if (name === "mlp_batch_rows_sum") each.batchRows = value;
    if (name === "mlp_batch_rows_count") each.batches = value;
  }
  return { time_s, backends };
}

// A percentile of what came between two cumulative histograms, as if evenly spread within its bucket; null of nothing.
export function quantile(share, before, after) {
  const counts = after.map(([bound, count], index) => [bound, count - (before[index]?.[1] ?? 0)]);
  const total = counts.at(-1)?.[1] ?? 0;
  if (!(total > 0)) return null;
  const rank = share * total;
  const index = counts.findIndex(([, count]) => count >= rank);
  const [low, below] = index ? counts[index - 1] : [0, 0];
  const [high, upto] = counts[index];
  return high === Infinity ? low : low + ((high - low) * (rank - below)) / (upto - below || 1);
}

// Rate, percentiles and batch size of a backend between two readings.
export function figures(name, before, after) {
  const [old, now] = [before.backends[name], after.backends[name]];
  const batches = now.batches - old.batches;
  const ms = (share) => {
    const seconds = quantile(share, old.seconds, now.seconds);
    return seconds === null ? null : 1e3 * seconds;
  };
  return {
    rate: (now.requests - old.requests) / (after.time_s - before.time_s),
    p50: ms(0.5),
    p99: ms(0.99),
    batch: batches > 0 ? (now.batchRows - old.batchRows) / batches : null,
  };
}

// Whether the counters went on from one reading to the next; a server that was started anew begins at 0.
export const goesOn = (before, after) =>
  Object.entries(before.backends).every(([name, each]) => (after.backends[name]?.requests ?? -1) >= each.requests);
