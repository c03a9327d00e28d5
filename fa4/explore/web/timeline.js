// The timeline: a row for each warp role and each unit, time from left to right in cycles.

import { byId, el, heading, number, sv, tableOf } from "./dom.js";
import { theHead } from "./data.js";
import { describeEvent, eventAt } from "./moment.js";

const ROW = 25;
const GAP = 14;
const LABEL = 136;
const LEAST = 640;
let cursors = [];
let drawn = [];

/** The class that gives an element a role's colour. */
export function roleClass(name) {
  return `r-${name}`;
}

/** A role's letter. */
export function letterOf(name) {
  return theHead().roles[name]?.letter || name.slice(0, 2).toUpperCase();
}

/** Draw the timelines of one or two steps, one under the other in the same scale. */
export function drawTimeline(steps, onMoment) {
  const section = byId("timeline");
  const width = Math.max(LEAST, section.clientWidth - 34);
  const longest = Math.max(...steps.map((one) => one.step.length));
  cursors = [];
  drawn = steps;
  const figures = steps.map(({ step, name }) => {
    const figure = drawOne(step, width, longest, onMoment);
    return el("figure", {}, steps.length > 1 ? el("figcaption", { class: "which" }, name) : null, figure);
  });
  const holder = el(
    "div",
    { class: "scroll", tabindex: "0", role: "region", "aria-label": "Timeline, scrolls sideways" },
    figures,
  );
  const tip = el("p", { class: "tip", id: "tip" }, " ");
  section.querySelector(".drawing")?.remove();
  const ns = 1e9 / steps[0].step.clock_hz;
  const about = `Two steps of ${number(steps[0].step.step_cycles)} cycles (${number(steps[0].step.step_cycles * ns)} ns) each, as simulated. Above the warp roles, below the units they keep busy. Grey: waiting for the signal that is named; a triangle: arriving at one.`;
  const drawing = el(
    "div",
    { class: "drawing" },
    heading("timeline", "Timeline", about),
    holder,
    tip,
    tableOf("Timeline", ["role", "what", "from", "to", "complete", "cycles waited"], () =>
      tableRows(steps[0].step),
    ),
  );
  section.prepend(drawing);
}

function tableRows(step) {
  return step.events
    .filter((one) => one.start < step.length)
    .map((one) => [
      step.plan.roles[one.role].name,
      one.text,
      Math.round(one.start),
      Math.round(one.end),
      Math.round(one.done),
      one.stalled ? Math.round(one.stalled) : "",
    ]);
}

function unitRows(step) {
  const used = new Set(step.slices.map((one) => one.unit));
  return Object.keys(theHead().units).filter((unit) => used.has(unit));
}

function drawOne(step, width, longest, onMoment) {
  const roles = step.plan.roles;
  const units = unitRows(step);
  const top = 20;
  const split = top + roles.length * ROW + GAP;
  const height = split + units.length * ROW + 6;
  const x = (t) => LABEL + (Math.min(Math.max(t, 0), step.length) / longest) * (width - LABEL - 2);
  const names = `Timeline of ${step.plan.name}: ${roles.map((role) => role.name).join(", ")} over ${number(step.length)} cycles.`;
  const svg = sv("svg", {
    width,
    height,
    viewBox: `0 0 ${width} ${height}`,
    role: "img",
    "aria-label": names,
    class: "chart",
  });
  svg.append(axis(step, x, height, top));
  roles.forEach((role, i) => svg.append(rowLabel(top + i * ROW, role.name, letterOf(role.name))));
  units.forEach((unit, i) => svg.append(rowLabel(split + i * ROW, theHead().units[unit], "")));
  svg.append(sv("line", { x1: 0, x2: width, y1: split - GAP / 2, y2: split - GAP / 2, class: "rule" }));
  for (const event of step.events) svg.append(roleBar(step, event, x, top + event.role * ROW));
  for (const slice of step.slices) {
    const bar = unitBar(step, slice, x, split + units.indexOf(slice.unit) * ROW);
    if (bar) svg.append(bar);
  }
  const cursor = sv(
    "g",
    { class: "cursor" },
    sv("line", { x1: 0, x2: 0, y1: top - 6, y2: height }),
    sv("path", { d: `M-5 ${top - 14}h10v5l-5 6l-5 -6z` }),
  );
  svg.append(cursor);
  cursors.push({ cursor, x, step });
  const point = (press) => {
    const box = svg.getBoundingClientRect();
    const at = ((press.clientX - box.left) * (width / box.width) - LABEL) / (width - LABEL - 2);
    onMoment(Math.min(step.length - 0.01, Math.max(0, at * longest)));
  };
  svg.addEventListener("pointerdown", (press) => {
    svg.setPointerCapture(press.pointerId);
    point(press);
  });
  svg.addEventListener("pointermove", (press) => {
    if (press.buttons) point(press);
    const over = press.target.closest?.("[data-event]");
    if (over) byId("tip").textContent = describeEvent(step, step.events[over.dataset.event]);
  });
  return svg;
}

