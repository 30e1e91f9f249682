// Tags and a note about a run, shown and edited in place.
import { el, send } from "./dom.js";

export function tagList(tags) { return tags.flatMap((tag) => [el("span", { class: "tag" }, tag), " "]); }

export function noteEditor(run) {
  const shown = el("div", { class: "notes" }), problem = el("p", { class: "problem", role: "alert" });
  const tags = el("input", { type: "text", "aria-label": "tags, separated by spaces", placeholder: "tags, separated by spaces" });
  const note = el("textarea", { rows: 3, "aria-label": "note", placeholder: "what this run is for, what came of it" });
  const form = el("form", { class: "notes", hidden: true, onsubmit: (event) => { event.preventDefault(); write(); }, onkeydown: (event) => { if (event.key === "Escape") close(); } },
    tags, note, el("div", { class: "bar" }, el("button", { type: "submit" }, "Save"), el("button", { type: "button", onclick: () => close() }, "Cancel")));
  const edit = el("button", { class: "small", onclick: () => open() });
  let known = { tags: [], note: "" };

  function draw() {
    edit.textContent = known.tags.length || known.note ? "Edit note" : "Add tags or a note";
    shown.replaceChildren(...tagList(known.tags), known.note ? el("span", { class: "said" }, known.note) : "", edit);
  }
  function open() { tags.value = known.tags.join(" "); note.value = known.note; problem.remove(); form.hidden = false; shown.hidden = true; tags.focus(); }
  function close() { form.hidden = true; shown.hidden = false; edit.focus(); }
  async function write() {
    try {
      known = await send("note", [["run", run]], { tags: tags.value.split(/[\s,]+/).filter(Boolean), note: note.value.trim() });
      draw();
      close();
    } catch (error) { problem.textContent = error.message; form.append(problem); }
  }

  draw();
  return { nodes: [shown, form], show: (found) => { if (found.note !== known.note || found.tags.join() !== known.tags.join()) { known = { tags: found.tags, note: found.note }; draw(); } } };
}
