// Elements made by hand. Children are nodes or text, and text is never read as HTML.

export const at = (id) => document.getElementById(id);

function attach(made, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined && value !== false) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

export const element = (tag, attributes = {}, ...children) => attach(document.createElement(tag), attributes, children);

export const drawn = (tag, attributes = {}, ...children) =>
  attach(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);

export const cell = (content, attributes = {}) => element("td", attributes, content ?? "");

export const figure = (content) => cell(content, { class: "figure" });

export const heading = (content, attributes = {}) => element("th", { scope: "row", ...attributes }, content);

// A table in a region of its own, which scrolls sideways by itself where it is too wide, with the keyboard too.
export function table(label, columns, rows) {
  const head = columns.map(([name, kind]) => element("th", { scope: "col", class: kind }, name));
  return element(
    "div",
    { class: "scroll", role: "region", tabindex: "0", "aria-label": label },
    element(
      "table",
      {},
      element("thead", {}, element("tr", {}, ...head)),
      element("tbody", {}, ...rows.map((cells) => element("tr", {}, ...cells))),
    ),
  );
}

// A bar of parts, each a share of the whole; told in words elsewhere.
export function bar(parts) {
  const made = element("div", { class: "bar", "aria-hidden": "true" });
  for (const { share, kind } of parts) {
    const part = element("span", { class: kind });
    part.style.width = `${(100 * share).toFixed(3)}%`;
    made.append(part);
  }
  return made;
}

export function say(place, sentence, isError = false) {
  if (place.textContent !== sentence) place.textContent = sentence; // the same again would be read out again
  place.classList.toggle("error", isError);
}

const plain = (value, digits) =>
  value && Math.abs(value) < 1e-3 ? value.toExponential(digits - 1) : value.toPrecision(digits);

export const number = (value, digits = 3) => {
  if (value === null || value === undefined) return "none";
  if (Number.isInteger(value) || Math.abs(value) >= 1000) return Math.round(value).toLocaleString("en");
  return plain(value, digits);
};

export const duration = (ms) => {
  if (ms === null || ms === undefined) return "none";
  if (ms < 0.9995) return `${number(Math.round(ms * 1e3))} µs`;
  return ms < 999.5 ? `${plain(ms, 3)} ms` : `${plain(ms / 1e3, 3)} s`;
};

export const bytes = (count) => {
  if (count === null || count === undefined) return "not recorded";
  const unit = Math.min(3, Math.floor(Math.log2(Math.max(1, count)) / 10));
  return `${number(count / 2 ** (10 * unit))} ${["B", "KiB", "MiB", "GiB"][unit]}`;
};
