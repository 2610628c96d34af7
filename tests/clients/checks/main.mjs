// Runs the check of one client: `node main.mjs CHECK` runs CHECK.mjs. Each use adds a line of JSON to the file named by
// SPECDEC_CLIENT_RESULTS, as in __main__.py.
import { appendFileSync } from "node:fs";

import { uses } from "./uses.mjs";

const SECONDS_A_USE = 120;
const MAX_ERROR_CHARACTERS = 300;

function said(error) {
  const lines = String(error?.message ?? error).split("\n").map((line) => line.trim()).filter(Boolean);
  return `${error?.name ?? "Error"}: ${lines.join(" ")}`.slice(0, MAX_ERROR_CHARACTERS);
}

async function attempt(run) {
  let timer;
  const late = new Promise((_, reject) => {
    timer = setTimeout(() => reject(new Error(`did not end within ${SECONDS_A_USE} s`)), 1000 * SECONDS_A_USE);
  });
  try {
    await Promise.race([run(), late]);
    return null;
  } catch (error) {
    console.error(error);
    return said(error);
  } finally {
    clearTimeout(timer);
  }
}

function record(name, error) {
  appendFileSync(process.env.SPECDEC_CLIENT_RESULTS, JSON.stringify({ use: name, error }) + "\n");
}

process.on("unhandledRejection", (error) => console.error("unhandled:", error));
const failed = await attempt(() => import(`./${process.argv[2]}.mjs`));
if (failed !== null) record("import", failed);
for (const [name, run] of uses) record(name, await attempt(run));
process.exit(0);
