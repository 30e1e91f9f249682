// The list of runs, newest first, to open one or compare several.
import { ask, el, amount, clock, figure, percent, when } from "./dom.js";
import { address } from "./address.js";
import { Grid } from "./grid.js";
import { tagList } from "./notes.js";

const shown = (value, write) => (value === undefined || value === null ? "" : write(value));

export const runLink = (run) => el("a", { href: address("runs", [["run", run.name]]), "data-key": "open " + run.name }, run.name);
export const NAME = { name: "run", kind: "name", value: (run) => run.name, show: runLink };
export const STATE = { name: "state", value: (run) => run.state, show: (run) => el("span", { class: "state " + run.state }, run.reading ? `reading ${percent(run.reading)}` : run.state) };
export const RESULTS = [
  { name: "step", kind: "n", value: (run) => run.last.step, show: (run) => (run.last.step === undefined ? "" : `${amount(run.last.step)} / ${amount(run.last.steps)}`) },
  { name: "loss", kind: "n", value: (run) => run.last.loss, show: (run) => (run.last.loss === undefined ? "" : figure(run.last.loss)) },
  { name: "validation", kind: "n", value: (run) => run.validation, show: (run) => shown(run.validation, figure) },
  { name: "best validation", kind: "n", value: (run) => run.best_validation, show: (run) => shown(run.best_validation, figure) },
  { name: "size", kind: "n", value: (run) => run.parameters, show: (run) => shown(run.parameters, amount) },
  { name: "tokens", kind: "n", value: (run) => run.last.tokens, show: (run) => shown(run.last.tokens, amount) },
  { name: "duration", kind: "n", value: (run) => run.seconds, show: (run) => shown(run.seconds, clock) },
  { name: "tok/s", kind: "n", value: (run) => run.last.tokens_per_s, show: (run) => shown(run.last.tokens_per_s, amount) },
  { name: "MFU", kind: "n", value: (run) => run.last.mfu, show: (run) => shown(run.last.mfu, percent) },
  { name: "goodput", kind: "n", value: (run) => run.last.goodput, show: (run) => shown(run.last.goodput, percent) },
  { name: "cost", kind: "n", value: (run) => run.last.cost, show: (run) => shown(run.last.cost, (cost) => "$" + cost.toFixed(2)) },
];
const ETA = { name: "ETA", kind: "n", value: (run) => (run.state === "running" ? run.last.eta_s : undefined), show: (run) => (run.state === "running" ? clock(run.last.eta_s) : "") };
export const STARTED = { name: "started, UTC", kind: "n keep", value: (run) => run.created, show: (run) => when(run.created).slice(0, 16) };
export const TAGS = { name: "tags", value: (run) => run.tags.join(" "), show: (run) => el("span", {}, tagList(run.tags)) };
const ALERTS = { name: "alerts", kind: "n", value: (run) => run.alerts || undefined, show: (run) => (run.alerts ? el("span", { class: "warn" }, run.alerts) : "") };

// Words of the filter are looked for in these.
export const words = (run) => [run.name, run.state, ...run.tags, run.note].join(" ");

// Boxes to tick, and the button that compares the runs ticked.
export function comparing() {
  const chosen = new Set();
  const button = el("button", { disabled: true, onclick: () => { location.hash = address("runs", [...chosen].map((name) => ["run", name])); } }, "Compare");
  const say = () => { button.disabled = chosen.size < 2; button.textContent = chosen.size ? `Compare ${chosen.size}` : "Compare"; };
  const column = { name: "", kind: "tick", show: (run) => {
    const box = el("input", { type: "checkbox", "aria-label": "compare " + run.name, "data-key": "compare " + run.name, onchange: () => { if (box.checked) chosen.add(run.name); else chosen.delete(run.name); say(); } });
    box.checked = chosen.has(run.name);
    return box;
  } };
  return { button, column };
}

export function runsPage(main) {
  const { button, column } = comparing(), columns = [column, NAME, STATE, ...RESULTS, ETA, STARTED, TAGS, ALERTS];
  const grid = new Grid({ label: "runs", words, order: STARTED.name, down: true, empty: "no runs here yet; `argosy train` makes them", file: "runs.csv" });
  main.replaceChildren(el("h1", {}, "Runs"), el("div", { class: "bar" }, grid.filter, button, grid.csv, grid.found), grid.body);
  return async () => {
    const runs = await ask("runs");
    // Columns that no run has anything for are left out.
    grid.show(columns.filter((one) => !one.value || one === STARTED || runs.some((run) => ![undefined, null, ""].includes(one.value(run)))), runs);
  };
}
