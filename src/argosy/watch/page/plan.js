// The planner: does a model fit on a cluster, how long does it take, what does it cost; the same answers as those of `argosy plan`.
import { ask, el, table, amount, percent, short } from "./dom.js";
import { address } from "./address.js";
import { memoryBar, memoryParts } from "./pictures.js";

const COLUMNS = [["layout", "layout"], ["time", "n"], ["cost", "n"], ["memory of the fullest GPU"], ["step", "n opt"], ["tok/s/GPU", "n opt"], ["MFU", "n opt"], ["bubble", "n opt"], ["exposed", "n opt"]];
const RARE = ["global_batch", "seq_len", "precision", "what_if", "price", "spot"];

export function planPage(main, query) {
  const models = el("datalist", { id: "models" }), clusters = el("datalist", { id: "clusters" });
  const field = (name, label, options = {}) => el("label", {}, label, el("input", { name, value: query.get(name) || "", ...options }));
  const another = el("button", { type: "button", class: "small", "aria-label": "compare with another cluster", onclick: () => { const one = cluster(""); another.before(one); one.querySelector("input").focus(); } }, "+ cluster");
  const cluster = (value) => el("label", {}, "cluster", el("input", { name: "cluster", value, list: "clusters", placeholder: "2xp4d.24xlarge, 16xH100" }));
  const rare = el("details", { class: "rare", open: RARE.some((name) => query.get(name)) }, el("summary", {}, "more"), el("div", { class: "bar" },
    field("global_batch", "samples a step", { type: "number", min: 1, placeholder: "a million tokens" }), field("seq_len", "tokens a sample", { type: "number", min: 1, placeholder: "the model's" }), field("precision", "precision", { placeholder: "bf16" }),
    field("what_if", "only layouts with", { placeholder: "tp=2,pp=1" }), field("price", "$ an hour a node", { type: "number", min: 0, step: "any", placeholder: "on-demand" }), field("spot", "spot, share of that price", { type: "number", min: 0.01, max: 1, step: "any", placeholder: "0.4" })));
  const form = el("form", { class: "bar", onsubmit: (event) => { event.preventDefault(); go(); } }, field("model", "model, or a run", { list: "models", required: true, placeholder: "llama2-7b" }),
    (query.getAll("cluster").length ? query.getAll("cluster") : [""]).map(cluster), another, field("tokens", "tokens in all", { placeholder: "the run's, or 20 a parameter" }), field("within", "days at most", { type: "number", min: 0.001, step: "any", placeholder: "any" }),
    models, clusters, el("button", { type: "submit" }, "Plan"), rare);
  const found = el("div", { "aria-live": "polite" });
  main.replaceChildren(el("h1", {}, "Planner"), form, found);
  ask("choices").then((known) => {
    models.replaceChildren(...known.models.map((name) => el("option", { value: name })));
    clusters.replaceChildren(...known.clusters.map((name) => el("option", { value: name })));
  });

  async function go() {
    const asked = [...new FormData(form)].filter(([, value]) => value.trim());
    history.replaceState(null, "", address("plan", asked));
    found.replaceChildren(el("p", { class: "note" }, "searching…"));
    try {
      const advice = await ask("plan", asked);
      found.replaceChildren(...(advice.clusters ? several(advice, asked) : one(advice)));
    } catch (error) { found.replaceChildren(el("p", { class: "problem", role: "alert" }, error.message)); }
  }

  if (query.get("model")) go();
  return async () => {};
}

