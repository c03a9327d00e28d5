// What the emulator says when a wait, an arrival or a fence is taken out: recorded verdicts.

import { byId, counted, el, heading, listed, number } from "./dom.js";
import { theHead } from "./data.js";
import { letterOf, roleClass } from "./timeline.js";
import { change, theState } from "./state.js";

const MARKS = { race: "⇄", deadlock: "∞", equivalent: "=", survived: "~" };
const indexes = new Map();

// The kernel whose verdicts fit a plan: of this package, the same pass, for the same machines; if there
// is one with as many CTAs and as many warpgroups, that one.
function kernelOf(plan) {
  const direction = plan.name.startsWith("backward") ? "bwd" : "fwd";
  const roles = new Set(plan.roles.map((role) => role.name));
  const fitting = theHead().verdicts.kernels.filter((one) => one.pass === direction && roles.has(one.issues));
  const known = plan.name.includes("flash_attn.cute") ? [] : fitting;
  const alike = known.filter((one) => one.cta_group === plan.cta_group);
  return alike.find((one) => one.roles === roles.size) || alike[0] || known[0];
}

function indexOf(kernel) {
  if (!indexes.has(kernel.kernel)) {
    const found = new Map();
    for (const removal of kernel.removals) {
      for (const step of removal.steps) {
        const key = step.join("/");
        found.set(key, [...(found.get(key) || []), removal]);
      }
    }
    indexes.set(kernel.kernel, found);
  }
  return indexes.get(kernel.kernel);
}

/** The recorded removals of a role's wait, arrival or fence. */
export function removalsAt(plan, role, verb, signal) {
  const kernel = kernelOf(plan);
  return kernel ? indexOf(kernel).get(`${role}/${verb}/${signal}`) || [] : [];
}

/** [verb, what] of a role in the compiled kernel that is no line of its program: fences and the like. */
export function fencesOf(plan, role) {
  const kernel = kernelOf(plan);
  if (!kernel) return [];
  const program = plan.roles.find((one) => one.name === role).lines;
  const known = new Set(program.map(([, kind, , signal]) => `${theHead().kinds[kind]}/${signal}`));
  return [...indexOf(kernel).keys()]
    .map((key) => key.split("/"))
    .filter(([name, verb, what]) => name === role && !known.has(`${verb}/${what}`))
    .map(([, verb, what]) => [verb, what]);
}

function summary(kernel) {
  const counts = new Map();
  for (const removal of kernel.removals) counts.set(removal.verdict, (counts.get(removal.verdict) || 0) + 1);
  const words = [...counts]
    .sort((a, b) => b[1] - a[1])
    .map(([verdict, count]) => `${theHead().verdicts.names[verdict][0]} ${count}`);
  return `Of ${counted(kernel.removals.length, "removal")} in this kernel: ${listed(words)}.`;
}

/** Draw the verdict on what is switched off. */
export function drawVerdict(plan) {
  const section = byId("verdict");
  const about =
    "Switch a wait, an arrival or a fence off in the program above: the compiled kernel was run without it in the emulator, and this is what it said.";
  const top = heading("verdict", "Remove a barrier", about);
  const kernel = kernelOf(plan);
  if (!kernel) {
    section.replaceChildren(
      top,
      el(
        "p",
        { class: "quiet" },
        "Nothing is recorded for this design: verdicts are of this package's own kernels.",
      ),
    );
    return;
  }
  const [role, verb, signal] = theState().off.split("/");
  const found = role ? removalsAt(plan, role, verb, signal) : [];
  const from = `Recorded of "${kernel.kernel}" (${kernel.plan}, ${number(kernel.ptx_lines)} lines of PTX), not of every combination of choices. Schedules tried: ${listed(theHead().verdicts.schedules)}.`;
  const body = found.length
    ? [
        el(
          "p",
          { class: "without" },
          "Without ",
          el("b", {}, `${verb} ${signal}`),
          " in ",
          chip(role),
          ` ${role}: `,
          found.length > 1
            ? `${found.length} instructions carry it out, each was removed alone.`
            : "one instruction carries it out.",
          el(
            "button",
            { type: "button", class: "plain", onclick: () => change({ off: "" }, "removed") },
            "put it back",
          ),
        ),
        el("div", { class: "removals" }, found.map(removalCard)),
      ]
    : [el("p", { class: "quiet" }, "Everything is in place. ", summary(kernel))];
  section.replaceChildren(top, ...body, el("p", { class: "source" }, from));
}

function chip(role) {
  return el("span", { class: `chip ${roleClass(role)} on-${role}` }, letterOf(role));
}

function removalCard(removal, at) {
  const first = at === 0;
  const [name, meaning] = theHead().verdicts.names[removal.verdict];
  const kind = removal.verdict === "equivalent" || removal.verdict === "survived" ? "fine" : "wrong";
  const parts = [
    el(
      "h3",
      { class: `badge ${kind}` },
      el("span", { "aria-hidden": "true" }, MARKS[removal.verdict] || "!"),
      ` ${name}`,
    ),
    el("p", { class: "meaning" }, `${meaning}.`),
  ];
  if (removal.waits.length)
    parts.push(
      el("details", { open: first }, el("summary", {}, "Who waits for whom"), waitList(removal.waits)),
    );
  else if (removal.sides.length) parts.push(el("div", { class: "sides" }, removal.sides.map(side)));
  if (removal.message && !removal.waits.length) parts.push(el("p", { class: "message" }, removal.message));
  const where = `PTX line ${removal.ptx_line}: ${removal.instruction}`;
  return el(
    "article",
    { class: "removal", "data-verdict": removal.verdict, "data-line": removal.ptx_line },
    el(
      "p",
      { class: "where" },
      el("code", {}, where),
      el("span", {}, removal.schedule ? ` schedule ${removal.schedule}` : ""),
    ),
    parts,
  );
}

function side(one) {
  return el(
    "div",
    { class: "one-side" },
    one.roles.map((role) => [chip(role), ` ${role} `]),
    el("code", {}, `line ${one.ptx_line}`),
    el("code", { class: "op" }, one.instruction),
  );
}

function waitList(waits) {
  const several = new Set(waits.map((one) => one.cta)).size > 1;
  return el(
    "ul",
    { class: "waits" },
    waits.map((one) =>
      el(
        "li",
        {},
        several ? `CTA ${one.cta}: ` : null,
        chip(one.role),
        ` ${one.role} waits for `,
        el("b", {}, one.signal),
        one.phase === null ? "" : ` phase ${one.phase}`,
        one.by.length ? [" of ", one.by.map((role) => [chip(role), ` ${role} `])] : "",
        el("span", { class: "missing" }, ` ${one.missing}, PTX line ${one.ptx_line}`),
      ),
    ),
  );
}
