// The charts of a page: the same part of the x axis in all of them, and one set of choices, kept in the address.
import { ask, el, save } from "./dom.js";
import { here, keep } from "./address.js";
import { Chart } from "./chart.js";
import { chartPng } from "./png.js";
import { AXES } from "./scale.js";

// [group, [title, metrics drawn in one chart, options]...]; `compared` names the metric for comparing several runs
const GROUPS = [
  ["Training", ["Loss", ["loss", "validation_loss"]], ["Gradient norm", ["grad_norm"], { log: true }], ["Learning rate", ["lr"]], ["Loss scale", ["loss_scale"], { log: true }], ["Expert load", ["max_load"]]],
  ["Speed", ["Tokens per second", ["tokens_per_s"]], ["Step time, s", ["time/data", "time/forward_backward", "time/communication", "time/optimizer"], { compared: ["step_s"] }], ["MFU", ["mfu"]],
    ["Goodput", ["goodput"]], ["Slowest rank over its peers", ["rank_spread"]], ["Memory by part, GiB", ["memory/parameters", "memory/gradients", "memory/optimiser", "memory/rest"], { compared: ["memory_gib"] }]],
  ["Machines", ["GPU use", ["gpu/utilisation"]], ["GPU memory, GiB", ["gpu/memory_gib"]], ["GPU temperature, °C", ["gpu/temperature"]], ["GPU power, W", ["gpu/power_w"]], ["GPUs throttled", ["gpu/throttled"]],
    ["CPU use", ["host/cpu"]], ["Host memory, GiB", ["host/memory_gib"]], ["Network, MB/s", ["host/received_mb_s", "host/sent_mb_s"], { compared: ["host/received_mb_s"] }]],
  ["Tasks"],
  ["Added"],
];

export class Charts {
  constructor(names) {
    this.names = names;
    this.drawn = [];
    const { query } = here(), edges = [query.get("from"), query.get("to")].map(Number);
    this.axis = AXES[query.get("x")] ? query.get("x") : "step";
    this.xlog = query.get("xscale") === "log";
    this.smoothing = Math.min(0.99, Math.max(0, Number(query.get("smooth")) || 0));
    this.range = query.get("to") && edges.every(Number.isFinite) && edges[1] > edges[0] ? edges : null;
    // Charts whose y scale is not the usual one.
    this.turned = new Set(query.getAll("y"));
    this.added = query.getAll("chart");
    this.hidden = new Set(query.getAll("hide"));
    this.wanted = new Set();
    this.groups = new Map(GROUPS.map(([title]) => [title, el("div", { class: "grid" })]));
    this.box = el("div", {}, el("p", { class: "note" }, "nothing logged yet"));
    this.bar = this.toolbar();
  }

  toolbar() {
    const choice = (label, options, value, change) => {
      const box = el("select", { onchange: () => change(box.value) }, options.map((name) => el("option", { value: name, selected: name === value }, name)));
      return el("label", {}, label, box);
    };
    const strength = el("output", {}, String(this.smoothing || "off"));
    const smoothing = el("input", { type: "range", min: 0, max: 0.99, step: 0.01, value: this.smoothing, "aria-label": "smoothing", oninput: () => {
      this.smoothing = Number(smoothing.value);
      strength.textContent = this.smoothing || "off";
      for (const one of this.drawn) { one.chart.smoothing = this.smoothing; one.chart.draw(); }
      this.remember();
    } });
    this.more = el("select", { onchange: () => { if (this.more.value) this.include(this.more.value); this.more.value = ""; } });
    this.whole = el("button", { disabled: !this.range, onclick: () => this.zoom(null) }, "Show all");
    return el("div", { class: "bar" }, choice("x axis", Object.keys(AXES), this.axis, (axis) => this.turn({ axis, range: null })),
      choice("x scale", ["linear", "log"], this.xlog ? "log" : "linear", (kind) => this.turn({ xlog: kind === "log" })),
      el("label", {}, "smoothing", smoothing, strength), el("label", {}, "add a chart", this.more), this.whole);
  }

  // Draws the charts for the metrics that the runs have logged so far.
  offer(metrics) {
    const found = new Set(metrics);
    if (!found.size || [...found].every((name) => this.wanted.has(name))) return;
    this.wanted = found;
    for (const [group, ...charts] of GROUPS) for (const chart of charts) if (!this.has(chart[0]) && chart[1].some((metric) => found.has(metric))) this.add(group, ...chart);
    // Scores are logged as task/NAME/METRIC: one chart for each task.
    const tasks = Map.groupBy([...found].filter((name) => name.startsWith("task/")).sort(), (name) => name.split("/").slice(1, -1).join("/"));
    for (const [task, scores] of tasks) if (!this.has(task)) this.add("Tasks", task, scores);
    for (const metric of this.added) if (!this.has(metric) && found.has(metric)) this.add("Added", metric, [metric]);
    this.more.replaceChildren(el("option", { value: "" }, "choose a metric"), ...[...found].sort().map((name) => el("option", { value: name }, name)));
  }

  has(title) { return this.drawn.some((one) => one.title === title); }

