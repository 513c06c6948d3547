// The list of conversations: open, rename, export, delete.

import { $, download, el, iconButton, toast } from "./dom.js";
import { cleaned, everyTurn } from "./branches.js";
import { keep, ofURL, urls } from "./images.js";
import * as store from "./store.js";
import { messages } from "./talk.js";

/** Fills the list. `act` has open(chat) and changed(). */
export function sidebar(current, act) {
  const focused = document.activeElement?.closest?.("#chats li")?.dataset.id;
  const all = store.chats();
  $("find").hidden = !all.length;
  const words = all.length ? $("find").value.toLowerCase().split(/\s+/).filter(Boolean) : [];
  const found = words.length ? all.filter((chat) => has(chat, words)) : all;
  const none = words.length && !found.length ? [el("li", { class: "note" }, "No conversation has these words.")] : [];
  $("chats").replaceChildren(...found.map((chat) => row(chat, chat.id === current.id, act)), ...none);
  if (focused && !document.activeElement.closest("#chats")) $("chats").querySelector(`[data-id="${focused}"] .open`)?.focus();
}

/** True if each of these words is in the title or in a turn of any version. */
function has(chat, words) {
  const texts = [store.titleOf(chat), ...everyTurn(chat.turns).flatMap(({ content, files }) => [content, ...(files ?? []).flatMap(({ name, text }) => [name, text])])].map((text) => String(text).toLowerCase());
  return words.every((word) => texts.some((text) => text.includes(word)));
}

function row(chat, open, act) {
  const title = store.titleOf(chat);
  const node = el("li", { "data-id": chat.id, class: open ? "current" : null });
  const name = el("button", { type: "button", class: "open", dir: "auto", title, "aria-current": open ? "page" : null, onclick: () => act.open(chat), ondblclick: () => rename(node, chat, act) }, title);
  node.append(name, el("span", { class: "tools" },
    iconButton("edit", `Rename ${title}`, () => rename(node, chat, act)),
    iconButton("save", `Export ${title}`, () => save(chat, title)),
    iconButton("remove", `Delete ${title}`, () => remove(chat, act))));
  return node;
}

function rename(node, chat, act) {
  const field = el("input", { dir: "auto", "aria-label": "Title of the conversation", maxlength: "120" });
  field.value = store.titleOf(chat);
  let over = false;
  const end = (kept) => {
    if (over) return;
    over = true;
    if (kept) act.rename(chat, field.value.trim());
    else act.changed();
  };
  field.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.isComposing) end(true);
    if (event.key === "Escape") { event.stopPropagation(); end(false); }
  });
  field.addEventListener("blur", () => end(true));
  node.replaceChildren(field);
  field.select();
}

function remove(chat, act) {
  act.remove(chat);
  toast(`Deleted “${store.titleOf(chat)}”.`, "Undo", () => { store.keep(chat); act.open(chat); });
}

/** Exports with `messages`, the form that other programs read, such as mlxinfer chat's /load. They have the pictures, and
    `pictures` those of other versions. */
async function save(chat, title) {
  try {
    const others = everyTurn(chat.turns).filter((turn) => !chat.turns.includes(turn));
    const pictures = Object.fromEntries(await urls(others));
    download(`${slug(title)}.json`, JSON.stringify({ ...chat, messages: await messages(chat.settings ?? {}, chat.turns), pictures }, null, 2));
  } catch (error) {
    toast(error.message);
  }
}

/** A new conversation from the text of an exported file, or from any JSON object with a list of messages; null for anything else. */
export async function imported(text) {
  let found;
  try {
    found = JSON.parse(text);
  } catch {
    return null;
  }
  const plain = (turn) => ["user", "assistant", "tool"].includes(turn?.role) && typeof turn.content === "string";
  const listed = (Array.isArray(found?.turns) ? found.turns : Array.isArray(found?.messages) ? await Promise.all(found.messages.map(ofParts)) : null);
  const turns = listed && (found.turns ? cleaned(listed, plain) : listed.filter(plain).map(ofMessage));
  if (!turns?.length) return null;
  if (found.turns) await restore(turns, found);
  for (const turn of everyTurn(turns)) {
    if (turn.files && !(Array.isArray(turn.files) && turn.files.length && turn.files.every((one) => typeof one?.name === "string" && typeof one.text === "string"))) delete turn.files;
  }
  await keep(everyTurn(turns).flatMap((turn) => turn.images ?? []));
  const system = found.turns ? found.settings?.system : listed.find((turn) => turn?.role === "system")?.content ?? found.system;
  const settings = { ...(found.turns && typeof found.settings === "object" ? found.settings : {}), ...(typeof system === "string" && system ? { system } : {}) };
  return { ...store.newChat(), title: typeof found.title === "string" ? found.title : "", model: typeof found.model === "string" ? found.model : null, settings, turns };
}

/** Gives the users' turns of an exported conversation their pictures, which its messages have, or `pictures` for other versions. */
async function restore(turns, { messages, pictures }) {
  for (const turn of everyTurn(turns).filter((one) => one.images && !turns.includes(one))) {
    const images = (await Promise.all(turn.images.map(({ id }) => ofURL(String(pictures?.[id]))))).filter(Boolean);
    if (images.length) turn.images = images;
    else delete turn.images;
  }
  const said = Array.isArray(messages) ? messages.filter((one) => one?.role === "user") : [];
  for (const [i, turn] of turns.filter(({ role }) => role === "user").entries()) {
    if (!turn.images) continue;
    const { images } = await ofParts(said[i]) ?? {};
    if (images) turn.images = images;
    else delete turn.images;
  }
}

/** A message whose content is text, with the pictures of its parts. */
async function ofParts(message) {
  if (!Array.isArray(message?.content)) return message;
  const images = (await Promise.all(message.content.map((part) => (part?.image_url?.url ? ofURL(part.image_url.url) : null)))).filter(Boolean);
  return { ...message, content: message.content.map((part) => part?.text ?? "").join(""), ...(images.length ? { images } : {}) };
}

function ofMessage({ images, role, content, reasoning, reasoning_content: thought, tool_calls: calls, tool_call_id: id, name }) {
  if (role === "tool") return { role, id, name: name ?? "", content };
  const made = Array.isArray(calls) && calls.map((call) => ({ id: call.id ?? "", name: call.function?.name ?? "", arguments: String(call.function?.arguments ?? "") }));
  return { role, content, ...(images ? { images } : {}), finish: "stop", ...(reasoning ?? thought ? { reasoning: String(reasoning ?? thought) } : {}), ...(made ? { calls: made } : {}) };
}

const slug = (title) => title.toLowerCase().replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "").slice(0, 60) || "conversation";
