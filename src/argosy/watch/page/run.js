// One run, or several on the same axes.
import { ask, el, table, amount, clock, count, figure, percent, short, when } from "./dom.js";
import { address } from "./address.js";
import { Cards } from "./cards.js";
import { Charts } from "./charts.js";
import { eventTable } from "./events.js";
import { rankLog } from "./log.js";
import { noteEditor } from "./notes.js";
import { heatMap, waterfall } from "./pictures.js";
import { sampleViewer } from "./samples.js";

const CARDS = ["What differs in their specs", "Now", "Where the time went", "Predicted and measured", "Checkpoints", "Ranks now", "Samples", "Ranks over time", "Events", "Log", "Config"];
const COLUMNS = { ratio: "own work over its peers'", own_s: "own work, s", data_s: "waiting for data, s", memory_gib: "memory, GiB", utilisation: "GPU use", temperature: "GPU temperature, °C", power_w: "GPU power, W", throttled: "GPU throttled",
  device_gib: "GPU memory in use, GiB", cpu: "CPU use", host_gib: "host memory in use, GiB", received_mb_s: "network received, MB/s", sent_mb_s: "network sent, MB/s" };

export function runPage(main, names) {
  const several = names.length > 1, charts = new Charts(names), cards = new Cards(CARDS);
  const tiles = el("div", { class: "tiles", hidden: several }), verdict = el("div", { class: "verdict", hidden: true, role: "status" });
  const notes = several ? null : noteEditor(names[0]), log = rankLog(names[0]), samples = sampleViewer(names);
  main.replaceChildren(el("h1", {}, names.join(" · "), several ? null : el("a", { class: "beside", href: address("plan", [["model", "run:" + names[0]]]) }, "plan it on other GPUs")), ...(notes ? notes.nodes : []), verdict, tiles, charts.bar, charts.box, cards.box);
  let version = null, column = "ratio";

  function tile(value, label) { return el("div", { class: "tile" }, el("b", {}, value), el("span", {}, label)); }

  function drawTiles(runs) {
    if (several) return;
    const { last, state, reading, skips } = runs[0];
    const all = [
      tile(el("span", { class: "state " + state }, state), reading ? `reading, ${percent(reading)}` : last.time ? when(last.time) + " UTC" : "no log yet"),
      tile(last.step === undefined ? "n/a" : `${count(last.step)} / ${count(last.steps)}`, "step"), tile(figure(last.loss), "loss"), ...(runs[0].best_validation === null ? [] : [tile(figure(runs[0].best_validation), "best validation loss")]),
      tile(amount(last.tokens_per_s), "tokens/s"), tile(percent(last.mfu), last.peak ? `MFU of ${last.peak} TFLOP/s` : "MFU: no peak is known"),
      tile(percent(last.goodput), "goodput"), tile(last.cost === undefined ? "n/a" : "$" + last.cost.toFixed(2), "cost so far"),
      tile(state === "running" ? clock(last.eta_s) : "n/a", "ETA"),
    ];
    if (skips) all.push(tile(el("span", { class: "warn" }, count(skips)), "skipped by the guard"));
    if (last.slowest_rank !== undefined) all.push(tile(`${last.slowest_rank} (+${percent(last.rank_spread)})`, "slowest rank"));
    tiles.replaceChildren(...all);
  }

  async function drawOne(run) {
    const none = () => el("p", { class: "note" }, "none yet");
    cards.put("Where the time went", {}, waterfall(run.waterfall));
    if (run.predicted.length) cards.put("Predicted and measured", {}, table([["figure"], ["predicted", "n"], ["measured", "n"], ["ratio", "n"]],
      run.predicted.map((row) => [row.figure, short(row.predicted), row.measured === null ? "n/a" : short(row.measured), row.ratio === null ? "" : short(row.ratio)]), "predicted and measured"));
    cards.put("Checkpoints", { version: JSON.stringify(run.checkpoints) }, run.checkpoints.length ? table([["checkpoint", "keep"], ["size", "n"], ["written, UTC", "keep"]],
      run.checkpoints.map((c) => [c.complete ? c.name : c.name + " (incomplete)", amount(c.bytes) + "B", when(c.time)]), "checkpoints") : none());
    if (run.heartbeats.length) cards.put("Ranks now", {}, el("div", { class: "tall" }, table([["rank", "n"], ["host"], ["step", "n"], ["doing"], ["for", "n"]],
      behind(run.heartbeats).map((b) => [b.rank, b.host, b.step, b.alive === false ? "ended" : b.phase, clock(b.phase_s)]), "ranks")));
    const map = await ask("ranks", [["run", names[0]], ["column", column]]);
    if (map.reading) version = null; // the rest is on its way: look again
    if (map.ranks.length > 1) cards.put("Ranks over time", { wide: true }, heatColumns(map), heatMap(map));
    cards.put("Events", { wide: true, version: JSON.stringify(run.events.at(-1)) + run.events.length }, run.events.length ? eventTable(run.events) : none());
    if (await log.refresh()) { cards.put("Log", { wide: true, version: "kept" }, log.nodes); log.toEnd(); }
    if (!cards.has("Config")) await configCard();
  }

  async function drawSeveral(runs) {
    const rows = await ask("diff", names.map((name) => ["run", name]));
    cards.put("What differs in their specs", { wide: true, version: JSON.stringify(rows) }, rows.length ? table([["key"], ...names.map((name) => [name, "break"])], rows.map((row) => [row.key, ...row.values.map(plain)]), "differing keys") : el("p", { class: "note" }, "nothing but their names"));
    cards.put("Now", { wide: true }, table([["run", "break"], ["state"], ["step", "n"], ["loss", "n"], ["best validation", "n"], ["size", "n"], ["duration", "n"], ["tok/s", "n"], ["MFU", "n"], ["goodput", "n"]],
      runs.map((run) => [run.name, run.state, count(run.last.step), figure(run.last.loss), figure(run.best_validation ?? undefined), amount(run.parameters), clock(run.seconds ?? NaN), amount(run.last.tokens_per_s), percent(run.last.mfu), percent(run.last.goodput)]), "results"));
  }

  function plain(value) { return value === null || value === undefined ? "" : typeof value === "object" ? JSON.stringify(value) : String(value); }

  // Ranks furthest behind, or longest in a phase, first.
  function behind(beats) { return [...beats].sort((a, b) => (a.step ?? 0) - (b.step ?? 0) || (b.phase_s ?? 0) - (a.phase_s ?? 0)).slice(0, 512); }

  function heatColumns(map) {
    const choice = el("select", { "aria-label": "what is shown of each rank", onchange: () => { column = choice.value; version = null; } }, map.columns.map((name) => el("option", { value: name, selected: name === column }, COLUMNS[name] || name)));
    return el("div", { class: "bar" }, choice);
  }

  async function judge() {
    if (several) return;
    const found = await ask("verdict", [["run", names[0]]]), [first, ...others] = found;
    verdict.hidden = !first;
    if (first) verdict.replaceChildren(el("p", {}, first.verdict), first.fix ? el("p", { class: "soft" }, first.fix) : "", ...others.map((other) => el("p", { class: "soft" }, "also: " + other.verdict)));
  }

  async function configCard() {
    const rows = await ask("config", [["run", names[0]]]), list = el("div", {});
    const filter = el("input", { type: "search", placeholder: "filter keys", "aria-label": "filter keys of the spec", oninput: () => draw() });
    function draw() { list.replaceChildren(table([["key"], ["value", "break"], ["from", "opt"]], rows.filter((row) => (row.key + " " + plain(row.value)).toLowerCase().includes(filter.value.toLowerCase())).map((row) => [row.key, plain(row.value), row.origin]), "config")); }
    draw();
    cards.put("Config", { wide: true, version: "kept" }, el("details", {}, el("summary", {}, `${rows.length} keys`), filter, list));
  }

  return async () => {
    const runs = await Promise.all(names.map((name) => ask("run", [["run", name]])));
    charts.offer(runs.flatMap((run) => run.names));
    drawTiles(runs);
    if (notes) notes.show(runs[0]);
    const now = runs.map((run) => `${run.version}/${run.events.length}/${run.state}/${run.checkpoints.length}`).join();
    if (now === version) {
      if (!several) await log.refresh(); // a rank may speak between two logged steps
      return;
    }
    version = now;
    try {
      await Promise.all([charts.refreshAll(), several ? drawSeveral(runs) : drawOne(runs[0]), judge()]);
    } catch (error) {
      version = null; // some of it is not shown: ask again, also if the run does not change any more
      throw error;
    }
    if (await samples.refresh()) cards.put("Samples", { wide: true, version: "kept" }, samples.nodes);
  };
}
