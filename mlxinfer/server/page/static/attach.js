// The pictures and text files of the unsent message: chosen, pasted or dropped.

import { $, el, iconButton, toast } from "./dom.js";
import { show, take } from "./images.js";

const unsent = new Map(); // pictures and { name, text } by conversation id
const MOST_TEXT = 1_000_000; // bytes of a text file
const BINARY = /[\0-\x08\x0e-\x1a]/;

/** A thumbnail with the picture's size. */
export function thumbnail(image, ...more) {
  const size = `${image.width} × ${image.height}`;
  const node = el("img", { alt: `Picture, ${size}` });
  show(node, image);
  return el("figure", { class: "picture" }, node, el("figcaption", {}, size), ...more);
}

/** A text file, folded. */
export function textFile({ name, text }, ...more) {
  const lines = text.split("\n").length - (text.endsWith("\n") ? 1 : 0);
  const content = el("pre", { dir: "auto", tabindex: "0" });
  const open = () => { content.textContent = text; };
  return el("div", { class: "file" }, el("details", { ontoggle: open }, el("summary", {}, el("span", { dir: "auto" }, name), el("small", {}, `${lines.toLocaleString("en")} ${lines === 1 ? "line" : "lines"}`)), content), more);
}

const isText = (one) => one.text !== undefined;
const view = (one, ...more) => (isText(one) ? textFile(one, ...more) : thumbnail(one, ...more));

/** The fields of a turn with these attachments. */
export function asFields(attachments) {
  const [files, images] = [attachments.filter(isText), attachments.filter((one) => !isText(one))];
  return { ...(images.length ? { images } : {}), ...(files.length ? { files } : {}) };
}

export const attached = (id) => unsent.get(id) ?? [];

/** Takes the attachments away from a conversation: they are sent, or belong to another one. */
export function detach(id) {
  const found = attached(id);
  unsent.delete(id);
  return found;
}

export function attach(id, attachments) {
  if (attachments.length) unsent.set(id, [...attached(id), ...attachments]);
}

/** Shows the attachments of the unsent message; `changed()` is called after one is removed. */
export function tray(id, changed) {
  $("tray").replaceChildren(...attached(id).map((one) => view(one, iconButton("close", isText(one) ? `Remove ${one.name}` : "Remove the picture", () => {
    unsent.set(id, attached(id).filter((other) => other !== one));
    changed();
  }))));
  $("tray").hidden = !attached(id).length;
}

/** The text of a file in UTF-8; null if it is not text. */
async function textOf(file) {
  try {
    const text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
    return BINARY.test(text) || text.startsWith("%PDF-") ? null : text.replaceAll("\r\n", "\n");
  } catch {
    return null;
  }
}

/** A file as an attachment. Raises `Error` if it is none. */
async function taken(file, { sees, name }) {
  const picture = file.type.startsWith("image/") && file.type !== "image/svg+xml";
  const text = picture || file.size > MOST_TEXT ? null : await textOf(file);
  if (text !== null) return { name: file.name || "text", text };
  if (picture && !sees) throw new Error(`${name || "This model"} cannot see pictures.`);
  const image = sees ? await take(file) : null;
  if (image) return image;
  if (file.size > MOST_TEXT) throw new Error(`${file.name} is too large: a text file may have 1 MB.`);
  throw new Error(`${file.name} is neither text nor a picture that the browser can read.`);
}

/** Adds these files. */
async function add(files, { id, ...model }, changed) {
  const found = await Promise.allSettled([...files].map((file) => taken(file, model)));
  attach(id, found.filter((one) => one.status === "fulfilled").map((one) => one.value));
  const failed = found.find((one) => one.status === "rejected");
  if (failed) toast(failed.reason.message);
  changed();
}

/** Watches the button, the clipboard and dropped files. `now()` gives { id, sees, name }: the conversation, and the chosen model. */
export function watchFiles(now, changed) {
  const given = (files, event) => {
    if (!files?.length) return;
    event.preventDefault();
    add(files, now(), changed);
  };
  const field = el("input", { type: "file", multiple: true });
  field.addEventListener("change", (event) => { given([...field.files], event); field.value = ""; });
  $("attach").addEventListener("click", () => field.click());
  $("prompt").addEventListener("paste", (event) => given(event.clipboardData?.files, event));
  document.addEventListener("dragover", (event) => { if (event.dataTransfer?.types.includes("Files")) event.preventDefault(); });
  document.addEventListener("drop", (event) => given(event.dataTransfer?.files, event));
}
