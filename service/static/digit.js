// A digit drawn by hand, as the demo model knows them: 8 by 8 cells, each the count of set bits in 4 by 4 of a bitmap
// of 32 by 32 to which the digit was fitted.
//
// Source: Alpaydin and Kaynak, Optical Recognition of Handwritten Digits, https://doi.org/10.24432/C50P49.

import { at, drawn, element } from "./element.js";

const SIDE = 8;
const BLOCK = 4;
const BITS = SIDE * BLOCK;
const MOST = BLOCK * BLOCK;
const PEN = 2.6; // half a stroke's width, in bits: as wide as those of the data
const WIDE = 24; // what the data's digits fill of the bitmap's width
const LARGEST_SCALE = 4; // a dot stays a dot
const STEP = 4;
const SAMPLE = [turns(36).map((angle) => [0.5 + 0.22 * Math.cos(angle), 0.5 + 0.35 * Math.sin(angle)])]; // a zero
const NEAR = 0.008; // of the pad's side: points closer than this add nothing

export function rasterise(strokes) {
  const points = strokes.flat();
  if (!points.length) return new Array(SIDE * SIDE).fill(0);
  const [left, right, top, bottom] = [0, 1].flatMap((axis) => {
    const values = points.map((point) => point[axis]);
    return [Math.min(...values), Math.max(...values)];
  });
  const fit = Math.min((BITS - 2 * PEN) / (bottom - top), (WIDE - 2 * PEN) / (right - left), LARGEST_SCALE * BITS);
  const place = ([x, y]) => [BITS / 2 + (x - (left + right) / 2) * fit, BITS / 2 + (y - (top + bottom) / 2) * fit];
  const lines = strokes.map((stroke) => stroke.map(place));
  const counts = new Array(SIDE * SIDE).fill(0);
  for (let y = 0; y < BITS; y += 1) {
    for (let x = 0; x < BITS; x += 1) {
      if (lines.some((line) => isNear(line, x + 0.5, y + 0.5))) {
        counts[Math.floor(y / BLOCK) * SIDE + Math.floor(x / BLOCK)] += 1;
      }
    }
  }
  return counts;
}

const isNear = (line, x, y) => line.some((end, index) => distance(line[Math.max(0, index - 1)], end, x, y) <= PEN);

function distance([ax, ay], [bx, by], x, y) {
  const [dx, dy] = [bx - ax, by - ay];
  const along = ((x - ax) * dx + (y - ay) * dy) / (dx * dx + dy * dy || 1);
  const share = Math.min(1, Math.max(0, along));
  return Math.hypot(x - ax - share * dx, y - ay - share * dy);
}

function turns(steps) {
  return Array.from({ length: steps + 1 }, (_, step) => (2 * Math.PI * step) / steps);
}

// The two pads: one to draw on, and the cells, which the keyboard reaches and which hold what is sent.
export class DigitPad {
  #strokes = [];
  #edits = new Map(); // cells set by hand, which a stroke does not change
  #cells = [];

  constructor(submit) {
    const grid = at("cells");
    for (let row = 0; row < SIDE; row += 1) {
      const cells = Array.from({ length: SIDE }, () => element("div", { role: "gridcell", tabindex: "-1" }));
      this.#cells.push(...cells);
      grid.append(element("div", { role: "row" }, ...cells));
    }
    this.#cells[0].tabIndex = 0;
    this.#cells.forEach((each, index) => {
      each.addEventListener("pointerdown", () => this.#set(index, this.values[index] ? 0 : MOST));
      each.addEventListener("keydown", (event) => this.#press(event, index, submit));
      each.addEventListener("focus", () => {
        for (const other of this.#cells) other.tabIndex = other === each ? 0 : -1;
      });
    });
    this.#listen(at("pad"));
    at("clear").addEventListener("click", () => this.#draw([]));
    at("sample").addEventListener("click", () => this.#draw(structuredClone(SAMPLE)));
    this.#show();
  }

  get values() {
    const values = rasterise(this.#strokes);
    for (const [index, value] of this.#edits) values[index] = value;
    return values;
  }

  get isEmpty() {
    return this.values.every((value) => value === 0);
  }

  #draw(strokes) {
    this.#strokes = strokes;
    this.#edits.clear();
    this.#show();
  }

  #set(index, value) {
    this.#edits.set(index, Math.min(MOST, Math.max(0, value)));
    this.#show();
  }

  #press(event, index, submit) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const column = index % SIDE;
    const [back, on] = [column ? -1 : 0, column < SIDE - 1 ? 1 : 0];
    const moves = { ArrowUp: -SIDE, ArrowDown: SIDE, ArrowLeft: back, ArrowRight: on };
    const ends = { Home: index - column, End: index - column + SIDE - 1 };
    const value = this.values[index];
    const changes = { " ": value ? 0 : MOST, "+": value + STEP, "-": value - STEP, Delete: 0, Backspace: 0 };
    if (event.key in moves || event.key in ends) {
      this.#cells[event.key in ends ? ends[event.key] : index + moves[event.key]]?.focus();
    } else if (event.key in changes) {
      this.#set(index, changes[event.key]);
      at("changed").textContent = `${this.values[index]} of ${MOST}`; // a label that changes is not read out
    } else if (event.key === "Enter") {
      submit();
    } else {
      return;
    }
    event.preventDefault();
  }

  #listen(pad) {
    const point = (event) => {
      const box = pad.getBoundingClientRect();
      return [(event.clientX - box.left) / box.width, (event.clientY - box.top) / box.height];
    };
    let stroke = null;
    pad.addEventListener("pointerdown", (event) => {
      if (event.button !== 0) return;
      pad.setPointerCapture(event.pointerId);
      stroke = [point(event)];
      this.#strokes.push(stroke);
      this.#show();
      event.preventDefault();
    });
    pad.addEventListener("pointermove", (event) => {
      if (!stroke) return;
      for (const each of event.getCoalescedEvents?.() ?? [event]) {
        const [x, y] = point(each);
        const [lastX, lastY] = stroke.at(-1);
        if (Math.hypot(x - lastX, y - lastY) > NEAR) stroke.push([x, y]);
      }
      this.#show();
    });
    for (const kind of ["pointerup", "pointercancel"]) pad.addEventListener(kind, () => (stroke = null));
  }

  #show() {
    const pad = at("pad");
    pad.replaceChildren(
      ...this.#strokes.map((stroke) => {
        const [[x, y]] = stroke;
        const points = [...stroke, [x, y + 1e-4]].slice(0, Math.max(2, stroke.length)); // a dot shows as a short line
        return drawn("polyline", { points: points.map((each) => each.join(",")).join(" ") });
      }),
    );
    this.values.forEach((value, index) => {
      const [row, column] = [Math.floor(index / SIDE) + 1, (index % SIDE) + 1];
      this.#cells[index].setAttribute("aria-label", `row ${row}, column ${column}: ${value} of ${MOST}`);
      this.#cells[index].dataset.value = value;
      this.#cells[index].style.setProperty("--level", String(value / MOST));
    });
  }
}
