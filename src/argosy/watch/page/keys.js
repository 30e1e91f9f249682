// Keys of all pages, and the list of them.
import { el } from "./dom.js";

const KEYS = [
  ["g", "runs"], ["t", "table of hyper-parameters and results"], ["p", "planner"], ["/", "filter"], ["j k", "next and previous run of a list; Enter opens it"], ["x", "tick the run for a comparison"], ["c", "compare the runs ticked"],
  ["d", "light, dark or the system's colours"], ["?", "this list"], ["+ −", "in a chart: zoom"], ["← →", "in a chart: move"], ["Shift ← →", "in a chart: read values"], ["Esc", "in a chart: show all"],
];

export function helpWithKeys() {
  const close = el("button", { onclick: () => dialog.close() }, "Close");
  const dialog = el("dialog", { class: "card", "aria-label": "keys", onclose: () => dialog.remove() }, el("h2", {}, "Keys"),
    el("table", {}, el("tbody", {}, KEYS.map(([key, does]) => el("tr", {}, el("td", { class: "keep" }, key.split(" ").map((one) => [el("kbd", {}, one), " "]).flat()), el("td", {}, does))))), close);
  document.body.append(dialog);
  dialog.showModal();
}

// actions: {key: function}
export function listen(main, actions) {
  addEventListener("keydown", (event) => {
    const typing = event.target.matches("input:not([type=range]):not([type=checkbox]), select, textarea");
    if (typing || event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
    const links = [...main.querySelectorAll("td.name a")], at = links.findIndex((link) => link.closest("tr").contains(document.activeElement));
    const does = {
      ...actions, "?": helpWithKeys,
      "/": () => { const box = main.querySelector("input[type=search]"); if (box) { event.preventDefault(); box.focus(); } },
      j: () => links[Math.min(links.length - 1, at + 1)]?.focus(), k: () => links[Math.max(0, at - 1)]?.focus(),
      x: () => links[at]?.closest("tr").querySelector("input[type=checkbox]")?.click(), c: () => [...main.querySelectorAll("button")].find((button) => button.textContent.startsWith("Compare"))?.click(),
    }[event.key];
    if (does) does();
  });
}
