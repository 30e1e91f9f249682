// A chart of curves: drag, + and − or the wheel with Ctrl zoom; arrow keys move; Escape or a double click shows everything.
// The server sends as many pieces as the width has room for; the range between lowest and highest of each is drawn as a band.
import { el, svg, short, amount } from "./dom.js";

const WIDTH = 440, HEIGHT = 190, LEFT = 48, RIGHT = 10, TOP = 8, BOTTOM = 24;

export class Chart {
  constructor(title, { onzoom, log = false } = {}) {
    this.onzoom = onzoom;
    this.log = log;
    this.range = null; // steps shown; null: all
    this.series = [];
    this.smoothing = 0;
    this.tip = el("div", { class: "tip", hidden: true });
    this.legend = el("div", { class: "legend" });
    this.root = svg("svg", {
      viewBox: `0 0 ${WIDTH} ${HEIGHT}`, tabindex: 0, role: "img", "aria-label": title + ": drag to zoom, arrow keys to move",
      onkeydown: (event) => this.key(event), onpointerdown: (event) => this.down(event), onpointermove: (event) => this.move(event),
      onpointerup: (event) => this.up(event), onpointerleave: () => this.leave(), ondblclick: () => this.zoom(null),
      onwheel: (event) => this.wheel(event),
    });
    this.box = el("div", { class: "chart" }, this.root, this.tip, this.legend);
  }

  // series: [{label, colour, step, mean, low, high, dots}]
  show(series) {
    this.series = series.filter((one) => one.step.length);
    this.draw();
  }

  draw() {
    this.root.replaceChildren();
    const drawn = this.series.map((one) => ({ ...one, line: smooth(one.mean, this.smoothing) }));
    this.drawn = drawn;
    const steps = drawn.flatMap((one) => [one.step[0], one.step.at(-1)]);
    const [x0, x1] = this.range || [Math.min(...steps), Math.max(...steps)];
    if (!drawn.length || !Number.isFinite(x0)) {
      this.root.append(svg("text", { x: WIDTH / 2, y: HEIGHT / 2, "text-anchor": "middle" }, "nothing logged yet"));
      this.legend.replaceChildren();
      return;
    }
    let low = Infinity, high = -Infinity;
    for (const one of drawn) {
      for (let i = 0; i < one.step.length; i++) {
        if (one.step[i] < x0 || one.step[i] > x1) continue;
        low = Math.min(low, one.low[i]);
        high = Math.max(high, one.high[i]);
      }
    }
    if (!Number.isFinite(low)) [low, high] = [0, 1];
    if (this.log && low <= 0) low = high / 1e4 || 1e-9;
    if (high === low) { high += Math.abs(high) * 0.05 || 1; low -= Math.abs(low) * 0.05 || (this.log ? 0 : 1); }
    const unit = this.log ? Math.log : (v) => v;
    this.x = (step) => LEFT + ((step - x0) / (x1 - x0 || 1)) * (WIDTH - LEFT - RIGHT);
    this.step = (x) => x0 + ((x - LEFT) / (WIDTH - LEFT - RIGHT)) * (x1 - x0);
    this.y = (value) => TOP + (1 - (unit(Math.max(value, this.log ? low : -Infinity)) - unit(low)) / (unit(high) - unit(low) || 1)) * (HEIGHT - TOP - BOTTOM);
    this.shown = [x0, x1];
    this.axes(low, high, x0, x1);
    const clip = svg("g", {});
    for (const one of drawn) {
      if (one.dots) {
        for (let i = 0; i < one.step.length; i++) if (this.inside(one.step[i])) clip.append(svg("circle", { cx: this.x(one.step[i]), cy: this.y(one.mean[i]), r: one.step.length > 40 ? 1.8 : 3, class: "s" + one.colour }));
        continue;
      }
      const inside = one.step.map((step, i) => i).filter((i) => this.inside(one.step[i]));
      if (inside.some((i) => one.high[i] !== one.low[i])) {
        const up = inside.map((i) => `${this.x(one.step[i]).toFixed(1)},${this.y(one.high[i]).toFixed(1)}`);
        const down = inside.map((i) => `${this.x(one.step[i]).toFixed(1)},${this.y(one.low[i]).toFixed(1)}`).reverse();
        clip.append(svg("polygon", { points: up.concat(down).join(" "), class: "band s" + one.colour }));
      }
      if (inside.length === 1) clip.append(svg("circle", { cx: this.x(one.step[inside[0]]), cy: this.y(one.line[inside[0]]), r: 2.5, class: "s" + one.colour }));
      const points = inside.map((i) => `${this.x(one.step[i]).toFixed(1)},${this.y(one.line[i]).toFixed(1)}`);
      clip.append(svg("polyline", { points: points.join(" "), class: "curve s" + one.colour }));
    }
    this.root.append(clip);
    this.selection = svg("rect", { class: "select", y: TOP, height: HEIGHT - TOP - BOTTOM, width: 0 });
    this.cross = svg("line", { class: "cross", y1: TOP, y2: HEIGHT - BOTTOM, visibility: "hidden" });
    this.root.append(this.selection, this.cross);
    const keys = drawn.length > 1 ? drawn.filter((one, i) => drawn.findIndex((other) => other.colour === one.colour && other.label === one.label) === i) : [];
    this.legend.replaceChildren(...keys.map((one) => el("span", {}, el("i", { class: "k" + one.colour }), one.label)));
  }

  inside(step) { return step >= this.shown[0] && step <= this.shown[1]; }

