// Vercel's AI SDK: uses shared by its providers for OpenAI, OpenAI-compatible servers and Anthropic. Each provider has
// its own row in the table.
import { Output, generateObject, generateText, streamObject, streamText, tool } from "ai";
import { z } from "zod";

import { PROMPT, QUESTION, TOKENS, TOOL, called, equal, joined, sameText, server, use, weather } from "./uses.mjs";

const Weather = z.object({ city: z.enum(["Paris", "Rome"]), warm: z.boolean() });
const get_weather = tool({
  description: "Return the weather in a city.",
  inputSchema: z.object({ city: z.enum(["Paris", "Rome"]) }),
});
const asked = { prompt: QUESTION, maxOutputTokens: TOKENS, temperature: 0, maxRetries: 0 };

async function all(pieces) {
  const found = [];
  for await (const piece of pieces) found.push(piece);
  return found;
}

// Register the uses of a provider's model for chats.
export function chats(model) {
  use("text", async () => {
    sameText((await generateText({ model, ...asked })).text, server.answer);
  });

  use("text, streamed", async () => {
    joined(await all(streamText({ model, ...asked }).textStream), server.answer);
  });

  use("tools", async () => {
    const answer = await generateText({ model, ...asked, tools: { get_weather }, toolChoice: "required" });
    const [call] = answer.toolCalls;
    called(call.toolName, call.input);
  });

  use("tools, streamed", async () => {
    const answer = streamText({ model, ...asked, tools: { get_weather }, toolChoice: "required" });
    const [call] = await answer.toolCalls;
    called(call.toolName, call.input);
  });
}

// Register the uses of a model that takes schemas of answers.
export function objects(model) {
  use("object", async () => {
    weather((await generateObject({ model, ...asked, schema: Weather })).object);
  });

  use("object, streamed", async () => {
    const answer = streamObject({ model, ...asked, schema: Weather });
    await all(answer.partialObjectStream);
    weather(await answer.object);
  });

  use("record of booleans", async () => {
    const schema = z.object({ warm: z.record(z.enum(["Paris", "Rome"]), z.boolean()) });
    const { object } = await generateObject({ model, ...asked, schema });
    equal(Object.values(object.warm).every((value) => typeof value === "boolean"), true);
  });

  use("object beside tools", async () => {
    const answer = await generateText({
      model, ...asked, tools: { get_weather }, output: Output.object({ schema: Weather }),
    });
    // If a tool is neither strict nor required, nothing constrains its arguments.
    if (answer.toolCalls.length) equal(answer.toolCalls[0].toolName, TOOL);
    else weather(answer.text);
  });
}

// Register the use of a model for completions.
export function completions(model) {
  use("completion", async () => {
    sameText((await generateText({ model, ...asked, prompt: PROMPT })).text, server.completion);
  });
}
