// The settings: from the form to a request, and to the part of the link after `#` and back. Prompts and keys stay out.

const form = document.querySelector("#ask");
const model = document.querySelector("#model");
let wanted = null; // the model of the link, until the models are known; "" for the first one

const TEXTS = ["temperature", "seed", "max_tokens", "rule", "max_depth", "max_candidates", "window"];
const FLAGS = ["forced", "rejected", "compare"];
const DEFAULTS = { kind: "completion", max_tokens: "200" };

const drafters = () => [...form.elements.drafters].filter((box) => box.checked).map((box) => box.value);

export const kind = () => form.elements.kind.value;
export const wants = (flag) => form.elements[flag].checked;

export function link() {
  const found = new URLSearchParams();
  const put = (name, value) => value !== (DEFAULTS[name] ?? "") && found.set(name, value);
  put("kind", kind());
  for (const name of TEXTS) put(name, form.elements[name].value.trim());
  if (drafters().length < form.elements.drafters.length) found.set("drafters", drafters().join());
  for (const name of FLAGS) if (wants(name)) found.set(name, "1");
  if (wanted ?? model.selectedIndex > 0) found.set("model", wanted ?? model.value);
  return `#${found}`;
}

// Show the names of the models; keep the chosen one, or choose the link's. If it is not served, choose the first one.
export function offer(names) {
  const before = wanted ?? model.value;
  wanted = null;
  model.replaceChildren(...names.map((name) => new Option(name)));
  model.selectedIndex = Math.max(0, names.indexOf(before));
}

// Set the form from a link's part.
export function load(hash) {
  const found = new URLSearchParams(hash.replace(/^#/, ""));
  const given = (name) => found.get(name) ?? DEFAULTS[name] ?? "";
  form.elements.kind.value = given("kind") === "chat" ? "chat" : "completion";
  for (const name of TEXTS) form.elements[name].value = given(name);
  if (form.elements.rule.selectedIndex < 0) form.elements.rule.value = "";
  const named = found.get("drafters")?.split(",");
  for (const box of form.elements.drafters) box.checked = named?.includes(box.value) ?? true;
  for (const name of FLAGS) form.elements[name].checked = found.get(name) === "1";
  wanted = found.get("model") ?? "";
  if (model.length) offer([...model.options].map((option) => option.value));
}

// Without a seed the page draws one: a second request by plain decoding needs the same.
function seed() {
  const given = form.elements.seed.value.trim();
  return given ? Number(given) : crypto.getRandomValues(new Uint32Array(1))[0];
}

// Return the fields of a request, without its prompt.
export function request() {
  const number = (name) => (form.elements[name].value.trim() === "" ? undefined : Number(form.elements[name].value));
  const chosen = drafters();
  const own = {
    chunks: true,
    rejected_candidates: wants("rejected") || undefined,
    rule: form.elements.rule.value || undefined,
    max_depth: number("max_depth"),
    max_candidates: number("max_candidates"),
  };
  if (chosen.length === 0) own.speculation = "off";
  else if (wants("forced")) own.forced = true;
  if (chosen.length && chosen.length < form.elements.drafters.length) own.drafters = chosen;
  if (form.elements.window.value.trim()) own.lookahead = form.elements.window.value.split(",").map(Number);
  return {
    model: (wanted ?? model.value) || undefined,
    max_tokens: number("max_tokens"),
    temperature: number("temperature"),
    seed: seed(),
    stream: true,
    stream_options: { include_usage: true },
    specdec: own,
  };
}

// Return a request for the same text by plain decoding.
export function plain(request) {
  return { ...request, specdec: { chunks: true, speculation: "off" } };
}