function one(advice) {
  const best = advice.plans[0], columns = [["", "n"], ...COLUMNS];
  return [
    tiles(best, advice),
    card("Layouts, the fastest first", table(columns, advice.plans.map((plan, i) => [i + 1, ...row(plan)]), "layouts"), parts(best), legend(advice.legend)),
    ...(advice.asked ? [card("The run's own layout" + (advice.asked.fits ? "" : ", which does not fit"), table(columns.slice(1), [row(advice.asked)], "the run's own layout"))] : []),
    ...best.warnings.map((text) => el("p", { class: "warn" }, text)),
    copying(advice.copy),
    ...(advice.why_lost.length ? [card("Why the others lost, against the first", el("ul", {}, advice.why_lost.map((why) => el("li", {}, why))))] : []),
    card("What was asked", table([["what", "keep"], ["asked", "break"]], Object.entries(advice.facts).filter(([name]) => name !== "answer"), "what was asked"), ...(advice.offer ? [el("p", { class: "note" }, advice.offer)] : [])),
  ];
}

function several(advice, asked) {
  const rest = asked.filter(([name]) => name !== "cluster" && name !== "within");
  const link = (name) => el("a", { href: address("plan", [...rest, ["cluster", name]]) }, name);
  const rows = Object.entries(advice.clusters).map(([name, found]) => [el("span", {}, link(name), " ", name === advice.cheapest ? el("span", { class: "tag" }, "best") : null), ...timeFirst(row(found.plans[0]))]);
  const [first] = Object.values(advice.clusters), best = advice.clusters[advice.cheapest] || first;
  return [
    el("p", { class: "answer" }, advice.verdict),
    el("p", { class: "note" }, `${amount(first.tokens)} tokens (${first.tokens_from}); the best layout of each cluster`),
    card("Clusters", table([["cluster", "name"], ...timeFirst(COLUMNS)], rows, "clusters"), parts(best.plans[0]), legend(advice.legend)),
    ...Object.entries(advice.refused).map(([name, why]) => el("p", { class: "warn" }, `${name}: ${why}`)),
    ...(advice.cheapest ? [copying(best.copy)] : []),
  ];
}

function tiles(best, advice) {
  const tile = (value, label) => el("div", { class: "tile" }, el("b", {}, value), el("span", {}, label));
  return el("div", { class: "tiles" }, tile(best.fits ? "fits" : "does not fit", `${device(best).toFixed(1)} of ${best.card_gib} GiB`), tile(best.time, `${amount(advice.tokens)} tokens: ${advice.tokens_from}`),
    tile(best.cost || "n/a", best.cost ? advice.price_from || "at the node's price" : "no price is known: give $ an hour"), tile(advice.gpus, `GPUs: ${advice.cluster}`));
}

function row(plan) {
  const memory = el("div", {}, memoryBar(fullest(plan), plan.card_gib), el("span", { class: "soft" }, `${device(plan).toFixed(1)} of ${plan.card_gib} GiB`));
  return [plan.notation, plan.time, plan.cost, memory,
    short(plan.step_s) + " s", amount(plan.tokens_per_s_gpu), percent(plan.mfu), percent(plan.bubble), percent(plan.exposed_communication)];
}

const fullest = (plan) => plan.memory_gib.reduce((a, b) => ((b.device || 0) > (a.device || 0) ? b : a));
const device = (plan) => fullest(plan).device || 0;
// Of clusters, time and cost are compared before layouts.
const timeFirst = ([layout, time, cost, ...rest]) => [time, cost, layout, ...rest];

const card = (title, ...content) => el("section", { class: "card answers", "data-card": title }, el("h2", {}, title), content.flat());
const legend = (lines) => el("ul", { class: "note" }, lines.map((line) => el("li", {}, line)));

// The colours of a memory bar.
function parts(plan) {
  return el("div", { class: "legend" }, memoryParts(fullest(plan)).map(({ name, colour }) => el("span", {}, el("i", { class: "k" + colour }), name)));
}

function copying(lines) {
  const labels = ["in the run spec", "on the command line"];
  return card("To copy", lines.map((line, i) => {
    const button = el("button", { class: "small", type: "button", "aria-label": "copy what goes " + labels[i], onclick: async () => { await navigator.clipboard.writeText(line); button.textContent = "copied"; } }, "copy");
    return el("div", { class: "copy" }, el("span", { class: "soft" }, labels[i]), el("code", {}, line), button);
  }));
}
