// The AI SDK with its provider for OpenAI-compatible servers.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";

import { chats, objects } from "./ai_sdk.mjs";
import { server } from "./uses.mjs";

const provider = createOpenAICompatible({
  name: "here", baseURL: server.base, apiKey: server.key, supportsStructuredOutputs: true,
});
chats(provider(server.model));
objects(provider(server.model));
