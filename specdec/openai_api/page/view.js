// Elements of the page: texts in the colours of their tokens, figures, charts and events.

import { SOURCES } from "./figures.js";

export const at = (selector) => document.querySelector(selector);

export function make(tag, className, text) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text !== undefined) element.textContent = text;
  return element;
}

const MAX_REJECTED = 32; // shown at one place
const MAX_STEPS = 120; // in the strip
const MAX_EVENTS = 200;
const SVG = "http://www.w3.org/2000/svg";

// The text of one answer, a span for every token.
export class Turn {
  #said = make("p", "said");
  #end = make("p", "end");
  #count = 0;
  #follows;
  text = ""; // without reasoning

  // With `follows`, the box scrolls with the text.
  constructor(title, given, follows = true) {
    this.#follows = follows;
    const turn = make("article", "turn");
    turn.append(make("h3", "", title), this.#said, this.#end);
    if (given) this.#said.append(make("span", "given", given));
    at("#texts").append(turn);
  }

  take(chunk) {
    const rejected = new Map(); // by the place of the token committed instead
    for (const candidate of chunk.rejected ?? []) {
      const place = candidate.position - candidate.depth;
      rejected.set(place, [...(rejected.get(place) ?? []), candidate]);
    }
    const box = at("#texts");
    const follows = this.#follows && box.scrollHeight - box.scrollTop - box.clientHeight < 40;
    const pieces = [];
    chunk.token_texts.forEach((text, index) => {
      const source = chunk.sources[index];
      pieces.push(...rejectedSpans(rejected.get(this.#count)));
      const span = make("span", `t ${source}`, text);
      span.title = SOURCES[source] ?? source;
      if (index < chunk.reasoning_tokens) span.classList.add("reasoning");
      else this.text += text;
      pieces.push(span);
      this.#count += 1;
    });
    this.#said.append(...pieces, ...rejectedSpans(rejected.get(this.#count)));
    if (follows) box.scrollTop = box.scrollHeight;
  }

  end(text) {
    this.#end.textContent = text;
  }
}

function rejectedSpans(candidates = []) {
  const spans = candidates.slice(0, MAX_REJECTED).map((candidate) => {
    const span = make("s", `r ${candidate.source}`, candidate.text.replaceAll("\n", "⏎"));
    span.title = `rejected: ${SOURCES[candidate.source] ?? candidate.source}`;
    return span;
  });
  if (candidates.length > MAX_REJECTED) spans.push(make("s", "r", `+${candidates.length - MAX_REJECTED}`));
  return spans;
}

// Make the legend; its buttons highlight the tokens of one source, or all of them again.
export function makeLegend() {
  for (const [source, name] of Object.entries(SOURCES)) {
    const button = make("button");
    button.type = "button";
    button.dataset.source = source;
    button.setAttribute("aria-pressed", "false");
    button.append(make("span", `swatch ${source}`), make("span", "", name), make("b", "", 0));
    button.addEventListener("click", () => highlight(source));
    const entry = make("li");
    entry.append(button);
    at("#legend").append(entry);
  }
}

function highlight(source) {
  const box = at("#texts");
  if (box.dataset.only === source) delete box.dataset.only;
  else box.dataset.only = source;
  for (const button of document.querySelectorAll("#legend button"))
    button.setAttribute("aria-pressed", String(button.dataset.source === box.dataset.only));
}

// Show the numbers of tokens by source.
export function legend(sources) {
  for (const button of document.querySelectorAll("#legend button"))
    button.querySelector("b").textContent = sources[button.dataset.source] ?? 0;
}

const short = (number) => (number >= 100 ? number.toFixed(0) : number.toFixed(number >= 10 ? 1 : 2));

// Show the figures of the drafted and of the plain answer; either may be null.
export function speed(drafted, plain) {
  const shown = { rate: (f) => short(f.rate), per_step: (f) => short(f.perStep), tokens: (f) => f.tokens, steps: (f) => f.steps };
  for (const [row, value] of Object.entries(shown)) {
    const cells = at(`#speed [data-row=${row}]`).querySelectorAll("td");
    [drafted, plain].forEach((figures, column) => {
      cells[column].textContent = figures?.tokens ? value(figures) : "–";
    });
  }
  const most = Math.max(drafted?.rate ?? 0, plain?.rate ?? 0) || 1;
  const bars = document.querySelectorAll(".bars i");
  [drafted, plain].forEach((figures, index) => (bars[index].style.width = `${(100 * (figures?.rate ?? 0)) / most}%`));
}

function ordinal(number) {
  const teen = number > 10 && number < 14;
  return number + ((!teen && { 1: "st", 2: "nd", 3: "rd" }[number % 10]) || "th");
}

export function acceptance(shares) {
  at("#accepted-none").hidden = shares.length > 0;
  const rows = shares.slice(0, 16).map((share, index) => {
    const row = make("tr");
    const name = make("th", "", ordinal(index + 1));
    name.scope = "row";
    const cell = make("td");
    const meter = make("meter");
    meter.value = share;
    meter.setAttribute("aria-hidden", "true");
    cell.append(meter, make("span", "", `${(100 * share).toFixed(0)} %`));
    row.append(name, cell);
    return row;
  });
  at("#accepted tbody").replaceChildren(...rows);
}

// The last steps: a column each, a square for every token, the first candidate at the bottom.
export class Strip {
  #svg = at("#strip");
  #columns = [];

  clear() {
    this.#columns = [];
    this.#svg.replaceChildren();
  }

  take(steps) {
    for (const sources of steps.slice(-MAX_STEPS)) {
      const column = document.createElementNS(SVG, "g");
      const height = Math.min(6, 70 / sources.length);
      sources.forEach((source, index) => {
        const rect = document.createElementNS(SVG, "rect");
        const place = { x: 0.5, y: 71 - (index + 1) * height, width: 5, height: height - 1 };
        for (const [name, value] of Object.entries(place)) rect.setAttribute(name, value);
        rect.setAttribute("class", source);
        column.append(rect);
      });
      this.#columns.push(column);
      this.#svg.append(column);
    }
    const shown = Math.min(MAX_STEPS, Math.floor((this.#svg.clientWidth || 360) / 6));
    while (this.#columns.length > shown) this.#columns.shift().remove();
    this.#columns.forEach((column, index) => column.setAttribute("transform", `translate(${6 * index} 0)`));
  }
}

export function event(text, bad = false) {
  const entry = make("li", bad ? "bad" : "");
  entry.append(make("time", "", new Date().toTimeString().slice(0, 8)), text);
  const list = at("#events");
  list.append(entry);
  while (list.children.length > MAX_EVENTS) list.firstChild.remove();
  list.scrollTop = list.scrollHeight;
}

export function problem(text) {
  at("#problem").textContent = text;
  at("#problem").hidden = !text;
}
