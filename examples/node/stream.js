// Streams a completion: node stream.js [ADDRESS,ADDRESS...] [PROMPT] [OPTIONS AS JSON]

import { Client } from "./client.js";
import { SpecdecError } from "./errors.js";

const [addresses = "127.0.0.1:50050", text = "def main(", options = "{}"] = process.argv.slice(2);
const client = new Client(addresses.split(","));
try {
  for await (const { text: piece, finish } of client.generate({ text, max_tokens: 64, ...JSON.parse(options) })) {
    process.stdout.write(piece);
    if (finish) console.error(`\n${finish.usage.completion_tokens} tokens in ${finish.speculation.steps} steps`);
  }
} catch (error) {
  if (!(error instanceof SpecdecError)) throw error;
  const wrong = error.violations.map(({ field, description }) => `${field}: ${description}`).join("; ");
  console.error(`${error.code} ${error.reason}: ${wrong || error.message}`);
  process.exitCode = 1;
} finally {
  client.close();
}