  axes(low, high, x0, x1) {
    for (const value of ticks(low, high, 5, this.log)) {
      const y = this.y(value);
      this.root.append(svg("line", { class: "grid-line", x1: LEFT, x2: WIDTH - RIGHT, y1: y, y2: y }), svg("text", { x: LEFT - 6, y: y + 4, "text-anchor": "end" }, axis(value)));
    }
    for (const value of ticks(x0, x1, 5)) {
      const x = this.x(value);
      this.root.append(svg("text", { x, y: HEIGHT - 8, "text-anchor": x > WIDTH - RIGHT - 16 ? "end" : "middle" }, amount(value)));
    }
    this.root.append(svg("line", { class: "axis", x1: LEFT, x2: WIDTH - RIGHT, y1: HEIGHT - BOTTOM, y2: HEIGHT - BOTTOM }));
  }

  at(event) {
    const box = this.root.getBoundingClientRect();
    return ((event.clientX - box.left) / box.width) * WIDTH;
  }

  down(event) { if (this.step && event.button === 0) { this.from = this.at(event); this.root.setPointerCapture(event.pointerId); } }

  move(event) {
    if (!this.step) return;
    const x = Math.min(WIDTH - RIGHT, Math.max(LEFT, this.at(event)));
    if (this.from !== undefined) {
      this.selection.setAttribute("x", Math.min(this.from, x));
      this.selection.setAttribute("width", Math.abs(x - this.from));
    }
    this.point(x);
  }

  point(x) {
    const step = this.step(x);
    this.cross.setAttribute("x1", x); this.cross.setAttribute("x2", x); this.cross.setAttribute("visibility", "visible");
    const lines = [];
    let nearest = null;
    for (const one of this.drawn) {
      const i = closest(one.step, step);
      if (nearest === null || Math.abs(one.step[i] - step) < Math.abs(nearest - step)) nearest = one.step[i];
      lines.push(el("div", {}, el("i", { class: "k" + one.colour }), `${short(one.line[i])} ${one.label}${one.dots && one.label !== "validation_loss" ? " (validation)" : ""}`));
    }
    this.tip.replaceChildren(el("div", { class: "soft" }, "step " + Math.round(nearest)), ...lines);
    this.tip.hidden = false;
    const share = x / WIDTH;
    this.tip.style.left = share < 0.5 ? share * 100 + 2 + "%" : "auto";
    this.tip.style.right = share < 0.5 ? "auto" : (1 - share) * 100 + 2 + "%";
    this.tip.style.maxWidth = (share < 0.5 ? 1 - share : share) * 100 - 4 + "%";
    this.tip.style.top = "8px";
  }

  up(event) {
    if (this.from === undefined) return;
    const [a, b] = [this.from, Math.min(WIDTH - RIGHT, Math.max(LEFT, this.at(event)))].sort((p, q) => p - q);
    this.from = undefined;
    this.selection.setAttribute("width", 0);
    if (b - a > 6) this.zoom([this.step(Math.max(a, LEFT)), this.step(b)]);
  }

  leave() { this.tip.hidden = true; if (this.cross) this.cross.setAttribute("visibility", "hidden"); }

  wheel(event) {
    if (!event.ctrlKey || !this.step) return;
    event.preventDefault();
    this.around(this.step(this.at(event)), event.deltaY > 0 ? 1.4 : 1 / 1.4);
  }

  key(event) {
    if (!this.shown) return;
    const [a, b] = this.shown, move = (b - a) / 5;
    const does = {
      ArrowLeft: () => this.zoom([a - move, b - move]), ArrowRight: () => this.zoom([a + move, b + move]),
      "+": () => this.around((a + b) / 2, 1 / 1.6), "=": () => this.around((a + b) / 2, 1 / 1.6), "-": () => this.around((a + b) / 2, 1.6),
      Escape: () => this.zoom(null), Home: () => this.zoom(null),
    }[event.key];
    if (does) { event.preventDefault(); does(); }
  }

  around(centre, factor) {
    const [a, b] = this.shown;
    this.zoom([centre - (centre - a) * factor, centre + (b - centre) * factor]);
  }

  zoom(range) {
    if (this.onzoom) this.onzoom(range && [Math.max(0, range[0]), Math.max(1, range[1])]);
  }

  // Redraws the present pieces for the new range at once, before the server sends finer ones.
  look(range) {
    this.range = range;
    this.draw();
  }
}

function smooth(values, share) {
  if (!share) return values;
  let mean = null;
  return values.map((value) => (mean = mean === null || !Number.isFinite(mean) ? value : share * mean + (1 - share) * value));
}

function ticks(low, high, count, log = false) {
  if (log && low > 0) {
    const decades = Math.log10(high / low), parts = decades > count ? [1] : decades > 1.5 ? [1, 3] : [1, 2, 3, 5, 7];
    const every = Math.max(1, Math.ceil((decades * parts.length) / (count + 1))), all = [];
    for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++) for (const part of parts) all.push(part * 10 ** power);
    const inside = all.filter((value) => value >= low && value <= high).filter((_, i) => parts.length > 1 || i % every === 0);
    if (inside.length > 1) return inside;
  }
  const span = high - low || 1, power = 10 ** Math.floor(Math.log10(span / count));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => span / s <= count) || power * 10;
  const found = [];
  for (let v = Math.ceil(low / step) * step; v <= high + step * 1e-6; v += step) found.push(Math.abs(v) < step * 1e-9 ? 0 : v);
  return found;
}

function axis(value) {
  if (value && (Math.abs(value) >= 1e15 || Math.abs(value) < 1e-3)) return Number(value.toPrecision(3)).toExponential().replace("e+", "e");
  return Math.abs(value) >= 1e4 ? amount(value) : short(value);
}

function closest(steps, step) {
  let low = 0, high = steps.length - 1;
  while (high - low > 1) { const middle = (low + high) >> 1; if (steps[middle] < step) low = middle; else high = middle; }
  return Math.abs(steps[low] - step) <= Math.abs(steps[high] - step) ? low : high;
}
