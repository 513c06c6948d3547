// Highlighted code and formulas. Their libraries are loaded when a text first needs them; until then, and without them, it is plain.

import { el } from "./dom.js";

// The library's time is quadratic in the length of a line, for some texts.
const LONGEST_CODE = 20_000; // characters
const LONGEST_GROWING = 10_000; // of code that is still being written, and highlighted with each piece
const LONG_LINE = /[^\n]{500}/;
const LONGEST_FORMULA = 5_000;
const DEEPEST_FORMULA = 100; // nested elements
const SIZES = [20, 200]; // em, pt: the largest length that a formula may set
const sources = { highlight: () => import("./vendor/highlight.js"), temml: () => import("./vendor/temml.js") };
const loading = new Map(); // promise by name
const loaded = new Map(); // library by name

/** Calls `use(library)`, at once if it is loaded. */
function within(name, use) {
  if (loaded.has(name)) {
    use(loaded.get(name));
    return;
  }
  if (!loading.has(name)) {
    if (name === "temml") document.head.append(el("link", { rel: "stylesheet", href: "page/vendor/temml.css" }));
    loading.set(name, sources[name]().then((found) => loaded.set(name, found.default)));
  }
  loading.get(name).then(() => use(loaded.get(name)), () => loading.delete(name)); // the server may be gone
}

/** Fills an element with code, which is `closed` once it is complete; `text(node, from, to)` appends a part of it. */
export function code(node, language, s, closed, text) {
  text(node, 0, s.length);
  if (!language || s.length > (closed ? LONGEST_CODE : LONGEST_GROWING) || LONG_LINE.test(s)) return;
  within("highlight", (library) => {
    if (!library.getLanguage(language)) return;
    const tree = library.highlight(s, { language, ignoreIllegals: true })._emitter.rootNode;
    const colored = el("code");
    let at = 0;
    const add = (parent, { children }) => {
      for (const child of children) {
        if (typeof child === "string") text(parent, at, at += child.length);
        else {
          const part = el("span", child.scope ? { class: `hl-${child.scope.split(".")[0]}` } : {});
          add(part, child);
          parent.append(part);
        }
      }
    };
    add(colored, tree);
    if (at === s.length) node.replaceChildren(...colored.childNodes);
  });
}

const DELIMITED = /^\s*(\\\(|\\\[|\$\$?)(.*?)(\\\)|\\\]|\$\$?)\s*([.,;:]?)\s*$/s;

/** Replaces the LaTeX in an element by its formula. A formula that is not understood stays as it is. */
export function formula(node, s) {
  if (s.length > LONGEST_FORMULA) return;
  const [, open, inner, , mark] = DELIMITED.exec(s) ?? ["", "\\begin", s, "", ""];
  within("temml", (library) => {
    const made = el("span");
    try {
      library.render(`${inner}${mark}`, made, { displayMode: open !== "\\(" && open !== "$", throwOnError: true, maxSize: SIZES });
    } catch {
      return;
    }
    if (depth(made) > DEEPEST_FORMULA) return;
    node.classList.add("drawn");
    node.replaceChildren(...made.childNodes);
  });
}

function depth(node) {
  let found = 0;
  for (let level = [node]; level.length; level = level.flatMap((one) => [...one.children])) found += 1;
  return found;
}
