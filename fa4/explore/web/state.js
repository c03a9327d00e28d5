// What is chosen and shown, kept in the address behind the #.

import { control, theHead } from "./data.js";

const listeners = [];
let state = null;

/** Choices before anything is changed: FlashAttention's own, head dim 128, the longest sequence. */
export function defaults() {
  const selection = {};
  for (const one of theHead().controls) {
    const keys = one.choices.map((choice) => choice.key);
    const wanted = { head_dim: "128", seqlen: keys.at(-1), kernel: "auto" }[one.key];
    selection[one.key] =
      one.level === "shape" ? "auto" : wanted === "auto" || keys.includes(wanted) ? wanted : keys[0];
  }
  return selection;
}

/** The state: selections a and b, which of them is shown, the moment, the role, what is removed. */
export function theState() {
  return state;
}

/** The selection that the controls and figures are about. */
export function shown() {
  return state[state.on];
}

/** Call `listener(what)` when something changes: "choice", "moment", "role", "removed", "theme". */
export function listen(listener) {
  listeners.push(listener);
}

function changed(what) {
  for (const listener of listeners) listener(what);
  if (what !== "moment") writeAddress();
}

/** Choose a control's position in the selection that is shown. */
export function choose(key, value) {
  shown()[key] = value;
  changed("choice");
}

/** Replace several choices at once. */
export function chooseAll(values) {
  Object.assign(shown(), values);
  changed("choice");
}

/** Change other parts of the state: on, compare, t, role, off, theme. */
export function change(values, what) {
  Object.assign(state, values);
  changed(what);
}

/** Back to FlashAttention's own choices, of what is shown. */
export function reset() {
  state[state.on] = defaults();
  changed("choice");
}

/** The address's fragment for the state: what differs from the defaults. */
export function fragment() {
  const words = new URLSearchParams();
  const first = defaults();
  for (const [key, value] of Object.entries(state.a)) if (value !== first[key]) words.set(key, value);
  for (const [key, value] of Object.entries(state.b))
    if (value !== state.a[key]) words.set(`b.${key}`, value);
  if (state.on === "b") words.set("on", "b");
  if (state.compare) words.set("compare", "1");
  if (state.t > 0) words.set("t", state.t.toFixed(0));
  if (state.role) words.set("role", state.role);
  if (state.off) words.set("off", state.off);
  if (state.theme) words.set("theme", state.theme);
  return words.toString();
}

/** Put the state into the address; the moment is written when it rests. */
export function writeAddress() {
  const text = fragment();
  if (text !== location.hash.slice(1)) {
    history.replaceState(null, "", text ? `#${text}` : location.pathname + location.search);
  }
}

/** Read the state from the address; what it does not know is left at its default. */
export function readAddress() {
  const words = new URLSearchParams(location.hash.slice(1));
  const known = (key, value) => value === "auto" || control(key).choices.some((one) => one.key === value);
  const a = defaults();
  for (const key of Object.keys(a)) if (words.has(key) && known(key, words.get(key))) a[key] = words.get(key);
  const b = { ...a };
  for (const key of Object.keys(a)) {
    const value = words.get(`b.${key}`);
    if (value !== null && known(key, value)) b[key] = value;
  }
  const moment = Number(words.get("t"));
  state = {
    a,
    b,
    on: words.get("on") === "b" ? "b" : "a",
    compare: words.get("compare") === "1",
    t: Number.isFinite(moment) && moment > 0 ? moment : 0,
    role: words.get("role") || "",
    off: words.get("off") || "",
    theme: ["light", "dark"].includes(words.get("theme")) ? words.get("theme") : "",
  };
}

/** The address was changed by hand or by a link. */
export function followAddress() {
  if (fragment() === location.hash.slice(1)) return;
  readAddress();
  changed("choice");
  changed("theme");
}
