// A chart of curves: drag, + and − or the wheel with Ctrl zoom; arrow keys move; Escape or a double click shows everything.
// The server sends as many pieces as the width has room for; the range between lowest and highest of each is drawn as a band.
import { el, svg, short } from "./dom.js";
import { AXES, closest, scale, smooth, tickLabel, ticks } from "./scale.js";

const WIDTH = 440, HEIGHT = 208, LEFT = 48, RIGHT = 10, TOP = 20, BOTTOM = 36;
// Beyond the ends of a curve the tip shows its last point this near the pointer, in units of the drawing, and nothing further on.
const NEAR = 3;

export class Chart {
  constructor(title, { onzoom, onpoint, onhide, hidden = new Set(), log = false } = {}) {
    this.title = title;
    this.onzoom = onzoom;
    this.onpoint = onpoint || (() => {});
    this.onhide = onhide;
    this.hidden = hidden; // keys of curves that the legend has switched off
    this.log = log;
    this.axis = "step";
    this.xlog = false;
    this.range = null; // part of the x axis that is shown; null: all
    this.series = [];
    this.smoothing = 0;
    this.pointer = null; // where the pointer is, in units of the drawing; null: not here
    this.tip = el("div", { class: "tip", hidden: true });
    this.spoken = el("div", { class: "unseen", role: "status" });
    this.legend = el("div", { class: "legend" });
    this.root = svg("svg", {
      viewBox: `0 0 ${WIDTH} ${HEIGHT}`, tabindex: 0, role: "img",
      "aria-label": title + ": drag or press plus and minus to zoom, arrow keys to move, Shift and arrow keys to read values",
      onkeydown: (event) => this.key(event), onpointerdown: (event) => this.down(event), onpointermove: (event) => this.move(event),
      onpointerup: (event) => this.up(event), onpointerleave: () => this.leave(), onblur: () => this.leave(), ondblclick: () => this.zoom(null),
      onwheel: (event) => this.wheel(event),
    });
    this.box = el("div", { class: "chart" }, this.root, this.tip, this.spoken, this.legend);
  }

  // series: [{key, label, colour, x, step, mean, low, high, dots, dashed, beside}]
  show(series) {
    this.series = series.filter((one) => one.x.length);
    this.draw();
  }

  draw() {
    this.root.replaceChildren();
    // Points that stand for themselves, as validation, are never smoothed.
    this.drawn = this.series.filter((one) => !this.hidden.has(one.key)).map((one) => ({ ...one, line: one.dots ? one.mean : smooth(one.mean, this.smoothing) }));
    const [x0, x1] = this.bounds();
    if (!this.drawn.length || !Number.isFinite(x0)) {
      this.root.append(svg("text", { x: WIDTH / 2, y: HEIGHT / 2, "text-anchor": "middle" }, this.series.length ? "all curves are hidden" : "nothing logged yet"));
      this.drawLegend();
      this.shown = null;
      this.hide();
      return;
    }
    this.shown = [x0, x1];
    const [low, high] = this.heights();
    const across = scale(this.xlog), up = scale(this.log);
    const a = across.place(x0), span = across.place(x1) - a || 1, wide = WIDTH - LEFT - RIGHT;
    this.x = (value) => LEFT + ((across.place(this.xlog ? Math.max(value, x0) : value) - a) / span) * wide;
    this.value = (x) => across.value(a + ((x - LEFT) / wide) * span);
    this.y = (value) => TOP + (1 - (up.place(this.log ? Math.max(value, low) : value) - up.place(low)) / (up.place(high) - up.place(low) || 1)) * (HEIGHT - TOP - BOTTOM);
    this.axes(low, high);
    this.root.append(svg("g", {}, this.drawn.flatMap((one) => this.curve(one))));
    this.selection = svg("rect", { class: "select", y: TOP, height: HEIGHT - TOP - BOTTOM, width: 0 });
    this.cross = svg("line", { class: "cross", y1: TOP, y2: HEIGHT - BOTTOM, visibility: "hidden" });
    this.root.append(this.selection, this.cross);
    this.drawLegend();
    if (this.pointer === null) this.hide(); else this.point(this.pointer);
  }

  // Curves whose labels and colours the legend shows: none for a single curve, and none for those beside another of the same colour.
  keys() { return this.series.length < 2 ? [] : this.series.filter((one) => !one.beside); }

  // A click on a label hides its curves, or shows them again.
  drawLegend() {
    const shown = this.keys().map((one) => `${one.key}/${one.colour}/${this.hidden.has(one.key)}`).join("\n");
    if (shown === this.legendShown) return; // the focus may be in it
    this.legendShown = shown;
    const button = (one) => el("button", { class: "key", "aria-pressed": String(!this.hidden.has(one.key)), title: "show or hide", "data-key": one.key, onclick: () => {
      this.onhide(one.key);
      [...this.legend.children].find((node) => node.dataset.key === one.key)?.focus();
    } }, el("i", { class: "k" + one.colour }), one.label);
    this.legend.replaceChildren(...this.keys().map(button), this.series.some((one) => one.beside) ? el("span", {}, "dots or dashes: validation") : "");
  }