function axis(step, x, height, top) {
  const group = sv("g", { class: "axis" });
  for (let at = 0; at < step.length; at += step.step_cycles) {
    group.append(sv("line", { x1: x(at), x2: x(at), y1: top - 4, y2: height, class: "step" }));
  }
  const stride = [100, 200, 250, 500, 1000, 2000].find((one) => step.length / one <= 9) || 4000;
  for (let at = 0; at <= step.length; at += stride) {
    group.append(
      sv("text", { x: x(at) + (at ? 0 : 2), y: 10, "text-anchor": at ? "middle" : "start" }, number(at)),
    );
  }
  return group;
}

function rowLabel(y, text, letter) {
  const group = sv("g", {}, sv("text", { x: letter ? 26 : 0, y: y + 16, class: "label" }, text));
  if (letter) {
    group.append(
      sv("rect", { x: 0, y: y + 4, width: 20, height: 16, rx: 3, class: `mark ${roleClass(text)}` }),
      sv("text", { x: 10, y: y + 16, class: `letter on-${text}`, "text-anchor": "middle" }, letter),
    );
  }
  return group;
}

function fitted(names, width) {
  return names.find((name) => name.length * 6.1 + 6 <= width);
}

function roleBar(step, event, x, y) {
  const name = step.plan.roles[event.role].name;
  const from = x(event.start);
  if (event.kind === "arrive") {
    if (event.start < 0 || event.start > step.length) return sv("g");
    return sv("path", { d: `M${from} ${y + 23}l-3 -4h6z`, class: "tick", "data-event": event.number });
  }
  const width = Math.max(0.7, x(event.end) - from);
  if (event.start >= step.length || event.end <= 0) return sv("g");
  const waits = event.kind === "wait";
  const group = sv("g", { "data-event": event.number, class: waits ? "wait" : roleClass(name) });
  group.append(
    sv("rect", { x: from, y: y + (waits ? 7 : 3), width, height: waits ? 10 : 17, rx: waits ? 2 : 3 }),
  );
  const words = event.text.split(" ");
  const text = waits ? fitted([event.signal], width) : fitted([event.text, words[0], letterOf(name)], width);
  if (text)
    group.append(
      sv(
        "text",
        {
          x: from + width / 2,
          y: y + (waits ? 15 : 15.5),
          "text-anchor": "middle",
          class: waits ? "faint" : `on-${name}`,
        },
        text,
      ),
    );
  return group;
}

function unitBar(step, slice, x, y) {
  const from = x(slice.start);
  const width = Math.max(0.7, x(slice.end) - from);
  if (slice.start >= step.length || slice.end <= 0) return null;
  const name = step.plan.roles[slice.event.role].name;
  const group = sv(
    "g",
    { "data-event": slice.event.number, class: roleClass(name) },
    sv("rect", { x: from, y: y + 4, width, height: 16, rx: 2 }),
  );
  const letter = letterOf(name);
  const text = fitted(
    [`${letter} ${slice.event.text}`, `${letter} ${slice.event.text.split(" ")[0]}`, letter],
    width,
  );
  if (text)
    group.append(
      sv("text", { x: from + width / 2, y: y + 16, "text-anchor": "middle", class: `on-${name}` }, text),
    );
  return group;
}

/** Put the cursor at a moment. */
export function moveCursor(t) {
  for (const { cursor, x, step } of cursors) {
    cursor.setAttribute("transform", `translate(${x(Math.min(t, step.length)).toFixed(2)} 0)`);
  }
  byId("tip").textContent = sentenceAt(t);
}

/** What all roles do at a moment, in one sentence. */
export function sentenceAt(t) {
  const { step } = drawn[0];
  const busy = [];
  const waits = [];
  step.plan.roles.forEach((role, i) => {
    const event = eventAt(step, i, t);
    if (!event || event.end <= t) return;
    if (event.kind === "wait") waits.push(`${role.name} for ${event.signal}`);
    else busy.push(`${role.name}: ${event.text}`);
  });
  const parts = [busy.join("; "), waits.length ? `waiting: ${waits.join(", ")}` : ""].filter(Boolean);
  return `Cycle ${Math.round(t)}. ${parts.join(". ")}.`;
}
