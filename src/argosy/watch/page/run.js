// One run, or several on the same axes.
import { ask, el, table, amount, clock, count, figure, percent, short, when } from "./dom.js";
import { eventTable } from "./events.js";
import { Chart } from "./chart.js";
import { rankLog } from "./log.js";
import { heatMap, waterfall } from "./pictures.js";

// [title, metrics drawn in one chart, options]; `compared` names the metric for comparing several runs
const CHARTS = [
  ["Loss", ["loss", "validation_loss"]], ["Gradient norm", ["grad_norm"], { log: true }], ["Tokens per second", ["tokens_per_s"]],
  ["Learning rate", ["lr"]], ["Step time, s", ["time/data", "time/forward_backward", "time/communication", "time/optimizer"], { compared: ["step_s"] }],
  ["Memory, GiB", ["memory/parameters", "memory/gradients", "memory/optimiser", "memory/rest"], { compared: ["memory_gib"] }], ["Goodput", ["goodput"]],
  ["MFU", ["mfu"]], ["Slowest rank over its peers", ["rank_spread"]], ["Loss scale", ["loss_scale"], { log: true }],
  ["Expert load", ["max_load"]], ["GPU utilisation", ["gpu/utilisation"]], ["GPU temperature, °C", ["gpu/temperature"]],
];

