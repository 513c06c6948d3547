// The list of conversations: open, rename, export, delete.

import { $, download, el, iconButton, toast } from "./dom.js";
import * as store from "./store.js";

/** Fills the list. `act` has open(chat) and changed(). */
export function sidebar(current, act) {
  const focused = document.activeElement?.closest?.("#chats li")?.dataset.id;
  $("chats").replaceChildren(...store.chats().map((chat) => row(chat, chat.id === current.id, act)));
  if (focused && !document.activeElement.closest("#chats")) $("chats").querySelector(`[data-id="${focused}"] .open`)?.focus();
}

function row(chat, open, act) {
  const title = store.titleOf(chat);
  const node = el("li", { "data-id": chat.id, class: open ? "current" : null });
  const name = el("button", { type: "button", class: "open", title, "aria-current": open ? "page" : null, onclick: () => act.open(chat), ondblclick: () => rename(node, chat, act) }, title);
  node.append(name, el("span", { class: "tools" },
    iconButton("edit", `Rename ${title}`, () => rename(node, chat, act)),
    iconButton("save", `Export ${title}`, () => download(`${slug(title)}.json`, JSON.stringify(chat, null, 2))),
    iconButton("remove", `Delete ${title}`, () => remove(chat, act))));
  return node;
}

function rename(node, chat, act) {
  const field = el("input", { "aria-label": "Title of the conversation", maxlength: "120" });
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

const slug = (title) => title.toLowerCase().replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "").slice(0, 60) || "conversation";
