// The choices: a group of radio buttons for each control, and what "auto" stands for.

import { byId, el } from "./dom.js";
import { contextOf, pointOf, resolved, theHead } from "./data.js";
import { choose, reset, shown, theState } from "./state.js";

const TITLES = { context: "Problem and design", length: "Problem and design", shape: "Kernel" };
const groups = new Map();

/** Make all controls. */
export function makeControls() {
  const parts = new Map();
  for (const one of theHead().controls) {
    const title = TITLES[one.level];
    if (!parts.has(title)) parts.set(title, []);
    parts.get(title).push(makeGroup(one));
  }
  const head = el(
    "div",
    { class: "choosing" },
    el("span", { id: "choosing" }),
    el("button", { type: "button", class: "plain", id: "reset", onclick: reset }, "all to auto"),
  );
  const hints = el(
    "p",
    { id: "hint", class: "hint", "aria-hidden": "true" },
    "Struck out: no such kernel fits or exists; choose it to see why. Dashed: what auto stands for.",
  );
  byId("controls").replaceChildren(
    head,
    hints,
    ...[...parts].map(([title, list]) => el("div", { class: "part" }, el("h2", {}, title), list)),
  );
}

function hint(one) {
  byId("hint").replaceChildren(el("b", {}, `${one.label}. `), one.about);
}

function makeGroup(one) {
  const auto = one.level === "shape" || one.key === "kernel";
  const choices = auto
    ? [{ key: "auto", label: "auto", about: "what FlashAttention would choose" }, ...one.choices]
    : one.choices;
  const inputs = choices.map((choice) => {
    const input = el("input", {
      type: "radio",
      name: one.key,
      value: choice.key,
      id: `${one.key}-${choice.key}`,
      onchange: () => choose(one.key, choice.key),
    });
    return {
      input,
      choice,
      label: el("label", { for: `${one.key}-${choice.key}`, title: choice.about || null }, choice.label),
    };
  });
  const note = el("span", { class: "note" });
  const set = el(
    "fieldset",
    {
      id: `set-${one.key}`,
      "aria-describedby": `about-${one.key}`,
      onpointerenter: () => hint(one),
      onfocusin: () => hint(one),
    },
    el("legend", {}, one.label, note),
    el("p", { class: "unseen", id: `about-${one.key}` }, one.about),
    el(
      "div",
      { class: "chips" },
      inputs.map(({ input, label }) => [input, label]),
    ),
  );
  groups.set(one.key, { one, set, inputs, note });
  return set;
}

/** Show the selection's choices; what its kernel does not have is greyed. */
export function showControls() {
  const selection = shown();
  const context = contextOf(selection);
  byId("choosing").textContent =
    theState().compare || theState().on === "b" ? `Choices of ${theState().on.toUpperCase()}` : "Choices";
  for (const { one, set, inputs, note } of groups.values()) {
    const applies = one.level !== "shape" || Boolean(context?.controls.includes(one.key));
    set.disabled = !applies;
    set.classList.toggle("none", !applies);
    const now = selection[one.key];
    note.textContent = !applies
      ? " not in this kernel"
      : now === "auto"
        ? ` ${labelOf(one, resolved(selection, one.key))}`
        : "";
    for (const { input, choice, label } of inputs) {
      input.checked = choice.key === now;
      const refused =
        applies && choice.key !== "auto" && !pointOf({ ...selection, [one.key]: choice.key }).result;
      label.classList.toggle("refused", refused);
      label.classList.toggle("auto", now === "auto" && choice.key === resolved(selection, one.key));
    }
  }
}

function labelOf(one, key) {
  return one.choices.find((choice) => choice.key === key)?.label || "";
}
