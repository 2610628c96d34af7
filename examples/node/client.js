// A client of specdec's gRPC API. A stream that loses its orchestrator is resumed at another one: its reader sees a pause,
// never a repeat or a gap.

import { setTimeout as sleep } from "node:timers/promises";
import { fileURLToPath } from "node:url";
import grpc from "@grpc/grpc-js";
import loader from "@grpc/proto-loader";

import { SpecdecError } from "./errors.js";

const PROTOS = fileURLToPath(new URL("../../proto", import.meta.url));
const definition = loader.loadSync("specdec/v2/generation.proto", {
  includeDirs: [PROTOS],
  keepCase: true, // field names as in the contract
  longs: String, // a seed has 64 bits, a number 53
  enums: String,
  defaults: true, // for unset fields; `optional` ones stay undefined
});
const { GenerationService } = grpc.loadPackageDefinition(definition).specdec.v2;

// A silent server is given up within half a minute: by default gRPC waits for ever.
const CHANNEL_OPTIONS = { "grpc.keepalive_time_ms": 20_000, "grpc.keepalive_timeout_ms": 10_000 };

const PAUSE_MS = 100;
const MAX_PAUSE_MS = 2000;
const MAX_WAIT_MS = 60_000; // limit on retry delays requested by servers

export class Client {
  /**
   * @param {string[]} addresses of orchestrators, each "host:port"
   * @param {object} [options]
   * @param {string} [options.apiKey] for orchestrators that require one
   * @param {grpc.ChannelCredentials} [options.credentials] without them the connection is not encrypted
   * @param {number} [options.maxFailures] limit on consecutive failed calls without a new token
   * @param {grpc.ChannelOptions} [options.channelOptions] override the client's own
   */
  constructor(
    addresses,
    { apiKey, credentials = grpc.credentials.createInsecure(), maxFailures = 10, channelOptions = {} } = {},
  ) {
    this.channelOptions = { ...CHANNEL_OPTIONS, ...channelOptions };
    this.services = addresses.map((address) => new GenerationService(address, credentials, this.channelOptions));
    this.apiKey = apiKey;
    this.maxFailures = maxFailures;
    this.turn = 0;
  }

  /**
   * Stream a completion: yield each GenerateResponse as it comes. Leaving the loop cancels the call.
   * @param {object} request a GenerateRequest with n = 1: `text`, `tokens` or `chat`, and options
   * @throws {SpecdecError} if the text cannot continue
   */
  async *generate(request) {
    if ((request.n ?? 1) > 1) throw new RangeError(`n = ${request.n}: a text is taken up only where n is 1`);
    const asked = structuredClone(request); // always requests exactly the tokens not received yet
    asked.generated_tokens ??= [];
    let begun = false;
    let failures = 0;
    for (;;) {
      const call = this.#service.Generate(asked, this.#metadata);
      try {
        for await (const response of call) {
          if (!begun) makeExplicit(asked, response);
          begun = true;
          asked.generated_tokens.push(...response.tokens);
          if (response.tokens.length > 0) failures = 0;
          yield response;
          if (response.finish) return;
        }
        throw new Error("the stream ended before the text did");
      } catch (error) {
        if (typeof error.code !== "number") throw error; // not a status
        const seen = new SpecdecError(error);
        // A text already begun waits for room, and for a server that knows its model's revision.
        const waits = begun && (seen.code === "RESOURCE_EXHAUSTED" || seen.reason === "UNKNOWN_MODEL");
        failures += 1;
        if (!(seen.isLoss || waits) || failures > this.maxFailures) throw seen;
        this.turn += 1;
        const pause = Math.min(PAUSE_MS * 2 ** (failures - 1), MAX_PAUSE_MS);
        await sleep(Math.max(pause, Math.min(1000 * (seen.retryAfter ?? 0), MAX_WAIT_MS)));
      } finally {
        call.cancel();
      }
    }
  }

  close() {
    for (const service of this.services) service.close();
  }

  get #service() {
    return this.services[this.turn % this.services.length];
  }

  get #metadata() {
    const metadata = new grpc.Metadata();
    if (this.apiKey !== undefined) metadata.set("authorization", `Bearer ${this.apiKey}`);
    return metadata;
  }
}

// Set every field resolved by the first server: another one might resolve it differently.
function makeExplicit(asked, response) {
  const { resolved } = response;
  if (!resolved) return; // an older server: repeat the original request
  asked.model_fingerprint = response.model_fingerprint;
  asked.sampling = { ...resolved.sampling, ...asked.sampling, seed: response.seed };
  asked.max_tokens = resolved.max_tokens;
  asked.ignore_end_token = true; // `resolved.end_tokens` has it
  asked.stop_tokens = resolved.end_tokens;
  asked.prompt_digest = resolved.prompt_digest;
  if (resolved.model) asked.model = resolved.model; // the revision in use
  if (resolved.reasoning) asked.reasoning = resolved.reasoning; // the position of the reasoning
  if (resolved.time && asked.chat) asked.chat.time = resolved.time;
}
