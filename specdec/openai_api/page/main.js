// The page: asks for a text, streams it, and shows who proposed its tokens and how much faster that made it.

import { ApiError, events, get, key } from "./api.js";
import { Figures } from "./figures.js";
import * as pods from "./pods.js";
import * as settings from "./settings.js";
import { acceptance, at, event, legend, make, makeLegend, problem, speed, Strip, Turn } from "./view.js";
import { why } from "./why.js";

const MAX_SPOKEN = 2000; // characters of an answer read out by screen readers
const PAUSE_SECONDS = 1; // without a token, worth an event
const LOST_STEPS = 30; // steps without a draft service's token, worth an event

const strip = new Strip();
const messages = []; // of the conversation
let stopping = null; // aborts the answer in progress
let plainFigures = null; // of the last answer by plain decoding, with these settings

async function models() {
  try {
    const { data } = await get("v1/models");
    settings.offer(data.map((model) => model.id));
    at("#server").textContent = data.length === 1 ? `${data[0].max_model_len} tokens of context` : `${data.length} models`;
    problem("");
  } catch (error) {
    problem(error.status === 401 ? `An API key is needed: ${error.message}` : error.message);
    if (error.status === 401) at("#key").focus();
  }
}

// Watches one answer for what a person would notice: pauses, and a draft that falls silent.
class Watch {
  #last = Infinity; // when the last token came; the first one waits for its prompt
  #silent = 0; // steps since a draft service's token
  #drafted = false;
  #timer = setInterval(() => this.#look(), 250);
  #paused = false;

