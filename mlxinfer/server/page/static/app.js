// The page: open conversations, running requests, and the actions of the controls.

import { forgetKey, keepKey, models, Problem } from "./api.js";
import { asFields, attach, attached, detach, tray, watchFiles } from "./attach.js";
import { choose, everyTurn, fork } from "./branches.js";
import { $, chosen, el, fit, icon, say, toast } from "./dom.js";
import { keep, sweep } from "./images.js";
import { Meters } from "./meters.js";
import { settingsPanel, showDefaults } from "./settings.js";
import { imported, sidebar } from "./sidebar.js";
import * as store from "./store.js";
import { fill, request } from "./talk.js";
import { themeSwitch } from "./theme.js";
import { watchTokens } from "./tokens.js";
import { TurnView } from "./turns.js";

const OPEN = "mlxinfer.open";
const narrow = matchMedia("(max-width: 55rem)");
const running = new Map(); // AbortController by conversation id
const opened = new Map(); // conversations by id: a conversation that is opened again is the same object
const views = new WeakMap(); // view by turn
let chat;
let served = [];
let leaving = false; // true while the page is being closed, which ends its requests
let stick = true; // true to keep the end of the conversation in sight

const act = {
  open: (one) => { open(one); closeDrawer(); },
  changed: () => list(),
  rename(one, title) {
    const known = opened.get(one.id) ?? one;
    known.title = title;
    store.keep(known);
    list();
  },
  remove(one) {
    running.get(one.id)?.abort();
    opened.delete(one.id);
    store.drop(one);
    if (one.id === chat.id) begin();
    else list();
  },
  isLast: (turn) => chat.turns.at(-1) === turn,
  retry(turn) {
    if (running.has(chat.id)) return;
    const made = newAnswer();
    fork(chat.turns, chat.turns.indexOf(turn), made);
    answer(made, { again: true });
  },
  resume(turn) {
    if (!running.has(chat.id) && act.isLast(turn)) answer(turn, { resumed: turn });
  },
  edit(turn, text) {
    if (running.has(chat.id)) return false;
    fork(chat.turns, chat.turns.indexOf(turn), { role: "user", content: text, ...asFields([...(turn.images ?? []), ...(turn.files ?? [])]) });
    answerNext();
    return true;
  },
  version(turn, number) {
    if (running.has(chat.id)) return;
    const at = chat.turns.indexOf(turn);
    choose(chat.turns, at, number);
    store.keep(chat);
    draw(true);
    viewOf(chat.turns[at]).focusVersions();
  },
  results(turn, texts) {
    turn.calls.forEach((call, i) => chat.turns.push({ role: "tool", id: call.id, name: call.name, content: texts[i] }));
    answerNext();
  },
};

/** A new conversation. It takes over the unsent text of a conversation without messages. */
function begin(id) {
  const unsent = chat && !chat.turns.length ? $("prompt").value : null;
  const attachments = chat && !chat.turns.length ? detach(chat.id) : [];
  if (unsent) store.keepDraft(chat.id, "");
  const made = { ...store.newChat(), ...(id ? { id } : {}), settings: store.lastSettings(), model: store.lastModel() };
  if (unsent) store.keepDraft(made.id, unsent);
  attach(made.id, attachments);
  open(made);
  if (!narrow.matches) $("prompt").focus();
}

function open(one) {
  chat = opened.get(one.id) ?? one;
  opened.set(chat.id, chat);
  chat.settings ??= {};
  sessionStorage.setItem(OPEN, chat.id);
  $("prompt").value = store.draft(chat.id);
  fit($("prompt"));
  draw();
  showAttachments();
  list();
  showModel();
  settingsPanel(chat.settings, () => {
    store.keepSettings(chat.settings);
    if (chat.turns.length) store.keep(chat);
  }, () => showSettings(false));
}

function list() {
  sidebar(chat, act);
  document.title = chat.turns.length ? `${store.titleOf(chat)} · mlxinfer` : "mlxinfer";
}

function viewOf(turn) {
  if (!views.has(turn)) views.set(turn, new TurnView(turn, act));
  return views.get(turn);
}

/** Shows all turns, and the last of them unless the user `stays` at the place. */
function draw(stays = false) {
  const live = running.has(chat.id);
  const shown = chat.turns.map(viewOf);
  for (const view of shown) {
    view.showVersions();
    if (view.turn.role === "assistant") view.update(live && act.isLast(view.turn));
  }
  $("transcript").replaceChildren(...(shown.length ? shown.map((view) => view.node) : [welcome()]));
  showState();
  if (stays) return;
  stick = true;
  follow();
}

function welcome() {
  return el("div", { class: "welcome" }, el("h1", {}, "What would you like to know?"),
    el("p", {}, "Answers come from this server. Conversations are kept in this browser and nowhere else."));
}

function follow() {
  if (stick) $("scroll").scrollTop = $("scroll").scrollHeight;
}

