// The packed data: decoding, and finding the point that some choices make.

let head = null;
let columns = null;
const steps = new Map();
const plans = new Map();

const TYPES = { uint8: Uint8Array, uint16: Uint16Array, int32: Int32Array, float32: Float32Array };

/** Decode the data that is in the page; must be awaited before anything else here. */
export async function loadData(text) {
  const packed = Uint8Array.from(atob(text.trim()), (letter) => letter.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  const whole = await new Response(stream).arrayBuffer();
  const length = new DataView(whole).getUint32(0, true);
  head = JSON.parse(new TextDecoder().decode(new Uint8Array(whole, 4, length)));
  columns = {};
  for (const [name, place] of Object.entries(head.columns)) {
    columns[name] = new TYPES[place.type](whole, 4 + length + place.at, place.length);
  }
  return head;
}

/** The head of the data: controls, machines, roles, units, verdicts. */
export function theHead() {
  return head;
}

/** The control with a key. */
export function control(key) {
  return head.controls.find((one) => one.key === key);
}

/** The keys of a level's controls: context, shape or length. */
export function keysOf(level) {
  return head.controls.filter((one) => one.level === level).map((one) => one.key);
}

/** The context that a selection is in; undefined if the file has none such. */
export function contextOf(selection) {
  const keys = keysOf("context");
  return head.contexts.find((one) => keys.every((key) => one.choices[key] === resolved(selection, key)));
}

/** The choice a control stands at, "auto" replaced by what FlashAttention would choose. */
export function resolved(selection, key) {
  const chosen = selection[key];
  if (chosen !== "auto") return chosen;
  if (key === "kernel") return autoKernel(selection);
  const context = contextOf(selection);
  const wanted = context?.auto?.[key] ?? fallback(key);
  return control(key).choices.some((one) => one.key === wanted) ? wanted : fallback(key);
}

function fallback(key) {
  const choices = control(key).choices;
  return (choices.find((one) => ["128", "fit", "tuned"].includes(one.key)) || choices[0]).key;
}

function autoKernel(selection) {
  const wanted = head.machines[selection.machine].auto_kernel;
  const kernels = control("kernel").choices.map((one) => one.key);
  return kernels.includes(wanted) ? wanted : kernels[0];
}

/** Everything about a selection: its context, step and prediction, or the reason it has none. */
export function pointOf(selection) {
  const context = contextOf(selection);
  if (!context) return { reason: "This combination is not in this file." };
  if (context.reason !== undefined) return { context, reason: head.reasons[context.reason] };
  let shape = 0;
  for (const key of context.controls) {
    const choices = control(key).choices;
    shape = shape * choices.length + choices.findIndex((one) => one.key === resolved(selection, key));
  }
  const lengths = control("seqlen").choices;
  const length = lengths.findIndex((one) => one.key === selection.seqlen);
  const at = context.first + shape;
  const step = columns.shape_steps[at];
  if (step < 0) return { context, reason: head.reasons[-1 - step] };
  const result = columns.point_results[at * lengths.length + length];
  if (result < 0) return { context, reason: head.reasons[-1 - result], step };
  return { context, step, result: resultOf(result, context, length, selection) };
}

function resultOf(at, context, length, selection) {
  const count = columns.tflops.length;
  const machine = head.machines[selection.machine];
  const tflops = columns.tflops[at];
  const units = Object.keys(head.units);
  return {
    tflops,
    seconds: context.flops[length] / (tflops * 1e12),
    peakShare: (tflops * 1e12) / machine.peak_flops,
    kernelCycles: columns.kernel_cycles[at],
    imbalance: columns.imbalance_share[at] / head.shares,
    boundShare: columns.bound_share[at] / head.shares,
    boundBy: head.bounds[columns.bound_by[at]],
    busy: Object.fromEntries(
      units.map((unit, i) => [unit, columns.busy_share[i * count + at] / head.shares]),
    ),
  };
}

/** A plan with its parts in place. */
export function planOf(number) {
  if (!plans.has(number)) {
    const plan = { ...head.plans[number] };
    plan.roles = plan.roles.map((role) => head.parts.roles[role]);
    for (const name of ["signals", "buffers", "regions", "touches"]) {
      plan[name] = head.parts[name][plan[name]];
    }
    plans.set(number, plan);
  }
  return plans.get(number);
}

/** A recorded step: plan, events, unit slices and counts; the other side of steps.pack_step. */
export function stepOf(number) {
  if (!steps.has(number)) steps.set(number, readStep(number));
  return steps.get(number);
}

function readStep(at) {
  const about = head.steps[at];
  const plan = planOf(about.plan);
  const numbers = columns.step_numbers.subarray(columns.step_starts[at], columns.step_starts[at + 1]);
  const [ticks, events, slices, counts] = numbers;
  let place = 4;
  const take = (length) => numbers.subarray(place, (place += length));
  const times = (differences) => {
    let sum = 0;
    return Array.from(differences, (step) => ((sum = (sum + step) & 0xffff) - head.lead_ticks) / ticks);
  };
  const role = take(events),
    line = take(events),
    touch = take(events);
  const start = times(take(events));
  const length = take(events),
    rest = take(events),
    stalled = take(events);
  const asked = take(slices),
    unit = take(slices),
    begun = times(take(slices)),
    span = take(slices);
  const signal = take(counts),
    arriver = take(counts),
    before = take(counts);
  const units = Object.keys(head.units);
  const found = start.map((from, i) => {
    const [, kind, text, named] = plan.roles[role[i]].lines[line[i]];
    const end = from + length[i] / ticks;
    return {
      number: i,
      role: role[i],
      line: line[i],
      touch: plan.touches[touch[i]],
      start: from,
      end,
      done: end + rest[i] / ticks,
      stalled: stalled[i] / ticks,
      kind: head.kinds[kind],
      text,
      signal: named,
    };
  });
  return {
    ...about,
    plan,
    events: found,
    length: about.step_cycles * head.steps_shown,
    slices: begun.map((from, i) => ({
      event: found[asked[i]],
      unit: units[unit[i]],
      start: from,
      end: from + span[i] / ticks,
    })),
    counts: Array.from(signal, (one, i) => ({
      signal: plan.signals[one].name,
      role: plan.roles[arriver[i]].name,
      before: before[i],
    })),
  };
}
