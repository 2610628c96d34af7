// The page in Node: a document with as much as its scripts need, and an API that a test scripts.

class Element {
  constructor(text = "") {
    Object.assign(this, { textContent: text, value: text, children: [], listeners: {}, dataset: {}, style: {} });
    this.classList = { add() {}, toggle() {} };
    this.found = new Map();
    this.selectedIndex = 0;
  }

  get length() {
    return this.children.length;
  }

  get options() {
    return this.children;
  }

  querySelector(selector) {
    if (!this.found.has(selector)) this.found.set(selector, new Element());
    return this.found.get(selector);
  }

  querySelectorAll(selector) {
    return [0, 1].map((index) => this.querySelector(`${selector}:${index}`));
  }

  append(...children) {
    this.children.push(...children);
  }

  replaceChildren(...children) {
    this.children = children;
  }

  addEventListener(type, listener) {
    (this.listeners[type] ??= []).push(listener);
  }

  dispatch(type) {
    for (const listener of this.listeners[type] ?? []) listener({ preventDefault() {} });
  }

  checkValidity() {
    return true;
  }

  reportValidity() {
    return true;
  }

  setAttribute() {}
  focus() {}
  remove() {}
}

class Select extends Element {
  get value() {
    return this.children[this.selectedIndex]?.value ?? "";
  }

  set value(_) {}
}

const root = new Element();
root.found.set("#model", new Select());
const texts = "temperature seed max_tokens rule max_depth max_candidates window kind forced rejected compare";
const elements = Object.fromEntries(texts.split(" ").map((name) => [name, new Element()]));
root.querySelector("#ask").elements = { ...elements, drafters: [] };

export const at = (selector) => root.querySelector(selector);
export const form = root.querySelector("#ask").elements;
export const asked = []; // path and body of each request for a text

// Load the page with this link. `api` returns the answer to a request: [status, body].
export async function open(folder, hash, api) {
  const kept = new Map();
  Object.assign(globalThis, {
    document: Object.assign(root, { baseURI: "http://x/", createElement: () => new Element(), createElementNS: () => new Element() }),
    location: { hash },
    history: { replaceState: (_, __, link) => (location.hash = link) },
    sessionStorage: { getItem: (name) => kept.get(name), setItem: (name, value) => kept.set(name, value) },
    requestAnimationFrame: (draw) => draw(),
    addEventListener() {},
    Option: Element,
    fetch: async (url, { body, headers }) => {
      const path = new URL(url).pathname;
      if (body) asked.push([path, JSON.parse(body)]);
      const [status, answer] = await api(path, headers);
      return new Response(typeof answer === "string" ? answer : JSON.stringify(answer), { status });
    },
  });
  await import(`${folder}/main.js`);
}

// Return the stream of a text of one token.
export function stream(text) {
  const chunk = { tokens: [1], token_texts: [text], sources: ["target"], reasoning_tokens: 0, steps: 1, offered: 0 };
  const counts = { sources: { target: 1 }, accepted_histogram: [], steps: 1, offered: 0 };
  const pieces = [
    { finish_reason: null, specdec: { chunks: [{ ...chunk, elapsed_seconds: 1 }] } },
    { finish_reason: "stop", specdec: { ...counts, failover_events: {}, reproducible: true } },
  ];
  const data = [...pieces.map((piece) => JSON.stringify({ choices: [{ index: 0, ...piece }] })), "[DONE]"];
  return data.map((event) => `data: ${event}\n\n`).join("");
}

export async function until(condition) {
  while (!condition()) await new Promise((done) => setTimeout(done));
}

// Ask for a text, as the button does, and wait until it is complete.
export async function ask(kind, prompt) {
  form.kind.value = kind;
  at("#prompt").value = prompt;
  const before = asked.length;
  at("#ask").dispatch("submit");
  await until(() => asked.length > before && !at("#send").disabled);
}