export function runPage(main, names) {
  const tiles = el("div", { class: "tiles" }), charts = el("div", { class: "grid" }), facts = el("div", { class: "grid" });
  const verdict = el("div", { class: "verdict", hidden: true, role: "status" });
  const smoothing = el("input", { type: "range", min: 0, max: 0.99, step: 0.01, value: 0, oninput: () => drawn.forEach((one) => { one.chart.smoothing = Number(smoothing.value); one.chart.draw(); }) });
  const more = el("select", { onchange: () => { if (more.value) add([more.value, [more.value]]); more.value = ""; } });
  main.replaceChildren(el("h1", {}, names.join(" · ")), verdict, tiles,
    el("div", { class: "bar" }, el("label", {}, "smoothing", smoothing), el("label", {}, "add a chart", more),
      el("button", { onclick: () => zoom(null) }, "Show all steps"), el("span", { class: "soft" }, "drag to zoom; arrows, + and − when a chart has the focus; Esc shows all")),
    charts, facts);
  const drawn = [];
  let version = null, known = new Set();

  function add([title, metrics, options = {}]) {
    const chart = new Chart(title, { ...options, onzoom: zoom });
    chart.range = drawn.length ? drawn[0].chart.range : null;
    const one = { title, metrics: names.length > 1 ? options.compared || metrics : metrics, chart };
    chart.smoothing = Number(smoothing.value);
    if (!drawn.length) charts.replaceChildren();
    drawn.push(one);
    charts.append(el("section", { class: "card", "data-chart": title }, el("h2", {}, title), chart.box));
    if (version !== null) refresh(one);
  }

  // All charts show the same steps, so that a spike can be compared across them.
  function zoom(range) {
    for (const one of drawn) one.chart.look(range);
    return Promise.all(drawn.map(refresh));
  }

  async function refresh(one) {
    const range = one.chart.range;
    const query = [...names.map((name) => ["run", name]), ...one.metrics.map((metric) => ["metric", metric]), ["pieces", 600]];
    if (range) query.push(["from", range[0]], ["to", range[1]]);
    const found = await ask("curves", query);
    if (one.chart.range !== range) return; // moved on while the answer was on its way
    const series = [];
    names.forEach((name, r) => one.metrics.forEach((metric, m) => {
      const curve = (found[name] || { curves: {} }).curves[metric];
      if (!curve) return;
      const label = names.length > 1 ? name : metric.replace(/^(time|memory)\//, "");
      series.push({ ...curve, label, colour: (names.length > 1 ? r : m) % 8, dots: metric.startsWith("validation") && curve.step.length < 200 });
    }));
    one.chart.show(series);
  }

  function tile(value, label) { return el("div", { class: "tile" }, el("b", {}, value), el("span", {}, label)); }

  function drawTiles(runs) {
    const { last, state, reading, skips } = runs[0];
    const all = [
      tile(el("span", { class: "state " + state }, state), reading ? `reading, ${percent(reading)}` : last.time ? when(last.time) + " UTC" : "no log yet"),
      tile(last.step === undefined ? "n/a" : `${count(last.step)} / ${count(last.steps)}`, "step"), tile(figure(last.loss), "loss"),
      tile(amount(last.tokens_per_s), "tokens/s"), tile(percent(last.mfu), last.peak ? `MFU of ${last.peak} TFLOP/s` : "MFU: no peak is known"),
      tile(percent(last.goodput), "goodput"), tile(last.cost === undefined ? "n/a" : "$" + last.cost.toFixed(2), "cost so far"),
      tile(state === "running" ? clock(last.eta_s) : "n/a", "ETA"),
    ];
    if (skips) all.push(tile(el("span", { class: "warn" }, count(skips)), "skipped by the guard"));
    if (last.slowest_rank !== undefined) all.push(tile(`${last.slowest_rank} (+${percent(last.rank_spread)})`, "slowest rank"));
    tiles.replaceChildren(...(names.length > 1 ? [] : all));
  }

  function card(title, wide, ...content) { return el("section", { class: "card" + (wide ? " wide" : ""), "data-card": title }, el("h2", {}, title), ...content); }

  async function drawFacts(runs) {
    const one = runs[0], cards = [];
    if (names.length === 1) {
      cards.push(card("Where the time went", false, waterfall(one.waterfall)));
      if (one.predicted.length) cards.push(card("Predicted and measured", false, table([["figure"], ["predicted", "n"], ["measured", "n"], ["ratio", "n"]],
        one.predicted.map((row) => [row.figure, short(row.predicted), row.measured === null ? "n/a" : short(row.measured), row.ratio === null ? "" : short(row.ratio)]))));
      cards.push(card("Checkpoints", false, one.checkpoints.length ? table([["checkpoint", "keep"], ["size", "n"], ["written, UTC", "opt keep"]], one.checkpoints.map((c) => [c.complete ? c.name : c.name + " (incomplete)", amount(c.bytes) + "B", when(c.time)])) : el("p", { class: "note" }, "none yet")));
      if (one.heartbeats.length) cards.push(card("Ranks now", false, el("div", { class: "tall" }, table([["rank", "n"], ["host"], ["step", "n"], ["doing"], ["for", "n"]], behind(one.heartbeats).map((b) => [b.rank, b.host, b.step, b.alive === false ? "ended" : b.phase, clock(b.phase_s)])))));
      const map = await ask("ranks", [["run", names[0]], ["column", column]]);
      if (map.reading) version = null; // the rest is on its way: look again
      if (map.ranks.length > 1) cards.push(card("Ranks over time", true, heatColumns(map), heatMap(map)));
      cards.push(card("Events", true, one.events.length ? eventTable(one.events) : el("p", { class: "note" }, "none yet")));
      if (await log.refresh()) cards.push(logCard);
      cards.push(await configCard());
    } else {
      const rows = await ask("diff", names.map((name) => ["run", name]));
      cards.push(card("What differs in their specs", true, rows.length ? table([["key"], ...names.map((name) => [name, "break"])], rows.map((row) => [row.key, ...row.values.map(plain)])) : el("p", { class: "note" }, "nothing but their names")));
      cards.push(card("Now", true, table([["run", "break"], ["state"], ["step", "n"], ["loss", "n"], ["tok/s", "n"], ["MFU", "n"], ["goodput", "n"]],
        runs.map((run) => [run.name, run.state, count(run.last.step), figure(run.last.loss), amount(run.last.tokens_per_s), percent(run.last.mfu), percent(run.last.goodput)]))));
    }
    facts.replaceChildren(...cards);
  }

  function plain(value) { return value === null || value === undefined ? "" : typeof value === "object" ? JSON.stringify(value) : String(value); }

  // Ranks furthest behind, or longest in a phase, first.
  function behind(beats) { return [...beats].sort((a, b) => (a.step ?? 0) - (b.step ?? 0) || (b.phase_s ?? 0) - (a.phase_s ?? 0)).slice(0, 512); }

  let column = "ratio";
  const COLUMNS = { ratio: "own work over its peers'", own_s: "own work, s", data_s: "waiting for data, s", memory_gib: "memory, GiB", utilisation: "GPU utilisation", temperature: "GPU temperature, °C", power_w: "GPU power, W", throttled: "GPU throttled" };
  function heatColumns(map) {
    const choice = el("select", { "aria-label": "what is shown of each rank", onchange: () => { column = choice.value; version = null; } }, map.columns.map((name) => el("option", { value: name, selected: name === column }, COLUMNS[name] || name)));
    return el("div", { class: "bar" }, choice);
  }

  async function judge() {
    if (names.length > 1) return;
    const found = await ask("verdict", [["run", names[0]]]), [first, ...others] = found;
    verdict.hidden = !first;
    if (first) verdict.replaceChildren(el("p", {}, first.verdict), first.fix ? el("p", { class: "soft" }, first.fix) : "", ...others.map((other) => el("p", { class: "soft" }, "also: " + other.verdict)));
  }

  const log = rankLog(names[0]), logCard = card("Log", true, ...log.nodes); // kept, with what was chosen in it

  let openConfig = null;
  async function configCard() {
    if (openConfig) return openConfig;
    const rows = await ask("config", [["run", names[0]]]), list = el("div", {});
    const filter = el("input", { type: "search", placeholder: "filter keys", "aria-label": "filter keys of the spec", oninput: () => draw() });
    function draw() { list.replaceChildren(table([["key"], ["value", "break"], ["from", "opt"]], rows.filter((row) => (row.key + " " + plain(row.value)).toLowerCase().includes(filter.value.toLowerCase())).map((row) => [row.key, plain(row.value), row.origin]))); }
    draw();
    openConfig = card("Config", true, el("details", {}, el("summary", {}, `${rows.length} keys`), filter, list));
    return openConfig;
  }

  return async () => {
    const runs = await Promise.all(names.map((name) => ask("run", [["run", name]])));
    const found = new Set(runs.flatMap((run) => run.names)), now = runs.map((run) => `${run.version}/${run.events.length}/${run.state}`).join();
    for (const chart of CHARTS) if (!drawn.some((one) => one.title === chart[0]) && chart[1].some((metric) => found.has(metric))) add(chart);
    if (found.size !== known.size) {
      known = found;
      more.replaceChildren(el("option", { value: "" }, "choose a metric"), ...[...found].sort().map((name) => el("option", { value: name }, name)));
    }
    drawTiles(runs);
    if (now === version) {
      if (names.length === 1) await log.refresh(); // a rank may speak between two logged steps
      return;
    }
    version = now;
    if (!drawn.length) charts.replaceChildren(el("p", { class: "note" }, "nothing logged yet"));
    await Promise.all([...drawn.map(refresh), drawFacts(runs), judge()]);
  };
}
