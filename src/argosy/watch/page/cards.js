// Cards that stay in their place while their content is renewed: scrolling, open details and the focus survive a refresh.
import { el } from "./dom.js";

export class Cards {
  // `order`: the titles of all cards there can be, in the order of the page.
  constructor(order) {
    this.order = order;
    this.box = el("div", { class: "grid" });
    this.known = new Map();
  }

  // `version`: the content is renewed when this text is another than last time; without it, every time.
  put(title, { wide = false, version } = {}, ...content) {
    let card = this.known.get(title);
    if (card && version !== undefined && card.version === version) return;
    if (!card) {
      card = { body: el("div", {}) };
      card.section = el("section", { class: "card" + (wide ? " wide" : ""), "data-card": title }, el("h2", {}, title), card.body);
      const next = this.order.slice(this.order.indexOf(title) + 1).find((other) => this.known.has(other));
      this.known.set(title, card);
      this.box.insertBefore(card.section, next ? this.known.get(next).section : null);
    }
    card.version = version;
    card.body.replaceChildren(...content.flat().filter((node) => node !== null && node !== undefined));
  }

  has(title) { return this.known.has(title); }
}
