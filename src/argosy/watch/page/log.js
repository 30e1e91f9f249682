// The last lines of a rank's log.
import { ask, el } from "./dom.js";

export function rankLog(run) {
  const choice = el("select", { "aria-label": "whose log is shown", onchange: () => refresh() });
  const lines = el("pre", { tabindex: 0, class: "log" }), note = el("span", { class: "soft" });
  const body = el("div", { class: "bar" }, el("label", {}, "rank", choice), note);
  let ranks = "";

  async function refresh() {
    const found = await ask("log", [["run", run], ["rank", choice.value || "0"]]);
    if (found.ranks.join() !== ranks) {
      ranks = found.ranks.join();
      const chosen = choice.value;
      choice.replaceChildren(...found.ranks.map((rank) => el("option", { value: rank, selected: String(rank) === chosen }, rank)));
    }
    const atEnd = lines.scrollTop + lines.clientHeight >= lines.scrollHeight - 4;
    note.textContent = found.path || "";
    lines.textContent = found.lines.join("\n");
    if (atEnd) lines.scrollTop = lines.scrollHeight;
    return found.ranks.length > 0;
  }

  return { nodes: [body, lines], refresh };
}
