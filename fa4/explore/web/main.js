// The page: reads the data and the address, makes the figures and keeps them up to date.

import { byId, el, say } from "./dom.js";
import { loadData, pointOf, stepOf, theHead } from "./data.js";
import { change, followAddress, listen, readAddress, reset, shown, theState, writeAddress } from "./state.js";
import { makeControls, showControls } from "./controls.js";
import { drawAnswer, drawRefusal } from "./answer.js";
import { drawTimeline, moveCursor } from "./timeline.js";
import { KEYS, go, listenToKeys, makePlayback, setStep, showMoment } from "./playback.js";
import { drawMemory, moveMemory } from "./memory.js";
import { drawBarriers, moveBarriers } from "./barriers.js";
import { drawProgram, moveProgram, turnRole } from "./program.js";
import { drawVerdict } from "./verdict.js";
import { drawBudget, drawChain } from "./budget.js";
import { drawLevers } from "./levers.js";
import { WORDS } from "./words.js";

let step = null;

function showMomentEverywhere() {
  if (!step) return;
  const t = theState().t;
  moveCursor(t);
  showMoment();
  moveMemory(t);
  moveBarriers(t);
  moveProgram(t);
}

function showChoice() {
  const state = theState();
  const point = pointOf(shown());
  showControls();
  showTools();
  drawAnswer();
  drawRefusal(shown(), point);
  const drawable = point.step !== undefined && point.step >= 0;
  byId("figures").hidden = !drawable;
  step = drawable ? stepOf(point.step) : null;
  if (!step) return;
  const other = state.on === "a" ? "b" : "a";
  const second = state.compare ? pointOf(state[other]) : {};
  const both = [{ step, name: state.on.toUpperCase() }];
  if (second.step !== undefined && second.step >= 0)
    both.push({ step: stepOf(second.step), name: other.toUpperCase() });
  if (both.length > 1)
    both.forEach((one) => {
      one.name += one.name.toLowerCase() === state.on ? ": the figures below are of this one" : "";
    });
  drawTimeline(both, go);
  setStep(step);
  drawMemory(step);
  drawBarriers(step, turnRole);
  drawProgram(step);
  drawVerdict(step.plan);
  drawBudget(step);
  drawChain(step);
  byId("levers").hidden = !point.result;
  if (point.result) drawLevers(shown(), point);
  showMomentEverywhere();
}

function sayAnswer() {
  const { result, reason } = pointOf(shown());
  say(result ? `${Math.round(result.tflops)} TFLOP/s` : `Refused: ${reason}`);
  // What was pressed may be gone: a lever, a way out of a refusal.
  if (document.activeElement === document.body) byId("answer").focus({ preventScroll: true });
}

function showRemoved() {
  const focused = document.activeElement?.dataset?.key;
  drawProgram(step);
  drawVerdict(step.plan);
  showMomentEverywhere();
  if (focused) [...document.querySelectorAll(".switch")].find((one) => one.dataset.key === focused)?.focus();
}

function showTheme() {
  if (theState().theme) document.documentElement.dataset.theme = theState().theme;
  else delete document.documentElement.dataset.theme;
}

