// OpenAI's Agents SDK for Node.
import {
  Agent, MaxTurnsExceededError, OpenAIChatCompletionsModel, OpenAIResponsesModel, run, setTracingDisabled, tool,
} from "@openai/agents";
import OpenAI from "openai";
import { z } from "zod";

import { QUESTION, TOKENS, equal, sameText, server, use, weather } from "./uses.mjs";

setTracingDisabled(true);
const client = new OpenAI({ baseURL: server.base, apiKey: server.key, maxRetries: 0 });
const kinds = [OpenAIResponsesModel, OpenAIChatCompletionsModel];
const cities = [];
const get_weather = tool({
  name: "get_weather",
  description: "Return the weather in a city.",
  parameters: z.object({ city: z.enum(["Paris", "Rome"]) }),
  execute: async ({ city }) => {
    cities.push(city);
    return "warm";
  },
});

async function answer(Kind, { modelSettings, ...options } = {}) {
  const settings = { temperature: 0, maxTokens: TOKENS, ...modelSettings };
  const agent = new Agent({ name: "a", model: new Kind(client, server.model), modelSettings: settings, ...options });
  return (await run(agent, QUESTION, { maxTurns: 4 })).finalOutput;
}

use("responses", async () => {
  sameText(await answer(OpenAIResponsesModel), server.answer);
});

use("chat", async () => {
  sameText(await answer(OpenAIChatCompletionsModel), server.answer);
});

use("tools", async () => {
  for (const Kind of kinds) {
    cities.length = 0;
    const settings = { toolUseBehavior: "stop_on_first_tool", modelSettings: { toolChoice: "required" } };
    await answer(Kind, { tools: [get_weather], ...settings });
    equal(cities.length > 0, true);
  }
});

use("answer schema beside tools", async () => {
  const outputType = z.object({ city: z.enum(["Paris", "Rome"]), warm: z.boolean() });
  for (const Kind of kinds) {
    cities.length = 0;
    try {
      weather(await answer(Kind, { tools: [get_weather], outputType }));
    } catch (error) {
      // The model may call the tool again and again instead.
      if (!(error instanceof MaxTurnsExceededError) || !cities.length) throw error;
    }
  }
});
