// What holds at a moment of a step: who does what, which phases are complete, what memory holds.

const prepared = new WeakMap();

function prepare(step) {
  if (prepared.has(step)) return prepared.get(step);
  const plan = step.plan;
  const roles = plan.roles.map((_, i) =>
    step.events.filter((one) => one.role === i && one.kind !== "arrive"),
  );
  const signals = plan.signals.map((signal) => {
    const arrivers = Object.keys(signal.arrivals).map((name) => {
      const counted = step.counts.find((one) => one.signal === signal.name && one.role === name);
      const moments = step.events
        .filter(
          (one) => one.kind === "arrive" && one.signal === signal.name && plan.roles[one.role].name === name,
        )
        .map((one) => one.done)
        .sort((a, b) => a - b);
      return { name, before: counted ? counted.before : 0, moments };
    });
    const waits = step.events.filter((one) => one.kind === "wait" && one.signal === signal.name);
    return { signal, arrivers, waits };
  });
  const regions = plan.regions.map(() => ({ reads: [], writes: [] }));
  for (const event of step.events) {
    event.touch[0].forEach((region) => regions[region].reads.push(event));
    event.touch[1].forEach((region) => regions[region].writes.push(event));
  }
  const found = { roles, signals, regions, edges: edgesOf(step) };
  prepared.set(step, found);
  return found;
}

function edgesOf(step) {
  const moments = new Set([0]);
  for (const one of step.events) {
    for (const at of [one.start, one.end, one.done])
      if (at > 0 && at < step.length) moments.add(Math.round(at * 4) / 4);
  }
  return [...moments].sort((a, b) => a - b);
}

function busyAt(event, t) {
  return event.start <= t && t < Math.max(event.done, event.end);
}

/** What a role does at `t`: its latest event, undefined before the first. */
export function eventAt(step, role, t) {
  let found;
  for (const event of prepare(step).roles[role]) {
    if (event.start > t) break;
    found = event;
  }
  return found;
}

/** Every signal at `t`: complete phases, arrivals of the phase under way, who waits. */
export function signalsAt(step, t) {
  return prepare(step).signals.map(({ signal, arrivers, waits }) => {
    const made = arrivers.map((one) => ({
      name: one.name,
      count: one.before + one.moments.filter((at) => at <= t).length,
      last: one.moments.filter((at) => at <= t).at(-1),
    }));
    const phases = made.length ? Math.min(...made.map((one) => one.count)) : 0;
    const need = Object.values(signal.arrivals).reduce((sum, one) => sum + one, 0);
    const here = made.reduce((sum, one) => sum + (one.count > phases ? signal.arrivals[one.name] : 0), 0);
    const waiting = waits
      .filter((one) => one.start <= t && t < one.end)
      .map((one) => step.plan.roles[one.role].name);
    return {
      signal,
      phases,
      need,
      here,
      waiting,
      recent: made.filter((one) => t - one.last < 120).map((one) => one.name),
    };
  });
}

/** Every memory region that work touches, at `t`: who reads and writes it, who wrote last. */
export function regionsAt(step, t) {
  return prepare(step).regions.map(({ reads, writes }, i) => {
    const past = writes.filter((one) => Math.max(one.done, one.end) <= t);
    const later = writes.length ? writes.reduce((a, b) => (a.done > b.done ? a : b)) : undefined;
    const [name, space, spans] = step.plan.regions[i];
    return {
      name,
      space,
      spans,
      reading: reads.filter((one) => busyAt(one, t)),
      writing: writes.filter((one) => busyAt(one, t)),
      // In a steady state what was written a window ago was written in the same way.
      last: past.length ? past.reduce((a, b) => (a.done > b.done ? a : b)) : later,
    };
  });
}

/** The next moment, after or before `t`, at which anything begins or ends. */
export function nextEdge(step, t, direction) {
  const edges = prepare(step).edges;
  if (direction > 0) return edges.find((at) => at > t + 0.01) ?? edges[0];
  return edges.findLast((at) => at < t - 0.01) ?? edges.at(-1);
}

/** An event in words: who, what, from when to when. */
export function describeEvent(step, event) {
  const role = step.plan.roles[event.role].name;
  const span = `cycle ${Math.round(event.start)} to ${Math.round(event.end)}`;
  const later = event.done > event.end + 1 ? `, complete at ${Math.round(event.done)}` : "";
  const stalled = event.stalled > 0 ? `, ${Math.round(event.stalled)} cycles of it waiting` : "";
  return `${role}: ${event.text}, ${span}${later}${stalled}`;
}
