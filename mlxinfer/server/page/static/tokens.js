// The token of each character of an answer, and the model's alternatives.

import { $, el } from "./dom.js";

const decoder = new TextDecoder();

/** The tokens of one text. Not stored: they would fill the browser's storage. */
export class Tokens {
  constructor(known = "") {
    this.list = []; // {text, p, top: [[text, p], ...]}
    this.places = [...Array(known.length)].map(() => -1); // the token of each character
    this.waiting = []; // indices of tokens whose text has not arrived
  }

  /** Adds a piece of text, with the server's log-probabilities of its tokens. */
  add(text, logprobs) {
    for (const one of logprobs) {
      this.waiting.push(this.list.length);
      const top = (one.top_logprobs ?? []).map((other) => [written(other), Math.exp(other.logprob)]);
      this.list.push({ text: written(one), p: Math.exp(one.logprob), top });
    }
    if (!text) return;
    let at = 0;
    while (at < text.length && this.waiting.length) {
      const last = this.waiting.length === 1;
      const token = this.waiting[0];
      const size = last ? text.length - at : Math.min(this.list[token].text.length, text.length - at);
      for (let i = 0; i < size; i += 1) this.places.push(token);
      at += size;
      this.waiting.shift();
    }
    for (; at < text.length; at += 1) this.places.push(this.places.at(-1) ?? -1);
  }

  at(place) {
    return this.places[place] ?? -1;
  }

  /** A class for the token's probability. */
  shade(token) {
    const { p } = this.list[token];
    return p > 0.6 ? "p1" : p > 0.3 ? "p2" : p > 0.1 ? "p3" : "p4";
  }
}

const written = ({ token, bytes }) => (bytes?.length ? decoder.decode(new Uint8Array(bytes)) : token);
const percent = (p) => (p >= 0.9995 ? "100 %" : p >= 0.1 ? `${(p * 100).toFixed(1)} %` : p >= 0.001 ? `${(p * 100).toFixed(2)} %` : "< 0.1 %");
const visible = (text) => text.replaceAll("\n", "\u21b5").replaceAll("\t", "\u21e5").replaceAll(" ", "\u00b7") || "(nothing)";

/** Shows a token's probability and its alternatives while the pointer is over it. `find(element)` returns its `Tokens`. */
export function watchTokens(root, find) {
  const tip = $("token");
  const hide = () => { tip.hidden = true; };
  root.addEventListener("mouseover", ({ target }) => {
    const span = target.closest?.("[data-t]");
    const token = span && find(span)?.list[Number(span.dataset.t)];
    if (!token) return hide();
    tip.replaceChildren(...rows(token));
    tip.hidden = false;
    const box = span.getClientRects()[0];
    const { offsetWidth: width, offsetHeight: height } = tip;
    const above = box.bottom + height + 12 > innerHeight;
    tip.style.left = `${Math.max(8, Math.min(box.left, innerWidth - width - 8))}px`;
    tip.style.top = `${above ? box.top - height - 6 : box.bottom + 6}px`;
    return undefined;
  });
  root.addEventListener("mouseleave", hide);
  document.addEventListener("scroll", hide, { capture: true, passive: true });
}

function rows(token) {
  const others = token.top.some(([text]) => text === token.text) ? token.top : [[token.text, token.p], ...token.top];
  return others.map(([text, p]) => {
    const bar = el("i");
    bar.style.width = `${Math.max(1, p * 100)}%`;
    return el("div", { class: text === token.text ? "row chosen" : "row" }, el("code", {}, visible(text)), el("span", {}, percent(p)), bar);
  });
}
