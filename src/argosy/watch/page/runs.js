// The list of runs, to open one or compare several.
import { ask, el, table, amount, clock, percent, short, when } from "./dom.js";

export function runsPage(main) {
  const chosen = new Set();
  const compare = el("button", { disabled: true, onclick: () => { location.hash = "#/runs?" + new URLSearchParams([...chosen].map((name) => ["run", name])); } }, "Compare");
  const filter = el("input", { type: "search", placeholder: "filter by name", "aria-label": "filter runs by name", oninput: () => draw() });
  const list = el("div", {});
  main.replaceChildren(el("h1", {}, "Runs"), el("div", { class: "bar" }, filter, compare), list);
  let runs = null;

  function row(run) {
    const last = run.last, box = el("input", { type: "checkbox", "aria-label": "compare " + run.name, onchange: () => {
      if (box.checked) chosen.add(run.name); else chosen.delete(run.name);
      compare.disabled = chosen.size < 2;
    } });
    box.checked = chosen.has(run.name);
    return [box, el("a", { href: "#/runs?" + new URLSearchParams([["run", run.name]]) }, run.name),
      el("span", { class: "state " + run.state }, run.reading ? `reading ${percent(run.reading)}` : run.state),
      last.step === undefined ? "" : `${amount(last.step)} / ${amount(last.steps)}`, short(last.loss ?? NaN), amount(last.tokens_per_s),
      percent(last.mfu), percent(last.goodput), last.cost === undefined ? "n/a" : "$" + last.cost.toFixed(2),
      run.state === "running" ? clock(last.eta_s) : "", when(last.time), run.alerts ? el("span", { class: "warn" }, run.alerts) : ""];
  }

  function draw() {
    if (runs === null) return;
    const wanted = runs.filter((run) => run.name.toLowerCase().includes(filter.value.toLowerCase()));
    const columns = [["", ""], ["run", "break"], ["state"], ["step", "n"], ["loss", "n"], ["tok/s", "n"], ["MFU", "n opt"], ["goodput", "n opt"], ["cost", "n opt"], ["ETA", "n"], ["last log", "opt"], ["alerts", "n opt"]];
    list.replaceChildren(wanted.length ? table(columns, wanted.map(row)) : el("p", { class: "note" }, runs.length ? "no run of that name" : "no runs here yet; `argosy train` makes them"));
  }

  return async () => { runs = await ask("runs"); draw(); };
}
