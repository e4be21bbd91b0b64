// Calls of this server, under the address that the page has; the key goes into a header and nowhere else.

export const events = new EventTarget(); // "locked": a key is missing, or wrong (detail: true); "unlocked": one was given

export class ServerError extends Error {
  constructor(status, code, sentence) {
    super(sentence);
    this.status = status;
    this.code = code;
  }
}

let key = "";

export function setKey(given) {
  // Header values are bytes: those of its UTF-8, as the server compares them.
  key = String.fromCharCode(...new TextEncoder().encode(given));
  events.dispatchEvent(new Event("unlocked"));
}

async function send(path, method, document, limit_ms) {
  const headers = {};
  if (key) headers["X-API-Key"] = key;
  if (document !== undefined) headers["content-type"] = "application/json";
  const body = document === undefined ? undefined : JSON.stringify(document);
  const signal = limit_ms ? AbortSignal.timeout(limit_ms) : undefined;
  const options = { method, headers, body, cache: "no-store", signal };
  try {
    const started = performance.now();
    const reply = await fetch(path, options);
    const text = await reply.text();
    return { reply, text, elapsed_ms: performance.now() - started };
  } catch {
    throw new ServerError(0, "unreachable", "the server does not answer; see whether it still runs");
  }
}

function refusal(reply, text) {
  try {
    const { error, code } = JSON.parse(text);
    if (typeof error === "string") return new ServerError(reply.status, code, error);
  } catch {
    // not of this server: a proxy's page, perhaps
  }
  const sentence = `expected a JSON reply, got status ${reply.status} with another body`;
  return new ServerError(reply.status, "unknown", sentence);
}

// Returns the text of a reply, its headers, and how long it took from here, in ms.
export async function call(path, { method = "GET", body, limit_ms } = {}) {
  const used = key;
  const { reply, text, elapsed_ms } = await send(path, method, body, limit_ms);
  if (reply.ok) return { text, headers: reply.headers, elapsed_ms };
  const error = refusal(reply, text);
  if (reply.status === 401 && key === used) {
    events.dispatchEvent(new CustomEvent("locked", { detail: key !== "" }));
  }
  throw error;
}

export async function callJson(path, options) {
  const { text, headers, elapsed_ms } = await call(path, options);
  return { document: JSON.parse(text), headers, elapsed_ms };
}

export const failure = (error) => {
  if (!(error instanceof ServerError)) throw error;
  return error.status ? `${error.message} (${error.status} ${error.code})` : error.message;
};
