// The server's API: models, metrics, and streamed answers. Errors have plain texts.

const KEY = "mlxinfer.key";

/** An error. `text` is for people; `kind` is "key", "gone", "long", "busy" or "other". */
export class Problem extends Error {
  constructor(kind, text) {
    super(text);
    this.kind = kind;
  }
}

export const keepKey = (key) => sessionStorage.setItem(KEY, key);
export const forgetKey = () => sessionStorage.removeItem(KEY);

async function ask(path, options = {}) {
  const key = sessionStorage.getItem(KEY);
  const headers = { ...options.headers, ...(key ? { Authorization: `Bearer ${key}` } : {}) };
  let answer;
  try {
    answer = await fetch(path, { ...options, headers, cache: "no-store", credentials: "omit" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Problem("gone", "The server cannot be reached. It may have been stopped: start it again, then retry.");
  }
  if (!answer.ok) throw await refused(answer);
  return answer;
}

async function refused(answer) {
  let error = {};
  try {
    error = (await answer.json()).error ?? {};
  } catch { /* it was no JSON */ }
  return told(answer.status, error, answer.headers.get("Retry-After"));
}

function told(status, error, wait) {
  const said = error.message ?? "";
  if (status === 401) return new Problem("key", error.code === "invalid_api_key" ? "That is not this server's key." : "This server asks for a key.");
  if (error.code === "context_length_exceeded") return new Problem("long", tooLong(said));
  if (status === 413) return new Problem("long", "This conversation is longer than the server takes. Start a new one, or shorten a message.");
  if (error.code === "model_not_found") return new Problem("other", "This model is not served any more. Choose another one above.");
  if (status === 429 || status === 503 || error.code === "engine_stopped") {
    const when = wait ? ` Try again in ${wait === "1" ? "a second" : `${wait} seconds`}.` : " Try again in a moment.";
    const stopping = /shutting down/.test(said);
    return new Problem("busy", stopping ? "The server was stopped before the answer was complete." : `The server cannot answer now.${when}${said ? ` It says: ${said}` : ""}`);
  }
  if (status === 408 || error.code === "timeout") return new Problem("other", "The answer took longer than this server allows.");
  if (status >= 500) return new Problem("other", "The server failed while it answered. Its log says more.");
  return new Problem("other", said || `The server refused this (status ${status}).`);
}

function tooLong(said) {
  const numbers = /length is (\d+) tokens.*?has (\d+) tokens/.exec(said);
  const count = numbers ? ` It has ${Number(numbers[2]).toLocaleString("en")} tokens, and the model reads ${Number(numbers[1]).toLocaleString("en")}.` : "";
  return `This conversation is too long for the model.${count} Start a new one, or shorten an earlier message.`;
}

export async function models() {
  return (await (await ask("v1/models")).json()).data;
}

/** Metrics of a model and of the server, by name without the prefix. */
export async function metrics(model) {
  const text = await (await ask("metrics")).text();
  const lines = text.matchAll(/^mlxinfer_(\w+)(?:\{model_name="([^"]*)"\})? (\S+)$/gm);
  return Object.fromEntries([...lines].filter(([, , of]) => !of || of === model).map(([, name, , value]) => [name, Number(value)]));
}

/** Streams an answer: calls `on(event)` with each of the server's events. Returns when the answer is complete. */
export async function answer(body, signal, on) {
  const options = { method: "POST", signal, headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) };
  const { body: stream } = await ask("v1/chat/completions", options);
  const reader = stream.getReader();
  const decoder = new TextDecoder();
  let rest = "";
  for (;;) {
    let piece;
    try {
      piece = await reader.read();
    } catch (error) {
      if (error.name === "AbortError") throw error;
      piece = { done: true };
    }
    if (piece.done) throw new Problem("gone", "The server went away before the answer was complete.");
    rest += decoder.decode(piece.value, { stream: true });
    const parts = rest.split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      if (!part.startsWith("data: ")) continue;
      if (part === "data: [DONE]") return;
      const event = JSON.parse(part.slice(6));
      if (event.error) throw told(event.error.status ?? 0, event.error, null);
      on(event);
    }
  }
}
