// Profiles of every backend beside each other: operators, kernels, and a trace of each to keep.

import { at, bar, bytes, cell, duration, element, figure, heading, number, say, table } from "./element.js";
import { call, callJson, failure } from "./server.js";

const MOST_LINES = 12;
const WITHOUT = {
  operator: "all of it is replayed as one graph",
  kernel: "on a CPU the operators do the work themselves",
};

export class Profiles {
  #backends;

  constructor(backends) {
    this.#backends = backends;
    at("profile-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#run();
    });
  }

  take(model) {
    at("profile-rows").max = model.max_batch_rows;
    at("profile-rows").value = Math.min(64, model.max_batch_rows);
  }

  async #run() {
    const button = at("profile-form").querySelector("button");
    if (button.getAttribute("aria-disabled") === "true") return;
    button.setAttribute("aria-disabled", "true");
    const rows = at("profile-rows").valueAsNumber;
    const found = [];
    try {
      // One at a time, as the server takes them.
      for (const backend of this.#backends.names) {
        say(at("profile-outcome"), `Profiling ${backend}…`);
        try {
          const { document: profile } = await callJson("profile", { method: "POST", body: { rows, backend } });
          found.push(profile);
        } catch (error) {
          found.push({ backend, error: failure(error) });
        }
        show(found);
      }
      const done = found.filter((each) => !each.error).map(summary);
      say(at("profile-outcome"), done.length ? `${done.join("; ")}.` : "No backend could be profiled.", !done.length);
    } finally {
      button.removeAttribute("aria-disabled");
    }
  }
}

// A name that may go on in the next line where a part of it ends.
const breakable = (name) => name.split(/(?<=::|_)(?!_|$)/).flatMap((part) => [part, element("wbr")]);

const time_us = (lines, level) =>
  lines.filter((line) => line.level === level).reduce((sum, line) => sum + line.time_us, 0);

const counted = (count, name) => `${number(count)} ${name}${count === 1 ? "" : "s"}`;

function summary({ backend, operators, kernels, lines }) {
  const level = kernels && !operators ? "kernel" : "operator";
  const parts = [counted(operators, "operator"), ...(kernels ? [counted(kernels, "kernel")] : [])];
  return `${backend}: ${parts.join(", ")}, ${duration(time_us(lines, level) / 1e3)}`;
}

function show(found) {
  const longest = Math.max(1e-9, ...found.flatMap((each) => (each.lines ?? []).map((line) => line.time_us)));
  at("profiles").replaceChildren(...found.map((each) => (each.error ? refused(each) : column(each, longest))));
}

const refused = ({ backend, error }) =>
  element("article", {}, element("h3", {}, backend), element("p", { class: "error" }, error));

function column(profile, longest) {
  const { backend, implementation, lines, rows } = profile;
  const save = element("button", { type: "button" }, "Save the trace");
  const outcome = element("output", { role: "status" }, profile.trace ? null : "The trace is too large to be kept.");
  save.addEventListener("click", () => keep(profile, outcome));
  const levels = [
    ["operator", "Operators"],
    ["kernel", "Kernels"],
  ].flatMap(([level, title]) => {
    const own = lines.filter((line) => line.level === level);
    if (!own.length) return [element("p", { class: "soft" }, `No ${level}s: ${WITHOUT[level]}.`)];
    const cells = own.slice(0, MOST_LINES).map((line) => [
      heading(element("div", { class: "name" }, ...breakable(line.name), bar([{ share: line.time_us / longest, kind: "compute" }]))),
      figure(number(line.count)),
      figure(duration(line.time_us / 1e3)),
      figure(bytes(line.bytes)),
    ]);
    if (own.length > MOST_LINES) {
      const rest = `and ${number(own.length - MOST_LINES)} shorter ones, which the trace has`;
      cells.push([cell(rest, { colspan: "4" })]);
    }
    const columns = [["name"], ["count", "figure"], ["time", "figure"], ["bytes", "figure"]];
    return [element("h4", {}, title), table(`${title} of ${backend}`, columns, cells)];
  });
  return element(
    "article",
    {},
    element("h3", {}, `${backend} (${implementation})`),
    element("p", {}, `${summary(profile).slice(backend.length + 2)}, ${rows === 1 ? "1 row" : `${number(rows)} rows`}`),
    ...levels,
    element("p", { class: "fields" }, profile.trace ? save : null, outcome),
  );
}

// The trace comes with the key in a header, so no plain link can fetch it.
async function keep({ backend, trace }, outcome) {
  try {
    const { text } = await call(trace.replace(/^\//, ""));
    const address = URL.createObjectURL(new Blob([text], { type: "application/json" }));
    element("a", { href: address, download: `${backend}-trace.json` }).click();
    setTimeout(() => URL.revokeObjectURL(address), 60_000);
    say(outcome, "Saved; ui.perfetto.dev shows it.");
  } catch (error) {
    say(outcome, failure(error), true);
  }
}
