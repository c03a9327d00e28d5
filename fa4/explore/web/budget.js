// The roofline strip: cycles that a step asks of each unit, beside the cycles it takes.

import { byId, el, heading, listed, number, percent, sv, tableOf } from "./dom.js";
import { theHead } from "./data.js";
import { letterOf, roleClass } from "./timeline.js";

const ROW = 22;
const LABEL = 128;

function sums(step) {
  const found = new Map();
  for (const slice of step.slices) {
    const cycles = Math.min(slice.end, step.length) - Math.max(slice.start, 0);
    if (cycles <= 0) continue;
    const role = step.plan.roles[slice.event.role].name;
    const unit = found.get(slice.unit) || new Map();
    unit.set(role, (unit.get(role) || 0) + cycles / theHead().steps_shown);
    found.set(slice.unit, unit);
  }
  return [...found]
    .map(([unit, roles]) => ({ unit, roles, cycles: [...roles.values()].reduce((a, b) => a + b, 0) }))
    .sort((a, b) => b.cycles - a.cycles);
}

/** Draw the strip of a step. */
export function drawBudget(step) {
  const section = byId("roofline");
  const rows = sums(step);
  const width = Math.max(280, section.clientWidth - 34);
  const x = (cycles) => LABEL + (cycles / step.step_cycles) * (width - LABEL - 46);
  const height = rows.length * ROW + 22;
  const svg = sv("svg", {
    width,
    height,
    viewBox: `0 0 ${width} ${height}`,
    class: "chart",
    role: "img",
    "aria-label": `Cycles of a step on each unit; the step takes ${number(step.step_cycles)}`,
  });
  rows.forEach(({ unit, roles, cycles }, i) => {
    const y = 4 + i * ROW;
    svg.append(sv("text", { x: 0, y: y + 14, class: "label" }, theHead().units[unit]));
    let from = 0;
    for (const [role, part] of roles) {
      const wide = x(from + part) - x(from);
      svg.append(
        sv("rect", {
          x: x(from),
          y: y + 2,
          width: Math.max(0.5, wide),
          height: 15,
          class: `part ${roleClass(role)}`,
        }),
      );
      if (wide > 16)
        svg.append(
          sv(
            "text",
            { x: x(from) + wide / 2, y: y + 14, "text-anchor": "middle", class: `on-${role}` },
            letterOf(role),
          ),
        );
      from += part;
    }
    svg.append(sv("text", { x: width - 1, y: y + 14, "text-anchor": "end", class: "count" }, number(cycles)));
  });
  const end = x(step.step_cycles);
  svg.append(
    sv("line", { x1: end, x2: end, y1: 0, y2: height - 16, class: "limit" }),
    sv(
      "text",
      { x: end, y: height - 3, "text-anchor": "end", class: "count" },
      `the step: ${number(step.step_cycles)} cycles`,
    ),
  );
  const units = Object.keys(theHead().units);
  const bound = Math.max(...step.roofline_cycles);
  const by = theHead().units[units[step.roofline_cycles.indexOf(bound)]];
  const about = `What a step asks of each unit. None can take longer than the step; at the roofline, ${by}, it would take ${number(bound)} cycles, ${percent(bound / step.step_cycles)} of what it takes. It leaves bulk loads out at the shared-memory port, as the paper does.`;
  section.replaceChildren(
    heading("roofline", "Roofline of a step", about),
    svg,
    tableOf("Roofline", ["unit", "cycles asked for", "share of the step", "roofline, cycles"], () =>
      rows.map((one) => [
        theHead().units[one.unit],
        number(one.cycles),
        percent(one.cycles / step.step_cycles, 1),
        number(step.roofline_cycles[units.indexOf(one.unit)]),
      ]),
    ),
  );
}

// What the chain's cycles are spent on, most first: "tensor core 43%".
function shares(rows, total) {
  const sums = new Map();
  for (const [, , unit, , taken] of rows) {
    const name = unit ? theHead().units[unit] || unit : "barriers";
    sums.set(name, (sums.get(name) || 0) + taken);
  }
  const sorted = [...sums].sort((a, b) => b[1] - a[1]);
  return sorted.map(([name, taken]) => `${name} ${percent(taken / total)}`);
}

/** Draw the critical chain of a step: what waited for what, all the way round. */
export function drawChain(step) {
  const section = byId("chain");
  const { links, cycles, steps, settled } = step.chain;
  const rows = links.map((link, i) => [...theHead().parts.links[link], cycles[i]]);
  const total = rows.reduce((sum, row) => sum + row[4], 0);
  const about = `What the step waits for, piece after piece: ${number(total / steps)} cycles of a step${steps > 1 ? ` (${steps} steps shown)` : ""}. A cycle less in any of them is a cycle less in all${settled ? "" : "; this pipeline does not repeat itself exactly"}.`;
  const most = Math.max(...rows.map((row) => row[4]));
  const items = rows.map(([role, what, unit, reason, taken]) =>
    el(
      "li",
      {},
      el("span", { class: `chip ${roleClass(role)} on-${role}` }, letterOf(role)),
      el(
        "span",
        { class: "what" },
        what,
        el(
          "small",
          {},
          ` ${unit ? theHead().units[unit] || unit : ""}${reason === "signal" ? " · after a signal" : reason === "unit" ? " · after the unit" : ""}`,
        ),
      ),
      el("span", { class: "cycles" }, number(taken)),
      el("span", { class: `weight ${roleClass(role)}`, style: `--share:${(taken / most).toFixed(3)}` }),
    ),
  );
  section.replaceChildren(
    heading("chain", "Critical chain", about),
    el("p", { class: "sum" }, `On it: ${listed(shares(rows, total))}.`),
    el("ol", { class: "chain", tabindex: "0", "aria-label": "Critical chain" }, items),
  );
}
