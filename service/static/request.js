// One request, to one backend or to all side by side: the answer, where its time went, and how far the backends differ.

import { at, bar, cell, duration, element, figure, heading, number, say, table } from "./element.js";
import { normalRows, pixelRows } from "./rows.js";
import { callJson, failure } from "./server.js";
import { DigitPad } from "./digit.js";

const MOST_SHOWN = { rows: 8, labels: 10, outputs: 6 };
const PARTS = {
  queue: "waiting for its turn",
  batch: "being put together with others",
  compute: "in the engine",
  encode: "reading the body and writing the reply",
  wire: "all else until the browser has it: network, HTTP, between the server's processes",
  rest: "the rest of the server's time",
};

export class Request {
  #model;
  #pad = null;

  constructor() {
    const form = at("request-form");
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.#send();
    });
    at("sources").addEventListener("change", () => this.#showSource());
  }

  // Called once the model is known; before, nothing can be sent.
  take(model) {
    this.#model = model;
    const isDigit = model.width_in === 64 && model.labels !== null;
    at("sources").hidden = !isDigit;
    at("count").max = model.max_request_rows;
    at("kind").textContent = isDigit ? "whole numbers, 0 to 16 alike" : "normal, mean 0, deviation 1";
    if (isDigit && !this.#pad) {
      this.#pad = new DigitPad(() => at("request-form").requestSubmit(at("send")));
      document.querySelector("input[name=source][value=digit]").checked = true;
    }
    this.#showSource();
  }

  get #isDrawn() {
    return this.#pad !== null && document.querySelector("input[name=source]:checked").value === "digit";
  }

  #showSource() {
    at("digit").hidden = !this.#isDrawn;
    at("random").hidden = this.#isDrawn;
    for (const id of ["count", "seed"]) at(id).disabled = this.#isDrawn; // what is hidden keeps no form from being sent
  }

  #rows() {
    if (this.#isDrawn) return [this.#pad.values];
    const draw = this.#pad ? pixelRows : normalRows;
    return draw(at("count").valueAsNumber, this.#model.width_in, at("seed").valueAsNumber);
  }

  async #send() {
    if (!this.#model) return;
    const button = at("send");
    if (button.getAttribute("aria-disabled") === "true") return;
    if (this.#isDrawn && this.#pad.isEmpty) {
      say(at("answer"), "There is no digit yet: draw one, or take the sample.");
      at("timing").replaceChildren();
      at("results").replaceChildren();
      return;
    }
    button.setAttribute("aria-disabled", "true"); // it keeps the focus, as a disabled one would not
    const chosen = at("backend").value;
    try {
      const rows = this.#rows();
      await (chosen === "*" ? this.#compare(rows) : this.#predict(rows, chosen));
    } catch (error) {
      say(at("answer"), failure(error), true);
      at("timing").replaceChildren();
      at("results").replaceChildren();
    } finally {
      button.removeAttribute("aria-disabled");
    }
  }

  async #predict(rows, chosen) {
    const path = chosen ? `predict/${encodeURIComponent(chosen)}` : "predict";
    const { document: reply, headers, elapsed_ms } = await callJson(path, { method: "POST", body: { inputs: rows } });
    const parts = {};
    for (const part of ["queue", "batch", "compute", "encode"]) parts[part] = Number(headers.get(`x-${part}-us`)) / 1e3;
    parts.wire = Math.max(0, elapsed_ms - Object.values(parts).reduce((sum, part) => sum + part, 0));
    const result = { name: reply.backend, ...reply };
    const { batch_rows } = reply.timing;
    const several = rows.length > batch_rows ? `in batches of up to ${number(batch_rows)} rows` : null;
    const batch = several ?? (batch_rows === 1 ? "alone" : `in a batch of ${number(batch_rows)} rows`);
    const who = `${reply.backend} (${reply.implementation})`;
    say(at("answer"), `${who}: ${said(result, rows.length)} after ${duration(elapsed_ms)}, computed ${batch}.`);
    this.#showTimes([{ name: reply.backend, parts }], "the whole as this browser measured it");
    at("results").replaceChildren(...outputs([result], this.#model.labels));
  }

  async #compare(rows) {
    const { document: reply, elapsed_ms } = await callJson("compare", { method: "POST", body: { inputs: rows } });
    const all = Object.entries(reply.backends).map(([name, each]) => ({ name, ...each }));
    const ran = all.filter((each) => each.outputs);
    const sentence = agreement(ran, all.length, reply.reference, rows.length);
    say(at("answer"), `${sentence} All of it took ${duration(elapsed_ms)}.`);
    const timed = ran.map((each) => {
      const rest = Math.max(0, each.total_ms - each.queue_ms - each.compute_ms);
      return { name: each.name, parts: { queue: each.queue_ms, compute: each.compute_ms, rest } };
    });
    this.#showTimes(timed, "each backend's whole as the server measured it");
    at("results").replaceChildren(differences(all, reply.reference), ...outputs(ran, this.#model.labels));
  }

  #showTimes(timed, whole) {
    if (!timed.length) {
      at("timing").replaceChildren();
      return;
    }
    const kinds = Object.keys(timed[0].parts);
    const total = (parts) => Object.values(parts).reduce((sum, part) => sum + part, 0);
    const longest = Math.max(...timed.map((each) => total(each.parts)));
    const bars = timed.map(({ name, parts }) =>
      element(
        "div",
        { class: "timed" },
        element("span", {}, name),
        bar(kinds.map((kind) => ({ share: longest ? parts[kind] / longest : 0, kind }))),
        element("span", { class: "figure" }, duration(total(parts))),
      ),
    );
    const legend = kinds.map((kind) => {
      const swatch = element("span", { class: `key ${kind}`, "aria-hidden": "true" });
      return element("li", {}, swatch, `${kind}: ${PARTS[kind]}`);
    });
    const rows = timed.map(({ name, parts }) => {
      const cells = kinds.map((kind) => figure(duration(parts[kind])));
      return [heading(name), ...cells, figure(duration(total(parts)))];
    });
    const columns = [["backend"], ...kinds.map((kind) => [kind, "figure"]), ["whole", "figure"]];
    at("timing").replaceChildren(
      element("h3", {}, "Where the time went"),
      ...bars,
      table("Where the time went", columns, rows),
      element("ul", { class: "keys" }, ...legend, element("li", {}, `whole: ${whole}`)),
    );
  }
}

const ofRows = (count) => (count === 1 ? "1 row" : `${number(count)} rows`);

function said(result, count) {
  if (!result.labels) return `${ofRows(count)} of ${number(result.outputs[0].length)} numbers`;
  if (count > 1) return `${ofRows(count)}, labelled`;
  return `“${result.labels[0]}”, probability ${percent(Math.max(...softmax(result.outputs[0])))},`;
}

function agreement(ran, count, reference, rows) {
  if (!ran.length) return "No backend answered.";
  const compared = ran.filter((each) => each.name !== reference && Number.isFinite(each.max_abs_diff));
  const worst = compared.toSorted((one, other) => other.max_abs_diff - one.max_abs_diff)[0];
  const differ = worst ? `; furthest from ${reference}: ${worst.name}, by ${number(worst.max_abs_diff, 2)}` : "";
  const who = ran.length === count ? `All ${count} backends` : `${ran.length} of ${count} backends`;
  if (!ran[0].labels) return `${who} ran ${ofRows(rows)}${differ}.`;
  const isSame = ran.every((each) => each.labels.every((label, row) => label === ran[0].labels[row]));
  const what = rows === 1 ? `“${ran[0].labels[0]}”` : `the labels of ${ofRows(rows)}`;
  if (isSame) return `${who} say ${what}${differ}.`;
  return `${who} answered and disagree on the labels${differ}.`;
}

function softmax(scores) {
  const most = Math.max(...scores);
  const weights = scores.map((score) => Math.exp(score - most));
  const sum = weights.reduce((one, other) => one + other, 0);
  return weights.map((weight) => weight / sum);
}

const percent = (share) => `${(100 * share).toFixed(1)}%`;

function differences(all, reference) {
  const rows = all.map((each) => {
    if (!each.outputs) {
      return [heading(each.name), cell(`${each.error} (${each.code})`, { colspan: "4", class: "words error" })];
    }
    const rest = each.name === reference ? "the reference" : each.reason;
    const apart = rest
      ? [cell(rest, { colspan: "2", class: "words" })]
      : [figure(number(each.max_abs_diff, 3)), figure(number(each.max_rel_diff, 3))];
    return [heading(each.name), cell(each.implementation), ...apart, figure(number(each.batch_rows))];
  });
  const figures = ["largest absolute", "largest relative", "batch rows"].map((name) => [name, "figure"]);
  const columns = [["backend"], ["implementation"], ...figures];
  const title = `Differences from ${reference}`;
  return element("div", {}, element("h3", {}, title), table(title, columns, rows));
}

function outputs(results, labels) {
  if (!results.length) return [];
  const rows = results[0].outputs.length;
  if (labels && rows === 1) return [byLabel(results, labels)];
  const shown = Math.min(rows, MOST_SHOWN.rows);
  const title = shown < rows ? `Outputs, the first ${shown} of ${number(rows)} rows` : "Outputs";
  const each = (result, row) => {
    const scores = result.outputs[row];
    if (result.labels) return cell(`${result.labels[row]}, ${percent(Math.max(...softmax(scores)))}`);
    const numbers = scores.slice(0, MOST_SHOWN.outputs).map((score) => number(score, 4));
    if (scores.length > numbers.length) numbers.push(`and ${number(scores.length - numbers.length)} more`);
    return cell(numbers.join("  "), { class: "numbers" });
  };
  const cells = (row) => [heading(`row ${row + 1}`), ...results.map((result) => each(result, row))];
  const body = Array.from({ length: shown }, (_, row) => cells(row));
  return [element("h3", {}, title), table(title, [["row"], ...results.map(({ name }) => [name])], body)];
}

function byLabel(results, labels) {
  const chances = results.map((result) => softmax(result.outputs[0]));
  const likeliest = [...labels.keys()].sort((one, other) => chances[0][other] - chances[0][one]);
  const shown = likeliest.slice(0, MOST_SHOWN.labels);
  if (shown.length === labels.length) shown.sort((one, other) => one - other);
  const rows = shown.map((index) => {
    const cells = results.flatMap((result, place) => {
      const share = chances[place][index];
      const told = element("span", {}, percent(share));
      const chance = element("div", { class: "chance" }, bar([{ share, kind: "compute" }]), told);
      return [cell(chance), figure(number(result.outputs[0][index], 4))];
    });
    return [heading(labels[index]), ...cells];
  });
  const pairs = results.flatMap(({ name }) => [[`${name}: probability`], [`${name}: score`, "figure"]]);
  const columns = [["label"], ...pairs];
  const isPart = shown.length < labels.length;
  const title = isPart ? `Outputs, the ${shown.length} most probable of ${number(labels.length)} labels` : "Outputs";
  return element("div", {}, element("h3", {}, title), table(title, columns, rows));
}