  bounds() {
    const ends = this.drawn.flatMap((one) => [this.xlog ? one.x.find((x) => x > 0) ?? one.x.at(-1) : one.x[0], one.x.at(-1)]);
    const whole = [Math.min(...ends), Math.max(...ends)], [x0, x1] = this.range || whole;
    return this.xlog && x0 <= 0 ? [Math.min(whole[0], x1 / 10), x1] : [x0, x1];
  }

  heights() {
    let low = Infinity, high = -Infinity;
    for (const one of this.drawn) {
      for (let i = 0; i < one.x.length; i++) {
        if (!this.inside(one.x[i])) continue;
        low = Math.min(low, one.low[i]);
        high = Math.max(high, one.high[i]);
      }
    }
    if (!Number.isFinite(low)) [low, high] = [0, 1];
    if (this.log && low <= 0) low = high / 1e4 || 1e-9;
    if (high === low) { high += Math.abs(high) * 0.05 || 1; low -= Math.abs(low) * 0.05 || (this.log ? 0 : 1); }
    return [low, high];
  }

  curve(one) {
    const inside = one.x.map((_, i) => i).filter((i) => this.inside(one.x[i])), colour = "s" + one.colour;
    const at = (i, values) => `${this.x(one.x[i]).toFixed(1)},${this.y(values[i]).toFixed(1)}`;
    const dot = (i, r) => svg("circle", { cx: this.x(one.x[i]), cy: this.y(one.line[i]), r, class: colour });
    if (one.dots) return inside.map((i) => dot(i, one.x.length > 40 ? 1.8 : 3));
    const parts = [];
    if (inside.some((i) => one.high[i] !== one.low[i])) {
      const outline = inside.map((i) => at(i, one.high)).concat(inside.map((i) => at(i, one.low)).reverse());
      parts.push(svg("polygon", { points: outline.join(" "), class: "band " + colour }));
    }
    // What was smoothed stays in sight behind the smoothed line.
    if (this.smoothing) parts.push(svg("polyline", { points: inside.map((i) => at(i, one.mean)).join(" "), class: `curve raw ${colour}` }));
    if (inside.length === 1) parts.push(dot(inside[0], 2.5));
    parts.push(svg("polyline", { points: inside.map((i) => at(i, one.line)).join(" "), class: `curve ${colour}${one.dashed ? " dashed" : ""}` }));
    return parts;
  }

  inside(x) { return x >= this.shown[0] && x <= this.shown[1]; }

  axes(low, high) {
    const [x0, x1] = this.shown, [caption, unit] = AXES[this.axis].unit(x1 - x0), bottom = HEIGHT - BOTTOM;
    for (const value of ticks(low, high, 5, this.log)) {
      const y = this.y(value);
      this.root.append(svg("line", { class: "grid-line", x1: LEFT, x2: WIDTH - RIGHT, y1: y, y2: y }), svg("text", { x: LEFT - 6, y: y + 4, "text-anchor": "end" }, tickLabel(value)));
    }
    for (const value of ticks(x0 / unit, x1 / unit, 5, this.xlog)) {
      const x = this.x(value * unit);
      this.root.append(svg("text", { x, y: bottom + 15, "text-anchor": x > WIDTH - RIGHT - 16 ? "end" : "middle" }, tickLabel(value)));
    }
    this.root.append(svg("line", { class: "axis", x1: LEFT, x2: WIDTH - RIGHT, y1: bottom, y2: bottom }),
      svg("text", { class: "caption y-scale", x: 2, y: 11 }, this.log ? "log scale" : "linear"),
      svg("text", { class: "caption x-scale", x: WIDTH - RIGHT, y: HEIGHT - 5, "text-anchor": "end" }, caption + (this.xlog ? ", log scale" : "")));
  }

  at(event) {
    const box = this.root.getBoundingClientRect();
    return ((event.clientX - box.left) / box.width) * WIDTH;
  }

  down(event) { if (this.shown && event.button === 0) { this.from = this.at(event); this.root.setPointerCapture(event.pointerId); } }

  move(event) {
    if (!this.shown) return;
    const x = Math.min(WIDTH - RIGHT, Math.max(LEFT, this.at(event)));
    if (this.from !== undefined) {
      this.selection.setAttribute("x", Math.min(this.from, x));
      this.selection.setAttribute("width", Math.abs(x - this.from));
    }
    this.point(x);
  }

