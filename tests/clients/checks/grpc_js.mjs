// gRPC for Node, with the contract in proto/.
import grpc from "@grpc/grpc-js";
import loader from "@grpc/proto-loader";

import { PROMPT, TOKENS, equal, joined, sameText, server, use } from "./uses.mjs";

const options = { keepCase: true, longs: String, enums: String, defaults: true, oneofs: true };
const definition = await loader.load("specdec/v2/generation.proto", { ...options, includeDirs: [server.contract] });
const { GenerationService } = grpc.loadPackageDefinition(definition).specdec.v2;
const client = new GenerationService(server.orchestrator, grpc.credentials.createInsecure());
const request = { text: PROMPT, max_tokens: TOKENS };

function call(method, message) {
  return new Promise((resolve, reject) => {
    client[method](message, (error, answer) => (error ? reject(error) : resolve(answer)));
  });
}

use("models", async () => {
  equal((await call("ListModels", {})).models.map((model) => model.name).join(), server.model);
});

use("completion", async () => {
  sameText((await call("Complete", { request })).completions[0].text, server.completion);
});

use("completion, streamed", async () => {
  const pieces = [];
  for await (const response of client.Generate(request)) pieces.push(response.text);
  joined(pieces, server.completion);
});

use("errors", async () => {
  const error = await call("Complete", { request: { ...request, max_tokens: 0 } }).catch((raised) => raised);
  equal(error.code, grpc.status.INVALID_ARGUMENT);
});
