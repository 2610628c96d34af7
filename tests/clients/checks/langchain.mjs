// LangChain for Node with its integration for OpenAI.
import { tool } from "@langchain/core/tools";
import { ChatOpenAI } from "@langchain/openai";
import { z } from "zod";

import { QUESTION, TOKENS, called, joined, sameText, server, use, weather } from "./uses.mjs";

const where = {
  model: server.model, apiKey: server.key, configuration: { baseURL: server.base }, temperature: 0, maxTokens: TOKENS,
  maxRetries: 0,
};
const model = new ChatOpenAI(where);
const schema = z.object({ city: z.enum(["Paris", "Rome"]), warm: z.boolean() });
const get_weather = tool(async () => "warm", {
  name: "get_weather",
  description: "Return the weather in a city.",
  schema: z.object({ city: z.enum(["Paris", "Rome"]) }),
});

use("chat", async () => {
  sameText((await model.invoke(QUESTION)).content, server.answer);
});

use("chat, streamed", async () => {
  const pieces = [];
  for await (const chunk of await model.stream(QUESTION)) pieces.push(chunk.content);
  joined(pieces, server.answer);
});

use("tools", async () => {
  const [call] = (await model.bindTools([get_weather], { tool_choice: "any" }).invoke(QUESTION)).tool_calls;
  called(call.name, call.args);
});

use("structured output", async () => {
  for (const method of ["jsonSchema", "functionCalling"]) {
    weather(await model.withStructuredOutput(schema, { method }).invoke(QUESTION));
  }
});

use("responses", async () => {
  sameText((await new ChatOpenAI({ ...where, useResponsesApi: true }).invoke(QUESTION)).text, server.answer);
});
