// Elements, icons, and the clipboard. Text becomes text nodes only: no HTML is parsed, and the page's policy forbids parsing.

const SVG = "http://www.w3.org/2000/svg";
const ICONS = {
  menu: "M4 7h16M4 12h16M4 17h16",
  tune: "M4 8h10m4 0h2M4 16h2m4 0h10M14 8a2 2 0 1 0 4 0 2 2 0 1 0-4 0M6 16a2 2 0 1 0 4 0 2 2 0 1 0-4 0",
  send: "M12 19V6M6 11l6-6 6 6",
  stop: "M8 8h8v8H8z",
  before: "M14 7l-5 5 5 5",
  after: "M10 7l5 5-5 5",
  copy: "M9 9h10v10H9zM5 15V5h10",
  check: "M5 12l5 5 9-10",
  retry: "M19 12a7 7 0 1 1-2-5l2 2M19 4v5h-5",
  edit: "M4 20h4L19 9l-4-4L4 16z",
  remove: "M5 7h14M10 7V4h4v3M7 7l1 13h8l1-13",
  open: "M12 15V4M7 9l5-5 5 5M5 20h14",
  save: "M12 4v11M7 11l5 5 5-5M5 20h14",
  clip: "M20 11l-8.5 8.5a5 5 0 0 1-7-7L13 4a3.3 3.3 0 0 1 4.7 4.7l-8.5 8.5a1.7 1.7 0 0 1-2.4-2.4L14.5 7",
  light: "M12 8a4 4 0 1 0 0 8 4 4 0 1 0 0-8M12 3v1.5M12 19.5V21M3 12h1.5M19.5 12H21M5.6 5.6l1.1 1.1M17.3 17.3l1.1 1.1M18.4 5.6l-1.1 1.1M6.7 17.3l-1.1 1.1",
  dark: "M19 14.5A7.5 7.5 0 0 1 9.5 5a7.5 7.5 0 1 0 9.5 9.5z",
  close: "M6 6l12 12M18 6L6 18",
};

export const $ = (id) => document.getElementById(id);

/** An element with attributes (`onclick` and the like are listeners) and children; null children are left out. */
export function el(tag, props = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

export function svg(tag, props) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(props)) node.setAttribute(name, value);
  return node;
}

export function icon(name) {
  const node = svg("svg", { viewBox: "0 0 24 24", "aria-hidden": "true" });
  node.append(svg("path", { d: ICONS[name] }));
  return node;
}

/** A button that is an icon; `label` is its name for screen readers and its tooltip. */
export function iconButton(name, label, onclick, more = {}) {
  return el("button", { type: "button", class: "icon", "aria-label": label, title: label, onclick, ...more }, icon(name));
}

/** A button that copies `text()` and says so for a moment. */
export function copyButton(text, label = "Copy") {
  return iconButton("copy", label, async ({ currentTarget: button }) => {
    await copy(text());
    button.replaceChildren(icon("check"));
    say("Copied");
    setTimeout(() => button.replaceChildren(icon("copy")), 1200);
  });
}

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch { // browsers allow the clipboard on loopback and HTTPS only
    const area = el("textarea", { class: "hidden", "aria-hidden": "true" });
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
}

/** Announces a text to screen readers. */
export const say = (text) => { $("status").textContent = text; };

let toastTimer = 0;
/** A note at the bottom for some seconds, with one action. */
export function toast(text, action, act) {
  const node = $("toast");
  clearTimeout(toastTimer);
  const hide = () => { node.hidden = true; };
  const button = action && el("button", { type: "button", class: "link", onclick: () => { hide(); act(); } }, action);
  node.replaceChildren(el("span", {}, text), ...(button ? [button] : []));
  node.hidden = false;
  toastTimer = setTimeout(hide, 7000);
}

/** Makes a text area as high as its text, up to the limit of its style. */
export function fit(area) {
  if (!area.offsetParent) return;
  area.style.height = "auto";
  area.style.height = `${area.scrollHeight + 2}px`;
}

/** The text of a file that the user chooses. */
export function chosen(accept) {
  return new Promise((settle) => {
    const field = el("input", { type: "file", accept, onchange: async () => settle(await field.files[0].text()) });
    field.click();
  });
}

export function download(name, text) {
  const url = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  el("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}
