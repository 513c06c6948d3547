// Small plots: tokens per second, the cache, memory. Read from /metrics: each second during an answer, otherwise rarely.

import { metrics } from "./api.js";
import { $, el, svg } from "./dom.js";

const POINTS = 60;
const [WIDTH, HEIGHT] = [120, 24];
const [BUSY_MS, IDLE_MS] = [1000, 15000];

const bytes = (n) => (n >= 1e9 ? `${(n / 1e9).toFixed(1)} GB` : `${Math.round(n / 1e6)} MB`);
const rows = [
  { name: "Speed", top: (values) => Math.max(1, ...values), of: ({ rate }) => [rate, rate ? `${rate.toFixed(rate < 10 ? 1 : 0)} tokens/s` : "idle"] },
  { name: "Cache", top: () => 1, of: ({ used, kept, pages }) => [pages ? (used + kept) / pages : 0, pages ? `${Math.round((100 * (used + kept)) / pages)} % of ${(pages * 64).toLocaleString("en")} tokens` : "…"] },
  { name: "Memory", top: () => 1, of: ({ memory, limit }) => [limit ? memory / limit : 0, memory ? `${bytes(memory)} of ${bytes(limit)}` : "…"] },
];

export class Meters {
  /** `busy()` is true during an answer; `model()` is the model whose numbers are shown. */
  constructor(busy, model) {
    this.busy = busy;
    this.model = model;
    this.before = null;
    this.timer = 0;
    this.rows = rows.map((row) => {
      const path = svg("path", { class: "line" });
      const fill = svg("path", { class: "fill" });
      const plot = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", "aria-hidden": "true" });
      plot.append(fill, path);
      const value = el("span", { class: "value" }, "…");
      $("meters").append(el("div", { class: "meter", "data-meter": row.name.toLowerCase() }, el("span", {}, row.name), value, plot));
      return { ...row, path, fill, value, values: [] };
    });
    document.addEventListener("visibilitychange", () => this.wake());
    this.wake();
  }

  /** Reads now and periodically, while the page is visible. */
  wake() {
    clearTimeout(this.timer);
    if (!document.hidden) this.read();
  }

  async read() {
    const model = this.model();
    if (model !== this.shown) {
      this.shown = model;
      this.before = null;
      for (const row of this.rows) row.values = [];
    }
    try {
      if (model) this.show(await metrics(model));
    } catch {
      this.before = null; // the server is down or needs a key: other parts of the page report this
    }
    clearTimeout(this.timer);
    if (!document.hidden) this.timer = setTimeout(() => this.read(), this.busy() ? BUSY_MS : IDLE_MS);
  }

  show(now) {
    const at = performance.now();
    const written = now.inter_token_latency_seconds_count ?? 0;
    const seconds = this.before ? (at - this.before.at) / 1000 : 0;
    // After a long pause the average would mean little.
    const rate = seconds > 0 && seconds < 5 ? Math.max(0, (written - this.before.written) / seconds) : 0;
    this.before = { at, written };
    const facts = { rate, used: now.kv_cache_pages_used ?? 0, kept: now.kv_cache_pages_cached ?? 0, pages: now.kv_cache_pages ?? 0, memory: now.memory_bytes ?? 0, limit: now.memory_limit_bytes ?? 0 };
    for (const row of this.rows) {
      const [value, text] = row.of(facts);
      row.values = [...row.values, value].slice(-POINTS);
      row.value.textContent = text;
      const top = row.top(row.values);
      const x = (i) => WIDTH - ((row.values.length - 1 - i) * WIDTH) / (POINTS - 1);
      const line = row.values.map((v, i) => `${x(i).toFixed(1)} ${(HEIGHT - 1 - (v / top) * (HEIGHT - 3)).toFixed(1)}`).join("L");
      row.path.setAttribute("d", `M${line}`);
      row.fill.setAttribute("d", `M${x(0).toFixed(1)} ${HEIGHT}L${line}L${WIDTH} ${HEIGHT}Z`);
    }
  }
}
