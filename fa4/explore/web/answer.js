// The answer: predicted speed of A, and of B beside it; or why there is none.

import { byId, el, listed, number, percent } from "./dom.js";
import { control, keysOf, pointOf, resolved, theHead } from "./data.js";
import { neighbours, WITHIN } from "./levers.js";
import { choose, theState } from "./state.js";

/** The settings of `fa4 predict` for a selection, as on the command line. */
export function commandOf(selection) {
  const point = pointOf(selection);
  const settings = { heads: String(theHead().heads) };
  for (const one of theHead().controls) {
    const applies = one.level !== "shape" || point.context?.controls.includes(one.key);
    if (!applies) continue;
    Object.assign(
      settings,
      one.choices.find((choice) => choice.key === resolved(selection, one.key))?.settings,
    );
  }
  return `fa4 predict ${Object.entries(settings)
    .map(([name, value]) => option(name.replaceAll("_", "-"), value))
    .join(" ")}`;
}

function option(name, value) {
  return { yes: `--${name}`, no: `--no-${name}` }[value] ?? `--${name} ${value}`;
}

function unitName(name) {
  return name === "hbm" ? "HBM" : theHead().units[name];
}

function figures(name, selection, compare) {
  const { result, reason } = pointOf(selection);
  if (!result)
    return el(
      "div",
      { class: "figures none" },
      compare ? el("b", { class: "which" }, name) : null,
      el("p", { class: "big" }, "—"),
      el("p", {}, compare ? reason : "no prediction"),
    );
  const machine = theHead().machines[selection.machine];
  const busiest = Object.entries(result.busy).sort((a, b) => b[1] - a[1])[0];
  const cell = (value, label, title) =>
    el("div", { class: "cell", title }, el("b", {}, value), el("span", {}, label));
  return el(
    "div",
    { class: "figures" },
    compare ? el("b", { class: "which" }, name) : null,
    el(
      "p",
      { class: "big" },
      el("span", { class: "tflops", "data-tflops": result.tflops }, number(result.tflops)),
      el("span", { class: "unit" }, "TFLOP/s"),
    ),
    el(
      "div",
      { class: "cells" },
      cell(percent(result.peakShare, 1), `of ${machine.name}'s peak`),
      cell(time(result.seconds), "a call"),
      cell(percent(busiest[1]), `${unitName(busiest[0])} busy`),
      result.boundBy === busiest[0]
        ? null
        : cell(
            percent(result.boundShare),
            `the bound: ${unitName(result.boundBy)}`,
            "what this alone would take, of the predicted time",
          ),
      cell(percent(result.imbalance, 1), "of SM time idle at the end"),
    ),
  );
}

function time(seconds) {
  const us = seconds * 1e6;
  return us < 1000 ? `${number(us, 1)} µs` : `${number(us / 1000, 2)} ms`;
}

function sentence(selection) {
  const say = (key) => control(key).choices.find((one) => one.key === resolved(selection, key))?.label;
  const length = control("seqlen").choices.find((one) => one.key === selection.seqlen);
  return `${say("kernel")} ${say("pass")}, head dim ${say("head_dim")}, ${selection.mask === "none" ? "no mask" : say("mask")}, ${length.about}, ${theHead().heads} heads, on ${say("machine")}: predicted, not measured.`;
}

/** Draw the answer for what is shown, or for both selections. */
export function drawAnswer() {
  const state = theState();
  const section = byId("answer");
  const names = state.compare ? ["a", "b"] : [state.on];
  const cards = names.map((name) => figures(name.toUpperCase(), state[name], state.compare));
  const command = commandOf(state[state.on]);
  const parts = [
    el("h2", { id: "answer-title", class: "unseen" }, "Predicted speed"),
    el("p", { class: "subject" }, sentence(state[state.on])),
    el("div", { class: "pair" }, cards),
  ];
  if (state.compare) parts.push(el("p", { class: "ratio" }, comparison(state)));
  parts.push(
    el(
      "p",
      { class: "command" },
      el("code", {}, command),
      el(
        "button",
        { type: "button", class: "plain", onclick: (press) => copy(press.target, command) },
        "copy",
      ),
      el(
        "button",
        {
          type: "button",
          class: "plain",
          title: "the timeline as a file for ui.perfetto.dev",
          onclick: (press) => copy(press.target, command.replace("predict", "trace")),
        },
        "copy for fa4 trace",
      ),
    ),
  );
  section.replaceChildren(...parts);
}

function copy(button, text) {
  const done = () => {
    button.textContent = "copied";
  };
  if (navigator.clipboard?.writeText) navigator.clipboard.writeText(text).then(done, () => {});
}

function comparison(state) {
  const [a, b] = [pointOf(state.a).result, pointOf(state.b).result];
  const different = theHead()
    .controls.filter((one) => resolved(state.a, one.key) !== resolved(state.b, one.key))
    .map((one) => one.label);
  if (!different.length) return "A and B are the same. Pick B above and change something.";
  const change = `They differ in ${listed(different)}.`;
  if (!a || !b) return change;
  const ratio = b.tflops / a.tflops;
  const undecided = Math.abs(ratio - 1) < WITHIN ? ", which is undecided: within the model's error" : "";
  return `B is ${number(ratio, 3)} times as fast as A${undecided}. ${change}`;
}

/** Say why a selection has no prediction, and offer single changes that have one. */
export function drawRefusal(selection, point) {
  const box = byId("refusal");
  box.hidden = Boolean(point.result);
  if (point.result) return;
  const keys = [
    ...keysOf("shape").filter((key) => point.context?.controls.includes(key)),
    ...keysOf("context"),
  ];
  const ways = neighbours(selection, keys).filter((one) => one.point.result);
  box.replaceChildren(
    el("h2", {}, "This combination is refused"),
    el("p", { class: "reason" }, point.reason),
    ways.length ? el("p", {}, "One change makes it work:") : el("p", {}, "No single change makes it work."),
    el(
      "ul",
      { class: "ways" },
      ways.map(({ key, choice }) =>
        el(
          "li",
          {},
          el(
            "button",
            { type: "button", onclick: () => choose(key, choice.key) },
            `${control(key).label}: ${choice.label}`,
          ),
        ),
      ),
    ),
  );
}
