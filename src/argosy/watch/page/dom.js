// Elements from data. Text is always set as text, so that the name of a run or metric can never become markup.
export function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  return fill(node, attributes, children);
}

export function svg(tag, attributes = {}, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  return fill(node, attributes, children);
}

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  for (const child of children.flat()) {
    if (child === null || child === undefined) continue;
    node.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
  return node;
}

export function table(columns, rows, label) {
  return scrolling(bareTable(columns, rows), label);
}

export function bareTable(columns, rows) {
  const head = columns.map(([name, kind]) => el("th", { class: kind || "", scope: "col" }, name));
  const body = rows.map((cells) => el("tr", {}, cells.map((cell, i) => el("td", { class: columns[i][1] || "" }, cell))));
  return el("table", {}, el("thead", {}, el("tr", {}, head)), el("tbody", {}, body));
}

// A part of the page that scrolls sideways, also by keys; its edges show that there is more.
export function scrolling(content, label = "table") {
  return el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": label + ", scrolls sideways" }, content);
}

// Offers data as a file to the browser.
export function save(blob, name) {
  const link = el("a", { href: URL.createObjectURL(blob), download: name.replace(/[^\w.-]+/g, "-") });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

// The present value of a colour of the style sheet, as [red, green, blue].
export function shade(name) {
  const probe = el("span", { hidden: true });
  probe.style.color = `var(${name})`;
  document.body.append(probe);
  const found = getComputedStyle(probe).color.match(/[\d.]+/g).map(Number);
  probe.remove();
  return found.slice(0, 3);
}

export function send(path, query, body) {
  return ask(path, query, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) });
}

export async function ask(path, query = [], options = {}) {
  const reply = await fetch("/api/" + path + (query.length ? "?" + new URLSearchParams(query) : ""), options);
  const body = await reply.json().catch(() => ({ error: { cause: "the server answered " + reply.status } }));
  if (reply.status === 401) throw new Error("this link is no longer good: open the one that `argosy dash` printed when it was started");
  if (!reply.ok) throw new Error(body.error ? [body.error.cause, body.error.fix].filter(Boolean).join("\n") : reply.status);
  return body;
}

export function amount(number) {
  if (number === null || number === undefined || !Number.isFinite(number)) return "n/a";
  const size = Math.abs(number);
  if (size >= 1e15) return short(number);
  for (const [limit, suffix] of [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "K"]]) {
    if (size >= limit) return short(number / limit) + suffix;
  }
  return short(number);
}

// An integer in full, if it is short enough to read.
export function count(number) {
  return Number.isInteger(number) && Math.abs(number) < 1e10 ? number.toLocaleString("en") : amount(number);
}

export function short(number) {
  if (number === 0) return "0";
  const size = Math.abs(number);
  if (size < 1e-3 || size >= 1e6) return number.toExponential(2);
  return String(Number(number.toPrecision(4)));
}

export function clock(seconds) {
  if (!Number.isFinite(seconds)) return "n/a";
  if (seconds < 9.95) return Number(seconds.toFixed(1)) + "s";
  const s = Math.round(seconds);
  if (s < 60) return s + "s";
  if (s < 3600) return Math.floor(s / 60) + "m" + String(s % 60).padStart(2, "0") + "s";
  if (s < 172800) return Math.floor(s / 3600) + "h" + String(Math.floor((s % 3600) / 60)).padStart(2, "0") + "m";
  return (s / 86400).toFixed(1) + "d";
}

// In UTC, as the headings say.
export function when(time) {
  return Number.isFinite(time) && time > 0 && time < 1e11 ? new Date(time * 1000).toISOString().replace("T", " ").slice(0, 19) : "";
}

// A value of a record; null stands for NaN.
export function figure(value) {
  return value === undefined ? "n/a" : value === null ? "NaN" : short(value);
}

export function percent(share) {
  return share === null || share === undefined ? "n/a" : (100 * share).toFixed(1) + "%";
}
