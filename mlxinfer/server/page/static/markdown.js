// Markdown to DOM nodes: headings, paragraphs, lists, tables, quotes, fenced code; emphasis, code, links to http(s) only. Everything
// else, HTML too, is text. Every character keeps its position in the source, which maps it to a token. Lines are {s, at}: a text and
// the position of its first character. Inline text is {s, p}: a text and the position of every character.

import { copyButton, el } from "./dom.js";
import { DEPTH, Inline } from "./inline.js";
import { code as highlighted, formula } from "./rich.js";

const ITEM = /^( *)([-*+]|\d{1,9}[.)])( +|$)/;
const RULE = /^ {0,3}([-*_])( *\1){2,} *$/;
const FENCE = /^( {0,3})(`{3,}|~{3,})(.*)$/;
const HEADING = /^ {0,3}(#{1,6})(?: +(.*?))?(?: +#+)? *$/;
const UNDERLINE = /^ {0,3}(={2,}|-{2,}) *$/;
const FORMULA = /^ *(\\\[|\$\$|\\begin\{(\w{1,16}\*?)\})/;
const LONGEST_FORMULA = 100; // lines
const DIVIDER = /^ *\|?( *:?-+:? *\|)*( *:?-+:? *)\|? *$/;

/** Shows a growing text in an element: unchanged blocks are not rendered again. */
export class MarkdownView {
  constructor(node) {
    this.node = node;
    this.keys = [];
  }

  show(source, tokens = null) {
    const parts = blocks(split(source), 0);
    const keys = parts.map((part) => `${part.kind}${part.lines[0].at}:${part.lines.map((line) => line.s).join("\n")}`);
    let same = 0;
    while (same < keys.length && keys[same] === this.keys[same]) same += 1;
    while (this.node.childNodes.length > same) this.node.lastChild.remove();
    const out = new Out(tokens);
    for (const part of parts.slice(same)) this.node.append(out.block(part));
    this.keys = keys;
  }
}

function split(source) {
  let at = 0;
  return source.split("\n").map((text) => {
    const line = { s: text.replace(/\r$/, "").replace(/\t/g, " "), at };
    at += text.length + 1;
    return line;
  });
}

const cut = (line, count) => ({ s: line.s.slice(count), at: line.at + count });
const blank = (line) => !line.s.trim();
const indent = (line) => line.s.length - line.s.trimStart().length;

function begins(line) {
  return FORMULA.test(line.s) || FENCE.test(line.s) || HEADING.test(line.s) || RULE.test(line.s) || ITEM.test(line.s) || /^ {0,3}>/.test(line.s);
}

/** The blocks of these lines: {kind, lines, ...}. */
function blocks(lines, depth) {
  const found = [];
  let i = 0;
  while (i < lines.length) {
    if (blank(lines[i])) { i += 1; continue; }
    const from = i;
    const part = depth < DEPTH ? begin(lines, i) : { kind: "p", to: paragraph(lines, i) };
    i = part.to;
    found.push({ ...part, depth, lines: lines.slice(from, i) });
  }
  return found;
}

function begin(lines, i) {
  const line = lines[i].s;
  const fence = FENCE.exec(line);
  if (fence && !(fence[2][0] === "`" && fence[3].includes("`"))) return fenced(lines, i, fence);
  if (HEADING.test(line)) return { kind: "h", to: i + 1 };
  if (RULE.test(line)) return { kind: "hr", to: i + 1 };
  if (/^ {0,3}>/.test(line)) {
    let to = i;
    while (to < lines.length && !blank(lines[to]) && (/^ {0,3}>/.test(lines[to].s) || !begins(lines[to]))) to += 1;
    return { kind: "quote", to };
  }
  if (ITEM.test(line)) return list(lines, i);
  const formula = FORMULA.exec(line);
  if (formula && lineOfEnd(lines, i, formula) >= 0) return { kind: "math", to: lineOfEnd(lines, i, formula) + 1 };
  if (line.includes("|") && i + 1 < lines.length && DIVIDER.test(lines[i + 1].s) && lines[i + 1].s.includes("-") &&
      cells(lines[i]).length === cells(lines[i + 1]).length) {
    let to = i + 2;
    while (to < lines.length && !blank(lines[to]) && lines[to].s.includes("|")) to += 1;
    return { kind: "table", to };
  }
  const to = paragraph(lines, i);
  return to < lines.length && UNDERLINE.test(lines[to].s) ? { kind: "underlined", to: to + 1 } : { kind: "p", to };
}

/** The last line of a formula of several lines; -1 if it is part of a paragraph or has no end. */
function lineOfEnd(lines, i, [all, open, environment]) {
  const close = environment ? `\\end{${environment}}` : open === "$$" ? open : "\\]";
  const ends = (line, from) => { const at = line.s.indexOf(close, from); return at >= 0 && /^ *[.,;:]? *$/.test(line.s.slice(at + close.length)); };
  if (ends(lines[i], all.length)) return i;
  for (let j = i + 1; j < Math.min(lines.length, i + LONGEST_FORMULA); j += 1) if (ends(lines[j], 0)) return j;
  return -1;
}

function paragraph(lines, i) {
  let to = i + 1;
  while (to < lines.length && !blank(lines[to]) && !begins(lines[to]) && !UNDERLINE.test(lines[to].s)) to += 1;
  return to;
}

function fenced(lines, i, fence) {
  const close = new RegExp(`^ {0,3}\\${fence[2][0]}{${fence[2].length},} *$`);
  let to = i + 1;
  while (to < lines.length && !close.test(lines[to].s)) to += 1;
  const closed = to < lines.length;
  return { kind: "code", to: closed ? to + 1 : to, closed, language: fence[3].trim().split(/\s/)[0], strip: fence[1].length };
}

function list(lines, i) {
  const first = ITEM.exec(lines[i].s);
  const base = first[1].length;
  const ordered = /\d/.test(first[2]);
  const marker = first[2].at(-1);
  const items = [];
  let to = i;
  let loose = false;
  while (to < lines.length) {
    const line = lines[to];
    const found = ITEM.exec(line.s);
    const within = items.length && indent(line) >= items.at(-1).inner;
    if (found && found[1].length < base + 2 && !within) {
      if (/\d/.test(found[2]) !== ordered || found[2].at(-1) !== marker || found[1].length < base || RULE.test(line.s)) break;
      const inner = found[0].length - (found[3].length > 4 ? found[3].length - 1 : 0) + (found[3] ? 0 : 1);
      items.push({ inner: Math.min(inner, base + found[2].length + 1), lines: [cut(line, Math.min(found[0].length, inner))] });
      to += 1;
    } else if (blank(line)) {
      const next = lines.slice(to).find((one) => !blank(one));
      if (!next || (indent(next) < items.at(-1).inner && !(ITEM.test(next.s) && indent(next) >= base))) break;
      loose ||= indent(next) <= base + 1;
      items.at(-1).lines.push(line);
      to += 1;
    } else if (within) {
      items.at(-1).lines.push(cut(line, items.at(-1).inner));
      to += 1;
    } else if (found && found[1].length >= base + 2) { // indented less than it should be
      items.at(-1).lines.push(cut(line, base + 2));
      to += 1;
    } else if (!begins(line) && !blank(lines[to - 1])) {
      items.at(-1).lines.push(cut(line, indent(line)));
      to += 1;
    } else break;
  }
  return { kind: "list", to, ordered, start: parseInt(first[2], 10) || 0, items, loose };
}

/** The cells of a row of a table, as lines. */
function cells(line) {
  const found = [];
  let from = indent(line) + (line.s.trimStart().startsWith("|") ? 1 : 0);
  let code = false;
  for (let i = from; i <= line.s.length; i += 1) {
    const c = line.s[i];
    if (c === "\\") { i += 1; continue; }
    if (c === "`") code = !code && line.s.indexOf("`", i + 1) > 0;
    if (i >= line.s.length ? line.s.slice(from).trim() : c === "|" && !code) {
      const text = line.s.slice(from, i);
      const lead = text.length - text.trimStart().length;
      found.push({ s: text.trim(), at: line.at + from + lead });
      from = i + 1;
    }
  }
  return found;
}

/** The direction of a block of blocks: "rtl" if its first letter is of a right-to-left script. Browsers detect this for text only. */
function side(lines) {
  const first = lines.map((line) => /\p{L}/u.exec(line.s)?.[0]).find(Boolean) ?? "";
  return /[\p{sc=Hebr}\p{sc=Arab}\p{sc=Syrc}\p{sc=Thaa}\p{sc=Nkoo}]/u.test(first) ? "rtl" : null;
}

/** The lines as inline text. */
function joined(lines) {
  const p = [];
  lines.forEach((line, number) => {
    if (number) p.push(line.at - 1);
    for (let i = 0; i < line.s.length; i += 1) p.push(line.at + i);
  });
  return { s: lines.map((line) => line.s).join("\n"), p };
}

/** Makes nodes. `tokens`, if any, maps each position in the source to its token. */
class Out {
  constructor(tokens) {
    this.tokens = tokens;
  }

  block(part) {
    return this[part.kind](part);
  }

  all(lines, depth) {
    return blocks(lines, depth).map((part) => this.block(part));
  }

  p({ lines }) {
    return this.filled("p", joined(lines.map((line) => cut(line, indent(line)))));
  }

  h({ lines: [line] }) {
    const found = HEADING.exec(line.s);
    const from = line.s.indexOf("#") + found[1].length;
    const lead = from + indent(cut(line, from));
    return this.filled(`h${Math.min(found[1].length + 1, 6)}`, joined([{ s: found[2] ?? "", at: line.at + lead }]));
  }

  underlined({ lines }) {
    const level = lines.at(-1).s.includes("=") ? "h2" : "h3";
    return this.filled(level, joined(lines.slice(0, -1).map((line) => cut(line, indent(line)))));
  }

  math({ lines }) {
    const node = el("p", { class: "math", dir: "ltr" });
    lines.forEach((line, number) => {
      if (number) this.text(node, "\n", [line.at - 1], 0, 1);
      this.text(node, line.s, null, 0, line.s.length, line.at);
    });
    return this.drawn(node);
  }

  /** A formula, drawn unless its tokens are to be shown. */
  drawn(node) {
    if (!this.tokens) formula(node, node.textContent);
    return node;
  }

  hr() {
    return el("hr");
  }

  quote({ lines, depth }) {
    const inner = lines.map((line) => {
      const found = /^ {0,3}> ?/.exec(line.s);
      return found ? cut(line, found[0].length) : line;
    });
    return el("blockquote", { dir: side(lines) }, this.all(inner, depth + 1));
  }

  list({ ordered, start, items, loose, depth }) {
    const dir = side(items.flatMap((item) => item.lines));
    const node = el(ordered ? "ol" : "ul", { dir, ...(ordered && start !== 1 ? { start: String(start) } : {}) });
    for (const item of items) {
      const task = /^\[([ xX])\] /.exec(item.lines[0].s);
      const content = task ? [cut(item.lines[0], 4), ...item.lines.slice(1)] : item.lines;
      const li = el("li", task ? { class: "task" } : {});
      if (task) li.append(el("input", { type: "checkbox", disabled: true, checked: task[1] !== " ", "aria-label": "Task" }));
      const children = this.all(content, depth + 1);
      const tight = !loose && children.filter((child) => child.tagName === "P").length < 2;
      for (const child of children) li.append(...(tight && child.tagName === "P" ? child.childNodes : [child]));
      node.append(li);
    }
    return node;
  }

  table({ lines }) {
    const align = cells(lines[1]).map(({ s }) => (s.endsWith(":") ? (s.startsWith(":") ? "center" : "right") : ""));
    const row = (line, tag) => {
      const found = cells(line);
      return el("tr", {}, align.map((side, i) => {
        const cell = this.filled(tag, joined([found[i] ?? { s: "", at: line.at }]));
        if (side) cell.className = side;
        return cell;
      }));
    };
    const body = lines.slice(2).map((line) => row(line, "td"));
    return el("div", { class: "table", dir: side(lines), tabindex: "0", role: "region", "aria-label": "Table" },
      el("table", {}, el("thead", {}, row(lines[0], "th")), el("tbody", {}, body)));
  }

  code({ lines, closed, language, strip }) {
    const inner = lines.slice(1, closed ? -1 : undefined).map((line) => cut(line, Math.min(strip, indent(line))));
    const code = el("code");
    const { s, p } = joined(inner);
    highlighted(code, language, s, closed, (node, from, to) => this.text(node, s, p, from, to));
    const head = el("figcaption", {}, el("span", {}, language || "text"), copyButton(() => s, "Copy code"));
    return el("figure", { class: "code", dir: "ltr" }, head, el("pre", { tabindex: "0" }, code));
  }

  filled(tag, { s, p }) {
    const node = el(tag, { dir: "auto" });
    new Inline(this, s, p).into(node, 0, s.length, 0);
    return node;
  }

  /** Appends s[from:to], with a span per token if there are tokens. `at` is the position of s[0] if `p` is null. */
  text(node, s, p, from, to, at = 0) {
    if (from >= to) return;
    if (!this.tokens) {
      node.append(s.slice(from, to));
      return;
    }
    const token = (i) => this.tokens.at(p ? p[i] : at + i);
    let i = from;
    while (i < to) {
      const one = token(i);
      let j = i + 1;
      while (j < to && token(j) === one) j += 1;
      node.append(one === -1 ? s.slice(i, j) : el("span", { class: `t ${this.tokens.shade(one)}`, "data-t": String(one) }, s.slice(i, j)));
      i = j;
    }
  }
}
