// Tensor memory (columns) and shared memory (bytes) of a CTA at the cursor.

import { byId, el, heading, kib, number, sv, tableOf } from "./dom.js";
import { regionsAt } from "./moment.js";
import { letterOf, roleClass } from "./timeline.js";

const HEIGHT = 400;
const WIDTH = 150;
const LEAST = 12; // of a part that has a label
let maps = [];
let step = null;

const TITLES = { tmem: "Tensor memory", smem: "Shared memory" };
const sized = { tmem: (size) => `${size} columns`, smem: kib };

/** Draw both maps of a step's plan. */
export function drawMemory(next) {
  step = next;
  maps = [];
  const section = byId("memory");
  const plan = step.plan;
  const spaces = ["tmem", "smem"].filter((space) => plan.buffers.some((one) => one.space === space));
  const used = spaces.map(
    (space) =>
      `${number(plan[space === "tmem" ? "tmem_cols" : "smem_bytes"])} of ${number(plan[space === "tmem" ? "tmem_limit_cols" : "smem_limit_bytes"])} ${space === "tmem" ? "columns of tensor memory" : "bytes of shared memory"}`,
  );
  const figures = spaces.map((space) =>
    el(
      "figure",
      {},
      el(
        "figcaption",
        {},
        TITLES[space],
        el("small", {}, space === "tmem" ? ` ${plan.tmem_cols} columns` : ` ${kib(plan.smem_bytes)}`),
      ),
      drawSpace(space),
    ),
  );
  section.replaceChildren(
    heading(
      "memory",
      "Memory",
      `${used.join("; ")}. Filled: written now; barred: read now; pale: what the last writer left.`,
    ),
    el("div", { class: "maps" }, figures),
    tableOf("Memory", ["buffer", "where", "from", "to", "stages", "shares memory with"], () =>
      plan.buffers.map((one) => [
        one.name,
        one.space === "tmem" ? "tensor memory" : "shared memory",
        one.start,
        one.start + one.size * one.stages,
        one.stages,
        Object.entries(one.overlaps)
          .map(([name, why]) => `${name}: ${why}`)
          .join("; "),
      ]),
    ),
  );
}

// Buffers side by side where they share memory: a lane is the first in which nothing is in the way.
function lanesOf(buffers) {
  const lanes = [];
  for (const buffer of buffers) {
    const stop = buffer.start + buffer.size * buffer.stages;
    let lane = lanes.findIndex((taken) =>
      taken.every((one) => one.stop <= buffer.start || stop <= one.start),
    );
    if (lane < 0) lane = lanes.push([]) - 1;
    lanes[lane].push({ buffer, start: buffer.start, stop });
  }
  return lanes;
}

function drawSpace(space) {
  const plan = step.plan;
  const end = space === "tmem" ? plan.tmem_cols : plan.smem_bytes;
  const svg = sv("svg", {
    viewBox: `0 0 ${WIDTH} ${HEIGHT}`,
    width: WIDTH,
    height: HEIGHT,
    role: "img",
    class: "chart map",
    "aria-label": `${TITLES[space]}: ${plan.buffers
      .filter((one) => one.space === space)
      .map((one) => one.name)
      .join(", ")}`,
  });
  const y = (place) => (place / end) * (HEIGHT - 2) + 1;
  const wide = plan.buffers
    .filter((one) => one.space === space)
    .sort((a, b) => a.start - b.start || b.size * b.stages - a.size * a.stages);
  const lanes = lanesOf(wide);
  lanes.forEach((lane, i) => {
    const left = i ? WIDTH * (1 - (0.42 * (lanes.length - i)) / (lanes.length - 1 || 1)) : 0;
    const right =
      i + 1 < lanes.length ? WIDTH * (1 - (0.42 * (lanes.length - i - 1)) / (lanes.length - 1)) - 4 : WIDTH;
    for (const { buffer } of lane) {
      for (let stage = 0; stage < buffer.stages; stage++) {
        const from = buffer.start + stage * buffer.size;
        const name = buffer.stages > 1 ? `${buffer.name} ${stage}` : buffer.name;
        svg.append(cell(space, name, from, from + buffer.size, { left, right, y }));
      }
    }
  });
  return svg;
}

function cell(space, name, from, to, { left, right, y }) {
  const top = y(from),
    height = Math.max(2, y(to) - top - 1.5);
  const group = sv("g", { class: "cell" });
  const box = sv("rect", { x: left + 0.5, y: top, width: right - left - 1, height, rx: 3, class: "box" });
  const bar = sv("rect", { x: left + 0.5, y: top, width: 5, height, rx: 2, class: "bar" });
  const title = sv("title", {}, `${name}: ${sized[space](to - from)}`);
  group.append(box, bar, title);
  let text = null,
    more = null;
  if (height >= LEAST) {
    text = sv("text", { x: left + 10, y: top + (height >= 26 ? 14 : height / 2 + 4), class: "name" }, name);
    more = sv("text", { x: left + 10, y: top + 27, class: "more" });
    group.append(text);
    if (height >= 32) group.append(more);
  }
  maps.push({
    space,
    from,
    to,
    group,
    box,
    bar,
    text,
    more,
    name,
    room: right - left - 14,
    tall: height >= 32,
  });
  return group;
}

/** Show what memory holds at a moment. */
export function moveMemory(t) {
  if (!step) return;
  const regions = regionsAt(step, t);
  const roleOf = (event) => step.plan.roles[event.role].name;
  for (const part of maps) {
    const here = regions.filter(
      (one) => one.space === part.space && one.spans.some(([a, b]) => a < part.to && part.from < b),
    );
    const writing = here.flatMap((one) => one.writing),
      reading = here.flatMap((one) => one.reading);
    const last = here
      .map((one) => one.last)
      .filter(Boolean)
      .sort(
        (a, b) =>
          (b.done <= t ? b.done : b.done - step.length) - (a.done <= t ? a.done : a.done - step.length),
      )[0];
    const owner = writing[0] || last;
    part.group.setAttribute(
      "class",
      `cell ${writing.length ? "writing" : owner ? "held" : "empty"} ${owner ? roleClass(roleOf(owner)) : ""}`,
    );
    part.bar.setAttribute("class", `bar ${reading.length ? `reading ${roleClass(roleOf(reading[0]))}` : ""}`);
    if (!part.text) continue;
    const who = (event) => `${letterOf(roleOf(event))} ${event.text}`;
    const mark = writing.length ? `◂ ${who(writing[0])}` : reading.length ? `▸ ${who(reading[0])}` : "";
    part.text.setAttribute("class", writing.length ? `name on-${roleOf(writing[0])}` : "name");
    part.more.setAttribute("class", writing.length ? `more on-${roleOf(writing[0])}` : "more");
    const short = part.tall ? part.name : [part.name, mark].filter(Boolean).join(" ");
    part.text.textContent = clip(short, part.room);
    part.more.textContent = clip(
      mark || (last ? `by ${letterOf(roleOf(last))}` : here.length ? "not in a step" : ""),
      part.room,
    );
  }
}

function clip(text, room) {
  const most = Math.floor(room / 6.2);
  return text.length <= most ? text : `${text.slice(0, Math.max(1, most - 1))}…`;
}
