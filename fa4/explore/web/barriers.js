// The barriers: a line for each role, an arrow for each signal from who arrives to who waits.

import { byId, el, heading, number, sv, tableOf } from "./dom.js";
import { signalsAt } from "./moment.js";
import { letterOf, roleClass } from "./timeline.js";
import { theState } from "./state.js";

const ROW = 21;
const TOP = 26;
const NAME = 132;
const COUNTS = 128;
let rows = [];
let step = null;

/** Draw the signals of a step's plan; `onRole` is called with a role that is picked. */
export function drawBarriers(next, onRole) {
  step = next;
  rows = [];
  const section = byId("barriers");
  const plan = step.plan;
  const width = Math.max(540, section.clientWidth - 34);
  const gap = (width - NAME - COUNTS) / plan.roles.length;
  const x = Object.fromEntries(plan.roles.map((role, i) => [role.name, NAME + gap * (i + 0.5)]));
  const signals = [...plan.signals].sort((a, b) => order(plan, a) - order(plan, b));
  const height = TOP + signals.length * ROW + 4;
  const svg = sv("svg", {
    width,
    height,
    viewBox: `0 0 ${width} ${height}`,
    class: "chart",
    role: "img",
    "aria-label": `${plan.signals.length} signals between ${plan.roles.length} roles`,
  });
  for (const role of plan.roles) {
    svg.append(
      sv("line", { x1: x[role.name], x2: x[role.name], y1: TOP - 4, y2: height - 2, class: "life" }),
    );
    const mark = sv(
      "g",
      { class: "pick" },
      sv("rect", {
        x: x[role.name] - 12,
        y: 2,
        width: 24,
        height: 17,
        rx: 4,
        class: `mark ${roleClass(role.name)}`,
      }),
      sv(
        "text",
        { x: x[role.name], y: 15, "text-anchor": "middle", class: `letter on-${role.name}` },
        letterOf(role.name),
      ),
      sv("title", {}, role.name),
    );
    mark.addEventListener("click", () => onRole(role.name));
    svg.append(mark);
  }
  svg.append(sv("text", { x: width - 2, y: 14, "text-anchor": "end", class: "head" }, "phase · arrived"));
  signals.forEach((signal, i) => svg.append(signalRow(signal, TOP + i * ROW, x, width)));
  const about =
    "An arrow leads from who arrives to who waits. The phase is complete when all have arrived; a ring marks a role that waits at the cursor.";
  section.replaceChildren(
    heading("barriers", "Barriers", about),
    el(
      "div",
      { class: "scroll", tabindex: "0", role: "region", "aria-label": "Barriers, scrolls sideways" },
      svg,
    ),
    tableOf(
      "Barriers",
      ["signal", "kind", "arrive", "count", "bytes", "wait", "stages", "free at the start"],
      () =>
        plan.signals.map((one) => [
          one.name,
          one.kind,
          Object.entries(one.arrivals)
            .map(([name, count]) => `${name} ${count}`)
            .join(", "),
          Object.values(one.arrivals).reduce((a, b) => a + b, 0),
          one.tx_bytes || "",
          one.waiters.join(", "),
          one.stages,
          one.free || "",
        ]),
    ),
  );
}

function order(plan, signal) {
  const names = plan.roles.map((role) => role.name);
  const ends = [...Object.keys(signal.arrivals), ...signal.waiters].map((name) => names.indexOf(name));
  return Math.max(...ends) * 100 - Math.min(...ends);
}

function signalRow(signal, y, x, width) {
  const group = sv("g", { class: "signal" });
  const middle = y + ROW / 2;
  group.append(
    sv("rect", { x: 0, y: y + 1, width, height: ROW - 2, rx: 3, class: "band" }),
    sv("text", { x: 2, y: middle + 4, class: "name" }, signal.name),
  );
  const arrows = {};
  const rings = {};
  for (const waiter of signal.waiters) {
    for (const arriver of Object.keys(signal.arrivals)) {
      arrows[arriver] ||= sv("g", { class: `arrow ${roleClass(arriver)}` });
      arrows[arriver].append(...arrow(x[arriver], x[waiter], middle));
    }
    rings[waiter] = sv("circle", { cx: x[waiter], cy: middle, r: 6.5, class: `ring ${roleClass(waiter)}` });
  }
  group.append(...Object.values(arrows), ...Object.values(rings));
  const count = sv("text", { x: width - 2, y: middle + 4, "text-anchor": "end", class: "count" });
  group.append(count);
  rows.push({ signal, group, arrows, rings, count });
  return group;
}

function arrow(from, to, y) {
  if (from === to) return [sv("path", { d: `M${from} ${y - 5}h12v10h-7m3 -3l-4 3l4 3` })];
  const way = Math.sign(to - from);
  const end = to - way * 8;
  return [
    sv("circle", { cx: from, cy: y, r: 3, class: "start" }),
    sv("path", { d: `M${from} ${y}H${end}m${-way * 4} -3.5l${way * 4} 3.5l${-way * 4} 3.5` }),
  ];
}

/** Show counts and phases at a moment, and which signal has a wait or an arrival taken out. */
export function moveBarriers(t) {
  if (!step) return;
  const found = Object.fromEntries(signalsAt(step, t).map((one) => [one.signal.name, one]));
  const [, , removed] = theState().off.split("/");
  for (const { signal, group, arrows, rings, count } of rows) {
    const now = found[signal.name];
    for (const [name, shape] of Object.entries(arrows))
      shape.classList.toggle("now", now.recent.includes(name));
    for (const [name, ring] of Object.entries(rings))
      ring.classList.toggle("waits", now.waiting.includes(name));
    group.classList.toggle("busy", now.waiting.length > 0);
    group.classList.toggle("removed", removed === signal.name);
    const slot = signal.stages > 1 ? ` slot ${now.phases % signal.stages}` : ` parity ${now.phases % 2}`;
    count.textContent = `${number(now.phases)}${slot} · ${now.here}/${now.need}`;
  }
}
