// What the server has: the model, the state of each backend, and the one that requests take which name none.

import { at, cell, element, heading, number, say } from "./element.js";
import { callJson, failure } from "./server.js";

const LIMIT_MS = 10_000;

export async function readModel() {
  const { document: model } = await callJson("model", { limit_ms: LIMIT_MS });
  const blocks = model.depth === 1 ? "1 block" : `${number(model.depth)} blocks`;
  const gate = model.is_gated ? "gated " : "";
  const parts = [
    `${model.name}: ${number(model.width_in)} numbers in, ${number(model.width_out)} out`,
    `${blocks} of dim ${number(model.dim)}, hidden ${number(model.hidden)}, ${gate}${model.activation}`,
    `${number(model.parameters)} parameters in ${model.dtype} on ${model.device}`,
  ];
  say(at("model"), `${parts.join("; ")}.`);
  return model;
}

export class Backends {
  #shown = "";
  names = [];

  constructor() {
    at("default-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#switch();
    });
  }

  async read() {
    const { document: found } = await callJson("backend", { limit_ms: LIMIT_MS });
    this.#show(found);
  }

  async #switch() {
    try {
      const body = { default: at("default").value };
      const { document: found } = await callJson("backend", { method: "PUT", body, limit_ms: LIMIT_MS });
      this.#show(found);
      say(at("default-outcome"), `Switched: ${sentence(found)}`);
    } catch (error) {
      say(at("default-outcome"), failure(error), true);
    }
  }

  async #putBack(name) {
    try {
      const body = { put_back: [name] };
      const { document: found } = await callJson("backend", { method: "PUT", body, limit_ms: LIMIT_MS });
      this.#show(found);
      say(at("default-outcome"), `Put ${name} back: ${sentence(found)}`);
      // The focus went with the button.
      if (document.activeElement === document.body) at("backends-title").focus();
    } catch (error) {
      say(at("default-outcome"), failure(error), true);
    }
  }

  #show(found) {
    const text = JSON.stringify(found);
    if (text === this.#shown) return; // nothing moves under a reader, or a pointer
    this.#shown = text;
    this.names = Object.keys(found.backends);
    at("states").replaceChildren(
      ...Object.entries(found.backends).map(([name, state]) =>
        element(
          "tr",
          {},
          heading(name === found.default ? `${name} (default)` : name),
          cell(state.implementation ?? "none"),
          cell(element("span", { class: `state ${state.state === "ready" ? "good" : "bad"}` }, state.state)),
          this.#remarks(name, state, found.canary?.[name]),
        ),
      ),
    );
    const auto = found.is_auto && found.default ? `auto, now ${found.default}` : "auto";
    const named = this.names.map((name) => [name, name]);
    options(at("default"), [["auto", auto], ...named]);
    at("default").value = found.is_auto ? "auto" : found.default;
    const first = ["", `the default, ${found.default ?? "which none is yet"}`];
    options(at("backend"), [first, ...named, ["*", "all, side by side"]]);
  }

  #remarks(name, state, share) {
    const takes = state.state === "ready" ? "takes" : "takes, once it is ready,";
    const canary = share ? `canary: ${takes} ${number(100 * share)}% of the requests that name no backend` : null;
    const made = cell([state.reason, canary, state.note].filter(Boolean).join("; "), { class: "words" });
    if (state.taken_out_at) {
      const button = element("button", { type: "button", class: "put-back" }, `Put ${name} back`);
      button.addEventListener("click", () => this.#putBack(name));
      made.append(" ", button);
    }
    return made;
  }
}

function sentence(found) {
  const name = found.default ?? "no backend yet";
  return `requests that name none go to ${name}${found.is_auto ? ", the best that is available" : ""}.`;
}

// Replaces the options of a select and keeps what was chosen.
function options(select, pairs) {
  const chosen = select.value;
  select.replaceChildren(...pairs.map(([value, text]) => new Option(text, value)));
  if (pairs.some(([value]) => value === chosen)) select.value = chosen;
}
