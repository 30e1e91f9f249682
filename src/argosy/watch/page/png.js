// A chart as a PNG: its drawing with the colours of the page, a title and a legend, at twice its size.
import { svg } from "./dom.js";

const KEPT = ["fill", "stroke", "stroke-width", "stroke-dasharray", "opacity", "font-size", "font-family"], TIMES = 2, HEAD = 24, LINE = 16;

export async function chartPng(chart) {
  const box = chart.root.viewBox.baseVal, keys = chart.keys().filter((one) => !chart.hidden.has(one.key)), wide = box.width, high = HEAD + box.height + LINE * keys.length + 4;
  const style = (node) => getComputedStyle(node), paper = style(chart.box.closest(".card") || document.body).backgroundColor, ink = style(document.body).color;
  const drawing = chart.root.cloneNode(true), originals = chart.root.querySelectorAll("*");
  // The picture has no style sheet: what the page's rules give each element is written on it.
  drawing.querySelectorAll("*").forEach((node, i) => { for (const name of KEPT) node.setAttribute(name, style(originals[i]).getPropertyValue(name)); });
  drawing.querySelectorAll(".cross, .select").forEach((node) => node.remove());
  for (const name of ["class", "tabindex", "role"]) drawing.removeAttribute(name);
  for (const [name, value] of Object.entries({ x: 0, y: HEAD, width: box.width, height: box.height })) drawing.setAttribute(name, value);
  const font = style(document.body).fontFamily, swatches = [...chart.legend.querySelectorAll("[aria-pressed=true] i")].map((node) => style(node).backgroundColor);
  const picture = svg("svg", { xmlns: "http://www.w3.org/2000/svg", viewBox: `0 0 ${wide} ${high}`, width: wide * TIMES, height: high * TIMES },
    svg("rect", { width: wide, height: high, fill: paper }), svg("text", { x: 10, y: 17, fill: ink, "font-family": font, "font-size": 14, "font-weight": 600 }, chart.title), drawing,
    keys.map((one, i) => svg("g", {}, svg("rect", { x: 10, y: HEAD + box.height + i * LINE, width: 10, height: 10, fill: swatches[i] }),
      svg("text", { x: 26, y: HEAD + box.height + i * LINE + 9, fill: ink, "font-family": font, "font-size": 12 }, one.label))));
  const image = new Image();
  image.src = "data:image/svg+xml," + encodeURIComponent(new XMLSerializer().serializeToString(picture));
  await image.decode();
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [wide * TIMES, high * TIMES];
  canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
  return new Promise((done) => canvas.toBlob(done, "image/png"));
}
