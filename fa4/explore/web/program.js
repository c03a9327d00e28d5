// The plan's lines: what each role does, with the line at the cursor; and a switch at each barrier.

import { byId, counted, el, heading, listed } from "./dom.js";
import { theHead } from "./data.js";
import { eventAt } from "./moment.js";
import { letterOf, roleClass } from "./timeline.js";
import { change, theState } from "./state.js";
import { removalsAt, fencesOf } from "./verdict.js";

let step = null;
let lines = [];
let tabs = [];

/** The role whose program is shown. */
export function shownRole() {
  const names = step.plan.roles.map((role) => role.name);
  return names.includes(theState().role) ? theState().role : names.includes("mma") ? "mma" : names[0];
}

/** Show another role's program: the one `by` places further on, or the one named. */
export function turnRole(by) {
  const names = step.plan.roles.map((role) => role.name);
  const next =
    typeof by === "string" ? by : names[(names.indexOf(shownRole()) + by + names.length) % names.length];
  change({ role: next }, "role");
}

/** Draw the program of the role that is shown. */
export function drawProgram(next) {
  step = next;
  const section = byId("program");
  const name = shownRole();
  const role = step.plan.roles.find((one) => one.name === name);
  const focused = document.activeElement?.id || "";
  tabs = step.plan.roles.map((one) => roleTab(one, one.name === name));
  const strip = el(
    "div",
    {
      class: "tabs",
      role: "tablist",
      "aria-label": "Roles",
      onkeydown: (press) => {
        const way = { ArrowRight: 1, ArrowLeft: -1 }[press.key];
        if (way) {
          press.stopPropagation();
          press.preventDefault();
          turnRole(way);
          byId(`role-${shownRole()}`)?.focus();
        }
      },
    },
    tabs.map((one) => one.tab),
  );
  const waits = step.plan.signals.filter((one) => one.waiters.includes(name)).length;
  const arrives = step.plan.signals.filter((one) => name in one.arrivals).length;
  const about = `${name} ${theHead().roles[name] ? theHead().roles[name].about : ""}: ${role.warps.includes("-") ? "warps" : "warp"} ${role.warps}, ${role.registers} registers; waits for ${counted(waits, "signal")}, arrives at ${arrives}.`;
  lines = role.lines.map((line) => programLine(name, line));
  const extra = fencesOf(step.plan, name).map((fence) => fenceLine(name, fence));
  const list = el(
    "ol",
    { class: "lines", id: "lines", role: "list" },
    lines.map((one) => one.item),
    extra.length ? el("li", { class: "line heading" }, "in the compiled kernel besides") : null,
    extra,
  );
  section.replaceChildren(
    heading("program", "Program", about),
    strip,
    el("div", { class: "listing", role: "tabpanel", tabindex: "0", "aria-labelledby": `role-${name}` }, list),
  );
  if (focused.startsWith("role-")) byId(focused)?.focus();
}

function roleTab(role, chosen) {
  const now = el("span", { class: "now" });
  const tab = el(
    "button",
    {
      type: "button",
      role: "tab",
      id: `role-${role.name}`,
      "aria-selected": String(chosen),
      tabindex: chosen ? "0" : "-1",
      onclick: () => turnRole(role.name),
    },
    el("span", { class: `chip ${roleClass(role.name)} on-${role.name}` }, letterOf(role.name)),
    el("span", { class: "who" }, role.name),
    now,
  );
  return { tab, now };
}

function programLine(role, [depth, kind, text, signal, detail]) {
  const named = theHead().kinds[kind];
  const item = el(
    "li",
    { class: `line ${named}`, style: `--depth:${depth}` },
    el("span", { class: "what" }, text),
    el("span", { class: "detail" }, detail),
  );
  if (named === "wait" || named === "arrive") item.append(...removeButton(role, named, signal));
  return { item };
}

function fenceLine(role, [verb, what]) {
  const text = verb === "fence" ? what : `${verb} ${what}`;
  return el(
    "li",
    { class: "line fence", style: "--depth:1" },
    el("span", { class: "what" }, text),
    el("span", { class: "detail" }),
    removeButton(role, verb, what),
  );
}

function removeButton(role, verb, signal) {
  const found = removalsAt(step.plan, role, verb, signal);
  if (!found.length) return [];
  const key = `${role}/${verb}/${signal}`;
  const off = theState().off === key;
  const kinds = [...new Set(found.map((one) => one.verdict))].map((one) => theHead().verdicts.names[one][0]);
  const says = off ? `put ${verb} ${signal} back` : `remove ${verb} ${signal}`;
  return [
    el(
      "button",
      {
        type: "button",
        class: "switch",
        "aria-pressed": String(off),
        title: `${says}: ${listed(kinds)}`,
        "data-key": key,
        onclick: () => change({ off: off ? "" : key }, "removed"),
      },
      off ? "off" : "on",
      el("span", { class: "unseen" }, `, ${says}`),
    ),
  ];
}

/** Mark the line at a moment, and say in each tab what its role does. */
export function moveProgram(t) {
  if (!step) return;
  const name = shownRole();
  step.plan.roles.forEach((role, i) => {
    const event = eventAt(step, i, t);
    const waits = event && event.kind === "wait" && event.end > t;
    tabs[i].now.textContent = !event ? "" : event.end > t ? event.text : "·";
    tabs[i].tab.classList.toggle("waits", Boolean(waits));
    if (role.name !== name) return;
    lines.forEach(({ item }, at) => {
      const here = event && event.line === at;
      if (here && !item.classList.contains("here")) reveal(item);
      item.classList.toggle("here", Boolean(here));
      item.toggleAttribute("aria-current", Boolean(here));
    });
  });
}

function reveal(item) {
  const box = item.closest(".listing");
  const top = item.offsetTop - box.offsetTop;
  if (top < box.scrollTop + 10 || top > box.scrollTop + box.clientHeight - 40)
    box.scrollTop = Math.max(0, top - 60);
}
