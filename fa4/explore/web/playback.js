// Moving through a step: play, step from event to event, drag; and the keys for all of it.

import { byId, el, number, say } from "./dom.js";
import { nextEdge } from "./moment.js";
import { sentenceAt } from "./timeline.js";
import { change, theState, writeAddress } from "./state.js";

const SPEEDS = [100, 300, 900]; // cycles a second
let playing = false;
let speed = 1;
let step = null;
let before = 0;
let parts = null;
let resting = 0;

const calm = () => matchMedia("(prefers-reduced-motion: reduce)").matches;

/** Make the bar below the timeline. */
export function makePlayback() {
  const button = (label, text, act, attributes = {}) =>
    el("button", { type: "button", "aria-label": label, title: label, onclick: act, ...attributes }, text);
  const play = button("Play", "▶", toggle, { class: "play" });
  const slide = el("input", {
    type: "range",
    min: "0",
    step: "1",
    value: "0",
    "aria-label": "Cycle",
    id: "cycle",
    oninput: () => go(Number(slide.value)),
  });
  const pace = el(
    "select",
    {
      "aria-label": "Speed",
      onchange: () => {
        speed = Number(pace.value);
      },
    },
    SPEEDS.map((cycles, i) => el("option", { value: i, selected: i === speed }, `${cycles} cycles/s`)),
  );
  const shown = el("output", { class: "cycle", for: "cycle" });
  const bar = el(
    "div",
    { class: "playback" },
    play,
    button("Previous event", "‹", () => hop(-1)),
    button("Next event", "›", () => hop(1)),
    slide,
    shown,
    pace,
  );
  byId("timeline").append(bar);
  parts = { play, slide, shown };
}

/** The step that is played from now on. */
export function setStep(next) {
  step = next;
  parts.slide.max = String(Math.floor(step.length));
  if (theState().t >= step.length) change({ t: 0 }, "moment");
}

/** Show where the cursor is. */
export function showMoment() {
  const t = theState().t;
  parts.slide.value = String(Math.round(t));
  parts.slide.setAttribute("aria-valuetext", `cycle ${Math.round(t)} of ${Math.round(step.length)}`);
  parts.shown.textContent = `${number(t)} / ${number(step.length)}`;
}

/** Go to a moment. */
export function go(t) {
  change({ t }, "moment");
  clearTimeout(resting);
  resting = setTimeout(writeAddress, 300);
}

/** Go to the next or previous event, and say what happens there. */
export function hop(direction) {
  if (!step) return;
  go(nextEdge(step, theState().t, direction));
  say(sentenceAt(theState().t));
}

/** Play or pause. */
export function toggle() {
  playing = !playing && Boolean(step);
  parts.play.textContent = playing ? "❚❚" : "▶";
  parts.play.setAttribute("aria-label", playing ? "Pause" : "Play");
  parts.play.title = playing ? "Pause" : "Play";
  before = performance.now();
  if (playing) requestAnimationFrame(tick);
}

function tick(now) {
  if (!playing) return;
  const passed = (now - before) / 1000;
  if (calm()) {
    if (passed > 0.8) {
      before = now;
      go(nextEdge(step, theState().t, 1));
    }
  } else {
    before = now;
    go((theState().t + passed * SPEEDS[speed]) % step.length);
  }
  requestAnimationFrame(tick);
}

/** The keys, for the help: [keys, what they do]. */
export const KEYS = [
  ["Space", "play or pause"],
  ["← →", "previous or next event"],
  ["Home, End", "first or last cycle"],
  ["A, B", "show selection A or B"],
  ["C", "compare A and B"],
  ["[ ]", "previous or next role's program"],
  ["R", "FlashAttention's own choices again"],
  ["T", "light or dark"],
  ["?", "this list"],
];

/** Keys of the whole page; `others` are actions by key that are not about time. */
export function listenToKeys(others) {
  document.addEventListener("keydown", (press) => {
    if (press.ctrlKey || press.metaKey || press.altKey || press.target.closest("select, dialog")) return;
    // Radio buttons and the slider have arrows, space, Home and End for themselves.
    if (press.target.closest("input") && !/^[a-z?[\]]$/i.test(press.key)) return;
    const onButton = press.target.closest("button, summary, a, label");
    const acts = {
      " ": onButton ? null : toggle,
      ArrowLeft: () => hop(-1),
      ArrowRight: () => hop(1),
      Home: () => go(0),
      End: () => go(step.length - 0.01),
      ...others,
    };
    const act = acts[press.key] || acts[press.key.toLowerCase()];
    if (!act) return;
    press.preventDefault();
    act();
  });
}
