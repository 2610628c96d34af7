// OpenAI's client for Node.
import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";

import {
  ARGUMENTS, PROMPT, QUESTION, TOKENS, TOOL, TOOL_ABOUT, called, equal, joined, sameText, server, use, weather,
} from "./uses.mjs";

const client = new OpenAI({ baseURL: server.base, apiKey: server.key, maxRetries: 0 });
const messages = [{ role: "user", content: QUESTION }];
const chat = { model: server.model, messages, max_tokens: TOKENS, temperature: 0 };
const text = { model: server.model, prompt: PROMPT, max_tokens: TOKENS, temperature: 0 };
const response = { model: server.model, input: QUESTION, max_output_tokens: TOKENS, temperature: 0 };
const tools = [{ type: "function", function: { name: TOOL, description: TOOL_ABOUT, parameters: ARGUMENTS } }];

use("models", async () => {
  const found = [];
  for await (const model of client.models.list()) found.push(model.id);
  equal(found.join(), server.model);
});

use("completion", async () => {
  sameText((await client.completions.create(text)).choices[0].text, server.completion);
});

use("chat", async () => {
  sameText((await client.chat.completions.create(chat)).choices[0].message.content, server.answer);
});

use("chat, streamed", async () => {
  const pieces = [];
  for await (const event of await client.chat.completions.create({ ...chat, stream: true })) {
    pieces.push(event.choices[0]?.delta.content);
  }
  joined(pieces, server.answer);
});

use("tools", async () => {
  const answer = await client.chat.completions.create({ ...chat, tools, tool_choice: "required" });
  const [call] = answer.choices[0].message.tool_calls;
  called(call.function.name, call.function.arguments);
});

use("parse", async () => {
  const schema = z.object({ city: z.enum(["Paris", "Rome"]), warm: z.boolean() });
  const format = zodResponseFormat(schema, "weather");
  const answer = await client.chat.completions.parse({ ...chat, response_format: format });
  weather(answer.choices[0].message.parsed);
});

use("responses", async () => {
  sameText((await client.responses.create(response)).output_text, server.answer);
});

use("responses, streamed", async () => {
  const pieces = [];
  for await (const event of await client.responses.create({ ...response, stream: true })) {
    if (event.type === "response.output_text.delta") pieces.push(event.delta);
  }
  joined(pieces, server.answer);
});
