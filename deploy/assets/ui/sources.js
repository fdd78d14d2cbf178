// Sources of tokens: each has a colour and a line of its own, in the order in which it was met.

export const TARGET = "target";
const NUM_STYLES = 8;

const places = new Map([[TARGET, 0]]);

/** Give these sources their places. */
export function meet(names) {
  for (const name of names) if (!places.has(name)) places.set(name, places.size);
}

export const sources = () => [...places.keys()];

/** The CSS class of a source; the first of the drafters' styles come again behind the last. */
export function styleOf(source) {
  meet([source]);
  const place = places.get(source);
  return `s${place === 0 ? 0 : ((place - 1) % (NUM_STYLES - 1)) + 1}`;
}

/** What a person reads of a source. */
export const titleOf = (source) => (source === TARGET ? "target (its own next token)" : source);

/** An element with text, a class and attributes. */
export function element(name, { text, className, ...attributes } = {}) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  for (const [attribute, value] of Object.entries(attributes)) made.setAttribute(attribute, value);
  return made;
}

/** A sample of a source's look, for legends and tables. */
export function swatch(source) {
  return element("span", { text: "abc", className: `swatch token ${styleOf(source)}`, "aria-hidden": "true" });
}

/** Buttons that show the tokens of one source alone; `panes` hold the tokens. */
export class Legend {
  constructor(place, panes) {
    this.place = place;
    this.panes = panes;
    this.chosen = null;
  }

  draw() {
    if (this.place.childElementCount === sources().length) return;
    const buttons = sources().map((source) => {
      const button = element("button", { type: "button", "aria-pressed": "false" });
      button.append(swatch(source), titleOf(source));
      button.addEventListener("click", () => this.toggle(source));
      button.dataset.source = source;
      return button;
    });
    this.place.replaceChildren(...buttons);
    this.show();
  }

  toggle(source) {
    this.chosen = this.chosen === source ? null : source;
    this.show();
  }

  show() {
    for (const button of this.place.children) {
      button.setAttribute("aria-pressed", String(button.dataset.source === this.chosen));
    }
    for (const pane of this.panes) {
      pane.classList.toggle("alone", this.chosen !== null);
      for (const token of pane.querySelectorAll(".token")) this.mark(token);
    }
  }

  /** Mark a token that is new. */
  mark(token) {
    token.classList.toggle("chosen", token.dataset.source === this.chosen);
  }
}
