// The AI SDK with its provider for OpenAI: `openai(MODEL)` calls /v1/responses.
import { createOpenAI } from "@ai-sdk/openai";
import { generateText } from "ai";

import { chats, objects } from "./ai_sdk.mjs";
import { QUESTION, TOKENS, sameText, server, use } from "./uses.mjs";

const openai = createOpenAI({ baseURL: server.base, apiKey: server.key });
chats(openai(server.model));
objects(openai(server.model));

use("chat completions", async () => {
  const model = openai.chat(server.model);
  const answer = await generateText({ model, prompt: QUESTION, maxOutputTokens: TOKENS, temperature: 0, maxRetries: 0 });
  sameText(answer.text, server.answer);
});
