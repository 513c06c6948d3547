// Markdown within a paragraph: emphasis, code, links. LaTeX formulas are drawn by rich.js.

import { el } from "./dom.js";

export const DEPTH = 12; // maximum depth of quotes, lists and emphasis; deeper ones are text
const ENTITIES = { amp: "&", lt: "<", gt: ">", quot: '"', apos: "'", nbsp: "\u00a0" };

const safeLink = (url) => {
  try {
    return /^https?:\/\//i.test(url) && ["http:", "https:"].includes(new URL(url).protocol);
  } catch {
    return false;
  }
};

/** Emphasis, code and links in one text. A failed search is not repeated, so that the time for hostile text is linear. */
export class Inline {
  constructor(out, s, p) {
    this.out = out;
    this.s = s;
    this.p = p;
    this.none = new Set();
  }

  into(node, from, to, depth) {
    const { s } = this;
    let plain = from;
    let i = from;
    while (i < to) {
      const next = /[\\$`*_~[!<&\nh]/g;
      next.lastIndex = i;
      const found = next.exec(s);
      if (!found || found.index >= to) break;
      i = found.index;
      const made = this.special(s[i], i, to, depth);
      if (!made) { i += this.run(i, to); continue; }
      this.out.text(node, s, this.p, plain, i);
      node.append(...made.nodes);
      i = made.to;
      plain = i;
    }
    this.out.text(node, s, this.p, plain, to);
  }

  /** Number of equal characters from here on. */
  run(i, to) {
    let j = i + 1;
    while (j < to && this.s[j] === this.s[i] && "`*_~".includes(this.s[i])) j += 1;
    return j - i;
  }

  special(c, i, to, depth) {
    const { s } = this;
    if (c === "\\" || c === "$") return this.formula(i, to) ?? (c === "$" ? null : this.escape(i, to));
    if (c === "`") return this.codeSpan(i, to);
    if (c === "*" || c === "_" || c === "~") return depth < DEPTH ? this.emphasis(c, i, to, depth) : null;
    if (c === "[") return depth < DEPTH ? this.link(i, i, to, depth) : null;
    if (c === "!") return s[i + 1] === "[" && depth < DEPTH ? this.link(i, i + 1, to, depth) : null;
    if (c === "\n") return / {2,}$/.test(s.slice(Math.max(0, i - 3), i)) ? { nodes: [el("br")], to: i + 1 } : null;
    if (c === "&") return this.entity(i, to);
    return this.url(c, i, to);
  }

  piece(i, to, text = this.s.slice(i, to)) {
    const holder = el("span");
    this.out.text(holder, text, this.p.slice(i, i + text.length), 0, text.length);
    return [...holder.childNodes];
  }

  /** A LaTeX formula. */
  formula(i, to) {
    const { s } = this;
    const money = s[i] === "$" && s[i + 1] !== "$";
    const open = money ? "$" : /^(?:\\[([]|\$\$|\\begin\{(\w{1,16}\*?)\})/.exec(s.slice(i, Math.min(to, i + 26)))?.[0];
    if (!open || (money && /\s/.test(s[i + 1] ?? " "))) return null;
    const close = open.startsWith("\\b") ? open.replace("begin", "end") : { "\\(": "\\)", "\\[": "\\]" }[open] ?? open;
    const key = `${close}:${to}`;
    if (this.none.has(key)) return null;
    let end = s.indexOf(close, i + open.length);
    if (end < 0 || end + close.length > to) {
      this.none.add(key);
      return null;
    }
    if (money && (/[\s\\]/.test(s[end - 1]) || /\d/.test(s[end + 1] ?? "") || s.slice(i, end).includes("\n"))) return null;
    end += close.length;
    const node = el("span", { class: "math", dir: "ltr" });
    this.out.text(node, s, this.p, i, end);
    return { nodes: [this.out.drawn(node)], to: end };
  }

  /** A backslash before a Markdown character, but not before LaTeX's spaces and braces. */
  escape(i, to) {
    const next = this.s[i + 1];
    if (next === "\n") return { nodes: [el("br")], to: i + 2 };
    const escapes = /["#$&'*+.<>\\_`|~-]/.test(next ?? "") || (next === "!" && this.s[i + 2] === "[");
    return i + 1 < to && escapes ? { nodes: this.piece(i + 1, i + 2), to: i + 2 } : null;
  }

  entity(i, to) {
    const found = /^&(?:#(\d{1,7})|(\w{2,5}));/.exec(this.s.slice(i, Math.min(to, i + 10)));
    const code = found?.[1] ? Number(found[1]) : 0;
    const text = found && (found[2] ? ENTITIES[found[2]] : code > 31 && code < 0x110000 ? String.fromCodePoint(code) : null);
    return text ? { nodes: this.piece(i, i + found[0].length, text), to: i + found[0].length } : null;
  }

  codeSpan(i, to) {
    const count = this.run(i, to);
    const key = `\`${count}`;
    if (this.none.has(key)) return null;
    const close = new RegExp(`(?<!\`)\`{${count}}(?!\`)`, "g");
    close.lastIndex = i + count;
    const found = close.exec(this.s);
    if (!found || found.index + count > to) {
      if (!found) this.none.add(key);
      return null;
    }
    let [from, end] = [i + count, found.index];
    if (this.s[from] === " " && this.s[end - 1] === " " && end - from > 2) { from += 1; end -= 1; }
    const node = el("code");
    this.out.text(node, this.s, this.p, from, end);
    return { nodes: [node], to: found.index + count };
  }

  emphasis(c, i, to, depth) {
    const { s } = this;
    const count = Math.min(this.run(i, to), c === "~" ? 2 : 3);
    if ((c === "~" && count < 2) || /\s/.test(s[i + count] ?? " ") || (c === "_" && /\w/.test(s[i - 1] ?? " "))) return null;
    const close = this.closer(c, count, i + count, to);
    if (close < 0) return null;
    const outer = el(c === "~" ? "del" : count === 1 ? "em" : "strong");
    const inner = count === 3 ? el("em") : outer;
    if (inner !== outer) outer.append(inner);
    this.into(inner, i + count, close, depth + 1);
    return { nodes: [outer], to: close + count };
  }

  /** The start of the run that closes an emphasis; -1 if there is none. */
  closer(c, count, from, to) {
    const { s } = this;
    const key = `${c}${count}:${to}`;
    if (this.none.has(key)) return -1;
    for (let j = from; j < to; j += 1) {
      if (s[j] === "\\") j += 1;
      else if (s[j] === "`") {
        const count = this.run(j, to);
        const end = this.none.has(`\`${count}`) ? -1 : s.indexOf("`".repeat(count), j + count);
        j = end > 0 && end < to ? end + count - 1 : j + count - 1;
      } else if (s[j] === c) {
        const size = this.run(j, to);
        const ends = j > from && !/\s/.test(s[j - 1]) && !(c === "_" && /\w/.test(s[j + size] ?? " "));
        if (ends && (size === count || size > 2 || count === 2 && size > count)) return j + (count === 1 ? size - 1 : 0);
        j += size - 1;
      }
    }
    this.none.add(key);
    return -1;
  }

  link(i, open, to, depth) {
    if (this.none.has("]")) return null;
    const { s } = this;
    let level = 0;
    let j = open;
    for (; j < to; j += 1) {
      if (s[j] === "\\") j += 1;
      else if (s[j] === "[") level += 1;
      else if (s[j] === "]" && (level -= 1) === 0) break;
    }
    if (j >= to) {
      this.none.add("]");
      return null;
    }
    const found = /^\(\s*<?((?:[^\s()<>]|\([^\s()<>]*\))*)>?(?:\s+(?:"[^"\n]*"|'[^'\n]*'))?\s*\)/.exec(s.slice(j + 1, Math.min(to, j + 3000)));
    if (!found || !safeLink(found[1])) return null;
    const node = anchor(found[1]);
    this.into(node, open + 1, j, depth + 1);
    if (!node.childNodes.length) node.append(found[1]);
    return { nodes: [node], to: j + 1 + found[0].length };
  }

  url(c, i, to) {
    const pattern = c === "<" ? /^<(https?:\/\/[^\s<>]+)>/i : /^(https?:\/\/[^\s<>"`\]]+)/i;
    const found = c === "h" && /\w/.test(this.s[i - 1] ?? " ") ? null : pattern.exec(this.s.slice(i, Math.min(to, i + 3000)));
    if (!found) return null;
    let url = found[1];
    if (c === "h") {
      url = url.replace(/[.,;:!?'*_~]+$/, "");
      while (url.endsWith(")") && url.split(")").length > url.split("(").length) url = url.slice(0, -1);
    }
    if (!safeLink(url)) return null;
    const node = anchor(url);
    const from = i + (c === "<" ? 1 : 0);
    node.append(...this.piece(from, from + url.length));
    return { nodes: [node], to: c === "<" ? i + found[0].length : i + url.length };
  }
}

const anchor = (href) => el("a", { href, target: "_blank", rel: "noopener noreferrer" });
