// Shared by the checks of all Node clients, as uses.py is for Python.
export const server = JSON.parse(process.env.SPECDEC_CLIENT_SERVER);
server.base = `${server.url}/v1`;

export const TOKENS = 64;
export const PROMPT = "def main(";
export const QUESTION = "Read a file.";
export const CITIES = ["Paris", "Rome"];
export const WEATHER = {
  type: "object",
  properties: { city: { type: "string", enum: CITIES }, warm: { type: "boolean" } },
  required: ["city", "warm"],
  additionalProperties: false,
};
export const TOOL = "get_weather";
export const TOOL_ABOUT = "Return the weather in a city.";
export const ARGUMENTS = {
  type: "object",
  properties: { city: WEATHER.properties.city },
  required: ["city"],
  additionalProperties: false,
};

// The functions of the check in this process, by use.
export const uses = new Map();

// Register a function as a use of the client. It throws if the use does not work.
export function use(name, run) {
  uses.set(name, run);
}

function wrong(got, expected) {
  throw new Error(`got ${JSON.stringify(got)}, expected ${expected}`);
}

export function equal(got, wanted) {
  if (got !== wanted) wrong(got, JSON.stringify(wanted));
}

// Compare texts. Surrounding white space does not count: several clients strip it.
export function sameText(got, wanted) {
  equal((got ?? "").trim(), wanted.trim());
}

// Check that a stream came in several pieces that join to the text.
export function joined(pieces, wanted) {
  sameText(pieces.map((piece) => piece ?? "").join(""), wanted);
  if (pieces.filter(Boolean).length < 2) wrong(pieces, "several pieces");
}

// Check an answer to a prompt made by the client: any text will do.
export function someText(got) {
  if (typeof got !== "string" || !got.trim()) wrong(got, "a text");
}

function fields(value) {
  return typeof value === "string" ? JSON.parse(value) : value;
}

// Check that an answer, as JSON or an object, fits WEATHER.
export function weather(got) {
  const { city, warm, ...others } = fields(got);
  if (!CITIES.includes(city) || typeof warm !== "boolean" || Object.keys(others).length) wrong(got, "city and warm");
}

// Check a call of the tool.
export function called(name, given) {
  equal(name, TOOL);
  if (!CITIES.includes(fields(given).city)) wrong(given, "a city"); // the client's schema may allow other arguments
}
