// Why an answer was speculated as it was: sentences from its statistics.

import { SOURCES } from "./figures.js";

const UNDRAFTED = {
  off: "drafting is off",
  no_draft: "no draft service is available",
  late: "the draft's candidates came too late",
  draft_lost: "the draft was lost",
  draft_useless: "the draft's candidates were not accepted",
  tokenizer_mismatch: "the draft has another tokenizer",
  protocol_mismatch: "the draft speaks another version",
};

const EVENTS = {
  verifier_lost: "the verifier was lost, another one went on",
  numerics_changed: "the text went on at a verifier with other numerics",
  draft_lost: "the draft was lost",
  draft_useless: "the draft was given up: too little was accepted",
  draft_back: "a draft is back",
  draft_paused: "drafting paused: it did not pay",
  draft_resumed: "drafting resumed: it pays again",
  resumed: "the stream broke, and resumed",
};

const MODES = {
  off: "off",
  ngram: "n-grams",
  local_draft: "local draft",
  heads: "heads",
  remote_draft: "draft service",
  forced: "forced",
};

const named = (counts, names) =>
  Object.entries(counts)
    .sort((one, other) => other[1] - one[1])
    .map(([name, count]) => `${names[name] ?? name} ${count}`)
    .join(", ");

export const event = (name) => EVENTS[name] ?? name.replaceAll("_", " ");
export const mode = (name) => MODES[name] ?? name;

// Return the sentences about a finished answer.
export function why(statistics) {
  const { decisions, failover_events: events, undrafted_tokens: undrafted } = statistics;
  const found = [`Tokens: ${named(statistics.sources, SOURCES)}.`];
  found.push(
    statistics.offered
      ? `${statistics.accepted} of ${statistics.offered} verified candidates were accepted.`
      : "No candidate was verified.",
  );
  if (decisions?.why) found.push(`Mode: ${decisions.why}.`);
  if (undrafted)
    found.push(
      `${undrafted} tokens lacked a draft's candidates` +
        (statistics.undrafted_reason ? `: ${UNDRAFTED[statistics.undrafted_reason] ?? statistics.undrafted_reason}.` : "."),
    );
  for (const [name, count] of Object.entries(events)) found.push(`${event(name)}${count > 1 ? ` (${count} times)` : ""}.`);
  if (!statistics.reproducible) found.push("The same request may give other tokens.");
  return found;
}
