// All runs with the hyper-parameters in which they differ, and their results.
import { ask, el } from "./dom.js";
import { here, keep } from "./address.js";
import { Grid } from "./grid.js";
import { NAME, RESULTS, STARTED, STATE, TAGS, comparing, words } from "./runs.js";

const NOTE = { name: "note", kind: "break", value: (run) => run.note, show: (run) => run.note };
const plain = (value) => (value === null || value === undefined ? "" : typeof value === "object" ? JSON.stringify(value) : typeof value === "number" ? value : String(value));

export function tablePage(main) {
  const { button, column } = comparing(), hidden = new Set(here().query.getAll("hide")), asked = new Set(here().query.getAll("show"));
  const grid = new Grid({ label: "hyper-parameters and results", words, order: "best validation", down: false, empty: "no runs here yet; `argosy train` makes them", file: "table.csv" });
  const choices = el("div", { class: "choices" }), differing = el("p", { class: "note" });
  main.replaceChildren(el("h1", {}, "Hyper-parameters and results"), el("div", { class: "bar" }, grid.filter, button, grid.csv, el("details", { class: "menu" }, el("summary", {}, "Columns"), choices), grid.found), differing, grid.body);
  let known = null, all = [], derived = new Set(), runs = [];

  // Values that follow from others, as the sizes of a preset, are shown when asked for.
  const visible = (one) => !one.name || (derived.has(one.name) ? asked.has(one.name) : !hidden.has(one.name));
  const filled = (one) => !RESULTS.includes(one) || runs.some((run) => ![undefined, null].includes(one.value(run)));
  const show = () => grid.show(all.filter((one) => visible(one) && filled(one)), runs);

  function choose(one, on) {
    const set = derived.has(one.name) ? asked : hidden;
    if (on === (set === asked)) set.add(one.name); else set.delete(one.name);
    keep({ hide: [...hidden], show: [...asked] });
    show();
  }

  function offer() {
    choices.replaceChildren(...all.filter((one) => one.name && one !== NAME).map((one) => {
      const box = el("input", { type: "checkbox", onchange: () => choose(one, box.checked) });
      box.checked = visible(one);
      return el("label", {}, box, one.name);
    }));
  }

  return async () => {
    const found = await ask("table"), keys = [...found.written, ...found.derived];
    [runs, derived] = [found.runs, new Set(found.derived)];
    all = [column, NAME, STATE, ...keys.map((key) => ({ name: key, kind: "n", value: (run) => plain(run.spec[key]), show: (run) => String(plain(run.spec[key])) })), ...RESULTS, STARTED, TAGS, NOTE];
    differing.textContent = keys.length ? `${found.written.length} keys that somebody set differ between these runs${found.derived.length ? `, and ${found.derived.length} that follow from them: see Columns` : ""}. Keys that all runs share are on a run's page, under Config.` : "The specs of these runs do not differ.";
    if (keys.join() !== known) { known = keys.join(); offer(); }
    show();
  };
}
