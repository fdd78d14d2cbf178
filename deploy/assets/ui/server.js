// What the page asks of the server: its figures, and streams of tokens.

const KEY = "draftline-key";

/** An answer of the server that is an error; `status` is its HTTP status. */
export class ServerError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export const key = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (value) => sessionStorage.setItem(KEY, value),
  forget: () => sessionStorage.removeItem(KEY),
};

/** Fetch a path beside the page; raises `ServerError` with what the server says. */
async function ask(path, options = {}) {
  const headers = { ...options.headers };
  if (key.get()) headers.authorization = `Bearer ${key.get()}`;
  const response = await fetch(path, { ...options, headers, cache: "no-store" });
  if (response.ok) return response;
  let message = `HTTP ${response.status}`;
  try {
    message = (await response.json()).error.message;
  } catch {
    // Not JSON: the status says it.
  }
  throw new ServerError(response.status, message);
}

export const serverInfo = async () => (await ask("server_info")).json();

export const servedModels = async () => (await (await ask("v1/models")).json()).data;

/**
 * Samples of /metrics of one model as {name, labels, value}.
 * Buckets of histograms are left out.
 */
export async function samples(model) {
  const text = await (await ask("metrics")).text();
  const found = [];
  for (const line of text.split("\n")) {
    const parts = /^([\w:]+)(?:\{(.*)\})? (\S+)$/.exec(line);
    if (!parts || parts[1].endsWith("_bucket")) continue;
    const labels = {};
    for (const [, name, value] of (parts[2] ?? "").matchAll(/(\w+)="((?:\\.|[^"\\])*)"/g)) {
      labels[name] = value.replace(/\\(.)/g, (_, char) => (char === "n" ? "\n" : char));
    }
    if (labels.model_name && labels.model_name !== model) continue;
    found.push({ name: parts[1], labels, value: Number(parts[3]) });
  }
  return found;
}

/**
 * Send a body to one of the two endpoints, and yield the JSON of each event of its stream.
 * An event that is an error is raised as `ServerError`.
 */
export async function* stream(kind, body, signal) {
  const path = kind === "chat" ? "v1/chat/completions" : "v1/completions";
  const response = await ask(path, {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
    signal,
  });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      const data = event.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const parsed = JSON.parse(data);
      if (parsed.error) throw new ServerError(parsed.error.code ?? 500, parsed.error.message);
      yield parsed;
    }
  }
}
