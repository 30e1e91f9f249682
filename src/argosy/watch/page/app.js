// Chooses the page, and refreshes it every two seconds while it is visible.
import { runsPage } from "./runs.js";
import { runPage } from "./run.js";
import { planPage } from "./plan.js";
import { el } from "./dom.js";

const main = document.getElementById("main"), pulse = document.getElementById("pulse");
let refresh = async () => {}, shown = 0;

function open() {
  const [path, query = ""] = location.hash.replace(/^#\/?/, "").split("?"), parameters = new URLSearchParams(query);
  const names = parameters.getAll("run");
  for (const link of document.querySelectorAll("header nav a")) {
    if (link.dataset.page === (path === "plan" ? "plan" : "runs")) link.setAttribute("aria-current", "page"); else link.removeAttribute("aria-current");
  }
  shown += 1;
  refresh = path === "plan" ? planPage(main, parameters) : names.length ? runPage(main, names) : runsPage(main);
  document.title = names.length ? names.join(", ") + " · Argosy" : "Argosy";
  main.focus({ preventScroll: true });
  tick(shown);
}

async function tick(page) {
  if (page !== shown) return;
  if (!document.hidden) {
    try {
      await refresh();
      pulse.textContent = "live";
      main.querySelector(":scope > .problem")?.remove();
    } catch (error) {
      pulse.textContent = "no answer";
      if (page === shown && !main.querySelector(".problem")) main.append(el("p", { class: "problem", role: "alert" }, error.message));
    }
  }
  setTimeout(() => tick(page), 2000);
}

addEventListener("hashchange", open);
// The part after # names a page, so the skip link must not change it.
document.querySelector(".skip").addEventListener("click", (event) => { event.preventDefault(); main.focus(); });
addEventListener("keydown", (event) => {
  if (event.target.matches("input:not([type=range]):not([type=checkbox]), select") || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "g") location.hash = "#/";
  if (event.key === "p") location.hash = "#/plan";
  if (event.key === "/") { const box = main.querySelector("input[type=search]"); if (box) { event.preventDefault(); box.focus(); } }
});
open();