  point(x) {
    this.pointer = x;
    const value = this.value(x), near = this.drawn.map((one) => this.nearest(one, x)).filter((i) => i !== null);
    this.mark(value);
    this.onpoint(value);
    this.tip.hidden = !near.length;
    if (!near.length) { this.tip.replaceChildren(); return; }
    const first = near.reduce((a, b) => (Math.abs(b.one.x[b.i] - value) < Math.abs(a.one.x[a.i] - value) ? b : a)), step = first.one.step[first.i];
    const head = "step " + step.toLocaleString("en") + (this.axis === "step" ? "" : " · " + AXES[this.axis].say(first.one.x[first.i]));
    this.tip.replaceChildren(el("div", { class: "soft" }, head), ...near.map(({ one, i }) => el("div", {}, el("i", { class: "k" + one.colour }), ...this.words(one, i, step))));
    const share = x / WIDTH;
    this.tip.style.left = share < 0.5 ? share * 100 + 2 + "%" : "auto";
    this.tip.style.right = share < 0.5 ? "auto" : (1 - share) * 100 + 2 + "%";
    this.tip.style.maxWidth = (share < 0.5 ? 1 - share : share) * 100 - 4 + "%";
    this.tip.style.top = "8px";
  }

  // The point of a curve nearest to the pointer, or null beyond the ends of the curve.
  nearest(one, x) {
    const value = this.value(x), beyond = value < one.x[0] ? this.x(one.x[0]) - x : value > one.x.at(-1) ? x - this.x(one.x.at(-1)) : 0;
    return beyond > NEAR ? null : { one, i: closest(one.x, value) };
  }

  // The value as it was logged, or the mean of the logs that one piece stands for; then what was made of it, and its own step if it is another.
  words(one, i, step) {
    const more = [];
    if (one.high[i] !== one.low[i]) more.push(`mean of ${short(one.low[i])} to ${short(one.high[i])}`);
    if (this.smoothing && !one.dots) more.push("smoothed " + short(one.line[i]));
    if (one.step[i] !== step) more.push("at step " + one.step[i].toLocaleString("en"));
    return [`${short(one.mean[i])} ${one.label}`, more.length ? el("span", { class: "soft" }, ", " + more.join(", ")) : ""];
  }

  // A line at a value of the x axis, also while the pointer is on another chart.
  mark(value) {
    if (!this.shown) return;
    const there = value !== null && this.inside(value), x = there ? this.x(value) : 0;
    this.cross.setAttribute("x1", x); this.cross.setAttribute("x2", x); this.cross.setAttribute("visibility", there ? "visible" : "hidden");
  }

  up(event) {
    if (this.from === undefined) return;
    const [a, b] = [this.from, Math.min(WIDTH - RIGHT, Math.max(LEFT, this.at(event)))].sort((p, q) => p - q);
    this.from = undefined;
    this.selection.setAttribute("width", 0);
    if (b - a > 6) this.zoom([this.value(Math.max(a, LEFT)), this.value(b)]);
  }

  leave() { this.pointer = null; this.hide(); this.onpoint(null); }

  hide() { this.tip.hidden = true; this.mark(null); }

  wheel(event) {
    if (!event.ctrlKey || !this.shown) return;
    event.preventDefault();
    this.around(this.at(event), event.deltaY > 0 ? 1.4 : 1 / 1.4);
  }

  key(event) {
    if (!this.shown) return;
    const middle = (LEFT + WIDTH - RIGHT) / 2, fifth = (WIDTH - LEFT - RIGHT) / 5;
    const does = event.shiftKey && event.key.startsWith("Arrow") ? { ArrowLeft: () => this.read(-1), ArrowRight: () => this.read(1) }[event.key] : {
      ArrowLeft: () => this.pan(-fifth), ArrowRight: () => this.pan(fifth),
      "+": () => this.around(middle, 1 / 1.6), "=": () => this.around(middle, 1 / 1.6), "-": () => this.around(middle, 1.6),
      Escape: () => this.zoom(null), Home: () => this.zoom(null),
    }[event.key];
    if (does) { event.preventDefault(); does(); }
  }

  // Moves the pointer by keys, and says what is there.
  read(way) {
    const from = this.pointer ?? (way > 0 ? LEFT : WIDTH - RIGHT);
    this.point(Math.min(WIDTH - RIGHT, Math.max(LEFT, from + way * (WIDTH - LEFT - RIGHT) / 40)));
    this.spoken.textContent = [...this.tip.children].map((line) => line.textContent).join("; ");
  }

  pan(by) { this.zoom([this.value(LEFT + by), this.value(WIDTH - RIGHT + by)]); }

  around(x, factor) { this.zoom([this.value(x - (x - LEFT) * factor), this.value(x + (WIDTH - RIGHT - x) * factor)]); }

  zoom(range) {
    if (this.onzoom) this.onzoom(range && [Math.max(0, range[0]), Math.max(this.axis === "step" ? 1 : 1e-3, range[1])]);
  }

  // Redraws the present pieces for the new range at once, before the server sends finer ones. The tip comes back when the pointer moves.
  look(range) {
    this.range = range;
    this.pointer = null;
    this.draw();
  }
}
