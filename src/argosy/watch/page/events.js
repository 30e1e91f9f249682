// Events as a table, newest first: the text, then all other fields.
import { el, short, table, when } from "./dom.js";

const BAD = { alert: "warn", "sink-down": "warn", skip: "warn", rewind: "warn", "save-failed": "bad", stall: "bad", "rank-died": "bad", "non-finite": "bad", failed: "bad", "gave-up": "bad" };
const SAID = ["text", "cause", "reason", "path"], LONG = ["stack", "error"], KNOWN = new Set(["event", "step", "time", "alert", ...SAID, ...LONG]);

export function eventTable(list) {
  return table([["time, UTC", "keep"], ["step", "n"], ["event", "keep"], ["", "break"]], [...list].reverse().slice(0, 200).map((event) => [
    when(event.time), event.step, el("span", { class: BAD[event.event] || "" }, event.alert ? `alert: ${event.alert}` : event.event), about(event)]));
}

function about(event) {
  const said = SAID.map((key) => event[key]).filter((value) => typeof value === "string");
  const rest = Object.entries(event).filter(([key, value]) => !KNOWN.has(key) && value !== null).map(([key, value]) => `${key} ${plain(value)}`);
  const long = LONG.filter((key) => event[key] && event[key].length).map((key) => el("details", {}, el("summary", {}, key), el("pre", {}, [event[key]].flat().join("\n"))));
  return el("div", {}, said.join("; "), said.length && rest.length ? " " : "", el("span", { class: "soft" }, rest.join(" · ")), long);
}

function plain(value) {
  if (typeof value === "number") return Number.isInteger(value) ? String(value) : short(value);
  if (Array.isArray(value)) return value.map(plain).join(", ");
  if (typeof value === "object") return Object.entries(value).map(([key, inner]) => `${key} ${plain(inner)}`).join(", ");
  return String(value);
}
