// The chart of what the server does now, drawn anew each second while somebody can see it.

import { at, drawn, duration, element, figure, heading, number, say } from "./element.js";
import { figures, goesOn, reading } from "./counters.js";
import { call, failure } from "./server.js";

const INTERVAL_MS = 1000;
const WINDOW_S = 5;
const GAP_S = 3; // a reading that comes later than this does not continue the line
const SPAN_S = 120;
const HEIGHT = 150; // as the style sheet has it
const MARGIN = { left: 62, right: 8, top: 10, bottom: 22 };
const CHARTS = {
  rate: { title: "Requests per second", tell: (value) => number(value) },
  p50: { title: "Latency, p50", tell: duration },
  p99: { title: "Latency, p99", tell: duration },
  batch: { title: "Rows of a request's batch, mean", tell: (value) => number(value) },
};

export class Live {
  #readings = [];
  #points = []; // of each second: its time, and the figures of each backend; null is a gap
  #isPaused = false;
  #isLocked = false;
  #timer = 0;
  #isAsking = false;

  constructor() {
    at("pause").addEventListener("click", () => {
      this.#isPaused = !this.#isPaused;
      at("pause").setAttribute("aria-pressed", String(this.#isPaused));
      this.#schedule();
    });
    document.addEventListener("visibilitychange", () => this.#schedule());
    new ResizeObserver(() => requestAnimationFrame(() => this.#draw())).observe(at("charts"));
  }

  lock(isLocked) {
    this.#isLocked = isLocked;
    this.#schedule();
  }

  #schedule() {
    clearTimeout(this.#timer);
    if (document.hidden || this.#isPaused || this.#isLocked) {
      say(at("live-state"), this.#isLocked ? "Waiting for the key." : this.#isPaused ? "Paused." : "");
    } else if (!this.#isAsking) {
      this.#tick();
    }
  }

  async #tick() {
    this.#isAsking = true;
    const started = performance.now();
    try {
      const { text } = await call("metrics", { limit_ms: 5 * INTERVAL_MS });
      this.#take(reading(text, started / 1e3));
      say(at("live-state"), "");
    } catch (error) {
      this.#readings = [];
      if (!this.#isLocked) say(at("live-state"), failure(error), true);
    }
    this.#isAsking = false;
    if (document.hidden || this.#isPaused || this.#isLocked) return;
    this.#timer = setTimeout(() => this.#tick(), Math.max(0, started + INTERVAL_MS - performance.now()));
  }

  #take(now) {
    const last = this.#readings.at(-1);
    if (last && (now.time_s - last.time_s > GAP_S || !goesOn(last, now))) this.#readings = [];
    if (!this.#readings.length && this.#points.length) this.#points.push({ time_s: now.time_s, backends: null });
    this.#readings.push(now);
    while (now.time_s - this.#readings[0].time_s > WINDOW_S + 0.5 * (INTERVAL_MS / 1e3)) this.#readings.shift();
    const [first] = this.#readings;
    if (first !== now) {
      const of = (name) => [name, figures(name, first, now)];
      this.#points.push({ time_s: now.time_s, backends: Object.fromEntries(Object.keys(now.backends).map(of)) });
    }
    this.#points = this.#points.filter(({ time_s }) => now.time_s - time_s <= SPAN_S);
    this.#draw();
  }

  #draw() {
    const now = this.#readings.at(-1);
    if (!now) return;
    const names = Object.keys(now.backends);
    const latest = this.#points.at(-1)?.backends ?? {};
    at("figures").replaceChildren(
      ...names.map((name) => {
        const each = latest[name] ?? { rate: null, p50: null, p99: null, batch: null };
        const cells = Object.entries(CHARTS).map(([kind, { tell }]) => figure(tell(each[kind])));
        return element("tr", {}, heading(name), ...cells, figure(number(now.backends[name].requests)));
      }),
    );
    if (at("legend").dataset.names !== names.join()) {
      at("legend").dataset.names = names.join();
      at("legend").replaceChildren(...names.map((name, index) => element("span", {}, swatch(index), name)));
      at("charts").replaceChildren(
        ...Object.entries(CHARTS).map(([kind, { title }]) => {
          const chart = drawn("svg", { role: "img", class: "chart" });
          return element("figure", { id: `chart-${kind}` }, element("figcaption", {}, title), chart);
        }),
      );
    }
    for (const [kind, chart] of Object.entries(CHARTS)) {
      const series = names.map((name) =>
        this.#points.map(({ time_s, backends }) => [time_s - now.time_s, backends?.[name]?.[kind] ?? null]),
      );
      const each = names.map((name) => `${name} ${chart.tell(latest[name]?.[kind])}`).join(", ");
      lines(at(`chart-${kind}`).querySelector("svg"), series, chart.tell, `${chart.title}, now: ${each}`);
    }
  }
}

function swatch(index) {
  const line = drawn("line", { x1: 1, x2: 27, y1: 4, y2: 4, class: `line line-${index}` });
  return drawn("svg", { class: "swatch", viewBox: "0 0 28 8", "aria-hidden": "true" }, line);
}

// The smallest of 1, 2 and 5 times a power of ten that is no less.
function ceiling(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return power * ([1, 2, 5].find((step) => step * power >= value * (1 - 1e-9)) ?? 10);
}

// Draws a line for each series of pairs of a time, in seconds from now, and a value or null.
function lines(chart, series, tell, label) {
  const width = Math.max(200, chart.parentElement.clientWidth);
  const [left, right, bottom] = [MARGIN.left, width - MARGIN.right, HEIGHT - MARGIN.bottom];
  const most = ceiling(Math.max(0, ...series.flat().map(([, value]) => value ?? 0)));
  const x = (time_s) => right + (time_s / SPAN_S) * (right - left);
  const y = (value) => bottom - (value / most) * (bottom - MARGIN.top);
  const parts = [0, most / 2, most].flatMap((value) => [
    drawn("line", { x1: left, x2: right, y1: y(value), y2: y(value), class: "grid" }),
    drawn("text", { x: left - 6, y: y(value) + 4, "text-anchor": "end" }, value ? tell(value) : "0"),
  ]);
  const foot = HEIGHT - 5;
  parts.push(drawn("text", { x: left, y: foot }, "2 minutes ago"));
  parts.push(drawn("text", { x: right, y: foot, "text-anchor": "end" }, "now"));
  series.forEach((pairs, index) => {
    for (const run of runs(pairs)) {
      const points = run.map(([time_s, value]) => `${x(time_s).toFixed(1)},${y(value).toFixed(1)}`);
      if (run.length > 1) {
        parts.push(drawn("polyline", { points: points.join(" "), class: `line line-${index}` }));
      } else {
        const [cx, cy] = points[0].split(",");
        parts.push(drawn("circle", { cx, cy, r: 2.5, class: `dot dot-${index}` }));
      }
    }
  });
  chart.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
  chart.setAttribute("aria-label", label);
  chart.replaceChildren(...parts);
}

// The stretches of a series without a gap.
function runs(pairs) {
  const found = [];
  pairs.forEach((pair, index) => {
    if (pair[1] === null) return;
    if (index && pairs[index - 1][1] !== null) found.at(-1).push(pair);
    else found.push([pair]);
  });
  return found;
}
