// Random rows that a seed tells again: the same seed, the same rows, in every browser.

// Source: Tommy Ettinger's mulberry32, public domain.
export function uniform(seed) {
  let state = seed >>> 0;
  return () => {
    state = (state + 0x6d2b79f5) >>> 0;
    let mixed = state;
    mixed = Math.imul(mixed ^ (mixed >>> 15), mixed | 1);
    mixed ^= mixed + Math.imul(mixed ^ (mixed >>> 7), mixed | 61);
    return ((mixed ^ (mixed >>> 14)) >>> 0) / 2 ** 32;
  };
}

const normal = (next) => Math.sqrt(-2 * Math.log(1 - next())) * Math.cos(2 * Math.PI * next());

const rows = (count, width, draw) => Array.from({ length: count }, () => Array.from({ length: width }, draw));

export function normalRows(count, width, seed) {
  const next = uniform(seed);
  return rows(count, width, () => Math.round(1e4 * normal(next)) / 1e4);
}

export function pixelRows(count, width, seed) {
  const next = uniform(seed);
  return rows(count, width, () => Math.floor(17 * next()));
}