function showState() {
  const live = running.has(chat.id);
  const button = $("send");
  button.replaceChildren(icon(live ? "stop" : "send"));
  button.setAttribute("aria-label", live ? "Stop" : "Send");
  button.title = live ? "Stop (Esc)" : "Send (Enter)";
  button.classList.toggle("stop", live);
  button.disabled = !live && (!($("prompt").value.trim() || attached(chat.id).length) || !canAsk());
}

function showAttachments() {
  tray(chat.id, showAttachments);
  showState();
}

const newAnswer = () => ({ role: "assistant", content: "", model: chat.model });

/** Requests an answer to the last turn. */
function answerNext() {
  chat.turns.push(newAnswer());
  return answer(chat.turns.at(-1));
}

/** Requests the last turn, an answer, or its continuation; `again`: a different answer than before. */
async function answer(turn, { again = false, resumed = null } = {}) {
  const mine = chat;
  const model = served.find((one) => one.id === mine.model) ?? { id: mine.model };
  const asked = () => request(model, mine.settings, resumed ? mine.turns : mine.turns.slice(0, -1), { again, resumed });
  for (const name of ["stopped", "interrupted", "finish", "problem"]) delete turn[name];
  mine.updated = Date.now();
  const controller = new AbortController();
  running.set(mine.id, controller);
  const view = viewOf(turn);
  store.keep(mine);
  draw();
  list();
  meters.wake();
  setTimeout(loadModels, 1000); // the request starts loading the model
  say("The answer begins");
  await write(turn, asked, view, controller.signal, mine);
  running.delete(mine.id);
  if (store.chats().some((one) => one.id === mine.id)) store.keep(mine);
  view.update(false);
  if (mine === chat) { showState(); follow(); }
  list();
  loadModels();
  say(turn.problem ?? (turn.stopped ? "Stopped" : "The answer is complete"));
}

async function write(turn, asked, view, signal, mine) {
  let frame = 0;
  const show = () => { frame = 0; view.update(true); if (mine === chat) follow(); };
  const changed = () => { frame ||= requestAnimationFrame(show); };
  try {
    await fill(turn, await asked(), view, signal, changed);
  } catch (error) {
    if (leaving) turn.interrupted = true;
    else if (error.name === "AbortError") turn.stopped = true;
    else if (!(error instanceof Problem)) throw error;
    else if (error.kind === "key" && await askKey(error.message)) await write(turn, asked, view, signal, mine);
    else turn.problem = error.message;
  } finally {
    cancelAnimationFrame(frame);
  }
}

const chosenModel = () => served.find((one) => one.id === $("model").value) ?? {};

/** True if the chosen model can chat. */
const canAsk = () => Boolean($("model").value) && chats(chosenModel());

/** True if the chosen model sees images. */
const sees = () => Boolean(chosenModel().capabilities?.includes("vision"));

function send() {
  const field = $("prompt");
  const text = field.value.trim();
  if (!(text || attached(chat.id).length) || running.has(chat.id) || !canAsk()) return;
  field.value = "";
  fit(field);
  store.keepDraft(chat.id, "");
  chat.model = $("model").value;
  const attachments = asFields(detach(chat.id));
  keep(attachments.images ?? []);
  showAttachments();
  chat.turns.push({ role: "user", content: text, ...attachments });
  answerNext();
}

async function bringIn() {
  const found = await imported(await chosen("application/json,.json"));
  if (!found) {
    toast("This file has no conversation: it needs a list of turns or messages.");
    return;
  }
  store.keep(found);
  open(found);
  closeDrawer();
}

/** The page is closed: saves the received parts of answers. */
function leave() {
  for (const id of running.keys()) {
    const mine = opened.get(id);
    mine.turns.at(-1).interrupted = true;
    store.keep(mine);
  }
}

const stop = () => running.get(chat.id)?.abort();

/** Asks for the server's key; true if the user gave one. */
function askKey(wrong) {
  const dialog = $("key");
  $("key-wrong").textContent = /not this server/.test(wrong) ? wrong : "";
  forgetKey();
  $("key-value").value = "";
  if (!dialog.open) dialog.showModal();
  return new Promise((settle) => {
    dialog.addEventListener("close", () => {
      const given = dialog.returnValue === "ok" && $("key-value").value;
      dialog.returnValue = "";
      if (given) keepKey($("key-value").value.trim());
      settle(Boolean(given));
    }, { once: true });
  });
}

let asking = null;
const loadModels = () => (asking ??= readModels().finally(() => { asking = null; }));

async function readModels() {
  try {
    served = await models();
  } catch (error) {
    if (error.kind === "key" && await askKey(error.message)) return readModels();
    $("banner").replaceChildren(el("p", {}, error.message), el("button", { type: "button", class: "solid", onclick: loadModels }, "Retry"));
    $("banner").hidden = false;
    return undefined;
  }
  $("banner").hidden = true;
  showModel();
  meters.wake();
  return undefined;
}

const chats = ({ capabilities }) => !capabilities || capabilities.includes("tools");

