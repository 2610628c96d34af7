// The figures of one answer, from the chunks of its stream. Knows nothing of the page.

export const SOURCES = {
  remote_draft: "draft service",
  local_model: "local draft model",
  heads: "heads of the target",
  ngram: "n-grams",
  lookahead: "lookahead window",
  grammar: "grammar",
  correction: "target, instead of a candidate",
  bonus: "target, after the candidates",
  plain: "target, without candidates",
};

const ACCEPTED = new Set(["remote_draft", "local_model", "heads", "ngram", "lookahead", "grammar"]);

// Return a chunk's steps, each as the sources of its tokens: a token of the target's own ends its step.
export function stepsOf(sources) {
  const steps = [];
  let open = [];
  for (const source of sources) {
    open.push(source);
    if (!ACCEPTED.has(source)) {
      steps.push(open);
      open = [];
    }
  }
  if (open.length) steps.push(open); // a text may end with a candidate
  return steps;
}

export class Figures {
  tokens = 0;
  steps = 0;
  offered = 0;
  sources = {}; // tokens by source
  histogram = []; // entry i: steps with i accepted candidates
  ids = []; // tokens, to compare texts
  #first = null; // tokens and seconds of the first chunk, which includes the prompt's time
  #seconds = 0;

  // Take a chunk; return its steps.
  take(chunk) {
    const steps = stepsOf(chunk.sources);
    for (const step of steps) this.#count(step.filter((source) => ACCEPTED.has(source)).length, 1);
    if (chunk.steps > steps.length) this.#count(0, chunk.steps - steps.length);
    for (const source of chunk.sources) this.sources[source] = (this.sources[source] ?? 0) + 1;
    this.tokens += chunk.tokens.length;
    this.steps += chunk.steps;
    this.offered += chunk.offered;
    this.ids.push(...chunk.tokens);
    this.#seconds = chunk.elapsed_seconds;
    this.#first ??= { tokens: this.tokens, seconds: this.#seconds };
    return steps;
  }

  // Take the server's own statistics at the end; return whether they agree with what the chunks said.
  end(statistics) {
    const names = [...new Set([...Object.keys(statistics.sources), ...Object.keys(this.sources)])];
    const agrees =
      statistics.steps === this.steps &&
      statistics.offered === this.offered &&
      names.every((name) => (statistics.sources[name] ?? 0) === (this.sources[name] ?? 0));
    this.sources = statistics.sources;
    this.histogram = statistics.accepted_histogram;
    this.steps = statistics.steps;
    this.offered = statistics.offered;
    return agrees;
  }

  // Tokens a second after the first chunk.
  get rate() {
    if (!this.#first) return 0;
    const seconds = this.#seconds - this.#first.seconds;
    return seconds > 0 ? (this.tokens - this.#first.tokens) / seconds : this.tokens / this.#seconds;
  }

  get perStep() {
    return this.steps ? this.tokens / this.steps : 0;
  }

  // For each position, the share of steps in which its candidate was accepted.
  get accepted() {
    let left = this.histogram.reduce((sum, count) => sum + count, 0);
    const all = left;
    return this.histogram.slice(0, -1).map((count) => (left -= count) / all);
  }

  #count(accepted, steps) {
    while (this.histogram.length <= accepted) this.histogram.push(0);
    this.histogram[accepted] += steps;
  }
}
