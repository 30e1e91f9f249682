// The planner: ranked layouts for a model and a cluster, with their memory by part.
import { ask, el, table, amount, percent, short } from "./dom.js";
import { memoryBar } from "./pictures.js";

export function planPage(main, query) {
  const field = (name, label, options = {}) => [name, el("label", {}, label, el("input", { name, value: query.get(name) || "", ...options }))];
  const models = el("datalist", { id: "models" }), clusters = el("datalist", { id: "clusters" });
  const fields = Object.fromEntries([
    field("model", "model", { list: "models", required: true, placeholder: "llama2-7b" }), field("cluster", "cluster", { list: "clusters", required: true, placeholder: "2xp4d.24xlarge" }),
    field("global_batch", "samples a step", { type: "number", min: 1, placeholder: "auto" }), field("seq_len", "tokens a sample", { type: "number", min: 1, placeholder: "model's" }),
    field("tokens", "tokens in all", { placeholder: "20B" }), field("precision", "precision", { placeholder: "bf16" }), field("what_if", "only layouts with", { placeholder: "tp=2,pp=1" }), field("price", "$ an hour a node", { type: "number", min: 0, step: "any", placeholder: "known" }),
  ]);
  const found = el("div", { "aria-live": "polite" });
  const form = el("form", { class: "bar", onsubmit: (event) => { event.preventDefault(); go(); } }, Object.values(fields), models, clusters, el("button", { type: "submit" }, "Plan"));
  main.replaceChildren(el("h1", {}, "Planner"), form, found);
  ask("choices").then((known) => {
    models.replaceChildren(...known.models.map((name) => el("option", { value: name })));
    clusters.replaceChildren(...known.clusters.map((name) => el("option", { value: name })));
  });

  async function go() {
    const asked = [...new FormData(form)].filter(([, value]) => value);
    history.replaceState(null, "", "#/plan?" + new URLSearchParams(asked));
    found.replaceChildren(el("p", { class: "note" }, "searching…"));
    try { show(await ask("plan", asked)); } catch (error) { found.replaceChildren(el("p", { class: "problem", role: "alert" }, error.message)); }
  }

  function show(advice) {
    const layout = (plan) => Object.entries(plan.layout).filter(([key, value]) => value !== 1 && value !== 0 && value !== "none" && value !== false && value !== null && key !== "sp").map(([key, value]) => `${key} ${value}`).join(" · ") || "one rank";
    const fullest = (plan) => plan.memory_gib.reduce((a, b) => ((b.device || 0) > (a.device || 0) ? b : a));
    const rows = advice.plans.map((plan, i) => [i + 1, layout(plan), short(plan.step_s) + " s", amount(plan.tokens_per_s_gpu), percent(plan.mfu), percent(plan.bubble), percent(plan.exposed_communication),
      el("div", {}, memoryBar(fullest(plan), plan.card_gib), el("span", { class: "soft" }, `${(fullest(plan).device || 0).toFixed(1)} of ${plan.card_gib} GiB`)), plan.days === null ? "" : plan.days.toFixed(1), plan.dollars === null ? "" : "$" + Math.round(plan.dollars).toLocaleString("en")]);
    const left = Object.entries(advice.left_out).map(([why, count]) => `${why}: ${count.toLocaleString("en")}`).join(", ");
    const names = Object.keys(fullest(advice.plans[0])).filter((name) => name !== "allocated" && name !== "device" && fullest(advice.plans[0])[name] > 0);
    found.replaceChildren(
      el("p", { class: "note" }, `${advice.model} on ${advice.cluster}: ${advice.gpus} GPUs, ${advice.global_batch.toLocaleString("en")} × ${advice.seq_len.toLocaleString("en")} tokens a step; ${advice.considered.toLocaleString("en")} layouts looked at${left ? ", left out (" + left + ")" : ""}`),
      el("section", { class: "card" }, table([["", "n"], ["layout", "break"], ["step", "n"], ["tok/s/GPU", "n opt"], ["MFU", "n"], ["bubble", "n opt"], ["exposed", "n opt"], ["memory of the fullest GPU"], ["days", "n opt"], ["cost", "n opt"]], rows),
        el("div", { class: "legend" }, names.map((name, i) => el("span", {}, el("i", { class: "k" + (i % 8) }), name)))),
      ...advice.plans[0].warnings.map((text) => el("p", { class: "warn" }, text)));
  }

  if (query.get("model") && query.get("cluster")) go();
  return async () => {};
}
