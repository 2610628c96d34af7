// Pods, queues, KV memory and breakers, as the orchestrator reports them to operators.

import { ApiError, get } from "./api.js";
import { at, event, make } from "./view.js";
import { mode } from "./why.js";

const LOOK_MS = 1000;
const MIN_STEPS = 5; // with a draft, between two answers, to judge whether drafts are in time

let before = null; // the last answer
let refused = false; // this key may not see them
let busy = false; // an answer is being generated
const late = new Map(); // by verifier: whether drafts were late for most of its last steps

const percent = (part, whole) => (whole ? `${((100 * part) / whole).toFixed(0)} %` : "–");
const breakerOf = (pod) => pod.breaker.replace("BREAKER_STATE_", "").toLowerCase().replace("_", "-");

// Return the growth of some counters since the last answer of the same process; null without one.
function grown(address, stats, ...counters) {
  const old = [...(before?.verifiers ?? []), ...(before?.drafts ?? [])].find((pod) => pod.address === address);
  const then = old?.verifier ?? old?.draft;
  if (!then || then.pod.process_id !== stats.pod.process_id || stats.up_us <= then.up_us) return null;
  return counters.map((name) => stats[name] - then[name]);
}

function perSecond(address, stats, counter) {
  const found = grown(address, stats, counter, "up_us");
  return found ? ((1e6 * found[0]) / found[1]).toFixed(0) : "–";
}

function share(address, stats, part, whole) {
  const found = grown(address, stats, part, whole);
  return found ? percent(...found) : "–";
}

const COMMON = {
  model: (pod) => pod.model,
  breaker: (pod) => breakerOf(pod),
  state: (pod, stats) => pod.unfit_reason || (stats ? (stats.serving ? "serving" : "not serving") : "no answer"),
};

const VERIFIER = {
  ...COMMON,
  mode: (_, stats) => (stats.mode ? mode(stats.mode) : "–"),
  running: (_, stats) => stats.running,
  waiting: (_, stats) => stats.waiting,
  "KV held": (_, stats) => percent(stats.kv_held_tokens, stats.kv_tokens),
  "KV cached": (_, stats) => percent(stats.kv_cached_tokens, stats.kv_tokens),
  "tokens/s": (pod, stats) => perSecond(pod.address, stats, "committed_tokens"),
  accepted: (pod, stats) => share(pod.address, stats, "accepted_candidates", "offered_candidates"),
  "draft in time": (pod, stats) => share(pod.address, stats, "draft_ready_steps", "drafted_steps"),
  busy: (pod, stats) => share(pod.address, stats, "busy_us", "up_us"),
  preemptions: (_, stats) => stats.preemptions,
};

const DRAFT = {
  ...COMMON,
  sessions: (_, stats) => stats.sessions,
  "KV held": (_, stats) => percent(stats.kv_held_tokens, stats.kv_tokens),
  "candidates/s": (pod, stats) => perSecond(pod.address, stats, "sent_candidates"),
  guessed: (pod, stats) => share(pod.address, stats, "guessed_tokens", "committed_tokens"),
  busy: (pod, stats) => share(pod.address, stats, "busy_us", "up_us"),
};

function table(title, pods, columns, statsOf) {
  const made = make("table");
  made.append(make("caption", "", title));
  const head = made.createTHead().insertRow();
  for (const name of ["address", ...Object.keys(columns)]) {
    const cell = make("th", "", name);
    cell.scope = "col";
    head.append(cell);
  }
  const body = made.createTBody();
  for (const pod of pods) {
    const row = body.insertRow();
    const name = make("th", "", pod.address);
    name.scope = "row";
    row.append(name);
    const stats = statsOf(pod);
    for (const [column, value] of Object.entries(columns)) {
      const cell = make("td", "", stats || column in COMMON ? value(pod, stats) : "–");
      if ((column === "breaker" && cell.textContent !== "closed") || (column === "state" && cell.textContent !== "serving"))
        cell.className = "bad";
      row.append(cell);
    }
  }
  return made;
}

// Report what has changed since the last answer of the same orchestrator.
function compare(told) {
  if (!before || before.pod.process_id !== told.pod.process_id) return;
  for (const role of ["verifiers", "drafts"]) {
    const old = new Map(before[role].map((pod) => [pod.address, pod]));
    const name = role.slice(0, -1);
    for (const pod of told[role]) {
      const then = old.get(pod.address);
      old.delete(pod.address);
      if (!then) event(`${name} ${pod.address}: new`);
      else if (then.breaker !== pod.breaker)
        event(`${name} ${pod.address}: breaker ${breakerOf(pod)}`, breakerOf(pod) !== "closed");
      const [alive, lived] = [pod, then ?? pod].map((seen) => Boolean(seen[name]));
      if (alive !== lived) event(`${name} ${pod.address} ${alive ? "answers again" : "does not answer"}`, !alive);
    }
    for (const address of old.keys()) event(`${name} ${address}: gone`, true);
  }
}

function compareDrafts(verifier) {
  const [ready, steps] = grown(verifier.address, verifier.verifier, "draft_ready_steps", "drafted_steps") ?? [0, 0];
  if (steps < MIN_STEPS) return;
  const now = ready < steps / 2;
  if (now !== (late.get(verifier.address) ?? false))
    event(`verifier ${verifier.address}: drafts in time for ${percent(ready, steps)} of steps`, now);
  late.set(verifier.address, now);
}

function show(told) {
  at("#pods-state").textContent =
    `Orchestrator, process ${told.pod.process_id}: ${told.running_requests} requests running, ` +
    `${told.waiting_prompts} prompts waiting for a tokeniser, ${told.generated_tokens} tokens generated.`;
  at("#pods-tables").replaceChildren(
    table("Verifiers", told.verifiers, VERIFIER, (pod) => pod.verifier),
    table("Drafts", told.drafts, DRAFT, (pod) => pod.draft),
  );
}

async function look() {
  if (document.hidden || refused || !(at("#pods").open || busy)) return;
  try {
    const told = await get("v1/specdec/stats");
    compare(told);
    for (const pod of told.verifiers) if (pod.verifier) compareDrafts(pod);
    show(told);
    before = told;
  } catch (error) {
    refused = error instanceof ApiError && [401, 403, 404].includes(error.status);
    before = null;
    at("#pods-tables").replaceChildren();
    at("#pods-state").textContent = !refused
      ? error.message
      : error.status === 404
        ? "The server does not show them: see its option --serve-metrics."
        : `For operators' keys alone: ${error.message}.`;
  }
}

async function watch() {
  await look();
  setTimeout(watch, LOOK_MS);
}

export function start() {
  at("#pods").addEventListener("toggle", look);
  watch();
}

// Forget what was seen with another key.
export function changed() {
  refused = false;
  before = null;
  look();
}

export const generating = (value) => (busy = value);
