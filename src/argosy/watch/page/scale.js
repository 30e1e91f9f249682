// Scales, ticks and the ways an x axis counts.
import { amount, clock, count, short } from "./dom.js";

const UNITS = [["s", 1], ["min", 60], ["h", 3600], ["days", 86400]];

// `unit` gives the caption and the size of the ticks' unit for a span; `say` writes a value in full.
export const AXES = {
  step: { unit: () => ["step", 1], say: (value) => "step " + count(Math.round(value)) },
  tokens: { unit: () => ["tokens", 1], say: (value) => amount(value) + " tokens" },
  time: {
    unit: (span) => { const [name, size] = UNITS.findLast(([, size]) => span >= 2 * size) || UNITS[0]; return ["time since the start, " + name, size]; },
    say: (value) => clock(value) + " since the start",
  },
};

// Both ways between a value and its place on a linear or logarithmic scale.
export function scale(log) {
  return log ? { place: Math.log, value: Math.exp } : { place: (value) => value, value: (place) => place };
}

export function ticks(low, high, most, log = false) {
  if (log && low > 0) {
    const decades = Math.log10(high / low), parts = decades > most ? [1] : decades > 1.5 ? [1, 3] : [1, 2, 3, 5, 7];
    const every = Math.max(1, Math.ceil((decades * parts.length) / (most + 1))), all = [];
    for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++) for (const part of parts) all.push(part * 10 ** power);
    const inside = all.filter((value) => value >= low && value <= high).filter((_, i) => parts.length > 1 || i % every === 0);
    if (inside.length > 1) return inside;
  }
  const span = high - low || 1, power = 10 ** Math.floor(Math.log10(span / most));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => span / s <= most) || power * 10;
  const found = [];
  for (let v = Math.ceil(low / step) * step; v <= high + step * 1e-6; v += step) found.push(Math.abs(v) < step * 1e-9 ? 0 : v);
  return found;
}

export function tickLabel(value) {
  if (value && (Math.abs(value) >= 1e15 || Math.abs(value) < 1e-3)) return Number(value.toPrecision(3)).toExponential().replace("e+", "e");
  return Math.abs(value) >= 1e4 ? amount(value) : short(value);
}

export function closest(values, wanted) {
  let low = 0, high = values.length - 1;
  while (high - low > 1) { const middle = (low + high) >> 1; if (values[middle] < wanted) low = middle; else high = middle; }
  return Math.abs(values[low] - wanted) <= Math.abs(values[high] - wanted) ? low : high;
}

// Exponential moving average.
export function smooth(values, share) {
  if (!share) return values;
  let mean = null;
  return values.map((value) => (mean = mean === null || !Number.isFinite(mean) ? value : share * mean + (1 - share) * value));
}
