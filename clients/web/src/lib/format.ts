// Numbers and times for people. Dates are the reader's own.

const COMPACT = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });
const PLAIN = new Intl.NumberFormat("en");

/** 1234 -> "1.2K"; small ones as they are. */
export function compact(value: number): string {
  return Math.abs(value) < 1000 ? PLAIN.format(value) : COMPACT.format(value);
}

/** 1234567 -> "1,234,567". */
export function plain(value: number): string {
  return PLAIN.format(value);
}

/** A reward: at most three digits behind the point, none where there are none. */
export function reward(value: number): string {
  return String(Math.round(value * 1000) / 1000);
}

/** Milliseconds as people say it: "840 ms", "12 s", "3 min 20 s", "2 h 5 min". */
export function duration(ms: number): string {
  if (ms < 1000) return `${Math.max(0, Math.round(ms))} ms`;
  const seconds = Math.round(ms / 1000);
  if (seconds < 60) return `${seconds} s`;
  const minutes = Math.floor(seconds / 60);
  if (minutes < 60) return seconds % 60 ? `${minutes} min ${seconds % 60} s` : `${minutes} min`;
  const hours = Math.floor(minutes / 60);
  return minutes % 60 ? `${hours} h ${minutes % 60} min` : `${hours} h`;
}

/** How long ago, in one unit: "now", "40 s ago", "3 min ago", "5 h ago", "12 days ago". */
export function ago(ms: number): string {
  const seconds = Math.floor(ms / 1000);
  if (seconds < 5) return "now";
  if (seconds < 60) return `${seconds} s ago`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ago`;
  if (seconds < 48 * 3600) return `${Math.floor(seconds / 3600)} h ago`;
  return `${Math.floor(seconds / 86_400)} days ago`;
}

/** A moment of today, as the reader's clock says it. */
export function clockTime(ms: number): string {
  return new Date(ms).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: "2-digit" });
}

/** Bytes: "1.5 GiB". */
export function bytes(value: number): string {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  let rest = value;
  while (rest >= 1024 && unit < units.length - 1) {
    rest /= 1024;
    unit += 1;
  }
  return `${rest >= 100 || unit === 0 ? Math.round(rest) : Math.round(rest * 10) / 10} ${units[unit] ?? ""}`;
}

/** The end of a long id: what distinguishes two. */
export function shortId(id: string, most = 14): string {
  return id.length <= most ? id : `${id.slice(0, 6)}…${id.slice(-(most - 7))}`;
}
