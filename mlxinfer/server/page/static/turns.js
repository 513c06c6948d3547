// The view of one turn of a conversation, during and after the answer.

import { textFile, thumbnail } from "./attach.js";
import { copyButton, el, fit, icon, iconButton } from "./dom.js";
import { MarkdownView } from "./markdown.js";

const count = (n, one, many = `${one}s`) => `${n.toLocaleString("en")} ${n === 1 ? one : many}`;
const seconds = (s) => (s < 10 ? `${s.toFixed(1)} s` : `${Math.round(s)} s`);

const LONG = 3000; // characters: longer messages are shown folded
const LONG_LINES = 40;

/** Shows only the start, until the user opens all of it. */
function fold(node, content) {
  const all = el("button", { type: "button", class: "link", onclick: () => { node.classList.remove("folded"); all.remove(); } }, `Show all ${count(content.split(/\s+/).length, "word")}`);
  node.classList.add("folded");
  node.append(all);
}

/** One turn. `act` has the actions of its buttons: retry(turn), resume(turn), edit(turn, text), which is false if it cannot, results(turn, texts),
    version(turn, number). */
export class TurnView {
  constructor(turn, act) {
    this.turn = turn;
    this.act = act;
    this.tokens = null;
    this.thoughts = null;
    this.node = el("article", { class: `turn ${turn.role}` });
    this.node.view = this;
    this.versions = el("span", { class: "versions" });
    if (turn.role === "assistant") this.assistant();
    else this.plain();
  }

  plain() {
    const { turn } = this;
    if (turn.role === "tool") {
      this.node.append(el("div", { class: "call" }, el("p", {}, el("code", {}, turn.name), " returned"), el("pre", {}, turn.content)));
      return;
    }
    this.node.setAttribute("aria-label", "You");
    const pictures = turn.images?.length ? el("div", { class: "pictures" }, ...turn.images.map((image) => thumbnail(image))) : null;
    const files = (turn.files ?? []).map((file) => textFile(file));
    const text = el("div", { class: "text", dir: "auto" }, pictures, files, turn.content);
    if (turn.content.length > LONG || turn.content.split("\n").length > LONG_LINES) fold(text, turn.content);
    this.node.replaceChildren(text,
      el("div", { class: "actions" }, this.versions, copyButton(() => turn.content), iconButton("edit", "Edit", () => this.edit())));
  }

  /** The number of the shown version of this turn, between arrows to the others. */
  showVersions() {
    const { turn, act } = this;
    const { at, tails } = turn.branches ?? { at: 0, tails: [null] };
    const arrow = (name, label, number) => iconButton(name, label, () => act.version(turn, number), number in tails ? {} : { disabled: true });
    this.versions.replaceChildren(...(tails.length < 2 ? [] : [
      arrow("before", "Previous version", at - 1), el("span", { "aria-label": `Version ${at + 1} of ${tails.length}` }, `${at + 1}/${tails.length}`), arrow("after", "Next version", at + 1)]));
  }

  /** Puts the focus on an arrow of the versions. */
  focusVersions() {
    this.versions.querySelector("button:enabled")?.focus({ preventScroll: true });
  }

