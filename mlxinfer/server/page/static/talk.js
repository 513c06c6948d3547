// One answer: the request to the server, and the conversion of its events to a turn.

import { answer } from "./api.js";
import { urls } from "./images.js";
import { fields } from "./settings.js";
import { Tokens } from "./tokens.js";

/** The conversation as messages of OpenAI's API. An answer with reasoning only is left out, unless it is the `last` turn, to be continued.
    Raises `Problem` if a picture is lost. */
export async function messages(settings, turns, last = null) {
  const pictures = await urls(turns);
  const system = settings.system?.trim() ? [{ role: "system", content: settings.system }] : [];
  const said = turns.filter((turn) => turn.role !== "assistant" || turn.content || turn.calls?.length || turn === last);
  return [...system, ...said.map((turn) => message(turn, pictures))];
}

/** The request for the next turn after these, or with `resumed` for the continuation of the last turn. `model` is the server's entry;
    `again`: the answer replaces an earlier one, and should differ. */
export async function request(model, settings, turns, { again = false, resumed = null } = {}) {
  const asked = fields(settings);
  if (settings.temperature === undefined) {
    if (model.conversation) asked.temperature = model.conversation.temperature;
    if (again) delete asked.seed;
  }
  asked.stop_on_loop = true;
  if (resumed) Object.assign(asked, { continue_final_message: true, add_generation_prompt: false });
  return { model: model.id, messages: await messages(settings, turns, resumed), stream: true, stream_options: { include_usage: true }, ...asked };
}

/** A text file as a named code block, as mlxinfer chat sends it. */
function block({ name, text }) {
  const fence = "`".repeat(Math.max(3, ...[...text.matchAll(/`+/g)].map(([run]) => run.length + 1)));
  return `${name}:\n${fence}\n${text.trimEnd()}\n${fence}`;
}

function message(turn, pictures) {
  if (turn.role === "user") {
    const content = [turn.content, ...(turn.files ?? []).map(block)].filter(Boolean).join("\n\n");
    if (!turn.images?.length) return { role: "user", content };
    const parts = turn.images.map(({ id }) => ({ type: "image_url", image_url: { url: pictures.get(id) } }));
    return { role: "user", content: content ? [...parts, { type: "text", text: content }] : parts };
  }
  if (turn.role === "tool") return { role: "tool", tool_call_id: turn.id, content: turn.content };
  const calls = turn.calls?.map(({ id, name, arguments: text }) => ({ id, type: "function", function: { name, arguments: text } }));
  return { role: "assistant", content: turn.content, ...(turn.reasoning ? { reasoning_content: turn.reasoning } : {}), ...(calls?.length ? { tool_calls: calls } : {}) };
}

/** Fills `turn` with the answer; `view` gets its tokens, `changed()` is called after each event. Raises `Problem`. */
export async function fill(turn, body, view, signal, changed) {
  const began = performance.now();
  const before = turn.stats?.tokens ?? 0; // of a continued answer
  let first = 0;
  let tokens = 0;
  const pace = (now) => { turn.stats = { ...turn.stats, tokens: before + tokens, first: (first - began) / 1000, rate: tokens > 4 && now > first ? ((tokens - 1) * 1000) / (now - first) : 0 }; };
  await answer(body, signal, (event) => {
    const now = performance.now();
    if (event.usage) {
      tokens = event.usage.completion_tokens;
      turn.stats = { ...turn.stats, prompt: event.usage.prompt_tokens, cached: event.usage.prompt_tokens_details?.cached_tokens ?? 0, image: event.usage.prompt_tokens_details?.image_tokens ?? 0 };
      pace(now);
    }
    for (const { delta, logprobs, finish_reason: reason, stop_reason: loop } of event.choices) {
      if (take(turn, delta, logprobs, view)) {
        first ||= now;
        tokens += logprobs?.content?.length || 1;
        if (turn.reasoning && turn.content && !turn.thought) turn.thought = (now - first) / 1000;
        pace(now);
      }
      if (reason) turn.finish = loop ?? reason;
    }
    changed();
  });
}

/** Adds a piece; false if it was empty. */
function take(turn, delta, logprobs, view) {
  const thought = delta.reasoning ?? delta.reasoning_content ?? "";
  const text = delta.content ?? "";
  const probabilities = logprobs?.content;
  if (probabilities) {
    view.tokens ??= new Tokens(turn.content);
    view.thoughts ??= new Tokens(turn.reasoning ?? "");
    (thought && !text ? view.thoughts : view.tokens).add(thought && !text ? thought : text, probabilities);
  } else if (view.tokens && text) view.tokens.add(text, []);
  turn.reasoning = (turn.reasoning ?? "") + thought;
  turn.content += text;
  for (const piece of delta.tool_calls ?? []) {
    turn.calls ??= [];
    const call = (turn.calls[piece.index] ??= { id: "", name: "", arguments: "" });
    call.id ||= piece.id ?? "";
    call.name += piece.function?.name ?? "";
    call.arguments += piece.function?.arguments ?? "";
  }
  return Boolean(thought || text || delta.tool_calls?.length);
}
