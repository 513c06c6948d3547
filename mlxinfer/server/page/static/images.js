// Pictures: made smaller here, kept in this browser (IndexedDB), and sent as data: URLs.

import { Problem } from "./api.js";

const MOST = 2048; // pixels of the longer side
const FEW = 4_000_000; // bytes of a file that is sent as it is
const SENT = ["image/png", "image/jpeg", "image/webp"];
const kept = new Map(); // Blob by id, of this visit
const shown = new Map(); // object URL by id
let database;

/** The store of pictures, or null. */
function pictures(mode) {
  database ??= new Promise((settle) => {
    const asked = globalThis.indexedDB?.open("mlxinfer", 1);
    if (!asked) settle(null);
    else Object.assign(asked, { onupgradeneeded: () => asked.result.createObjectStore("images"), onsuccess: () => settle(asked.result), onerror: () => settle(null) });
  });
  return database.then((found) => found?.transaction("images", mode).objectStore("images"));
}

const done = (asked) => new Promise((settle) => { asked.onsuccess = () => settle(asked.result); asked.onerror = () => settle(undefined); });

async function blobOf({ id }) {
  if (!kept.has(id)) {
    const store = await pictures("readonly");
    const found = store && await done(store.get(id));
    if (found) kept.set(id, found);
  }
  return kept.get(id);
}

function picture(blob, width, height) {
  const id = crypto.randomUUID?.() ?? String(Date.now() + Math.random());
  kept.set(id, blob);
  return { id, width, height };
}

/** Keeps these pictures after this visit, as part of a conversation. */
export async function keep(images) {
  for (const { id } of images) {
    const store = await pictures("readwrite");
    if (store) await done(store.put(kept.get(id), id));
  }
}

/** A file as a picture of at most 2048 pixels a side: { id, width, height }. Null for a file that is not a picture. */
export async function take(file) {
  let bitmap;
  try {
    bitmap = await createImageBitmap(file);
  } catch {
    return null;
  }
  const scale = Math.min(1, MOST / Math.max(bitmap.width, bitmap.height));
  if (scale === 1 && file.size <= FEW && SENT.includes(file.type)) return picture(file, bitmap.width, bitmap.height);
  const [width, height] = [bitmap.width, bitmap.height].map((side) => Math.max(1, Math.round(side * scale)));
  const canvas = Object.assign(document.createElement("canvas"), { width, height });
  const context = canvas.getContext("2d");
  context.imageSmoothingQuality = "high";
  context.drawImage(bitmap, 0, 0, width, height);
  bitmap.close();
  const made = (type) => new Promise((settle) => { canvas.toBlob(settle, type, 0.92); });
  const sharp = file.type === "image/jpeg" ? null : await made("image/png");
  return picture(sharp && sharp.size <= FEW ? sharp : await made("image/jpeg"), width, height);
}

/** The picture of a data: URL, from an imported file. Null for any other URL. */
export async function ofURL(url) {
  const found = /^data:(image\/\w+);base64,([A-Za-z0-9+/=]+)$/.exec(url);
  return found && take(new Blob([Uint8Array.from(atob(found[2]), (c) => c.charCodeAt(0))], { type: found[1] }));
}

/** Fills an <img> with a picture. */
export async function show(node, image) {
  const blob = await blobOf(image);
  if (blob && !shown.has(image.id)) shown.set(image.id, URL.createObjectURL(blob));
  if (blob) node.src = shown.get(image.id);
}

/** The data: URLs of all pictures in these turns, by id. Raises `Problem` if the browser has lost one. */
export async function urls(turns) {
  const found = new Map();
  for (const image of turns.flatMap((turn) => turn.images ?? [])) {
    const blob = await blobOf(image);
    if (!blob) throw new Problem("other", "The browser no longer has a picture of this conversation. Attach it again in a new message.");
    const reader = new FileReader();
    found.set(image.id, await new Promise((settle) => { reader.onload = () => settle(reader.result); reader.readAsDataURL(blob); }));
  }
  return found;
}

/** Deletes all pictures but those of these turns. */
export async function sweep(turns) {
  const used = new Set(turns.flatMap((turn) => turn.images ?? []).map(({ id }) => id));
  const store = await pictures("readwrite");
  const ids = store ? await done(store.getAllKeys()) : [];
  for (const id of ids ?? []) if (!used.has(id) && !kept.has(id)) store.delete(id);
}
