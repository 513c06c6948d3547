// The pictures of the unsent message: chosen, pasted or dropped.

import { $, el, iconButton, toast } from "./dom.js";
import { show, take } from "./images.js";

const unsent = new Map(); // pictures by conversation id
const ACCEPT = "image/*";

/** A thumbnail with the picture's size. */
export function thumbnail(image, ...more) {
  const size = `${image.width} × ${image.height}`;
  const node = el("img", { alt: `Picture, ${size}` });
  show(node, image);
  return el("figure", { class: "picture" }, node, el("figcaption", {}, size), ...more);
}

export const attached = (id) => unsent.get(id) ?? [];

/** Takes the pictures away from a conversation: they are sent, or belong to another one. */
export function detach(id) {
  const found = attached(id);
  unsent.delete(id);
  return found;
}

export function attach(id, images) {
  if (images.length) unsent.set(id, [...attached(id), ...images]);
}

/** Shows the pictures of a conversation; `changed()` is called after one is removed. */
export function tray(id, changed) {
  $("tray").replaceChildren(...attached(id).map((image) => thumbnail(image, iconButton("close", "Remove the picture", () => {
    unsent.set(id, attached(id).filter((one) => one !== image));
    changed();
  }))));
  $("tray").hidden = !attached(id).length;
}

/** Adds the pictures among these files. */
async function add(id, files, changed) {
  const found = await Promise.all([...files].map(take));
  attach(id, found.filter(Boolean));
  if (found.includes(null)) toast("This file is not a picture that the browser can read.");
  changed();
}

/** Watches the button, the clipboard and dropped files. `now()` gives { id, sees, name }: the conversation, and the chosen model. */
export function watchPictures(now, changed) {
  const given = (files, event) => {
    if (!files?.length) return;
    event.preventDefault();
    const { id, sees, name } = now();
    if (sees) add(id, files, changed);
    else toast(`${name || "This model"} cannot see pictures.`);
  };
  const field = el("input", { type: "file", accept: ACCEPT, multiple: true });
  field.addEventListener("change", (event) => { given([...field.files], event); field.value = ""; });
  $("attach").addEventListener("click", () => field.click());
  $("prompt").addEventListener("paste", (event) => given(event.clipboardData?.files, event));
  document.addEventListener("dragover", (event) => { if (event.dataTransfer?.types.includes("Files")) event.preventDefault(); });
  document.addEventListener("drop", (event) => given(event.dataTransfer?.files, event));
}
