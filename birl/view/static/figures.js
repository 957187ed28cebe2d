// Formatting of numbers, as in birl/track/units.py.

/** 0.5 -> "0.500", 0.00012 -> "0.00012", 0.00000836823 -> "8.37e-6", 12345.6 -> "12,345.6"; null -> "–" */
export function figure(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e7) return grouped(value, 0);
  if (size >= 0.01 && size < 10) return value.toFixed(3);
  if (size >= 10 && size < 1e7) return grouped(value, 1);
  return plain(Number(value.toPrecision(3)));
}

const plain = (value) => (Math.abs(value) < 1e-4 ? value.toExponential() : String(value));

/** Six digits, three for a number near 0. */
export function exact(value) {
  if (value === null || value === undefined) return "–";
  return Number.isInteger(value) ? grouped(value, 0) : plain(Number(value.toPrecision(Math.abs(value) < 1e-4 ? 3 : 6)));
}

/** This number of significant digits; null -> "–" */
export function short(value, digits = 3) {
  return value === null || value === undefined ? "–" : String(Number(value.toPrecision(digits))).replace("-", "−");
}

/** 12345 -> "12,345" */
export const whole = (value) => grouped(value, 0);

/** Seconds -> "2m10s" */
export function duration(seconds) {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return "–";
  const whole = Math.max(0, Math.round(seconds)), two = (n) => String(n).padStart(2, "0");
  if (whole < 60) return `${whole}s`;
  if (whole < 3600) return `${Math.floor(whole / 60)}m${two(whole % 60)}s`;
  if (whole < 86400) return `${Math.floor(whole / 3600)}h${two(Math.floor((whole % 3600) / 60))}m`;
  return `${Math.floor(whole / 86400)}d${two(Math.floor((whole % 86400) / 3600))}h`;
}

/** 12345678 -> "12.3M" */
export function count(value) {
  if (value === null || value === undefined) return "–";
  for (const [bound, unit] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e4, "k"]]) {
    if (Math.abs(value) >= bound) return `${Number((value / (unit === "k" ? 1e3 : bound)).toPrecision(3))}${unit}`;
  }
  return grouped(value, 0);
}

function grouped(value, digits) {
  return value.toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits });
}
