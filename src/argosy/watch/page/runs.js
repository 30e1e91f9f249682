// The list of runs, to open one or compare several.
import { ask, el, table, amount, clock, figure, percent, when } from "./dom.js";

// heading, class, what a click on the heading sorts by
const COLUMNS = [["", ""], ["run", "break", (run) => run.name.toLowerCase()], ["state", "", (run) => run.state], ["step", "n", (run) => run.last.step], ["loss", "n", (run) => run.last.loss],
  ["tok/s", "n opt", (run) => run.last.tokens_per_s], ["MFU", "n opt", (run) => run.last.mfu], ["goodput", "n opt", (run) => run.last.goodput], ["cost", "n opt", (run) => run.last.cost],
  ["ETA", "n opt", (run) => (run.state === "running" ? run.last.eta_s : undefined)], ["last log, UTC", "opt keep", (run) => run.last.time], ["alerts", "n opt", (run) => run.alerts]];

export function runsPage(main) {
  const chosen = new Set();
  const compare = el("button", { disabled: true, onclick: () => { location.hash = "#/runs?" + new URLSearchParams([...chosen].map((name) => ["run", name])); } }, "Compare");
  const filter = el("input", { type: "search", placeholder: "filter by name", "aria-label": "filter runs by name", oninput: () => draw() });
  const list = el("div", {});
  main.replaceChildren(el("h1", {}, "Runs"), el("div", { class: "bar" }, filter, compare), list);
  let runs = null, order = { column: 1, down: false };

  function row(run) {
    const last = run.last, box = el("input", { type: "checkbox", "aria-label": "compare " + run.name, onchange: () => {
      if (box.checked) chosen.add(run.name); else chosen.delete(run.name);
      compare.disabled = chosen.size < 2;
    } });
    box.checked = chosen.has(run.name);
    return [box, el("a", { href: "#/runs?" + new URLSearchParams([["run", run.name]]) }, run.name),
      el("span", { class: "state " + run.state }, run.reading ? `reading ${percent(run.reading)}` : run.state),
      last.step === undefined ? "" : `${amount(last.step)} / ${amount(last.steps)}`, figure(last.loss), amount(last.tokens_per_s),
      percent(last.mfu), percent(last.goodput), last.cost === undefined ? "n/a" : "$" + last.cost.toFixed(2),
      run.state === "running" ? clock(last.eta_s) : "", when(last.time), run.alerts ? el("span", { class: "warn" }, run.alerts) : ""];
  }

  function heading(name, column) {
    const sorted = order.column === column, arrow = sorted ? (order.down ? " ↓" : " ↑") : "";
    return el("button", { class: "sort", "aria-label": `sort by ${name}${sorted ? (order.down ? ", now downwards" : ", now upwards") : ""}`, onclick: () => {
      order = { column, down: sorted ? !order.down : column > 2 };
      draw();
      list.querySelectorAll("button.sort")[column - 1]?.focus();
    } }, name + arrow);
  }

  function draw() {
    if (runs === null) return;
    const wanted = runs.filter((run) => run.name.toLowerCase().includes(filter.value.toLowerCase()));
    const by = COLUMNS[order.column][2], missing = (value) => value === undefined || value === null;
    wanted.sort((a, b) => missing(by(a)) - missing(by(b)) || (by(a) < by(b) ? -1 : by(a) > by(b) ? 1 : 0) * (order.down ? -1 : 1));
    const columns = COLUMNS.map(([name, kind, sorts], i) => [sorts ? heading(name, i) : name, kind]);
    list.replaceChildren(wanted.length ? table(columns, wanted.map(row)) : el("p", { class: "note" }, runs.length ? "no run of that name" : "no runs here yet; `argosy train` makes them"));
  }

  return async () => { runs = await ask("runs"); draw(); };
}
