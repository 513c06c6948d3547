// The settings panel: fields of a request besides its messages. An empty field has the default that it shows.

import { $, el, fit, iconButton } from "./dom.js";

const NUMBERS = [
  ["temperature", "Temperature", "0 to 2: 0 always takes the most likely token", { min: 0, max: 2, step: 0.05 }],
  ["top_p", "Top p", "Sample from the most likely tokens up to this total probability", { min: 0, max: 1, step: 0.05 }],
  ["top_k", "Top k", "Sample from this many of the most likely tokens; 0: all", { min: 0, step: 1 }],
  ["min_p", "Min p", "Drop tokens below this share of the most likely one's probability", { min: 0, max: 1, step: 0.01 }],
  ["max_tokens", "Longest answer", "Most tokens of an answer", { min: 1, step: 1 }],
  ["seed", "Seed", "The same number gives the same answer", { step: 1 }],
  ["thinking_token_budget", "Thinking budget", "Most tokens of thinking", { min: 0, step: 1 }],
];
const TOOLS = '[{"type": "function", "function": {"name": …}}]';

let conversation; // the chosen model's default values

/** Shows this model's defaults in empty fields. */
export function showDefaults(values) {
  conversation = values;
  const others = { max_tokens: "no limit", seed: "random", thinking_token_budget: "no limit" }; // for every model
  for (const [name] of NUMBERS) {
    const node = $("settings").querySelector(`[name=${name}]`);
    const value = values?.[name];
    if (node) node.placeholder = others[name] ?? (value === undefined ? "default" : `default (${value})`);
  }
}

/** Fills the panel. `settings` is changed in place, and `changed()` called. */
export function settingsPanel(settings, changed, close) {
  const set = (name, value) => {
    if (value === "" || value === null) delete settings[name];
    else settings[name] = value;
    changed();
  };
  const head = el("header", { class: "bar" }, el("h2", {}, "Settings"), iconButton("close", "Close settings", close));
  $("settings").replaceChildren(head, el("div", { class: "fields" },
    area("system", "System prompt", settings, set, { rows: 4, placeholder: "How the model should answer" }),
    el("div", { class: "grid" }, NUMBERS.map((entry) => number(entry, settings, set)), thinking(settings, set)),
    toggle("logprobs", "Token probabilities", "Point at a word of an answer to see what else was likely", settings, set),
    tools(settings, set),
    el("button", { type: "button", class: "quiet", onclick: () => {
      for (const name of Object.keys(settings)) delete settings[name];
      changed();
      settingsPanel(settings, changed, close);
    } }, "Reset to defaults")));
  showDefaults(conversation);
  for (const node of $("settings").querySelectorAll("textarea")) fit(node);
}

function area(name, label, settings, set, more) {
  const node = el("textarea", { ...more, name, dir: "auto", spellcheck: name === "system" ? null : "false" });
  node.value = settings[name] ?? "";
  node.addEventListener("input", () => { fit(node); set(name, node.value); });
  return el("label", {}, el("span", {}, label), node);
}

function number([name, label, hint, limits], settings, set) {
  const node = el("input", { type: "number", name, title: hint, inputmode: "decimal", ...limits });
  node.value = settings[name] ?? "";
  const check = () => {
    const bad = !node.checkValidity() && !node.validity.stepMismatch;
    node.setAttribute("aria-invalid", String(bad));
    if (!bad) set(name, node.value === "" ? "" : limits.step === 1 ? Math.round(node.valueAsNumber) : node.valueAsNumber);
  };
  node.addEventListener("input", check);
  return el("label", {}, el("span", {}, label), node, el("small", {}, hint));
}

function thinking(settings, set) {
  const node = el("select", { name: "thinking" }, el("option", { value: "" }, "default"), el("option", { value: "on" }, "on"), el("option", { value: "off" }, "off"));
  node.value = settings.thinking ?? "";
  node.addEventListener("change", () => set("thinking", node.value));
  return el("label", {}, el("span", {}, "Thinking"), node, el("small", {}, "Where the model can switch it"));
}

function toggle(name, label, hint, settings, set) {
  const node = el("input", { type: "checkbox", name });
  node.checked = Boolean(settings[name]);
  node.addEventListener("change", () => set(name, node.checked || ""));
  return el("label", { class: "toggle" }, node, el("span", {}, label, el("small", {}, hint)));
}

function tools(settings, set) {
  const wrong = el("small", { class: "wrong", role: "alert" });
  const check = () => { wrong.textContent = settings.tools && !parsedTools(settings) ? "Not valid JSON yet, so it will not be sent." : ""; };
  const field = area("tools", "Tools", settings, (name, value) => { set(name, value); check(); }, { rows: 3, placeholder: TOOLS, class: "mono" });
  check();
  return el("details", { class: "more", ...(settings.tools ? { open: true } : {}) }, el("summary", {}, "Tools"),
    el("p", { class: "note" }, "A JSON list in OpenAI's form. The page shows calls, and you write what they return."), field, wrong);
}

/** The tools of these settings; null if their text is not a JSON list. */
export function parsedTools(settings) {
  try {
    const found = JSON.parse(settings.tools);
    return Array.isArray(found) && found.length ? found : null;
  } catch {
    return null;
  }
}

/** The request fields of these settings. */
export function fields(settings) {
  const found = {};
  for (const [name] of NUMBERS) if (settings[name] !== undefined) found[name] = settings[name];
  if (settings.thinking) found.chat_template_kwargs = { enable_thinking: settings.thinking === "on" };
  if (settings.logprobs) Object.assign(found, { logprobs: true, top_logprobs: 5 });
  const asked = settings.tools && parsedTools(settings);
  return asked ? { ...found, tools: asked } : found;
}
