// Elements of the page, made without markup in strings: model output is text and never becomes markup.

const SVG = "http://www.w3.org/2000/svg";

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

/** Makes an element. `on...` attributes are listeners; null, undefined and false attributes and children are left out. */
export function element(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** Makes an SVG element. */
export function drawn(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

/** Replaces the children of an element. */
export function show(node, ...children) {
  node.replaceChildren(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
}

/** Lets the arrow keys move between the children of a row, so that only one is in the tab order. */
export function steppable(row) {
  row.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: "previousElementSibling", ArrowRight: "nextElementSibling" }[event.key];
    const next = step && document.activeElement?.[step];
    if (!next) return;
    event.preventDefault();
    next.focus();
  });
  return row;
}

/** Returns a list that is written as JSON; an empty one for any other text. */
export function listOf(json) {
  try {
    const read = JSON.parse(json);
    return Array.isArray(read) ? read : [];
  } catch {
    return [];
  }
}

let lastId = 0;

/** Returns an id that no other element has. */
export function newId(prefix) {
  lastId += 1;
  return `${prefix}-${lastId}`;
}

/** Returns the characters of a text as the API counts them: Unicode code points, not UTF-16 units. */
export function characters(text) {
  return Array.from(text);
}

/** Sets a control's value as if somebody had entered it, so that it is kept. */
export function enter(control, value) {
  control.value = value;
  control.dispatchEvent(new Event("input", { bubbles: true }));
}

/** Enters an example where nothing is. */
export function refill(control, value) {
  if (!control.value.trim()) enter(control, value);
}

/** Writes a number for people: 1,437,700; 0.912; 37.3 ms is left to `milliseconds`. */
export function written(value, digits = 0) {
  return Number(value).toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
}

/** Writes a duration given in seconds. */
export function duration(seconds) {
  if (!Number.isFinite(seconds)) return "–";
  if (seconds < 0.01) return `${(seconds * 1000).toFixed(1)} ms`;
  return seconds < 1 ? `${Math.round(seconds * 1000)} ms` : `${seconds.toFixed(2)} s`;
}

/** Polls now and repeatedly, except while the page is hidden; returns a function that ends it. */
export function repeat(look, everyMs) {
  const seen = () => document.hidden || look();
  look();
  const timer = setInterval(seen, everyMs);
  document.addEventListener("visibilitychange", seen);
  return () => {
    clearInterval(timer);
    document.removeEventListener("visibilitychange", seen);
  };
}

/** Copies a text. Browsers have a clipboard only on HTTPS pages and localhost; otherwise the selection is copied. */
export async function copied(text) {
  if (navigator.clipboard) {
    await navigator.clipboard.writeText(text);
    return;
  }
  const area = element("textarea", { readonly: true, "aria-hidden": "true" });
  const focused = document.activeElement;
  area.style.position = "fixed"; // in sight, as what is copied must be, and seen by nobody
  area.style.opacity = "0";
  area.value = text;
  document.body.append(area);
  area.select();
  const isCopied = document.execCommand("copy");
  area.remove();
  focused?.focus();
  if (!isCopied) throw new Error("The browser cannot copy.");
}