/** A model's state: [text in the list, text next to the list]. */
function stateOf({ status, capabilities }) {
  if (!chats({ capabilities })) {
    return capabilities.includes("embedding") ? ["embedding model", "makes vectors of texts and cannot chat"] : ["base model", "continues texts and cannot chat: it has no chat template"];
  }
  if (status?.failed || status?.value === "failed") return ["failed", `could not be loaded${status.reason ? `: ${status.reason}` : ""}`];
  if (status?.value === "loading") return ["loading", "loading"];
  return status?.value === "unloaded" ? ["not loaded", "loads with your next message"] : [];
}

function showModel() {
  if (!served.length) return;
  const known = served.some((one) => one.id === chat.model);
  const able = served.filter(chats);
  const wanted = known ? chat.model : (able.find((one) => one.id === store.lastModel()) ?? able[0] ?? served[0]).id;
  $("model").replaceChildren(...[...able, ...served.filter((one) => !chats(one))].map((one) => {
    const label = [one.id, one.parent && `adapter of ${one.parent}`, stateOf(one)[0]].filter(Boolean).join(" · ");
    return el("option", { value: one.id, ...(one.id === wanted ? { selected: true } : {}) }, label);
  }));
  chat.model = wanted;
  const model = served.find((one) => one.id === wanted);
  const length = model.max_model_len ? `${model.max_model_len.toLocaleString("en")} tokens` : "";
  $("model-note").textContent = stateOf(model)[1] ?? length;
  showDefaults(model.conversation);
  showState();
}

function closeDrawer() {
  document.body.classList.remove("drawer");
  layout();
}

function showSettings(shown) {
  $("settings").hidden = !shown;
  layout();
  for (const area of $("settings").querySelectorAll("textarea")) fit(area);
  (shown ? $("settings").querySelector("textarea") : $("tune")).focus();
}

/** On narrow screens, panels cover the page and take the focus. */
function layout() {
  const drawer = document.body.classList.contains("drawer");
  const shown = !$("settings").hidden;
  $("menu").setAttribute("aria-expanded", String(drawer));
  $("tune").setAttribute("aria-expanded", String(shown));
  $("sidebar").inert = narrow.matches && !drawer;
  $("main").inert = narrow.matches && (drawer || shown);
  $("shade").hidden = !(narrow.matches && (drawer || shown));
}

function escape(event) {
  if (event.key !== "Escape" || event.defaultPrevented || $("key").open) return;
  if (running.has(chat.id)) stop();
  else if (document.body.classList.contains("drawer")) { closeDrawer(); $("menu").focus(); }
  else if (!$("settings").hidden) showSettings(false);
}

function wire() {
  $("menu").append(icon("menu"));
  $("tune").append(icon("tune"));
  $("import").append(icon("open"));
  $("attach").append(icon("clip"));
  themeSwitch($("theme"));
  $("import").addEventListener("click", bringIn);
  $("find").addEventListener("input", list);
  $("find").addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || !$("find").value) return;
    event.preventDefault();
    $("find").value = "";
    list();
  });
  $("new").addEventListener("click", () => { begin(); closeDrawer(); });
  $("menu").addEventListener("click", () => { document.body.classList.add("drawer"); layout(); $("new").focus(); });
  $("tune").addEventListener("click", () => showSettings($("settings").hidden));
  $("shade").addEventListener("click", () => { closeDrawer(); $("settings").hidden = true; layout(); });
  $("key-cancel").addEventListener("click", () => $("key").close());
  $("model").addEventListener("change", () => {
    chat.model = $("model").value;
    store.keepModel(chat.model);
    if (chat.turns.length) store.keep(chat);
    showModel();
  });
  $("composer").addEventListener("submit", (event) => { event.preventDefault(); if (running.has(chat.id)) stop(); else send(); });
  $("prompt").addEventListener("input", () => { fit($("prompt")); showState(); store.keepDraft(chat.id, $("prompt").value); });
  $("prompt").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); }
  });
  watchFiles(() => ({ id: chat.id, sees: sees(), name: $("model").value }), showAttachments);
  $("scroll").addEventListener("scroll", () => {
    const { scrollTop, scrollHeight, clientHeight } = $("scroll");
    stick = scrollHeight - scrollTop - clientHeight < 60;
  }, { passive: true });
  document.addEventListener("keydown", escape);
  narrow.addEventListener("change", layout);
  addEventListener("focus", loadModels);
  addEventListener("beforeunload", () => { leaving = true; setTimeout(() => { leaving = false; }, 3000); });
  addEventListener("pagehide", leave);
  addEventListener("unhandledrejection", ({ reason }) => toast(`The page made a mistake: ${reason?.message ?? reason}`));
  store.watch(() => { // another tab changed something
    for (const id of opened.keys()) if (id !== chat.id && !running.has(id)) opened.delete(id);
    list();
  });
  watchTokens($("transcript"), (span) => {
    const { view } = span.closest(".turn");
    return span.closest(".reasoning") ? view.thoughts : view.tokens;
  });
}

wire();
const before = sessionStorage.getItem(OPEN);
const last = store.chats().find((one) => one.id === before);
if (last) open(last);
else begin(before && store.draft(before) ? before : null);
layout();
sweep(store.chats().flatMap((one) => everyTurn(one.turns)));
const meters = new Meters(() => running.size > 0, () => $("model").value);
loadModels();
