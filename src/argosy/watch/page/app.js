// Chooses the page, and refreshes it every two seconds while it is visible.
import { here } from "./address.js";
import { runsPage } from "./runs.js";
import { runPage } from "./run.js";
import { tablePage } from "./table.js";
import { planPage } from "./plan.js";
import { helpWithKeys, listen } from "./keys.js";
import { el } from "./dom.js";

const PAGES = { plan: planPage, table: tablePage }, THEMES = ["auto", "light", "dark"];
const main = document.getElementById("main"), pulse = document.getElementById("pulse"), theme = document.getElementById("theme");
let refresh = async () => {}, shown = 0;

function open() {
  const { path, query } = here(), names = query.getAll("run");
  for (const link of document.querySelectorAll("header nav a")) {
    if (link.dataset.page === (PAGES[path] ? path : "runs")) link.setAttribute("aria-current", "page"); else link.removeAttribute("aria-current");
  }
  shown += 1;
  pulse.textContent = ""; // "live" once all of this page is shown
  refresh = PAGES[path] ? PAGES[path](main, query) : names.length ? runPage(main, names) : runsPage(main);
  document.title = names.length ? names.join(", ") + " · Argosy" : "Argosy";
  main.focus({ preventScroll: true });
  tick(shown);
}

async function tick(page) {
  if (page !== shown) return;
  if (!document.hidden) {
    const error = await refresh().then(() => null, (failure) => failure);
    if (page !== shown) return; // the answer is for a page that is no longer shown
    const told = main.querySelector(":scope > .problem");
    pulse.textContent = error ? "no answer" : "live";
    if (!error) told?.remove(); else if (!told) main.append(el("p", { class: "problem", role: "alert" }, error.message));
  }
  setTimeout(() => tick(page), 2000);
}

function nextTheme() {
  const chosen = THEMES[(THEMES.indexOf(document.documentElement.dataset.theme) + 1) % THEMES.length];
  try { localStorage.setItem("theme", chosen); } catch { /* the choice is for this page only */ }
  document.documentElement.dataset.theme = chosen;
  sayTheme();
  open(); // pictures that are not drawn by the style sheet are drawn again
}

function sayTheme() {
  theme.textContent = { auto: "◐ auto", light: "☀ light", dark: "☾ dark" }[document.documentElement.dataset.theme];
  theme.setAttribute("aria-label", `colours: ${document.documentElement.dataset.theme}; press for the next`);
}

addEventListener("hashchange", open);
// The part after # names a page, so the skip link must not change it.
document.querySelector(".skip").addEventListener("click", (event) => { event.preventDefault(); main.focus(); });
theme.addEventListener("click", nextTheme);
document.getElementById("keys").addEventListener("click", helpWithKeys);
const go = (hash) => () => { location.hash = hash; };
listen(main, { g: go("#/"), t: go("#/table"), p: go("#/plan"), d: nextTheme });
sayTheme();
open();
