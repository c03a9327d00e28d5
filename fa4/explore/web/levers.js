// Levers: what each single change of the kernel would do, looked up in the grid; and applying one.

import { byId, el, heading, number } from "./dom.js";
import { control, keysOf, pointOf, resolved } from "./data.js";
import { choose } from "./state.js";

const MOST = 9;
/** Relative difference of two predictions that is within the model's error (docs/simulator.md). */
export const WITHIN = 0.03;

/** Selections that differ from one in a single control, with their points. */
export function neighbours(selection, keys) {
  const found = [];
  for (const key of keys) {
    const now = resolved(selection, key);
    for (const choice of control(key).choices) {
      if (choice.key === now) continue;
      found.push({ key, choice, point: pointOf({ ...selection, [key]: choice.key }) });
    }
  }
  return found;
}

/** The controls of a kernel's shape in its context. */
export function shapeKeys(point) {
  return keysOf("shape").filter((key) => point.context?.controls.includes(key));
}

/** Draw what each single change of the kernel's shape would do. */
export function drawLevers(selection, point) {
  const section = byId("levers");
  const all = neighbours(selection, shapeKeys(point))
    .filter((one) => one.point.result)
    .map((one) => ({ ...one, gain: one.point.result.tflops / point.result.tflops - 1 }))
    .sort((a, b) => b.gain - a.gain);
  const kept = all.length > MOST ? [...all.slice(0, 5), ...all.slice(5 - MOST)] : all;
  const about = `One change of the kernel, everything else as it is. Less than ${100 * WITHIN}% is undecided: within the model's error.`;
  const items = kept.map(({ key, choice, point: other, gain }) =>
    el(
      "li",
      {},
      el(
        "button",
        {
          type: "button",
          class: "lever",
          onclick: () => choose(key, choice.key),
          "data-control": key,
          "data-choice": choice.key,
        },
        el(
          "span",
          { class: `gain ${gain > 0.0005 ? "up" : gain < -0.0005 ? "down" : ""}` },
          `${gain >= 0 ? "+" : "−"}${number(Math.abs(gain) * 100, 1)}%`,
        ),
        el("span", { class: "what" }, `${control(key).label}: `, el("b", {}, choice.label)),
        el("span", { class: "cycles" }, number(other.result.tflops)),
      ),
    ),
  );
  section.replaceChildren(heading("levers", "Change one thing", about), el("ul", { class: "levers" }, items));
}
