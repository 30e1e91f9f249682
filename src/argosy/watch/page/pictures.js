// Pictures that are not curves: the goodput waterfall, the ranks' heat map, memory as a bar.
import { el, svg, clock, percent, shade, short } from "./dom.js";

export function waterfall(rows) {
  const total = rows.length ? rows[0].seconds : 0;
  if (!total) return el("p", { class: "note" }, "nothing accounted for yet");
  const height = 24, width = 440, left = 84, right = 118;
  const x = (seconds) => left + (seconds / total) * (width - left - right);
  const bars = rows.map((row, i) => {
    const last = i === rows.length - 1;
    return svg("g", {}, svg("title", {}, row.meaning),
      svg("text", { x: left - 8, y: i * height + 15, "text-anchor": "end" }, row.part),
      svg("rect", { x: x(row.from), y: i * height + 3, height: height - 7, rx: 2, width: Math.max(1, x(row.to) - x(row.from)), class: i === 0 ? "total" : last ? "kept" : "" }),
      svg("text", { x: width - right + 8, y: i * height + 15 }, `${clock(row.seconds)}  ${percent(row.seconds / total)}`));
  });
  return el("div", { class: "fall" }, svg("svg", { viewBox: `0 0 ${width} ${rows.length * height}`, role: "img", "aria-label": "where the wall time went" }, bars));
}

// Colour scale: for own work over the peers', 1 is blank and 1.3 is full colour; for other columns, lowest to highest.
export function heatMap(map) {
  const ratio = map.column === "ratio", values = map.cells.flat().filter((value) => value !== null);
  let low = 1, high = 1.3;
  if (!ratio) [low, high] = values.reduce(([a, b], value) => [Math.min(a, value), Math.max(b, value)], [Infinity, -Infinity]);
  const canvas = el("canvas", { width: map.cells.length, height: map.ranks.length, role: "img", "aria-label": "each rank over time" });
  canvas.style.height = Math.max(60, Math.min(360, 14 * map.ranks.length)) + "px";
  const context = canvas.getContext("2d"), image = context.createImageData(map.cells.length, map.ranks.length);
  const from = shade("--grid"), to = shade("--bad");
  map.cells.forEach((column, x) => column.forEach((value, y) => {
    const share = value === null ? 0 : Math.min(1, Math.max(0, (value - low) / (high - low || 1))), at = 4 * (y * map.cells.length + x);
    for (let i = 0; i < 3; i++) image.data[at + i] = from[i] + share * (to[i] - from[i]);
    image.data[at + 3] = 255;
  }));
  context.putImageData(image, 0, 0);
  const say = el("p", { class: "note" }, `${map.ranks_a_row > 1 ? `rows of ${map.ranks_a_row} ranks` : `${map.ranks.length} ranks`}, rank 0 on top; steps ${map.steps[0]} to ${map.steps.at(-1)}; ${ratio ? "full colour: 30% more than its peers" : `from ${short(low)} to ${short(high)}`}`);
  canvas.addEventListener("pointermove", (event) => {
    const box = canvas.getBoundingClientRect();
    const x = Math.floor(((event.clientX - box.left) / box.width) * map.cells.length), y = Math.floor(((event.clientY - box.top) / box.height) * map.ranks.length);
    const value = (map.cells[x] || [])[y];
    if (value !== undefined) say.textContent = `rank ${map.ranks[y]}, step ${map.steps[x]}: ${value === null ? "n/a" : ratio ? percent(value - 1) + " more than its peers" : short(value)}`;
  });
  return el("div", {}, canvas, say);
}

// The parts of a GPU's memory that are not empty. A part has the same colour in every bar.
export function memoryParts(parts) {
  const all = Object.entries(parts).filter(([name]) => name !== "allocated" && name !== "device").map(([name, value], i) => ({ name, value, colour: i % 8 }));
  return all.filter(({ value }) => value > 0);
}

export function memoryBar(parts, card) {
  const entries = memoryParts(parts);
  let at = 0;
  const total = card || entries.reduce((sum, { value }) => sum + value, 0);
  const pieces = entries.map(({ name, value, colour }) => {
    const piece = svg("rect", { x: (100 * at) / total + "%", width: (100 * value) / total + "%", y: 0, height: "100%", class: "s" + colour }, svg("title", {}, `${name} ${value.toFixed(2)} GiB`));
    at += value;
    return piece;
  });
  return el("div", { class: "memory", title: entries.map(({ name, value }) => `${name} ${value.toFixed(1)}`).join(", ") + ` GiB of ${total}` }, svg("svg", { preserveAspectRatio: "none" }, pieces));
}
