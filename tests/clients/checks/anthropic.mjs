// Anthropic's client for Node.
import Anthropic from "@anthropic-ai/sdk";

import { ARGUMENTS, QUESTION, TOKENS, TOOL, TOOL_ABOUT, called, joined, sameText, server, use } from "./uses.mjs";

const client = new Anthropic({ baseURL: server.url, apiKey: server.key, maxRetries: 0 });
const asked = {
  model: server.model, messages: [{ role: "user", content: QUESTION }], max_tokens: TOKENS, temperature: 0,
};
const tools = [{ name: TOOL, description: TOOL_ABOUT, input_schema: ARGUMENTS }];

use("messages", async () => {
  sameText((await client.messages.create(asked)).content[0].text, server.answer);
});

use("messages, streamed", async () => {
  const pieces = [];
  const stream = client.messages.stream(asked).on("text", (piece) => pieces.push(piece));
  sameText(await stream.finalText(), server.answer);
  joined(pieces, server.answer);
});

use("tools", async () => {
  const answer = await client.messages.create({ ...asked, tools, tool_choice: { type: "any" } });
  const block = answer.content.find((each) => each.type === "tool_use");
  called(block.name, block.input);
});