  /** Lets the user edit this turn. */
  edit() {
    const area = el("textarea", { dir: "auto", "aria-label": "Edit your message" });
    area.value = this.turn.content;
    const done = () => { this.plain(); this.node.querySelector("[aria-label=Edit]").focus(); };
    const send = () => { if (area.value.trim() && this.act.edit(this.turn, area.value)) this.plain(); };
    area.addEventListener("input", () => fit(area));
    area.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); }
      if (event.key === "Escape") { event.stopPropagation(); done(); }
    });
    this.node.replaceChildren(el("form", { class: "editor", onsubmit: (event) => { event.preventDefault(); send(); } }, area,
      el("menu", {}, el("button", { type: "button", class: "quiet", onclick: done }, "Cancel"), el("button", { class: "solid" }, "Send"))));
    fit(area);
    area.focus();
    area.setSelectionRange(area.value.length, area.value.length);
  }

  assistant() {
    const { turn } = this;
    this.node.setAttribute("aria-label", turn.model ?? "Answer");
    const thinking = el("div", { class: "md" });
    const answer = el("div", { class: "md" });
    this.thinkingView = new MarkdownView(thinking);
    this.answerView = new MarkdownView(answer);
    this.summary = el("summary");
    this.reasoning = el("details", { class: "reasoning" }, this.summary, thinking);
    this.rest = el("div", { class: "rest" });
    this.meta = el("span", { class: "meta" });
    const buttons = [copyButton(() => turn.content), iconButton("retry", "Retry", () => this.act.retry(turn))];
    this.foot = el("div", { class: "actions" }, this.versions, this.meta, buttons);
    this.node.append(this.reasoning, answer, this.rest, this.foot);
    this.update(false);
  }

  /** Shows the turn's current content; `running` while more arrives. */
  update(running) {
    const { turn, node } = this;
    node.classList.toggle("running", running);
    node.setAttribute("aria-busy", String(running));
    this.reasoning.hidden = !turn.reasoning;
    if (turn.reasoning) {
      const thinks = running && !turn.content && !turn.calls?.length;
      this.summary.textContent = thinks ? "Thinking" : turn.thought ? `Thought for ${seconds(turn.thought)}` : "Thoughts";
      this.summary.classList.toggle("pulse", thinks);
      this.thinkingView.show(turn.reasoning, this.thoughts);
    }
    this.answerView.show(turn.content, this.tokens);
    node.classList.toggle("waiting", running && !turn.content && !turn.reasoning && !turn.calls?.length);
    this.rest.replaceChildren(...this.calls(running), ...this.problem(running));
    this.meta.textContent = running ? this.pace() : this.summed();
    this.foot.hidden = (running || turn.problem) && !turn.content && !turn.branches;
  }

  calls(running) {
    const { turn } = this;
    if (!turn.calls?.length) return [];
    const open = !running && this.act.isLast(turn) && !turn.problem;
    const areas = [];
    const cards = turn.calls.map((call) => {
      const area = open && el("textarea", { rows: 2, class: "mono", "aria-label": `What ${call.name} returns`, placeholder: `What ${call.name} returns` });
      if (area) {
        area.addEventListener("input", () => fit(area));
        areas.push(area);
      }
      return el("div", { class: "call" }, el("p", {}, "calls ", el("code", {}, call.name)), el("pre", {}, pretty(call.arguments)), area);
    });
    const send = open && el("button", { type: "button", class: "solid", onclick: () => this.act.results(turn, areas.map((area) => area.value)) }, "Send results");
    return send ? [...cards, send] : cards;
  }

  problem(running) {
    const { turn } = this;
    if (turn.problem) {
      const retry = el("button", { type: "button", class: "solid", onclick: () => this.act.retry(turn) }, icon("retry"), "Retry");
      return [el("div", { class: "problem", role: "alert" }, el("p", {}, turn.problem), retry)];
    }
    const why = turn.interrupted ? "Interrupted when the page was closed." : turn.stopped ? "Stopped." : turn.finish === "length" ? "The answer reached its longest length." : turn.finish === "loop" ? "Stopped: the same text was repeated five times." : "";
    if (!why) return [];
    const more = !running && this.act.isLast(turn) && !turn.calls?.length && (turn.content || turn.reasoning);
    const resume = more && el("button", { type: "button", class: "quiet", onclick: () => this.act.resume(turn) }, "Continue");
    return [el("p", { class: "note" }, el("span", {}, why), resume)];
  }

  pace() {
    const { stats } = this.turn;
    return stats?.rate ? `${count(stats.tokens, "token")} · ${stats.rate.toFixed(stats.rate < 10 ? 1 : 0)} tokens/s` : "";
  }

  summed() {
    const { stats } = this.turn;
    if (!stats?.tokens) return "";
    const parts = [this.pace() || count(stats.tokens, "token")];
    if (stats.first) parts.push(`first after ${stats.first < 1 ? `${Math.round(stats.first * 1000)} ms` : seconds(stats.first)}`);
    if (stats.prompt) parts.push(`${stats.cached ? `${stats.cached.toLocaleString("en")} of ` : ""}${count(stats.prompt, "prompt token")}${stats.cached ? " from the cache" : ""}`);
    if (stats.image) parts.push(count(stats.image, "image token"));
    return parts.join(" · ");
  }
}

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}
