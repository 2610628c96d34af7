// The HTTP API: requests with the user's key, and streams of server-sent events.

const KEY = "specdec.key"; // of sessionStorage: the key lives as long as the tab

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export const key = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (value) => (value ? sessionStorage.setItem(KEY, value) : sessionStorage.removeItem(KEY)),
};

async function send(path, options = {}) {
  const headers = { ...options.headers };
  if (key.get()) headers.authorization = `Bearer ${key.get()}`;
  // Relative to the page: a proxy may serve it under a path of its own.
  const answer = await fetch(new URL(path, document.baseURI), { ...options, headers, cache: "no-store" });
  if (answer.ok) return answer;
  const body = await answer.json().catch(() => ({}));
  throw new ApiError(answer.status, body.error?.message ?? `${answer.status} ${answer.statusText}`);
}

export const get = async (path) => (await send(path)).json();

// Yield the events of an answer to `request`, in order; ApiError if it fails, also in mid-stream.
export async function* events(path, request, signal) {
  const body = JSON.stringify(request);
  const answer = await send(path, { method: "POST", body, signal, headers: { "content-type": "application/json" } });
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  while (true) {
    const { value, done } = await reader.read();
    if (done) throw new ApiError(0, "the connection was closed before the answer was complete");
    text += value;
    const found = text.split("\n\n");
    text = found.pop();
    for (const event of found) {
      if (event.startsWith(":")) continue; // a comment, which keeps a quiet connection open
      const data = event.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const told = JSON.parse(data);
      if (told.error) throw new ApiError(0, told.error.message);
      yield told;
    }
  }
}
