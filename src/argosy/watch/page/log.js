// The last lines of a rank's log. It opens at its end, and stays there while the reader does.
import { ask, el } from "./dom.js";

export function rankLog(run) {
  const choice = el("select", { "aria-label": "whose log is shown", onchange: () => { following = true; refresh(); } });
  const lines = el("pre", { tabindex: 0, class: "log", "aria-label": "log", onscroll: () => { following = lines.scrollTop + lines.clientHeight >= lines.scrollHeight - 4; } });
  const note = el("span", { class: "soft" }), bar = el("div", { class: "bar" }, el("label", {}, "rank", choice), note);
  let ranks = "", following = true;

  async function refresh() {
    const found = await ask("log", [["run", run], ["rank", choice.value || "0"]]);
    if (found.ranks.join() !== ranks) {
      ranks = found.ranks.join();
      const chosen = choice.value;
      choice.replaceChildren(...found.ranks.map((rank) => el("option", { value: rank, selected: String(rank) === chosen }, rank)));
    }
    note.textContent = found.path || "";
    const text = found.lines.join("\n");
    if (lines.textContent !== text) lines.textContent = text;
    toEnd();
    return found.ranks.length > 0;
  }

  // Also after the log has become part of the page: before that it has no height to scroll in.
  function toEnd() { if (following) lines.scrollTop = lines.scrollHeight; }

  return { nodes: [bar, lines], refresh, toEnd };
}
