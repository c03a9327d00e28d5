// Making elements, and numbers as text.

const SVG = "http://www.w3.org/2000/svg";

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat(3).filter((child) => child !== null && child !== undefined));
  return node;
}

/** An HTML element: el("p", {class: "small"}, "text", other). */
export function el(tag, attributes, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** An SVG element. */
export function sv(tag, attributes, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

/** The element with an id. */
export function byId(id) {
  return document.getElementById(id);
}

/** 1,234 or 1,234.5 */
export function number(value, digits = 0) {
  return value.toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits });
}

/** 72% or 72.4% */
export function percent(share, digits = 0) {
  return `${number(100 * share, digits)}%`;
}

/** 65,536 bytes as 64 KiB. */
export function kib(bytes) {
  return bytes % 1024 === 0 && bytes >= 1024 ? `${bytes / 1024} KiB` : `${number(bytes)} B`;
}

/** Words joined as in a sentence: a, b and c. */
export function listed(words) {
  return words.length < 2 ? words.join("") : `${words.slice(0, -1).join(", ")} and ${words.at(-1)}`;
}

/** "1 tile", "2 tiles" */
export function counted(count, word) {
  return `${number(count)} ${word}${count === 1 ? "" : "s"}`;
}

/** Heading of a figure, with what it shows in a sentence. */
export function heading(id, title, about) {
  return el("div", { class: "heading" }, el("h2", { id: `${id}-title` }, title), el("p", {}, about));
}

/** A figure's content as a table, behind a summary; it is made when it is opened. */
export function tableOf(title, columns, rows) {
  const body = el("tbody");
  const details = el("details", { class: "table" }, el("summary", {}, `${title} as a table`));
  const show = () => {
    if (!details.open || details.querySelector("table")) return;
    body.append(
      ...rows().map((row) =>
        el(
          "tr",
          {},
          row.map((cell, i) => el(i ? "td" : "th", i ? {} : { scope: "row" }, String(cell))),
        ),
      ),
    );
    const head = el(
      "thead",
      {},
      el(
        "tr",
        {},
        columns.map((name) => el("th", { scope: "col" }, name)),
      ),
    );
    details.append(
      el(
        "div",
        { class: "scroll", tabindex: "0", role: "region", "aria-label": title },
        el("table", {}, el("caption", { class: "unseen" }, title), head, body),
      ),
    );
  };
  details.addEventListener("toggle", show);
  return details;
}

/** Says something to screen readers. */
export function say(text) {
  byId("said").textContent = text;
}