function isDark() {
  return theState().theme ? theState().theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

const actions = {
  a: () => change({ on: "a" }, "choice"),
  b: () => change({ on: "b" }, "choice"),
  c: () => change({ compare: !theState().compare }, "choice"),
  r: reset,
  t: () => {
    change({ theme: isDark() ? "light" : "dark" }, "theme");
  },
  "[": () => turnRole(-1),
  "]": () => turnRole(1),
  "?": () => byId("help").showModal(),
};

function showTools() {
  const { on, compare } = theState();
  const pick = (name) =>
    el(
      "button",
      {
        type: "button",
        "aria-pressed": String(on === name),
        "aria-label": `Show selection ${name.toUpperCase()}`,
        id: `pick-${name}`,
        onclick: actions[name],
      },
      name.toUpperCase(),
    );
  const focused = document.activeElement?.id;
  byId("tools").replaceChildren(
    el(
      "div",
      { class: "group", role: "group", "aria-label": "Selections" },
      pick("a"),
      pick("b"),
      el(
        "button",
        { type: "button", "aria-pressed": String(compare), id: "compare", onclick: actions.c },
        "side by side",
      ),
    ),
    el(
      "button",
      {
        type: "button",
        id: "theme",
        "aria-label": "Light or dark",
        title: "Light or dark",
        onclick: actions.t,
      },
      "◐",
    ),
    el(
      "button",
      { type: "button", id: "keys", title: "Keys and words", onclick: actions["?"] },
      "? words",
    ),
  );
  if (["pick-a", "pick-b", "compare", "theme", "keys"].includes(focused)) byId(focused).focus();
}

function makeHelp() {
  byId("help").replaceChildren(
    el("h2", { id: "help-title" }, "Keys"),
    el(
      "dl",
      {},
      KEYS.map(([keys, what]) => [
        el(
          "dt",
          {},
          keys.split(" ").map((key) => el("kbd", {}, key)),
        ),
        el("dd", {}, what),
      ]),
    ),
    el("h2", { id: "words" }, "Words"),
    el(
      "dl",
      {},
      WORDS.map(([words, what]) => [el("dt", {}, words), el("dd", {}, what)]),
    ),
    el("form", { method: "dialog" }, el("button", {}, "Close")),
  );
}

function makeStyles() {
  const light = (colour) => {
    // relative luminance, WCAG 2
    const [r, g, b] = [1, 3, 5]
      .map((at) => parseInt(colour.slice(at, at + 2), 16) / 255)
      .map((one) => (one <= 0.04045 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ink = (colour) => (light(colour) > 0.179 ? "#000" : "#fff");
  const rules = (shade) =>
    Object.entries(theHead().roles)
      .map(([name, style]) => `.r-${name}{--c:${style[shade]}}.on-${name}{--ink-on:${ink(style[shade])}}`)
      .join("\n");
  const dark = rules("dark");
  const scoped = (prefix) => dark.replaceAll(/^\./gm, `${prefix} .`).replaceAll("}.on", `}${prefix} .on`);
  document.head.append(
    el(
      "style",
      {},
      `${rules("light")}\n@media (prefers-color-scheme: dark){${scoped(":root:not([data-theme=light])")}}\n${scoped(":root[data-theme=dark]")}`,
    ),
  );
}

function makeFoot() {
  const head = theHead();
  byId("foot").replaceChildren(
    el(
      "p",
      {},
      "Times and speeds are those of fa4's simulator (see docs/simulator.md for what it models and how wrong it is). Memory and barriers are those of the plan that the kernels are built from. Not modelled: K and V that fall out of L2, temperature, the order of instructions in a warp.",
    ),
    el(
      "p",
      {},
      `fa4 ${head.fa4_version}, data schema ${head.schema_version}; made by fa4 explore. Nothing leaves this file.`,
    ),
  );
}

async function start() {
  await loadData(byId("data").textContent);
  byId("data").remove();
  readAddress();
  makeStyles();
  showTheme();
  makeControls();
  makePlayback();
  makeHelp();
  makeFoot();
  listen((what) => {
    if (what === "choice") {
      showChoice();
      sayAnswer();
    } else if (what === "moment") showMomentEverywhere();
    else if (what === "role") {
      drawProgram(step);
      showMomentEverywhere();
    } else if (what === "removed") showRemoved();
    else showTheme();
  });
  listenToKeys(actions);
  addEventListener("hashchange", followAddress);
  let width = innerWidth;
  addEventListener("resize", () => {
    if (innerWidth !== width) {
      width = innerWidth;
      showChoice();
    }
  });
  showChoice();
  writeAddress();
  document.documentElement.dataset.ready = "yes";
}

start().catch((error) => {
  byId("main").prepend(el("p", { class: "refusal" }, `This page could not be read: ${error.message}`));
  throw error;
});