  take(steps) {
    if (this.#paused) event(`the text goes on after ${((performance.now() - this.#last) / 1000).toFixed(1)} s`);
    this.#last = performance.now();
    this.#paused = false;
    for (const step of steps) {
      if (step.includes("remote_draft")) {
        if (this.#drafted && this.#silent >= LOST_STEPS) event("the draft service is back");
        this.#drafted = true;
        this.#silent = 0;
      } else if ((this.#silent += 1) === LOST_STEPS && this.#drafted) {
        event(`no token of the draft service in ${LOST_STEPS} steps: it is late, of no use here, or gone`);
      }
    }
  }

  end() {
    clearInterval(this.#timer);
  }

  #look() {
    if (this.#paused || performance.now() - this.#last < 1000 * PAUSE_SECONDS) return;
    this.#paused = true;
    event("no token for a second", true);
  }
}

// Stream one answer into a turn; return its text, figures and statistics.
async function answer(path, request, turn, shown, taken = () => {}) {
  const figures = new Figures();
  const watch = new Watch();
  let statistics = null;
  let reason = "";
  let due = false;
  const draw = () => {
    due = false;
    shown(figures);
  };
  try {
    for await (const told of events(path, request, stopping.signal)) {
      const choice = told.choices[0];
      if (!choice) continue; // the usage
      for (const chunk of choice.specdec?.chunks ?? []) {
        const steps = figures.take(chunk);
        turn.take(chunk);
        taken(steps);
        watch.take(steps);
      }
      if (choice.finish_reason) [statistics, reason] = [choice.specdec, choice.finish_reason];
      if (!due) due = Boolean(requestAnimationFrame(draw));
    }
  } finally {
    watch.end();
    const agrees = statistics === null || figures.end(statistics);
    shown(figures);
    const ended = statistics === null ? "broken off" : reason;
    turn.end(`${figures.tokens} tokens, ${figures.steps} steps, ${ended}${agrees ? "" : "; the server counted otherwise"}`);
  }
  return { figures, statistics };
}

function showWhy(statistics) {
  at("#mode").replaceChildren(...why(statistics).map((text) => make("li", "", text)));
}

function compared(drafted, plain) {
  if (!drafted.rate || !plain.rate) return "";
  const same = drafted.ids.length === plain.ids.length && drafted.ids.every((id, index) => id === plain.ids[index]);
  return `${same ? "The same tokens" : "Other tokens"}, ${(drafted.rate / plain.rate).toFixed(2)} times as fast.`;
}

async function ask() {
  const chat = settings.kind() === "chat";
  const prompt = at("#prompt").value;
  const request = settings.request();
  if (chat) messages.push({ role: "user", content: prompt });
  Object.assign(request, chat ? { messages: [...messages] } : { prompt });
  const path = chat ? "v1/chat/completions" : "v1/completions";
  if (chat) new Turn("You", prompt);
  else clear();
  strip.clear();
  at("#ratio").textContent = "";
  at("#spoken").textContent = "Generating.";

  let drafted = null;
  const turn = new Turn(chat ? "Model" : "Text", chat ? "" : prompt);
  let complete = false;
  try {
    const show = (figures) => {
      drafted = figures;
      speed(figures, plainFigures);
      legend(figures.sources);
      acceptance(figures.accepted);
    };
    const first = await answer(path, request, turn, show, (steps) => strip.take(steps));
    complete = true;
    showWhy(first.statistics);
    at("#spoken").textContent = `${turn.text.slice(0, MAX_SPOKEN)} End of the text.`;
  } finally {
    if (chat && complete) messages.push({ role: "assistant", content: turn.text });
    if (chat && !complete) messages.pop(); // a question without an answer is no part of the conversation
  }
  if (chat && at("#prompt").value === prompt) at("#prompt").value = ""; // else the next message is being typed
  if (!settings.wants("compare")) return;
  const again = new Turn("The same by plain decoding", chat ? "" : prompt, false);
  await answer(path, settings.plain(request), again, (figures) => {
    plainFigures = figures;
    speed(drafted, figures);
  });
  at("#ratio").textContent = compared(drafted, plainFigures);
}

async function send() {
  if (stopping) return;
  if (!at("#ask").checkValidity()) at("#settings").open = true;
  if (!at("#ask").reportValidity()) return;
  if (!at("#prompt").value) {
    problem("The prompt is empty.");
    at("#prompt").focus();
    return;
  }
  stopping = new AbortController();
  working(true);
  problem("");
  try {
    await ask();
  } catch (error) {
    if (error.name !== "AbortError") {
      problem(error instanceof ApiError ? error.message : `${error}`);
      event(error.message, true);
    }
    at("#spoken").textContent = error.name === "AbortError" ? "Stopped." : "";
  } finally {
    stopping = null;
    working(false);
  }
}

function working(value) {
  at("#send").disabled = value;
  at("#stop").disabled = !value;
  at("#texts").setAttribute("aria-busy", String(value));
  pods.generating(value);
}

function shown() {
  at("#prompt-label").textContent = settings.kind() === "chat" ? "Message" : "Prompt";
  at("#texts").classList.toggle("clean", !settings.wants("rejected"));
}

function saved() {
  history.replaceState(null, "", settings.link());
  plainFigures = null;
  shown();
}

function clear() {
  messages.length = 0;
  at("#texts").replaceChildren();
}

settings.load(location.hash);
shown();
makeLegend();
speed(null, null);
at("#key").value = key.get();
at("#ask").addEventListener("submit", (submit) => {
  submit.preventDefault();
  send();
});
at("#ask").addEventListener("change", saved);
at("#model").addEventListener("change", saved);
at("#stop").addEventListener("click", () => stopping?.abort());
at("#clear").addEventListener("click", () => {
  stopping?.abort();
  clear();
  at("#prompt").focus();
});
at("#copy").addEventListener("click", async () => {
  try {
    await navigator.clipboard.writeText(location.href);
    at("#copied").textContent = "Copied.";
  } catch {
    at("#copied").textContent = "It is in the address bar."; // without HTTPS there is no clipboard
  }
});
at("#key").addEventListener("change", () => {
  key.set(at("#key").value.trim());
  models();
  pods.changed();
});
document.addEventListener("keydown", (pressed) => {
  if (pressed.key === "Escape") stopping?.abort();
  if (pressed.key === "Enter" && (pressed.ctrlKey || pressed.metaKey)) send();
});
addEventListener("hashchange", () => {
  settings.load(location.hash);
  saved();
});
models();
pods.start();