  include(metric) {
    if (this.has(metric)) return;
    this.added.push(metric);
    this.remember();
    const one = this.add("Added", metric, [metric]);
    one.card.scrollIntoView({ block: "nearest" });
    this.refresh(one);
  }

  add(group, title, metrics, options = {}) {
    const log = Boolean(options.log) !== this.turned.has(title);
    const chart = new Chart(title, { log, hidden: this.hidden, onhide: (key) => this.hide(key), onzoom: (range) => this.zoom(range), onpoint: (value) => this.drawn.forEach((one) => { if (one.chart !== chart) one.chart.mark(value); }) });
    Object.assign(chart, { axis: this.axis, xlog: this.xlog, range: this.range, smoothing: this.smoothing });
    const y = el("button", { class: "small", title: "scale of the y axis", onclick: () => {
      if (!this.turned.delete(title)) this.turned.add(title);
      chart.log = !chart.log;
      chart.draw();
      y.textContent = chart.log ? "y: log" : "y: linear";
      this.remember();
    } }, log ? "y: log" : "y: linear");
    const csv = el("a", { class: "small", download: title.replace(/[^\w.-]+/g, "-") + ".csv", title: "every logged value of what is shown" }, "CSV");
    const png = el("button", { class: "small", title: "the chart as a picture", onclick: async () => save(await chartPng(chart), title + ".png") }, "PNG");
    const one = { title, metrics: this.names.length > 1 ? options.compared || metrics : metrics, chart, csv };
    one.card = el("section", { class: "card", "data-chart": title }, el("div", { class: "head" }, el("h2", {}, title), el("div", { class: "tools" }, y, csv, png)), chart.box);
    this.drawn.push(one);
    const place = this.groups.get(group);
    place.append(one.card);
    const titled = [...this.groups].filter(([, grid]) => grid.children.length);
    if (!place.isConnected) this.box.replaceChildren(...titled.flatMap(([name, grid]) => [el("h2", { class: "group" }, name), grid]));
    return one;
  }

  // All charts show the same part of the axis, so that a spike can be compared across them.
  zoom(range) {
    // Rounded as in the address, so that a link shows the very same.
    this.range = range && range.map((value) => (this.axis === "step" ? Math.round(value) : Number(value.toPrecision(7))));
    if (range && this.range[0] === this.range[1]) this.range[1] += 1;
    this.whole.disabled = !range;
    for (const one of this.drawn) one.chart.look(this.range);
    this.remember();
    return this.refreshAll();
  }

  // In all charts: a run that is in the way of one is in the way of the others.
  hide(key) {
    if (!this.hidden.delete(key)) this.hidden.add(key);
    for (const { chart } of this.drawn) chart.draw();
    this.remember();
  }

  turn(changes) {
    Object.assign(this, changes);
    for (const { chart } of this.drawn) Object.assign(chart, { xlog: this.xlog });
    if (!("axis" in changes)) { for (const { chart } of this.drawn) chart.look(this.range); this.remember(); return; }
    for (const { chart } of this.drawn) { chart.axis = this.axis; chart.range = null; chart.pointer = null; }
    this.whole.disabled = true;
    this.remember();
    this.refreshAll();
  }

  remember() {
    keep({ x: this.axis === "step" ? null : this.axis, xscale: this.xlog ? "log" : null, smooth: this.smoothing || null, y: [...this.turned], chart: this.added, hide: [...this.hidden],
      from: this.range?.[0] ?? null, to: this.range?.[1] ?? null });
  }

  refreshAll() { return Promise.all(this.drawn.map((one) => this.refresh(one))); }

  // A chart is busy until the answer to its newest question is drawn.
  async refresh(one) {
    const turn = one.turn = (one.turn || 0) + 1;
    one.card.setAttribute("aria-busy", "true");
    try {
      await this.fetch(one);
    } finally {
      if (turn === one.turn) one.card.setAttribute("aria-busy", "false");
    }
  }

  async fetch(one) {
    const { range, axis } = this;
    const query = [...this.names.map((name) => ["run", name]), ...one.metrics.map((metric) => ["metric", metric]), ["x", axis]];
    if (range) query.push(["from", range[0]], ["to", range[1]]);
    one.csv.href = "/api/csv?" + new URLSearchParams(query);
    const found = await ask("curves", [...query, ["pieces", 600]]);
    if (this.range !== range || this.axis !== axis) return; // moved on while the answer was on its way
    const several = this.names.length > 1, series = [];
    this.names.forEach((name, r) => one.metrics.forEach((metric, m) => {
      const curve = (found[name] || { curves: {} }).curves[metric], validation = metric.startsWith("validation");
      if (!curve) return;
      const label = several ? (validation ? "validation, " : "") + name : metric.replace(/^(time|memory|host)\//, "").replace(/_mb_s$/, "");
      series.push({ ...curve, label, key: several ? name : metric, colour: (several ? r : m) % 8, dots: validation && curve.x.length < 200, dashed: validation || r >= 8, beside: several && validation });
    }));
    one.chart.show(series);
  }
}
