// Conversations and settings, in this browser only (localStorage), with one entry per conversation.

import { toast } from "./dom.js";

const CHAT = "mlxinfer.chat.";
const DRAFT = "mlxinfer.draft.";
const SETTINGS = "mlxinfer.settings";
const MODEL = "mlxinfer.model";

function read(key) {
  try {
    return JSON.parse(localStorage.getItem(key) ?? "null");
  } catch {
    return null;
  }
}

function write(key, value) {
  try {
    localStorage.setItem(key, JSON.stringify(value));
  } catch {
    toast("The browser's storage is full: this is not kept. Export and delete old conversations.");
  }
}

export const newChat = () => ({ id: crypto.randomUUID?.() ?? String(Date.now() + Math.random()), title: "", updated: Date.now(), turns: [] });

/** All conversations, the latest first. */
export function chats() {
  return Object.keys(localStorage).filter((key) => key.startsWith(CHAT)).map(read).filter((chat) => Array.isArray(chat?.turns))
    .sort((a, b) => b.updated - a.updated);
}

export function keep(chat) {
  write(CHAT + chat.id, chat);
}

export function drop(chat) {
  localStorage.removeItem(CHAT + chat.id);
  keepDraft(chat.id, "");
}

/** The unsent message of a conversation. */
export const draft = (id) => read(DRAFT + id) ?? "";
export const keepDraft = (id, text) => (text ? write(DRAFT + id, text) : localStorage.removeItem(DRAFT + id));
export const lastSettings = () => read(SETTINGS) ?? {};
export const keepSettings = (settings) => write(SETTINGS, settings);
export const lastModel = () => read(MODEL);
export const keepModel = (model) => write(MODEL, model);

/** Calls `changed()` when another tab changes a conversation. */
export function watch(changed) {
  addEventListener("storage", ({ key }) => { if (!key || key.startsWith(CHAT)) changed(); });
}

/** The default title of a conversation: the start of its first message. */
export function titleOf(chat) {
  const asked = chat.turns.find((turn) => turn.role === "user");
  const first = asked?.content || asked?.files?.[0].name || (asked?.images ? "Picture" : "");
  const line = first.trim().split("\n")[0];
  return chat.title || (line.length > 60 ? `${line.slice(0, 57).trimEnd()}…` : line) || "New chat";
}
