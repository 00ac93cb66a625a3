// Figures as people read them, with their units. What is not known is a dash.

export const UNKNOWN = "–";
const whole = new Intl.NumberFormat("en");

export function count(value) {
  if (value === null || value === undefined) return UNKNOWN;
  if (Math.abs(value) < 10000) return whole.format(Math.round(value));
  return scaled(value, 1000, ["", "k", "M", "G", "T"]).join("");
}

export function rate(value) {
  if (value === null || value === undefined) return UNKNOWN;
  return value >= 100 || value === 0 ? count(value) : value >= 10 ? value.toFixed(1) : value.toFixed(2);
}

export function duration(ms) {
  const [value, unit] = durationParts(ms);
  return unit ? `${value} ${unit}` : value;
}

export function durationParts(ms) {
  if (ms === null || ms === undefined) return [UNKNOWN, ""];
  if (ms < 0) {
    const [value, unit] = durationParts(-ms);
    return [`-${value}`, unit];
  }
  if (ms === 0) return ["0", "ms"];
  if (ms < 10) return [ms.toFixed(ms < 1 ? 2 : 1), "ms"];
  if (ms < 1000) return [ms.toFixed(0), "ms"];
  if (ms < 60000) return [(ms / 1000).toFixed(ms < 10000 ? 2 : 1), "s"];
  return [(ms / 60000).toFixed(1), "min"];
}

// Without zeros that say nothing: for figures that people have set.
export const goal = (ms) => duration(ms).replace(/\.0+ /, " ");

export function age(seconds) {
  if (seconds < 1) return "now";
  if (seconds < 90) return `${Math.floor(seconds)} s`;
  if (seconds < 5400) return `${Math.floor(seconds / 60)} min`;
  return `${Math.floor(seconds / 3600)} h`;
}

export function bytes(value) {
  if (value === null || value === undefined) return UNKNOWN;
  if (value < 1024) return `${Math.round(value)} B`;
  const [number, unit] = scaled(value, 1024, ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]);
  return `${number} ${unit}`;
}

export function percent(share) {
  if (share === null || share === undefined) return UNKNOWN;
  const of100 = share * 100;
  return `${of100 > 0 && of100 < 10 ? of100.toFixed(1) : of100 > 99 && of100 < 100 ? of100.toFixed(1) : of100.toFixed(0)} %`;
}

export const plural = (number, word) => `${count(number)} ${word}${number === 1 ? "" : "s"}`;

function scaled(value, base, units) {
  let step = 0;
  while (Math.abs(value) >= base && step < units.length - 1) {
    value /= base;
    step += 1;
  }
  return [Math.abs(value) < 10 && step ? value.toFixed(1) : value.toFixed(0), units[step]];
}
