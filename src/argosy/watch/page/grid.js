// A table of runs that is sorted by its headings, filtered by words and conditions, and saved as CSV. The choice is kept in the address.
import { bareTable, el, save, scrolling } from "./dom.js";
import { here, keep } from "./address.js";

const CONDITION = /^(.+?)(!=|>=|<=|=|>|<)(.*)$/;
const SAME = { "=": (order) => order === 0, "!=": (order) => order !== 0, ">": (order) => order > 0, "<": (order) => order < 0, ">=": (order) => order >= 0, "<=": (order) => order <= 0 };
const missing = (value) => value === undefined || value === null || value === "";

export class Grid {
  // columns: [{name, kind, value(row), show(row), sorts}]; `words(row)` is the text that plain words of the filter are looked for in
  constructor({ label, words, order, down, empty, file }) {
    const { query } = here();
    Object.assign(this, { label, words, empty, file, columns: [], rows: null });
    this.order = query.get("sort") || order;
    this.down = query.has("sort") ? query.get("down") === "1" : down;
    this.filter = el("input", { type: "search", value: query.get("filter") || "", placeholder: "filter: words, loss<3, lr>=1e-3", "aria-label": "filter runs by words or conditions such as loss<3", class: "filter", oninput: () => { keep({ filter: this.filter.value }); this.draw(); } });
    this.csv = el("button", { onclick: () => save(new Blob([this.text()], { type: "text/csv" }), this.file) }, "CSV");
    this.found = el("span", { class: "soft", role: "status" });
    this.body = scrolling([], label);
  }

  show(columns, rows) {
    this.columns = columns;
    this.rows = rows;
    this.draw();
  }

  draw() {
    if (this.rows === null) return;
    const rows = this.wanted(), focus = this.body.contains(document.activeElement) ? document.activeElement.dataset.key : undefined;
    const heads = this.columns.map((column) => [column.value ? this.heading(column) : column.name, column.kind || ""]);
    this.found.textContent = rows.length < this.rows.length ? `${rows.length} of ${this.rows.length}` : "";
    this.body.replaceChildren(rows.length ? bareTable(heads, rows.map((row) => this.columns.map((column) => column.show(row)))) : el("p", { class: "note" }, this.rows.length ? "no run fits the filter" : this.empty));
    // The table was built again: the focus goes back to where it was in it.
    if (focus) [...this.body.querySelectorAll("[data-key]")].find((node) => node.dataset.key === focus)?.focus({ preventScroll: true });
  }

  heading(column) {
    const sorted = this.order === column.name;
    const button = el("button", { class: "sort", "data-key": "sort " + column.name, "aria-label": `sort by ${column.name}${sorted ? (this.down ? ", now downwards" : ", now upwards") : ""}`, onclick: () => {
      this.down = sorted ? !this.down : (column.kind || "").split(" ").includes("n");
      this.order = column.name;
      keep({ sort: this.order, down: this.down ? 1 : null });
      this.draw();
    } }, column.name + (sorted ? (this.down ? " ↓" : " ↑") : ""));
    return button;
  }

  wanted() {
    const terms = this.filter.value.trim().split(/\s+/).filter(Boolean).map((term) => this.term(term));
    const rows = this.rows.filter((row) => terms.every((fits) => fits(row)));
    const by = (this.columns.find((column) => column.name === this.order) || {}).value;
    // Runs without the value come last, whichever way the others are sorted.
    return by ? rows.sort((a, b) => missing(by(a)) - missing(by(b)) || (missing(by(a)) ? 0 : compared(by(a), by(b)) * (this.down ? -1 : 1))) : rows;
  }

  // A word, or a condition on a column: its name, or the end of its name after a dot.
  term(text) {
    const [, name, sign, wanted] = text.match(CONDITION) || [], low = (name || "").toLowerCase();
    const named = this.columns.filter((one) => one.value && name), column = named.find((one) => one.name.toLowerCase() === low) || named.find((one) => one.name.toLowerCase().endsWith("." + low));
    if (!column) return (row) => this.words(row).toLowerCase().includes(text.toLowerCase());
    return (row) => { const value = column.value(row); return !missing(value) && SAME[sign](compared(value, wanted)); };
  }

  text() {
    const columns = this.columns.filter((column) => column.value);
    const cell = (value) => { const text = missing(value) ? "" : String(value), safe = typeof value === "string" && /^[=+\-@\t\r]/.test(text) ? "'" + text : text; return /[",\n\r]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe; };
    return [columns.map((column) => column.name), ...this.wanted().map((row) => columns.map((column) => column.value(row)))].map((row) => row.map(cell).join(",") + "\n").join("");
  }
}

function compared(a, b) {
  const [x, y] = [a, b].map((value) => (typeof value === "string" && value.trim() === "" ? NaN : Number(value)));
  if (!Number.isNaN(x) && !Number.isNaN(y)) return x - y;
  return String(a).toLowerCase().localeCompare(String(b).toLowerCase(), "en", { numeric: true });
}
