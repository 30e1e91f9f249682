// Texts that the model wrote while it was trained: one prompt, and a slider over the steps.
import { ask, el, amount, count } from "./dom.js";

export function sampleViewer(names) {
  const prompt = el("select", { "aria-label": "prompt", onchange: () => draw() });
  const slider = el("input", { type: "range", min: 0, "aria-label": "step of the sample", oninput: () => { newest = Number(slider.value) === steps.length - 1; draw(); } });
  const at = el("output", { class: "soft" }), texts = el("div", {});
  const bar = el("div", { class: "bar" }, el("label", {}, "prompt", prompt), el("label", { class: "long" }, "step", slider), at);
  let found = [], steps = [], prompts = "", newest = true;

  function draw() {
    const wanted = found.filter((sample) => (sample.prompt || "") === prompt.value);
    const before = steps[Number(slider.value)];
    steps = [...new Set(wanted.map((sample) => sample.step))].sort((a, b) => a - b);
    const place = newest ? steps.length - 1 : Math.max(0, steps.findLastIndex((step) => step <= before));
    slider.max = Math.max(0, steps.length - 1);
    slider.value = place;
    slider.disabled = steps.length < 2;
    const step = steps[place];
    slider.setAttribute("aria-valuetext", "step " + step);
    // Runs may have sampled at other steps: each shows its newest text up to the chosen step.
    const shown = names.map((name) => wanted.findLast((sample) => sample.run === name && sample.step <= step)).filter(Boolean);
    at.textContent = shown.length ? `${count(step)}${shown[0].tokens ? ` · ${amount(shown[0].tokens)} tokens` : ""} · ${place + 1} of ${steps.length}` : "";
    texts.replaceChildren(...shown.map((sample) => el("div", {}, names.length > 1 || sample.step !== step ? el("p", { class: "note" }, `${sample.run}, step ${count(sample.step)}`) : null,
      el("pre", { class: "sample" }, el("b", {}, sample.prompt || ""), sample.text))));
  }

  async function refresh() {
    found = await ask("samples", names.map((name) => ["run", name]));
    const all = [...new Set(found.map((sample) => sample.prompt || ""))];
    if (all.join("\n") !== prompts) {
      const chosen = prompts ? prompt.value : all[0];
      prompts = all.join("\n");
      prompt.replaceChildren(...all.map((text) => el("option", { value: text, selected: text === chosen }, text.length > 60 ? text.slice(0, 59) + "…" : text || "(empty)")));
    }
    if (found.length) draw();
    return found.length > 0;
  }

  return { nodes: [bar, texts], refresh };
}
