// Numbers, times and sizes as people read them, and small helpers for elements.

export const $ = (id) => document.getElementById(id);

/** Return a new element with text and a class; text is never read as HTML. */
export function element(tag, text = "", name = "") {
  const made = document.createElement(tag);
  if (text !== "") made.textContent = text;
  if (name) made.className = name;
  return made;
}

/** Compare two names as people order them: h9 before h10. */
export const byName = new Intl.Collator("en", { numeric: true }).compare;

const colours = new Map();

/** Return a colour of the style sheet. To ask the browser costs a layout, so it is asked once. */
export function colour(name) {
  if (!colours.size) {
    const style = getComputedStyle(document.documentElement);
    for (const each of ["text", "muted", "line", "running", "ready", "starting", "stopping", "lost", "idle", "forming"]) {
      colours.set(each, style.getPropertyValue(`--${each}`).trim());
    }
  }
  return colours.get(name);
}

/** Ask for the colours again: the system has become dark or light. */
export const forgetColours = () => colours.clear();

/** Return a function that calls `draw` at once if the element is on the screen, else when it is. */
export function onScreen(node, draw) {
  let seen = true;
  let due = false;
  const look = (entries) => {
    seen = entries.at(-1).isIntersecting;
    if (seen && due) later();
  };
  const later = () => {
    due = !seen;
    if (seen) draw();
  };
  new IntersectionObserver(look, { rootMargin: "25%" }).observe(node);
  return later;
}

/** Set the text of an element if it is another one: an equal text costs no layout. */
export function say(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

const known = (value) => value !== null && value !== undefined && Number.isFinite(value);

export function figure(value, digits = 3) {
  if (!known(value)) return "–";
  const size = Math.abs(value);
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  return size !== 0 && size < 0.001 ? value.toExponential(1) : String(+value.toPrecision(digits));
}

export const percent = (value) => (known(value) ? `${(100 * value).toFixed(1)} %` : "–");

export function bytes(value) {
  if (!known(value)) return "–";
  const names = ["B", "kB", "MB", "GB", "TB", "PB"];
  let n = 0;
  for (; value >= 999.5 && n < names.length - 1; n++) value /= 1000;
  return `${+value.toPrecision(3)} ${names[n]}`;
}

export function duration(seconds) {
  if (!known(seconds)) return "–";
  if (seconds < 10) return `${+seconds.toFixed(seconds < 1 ? 3 : 1)} s`;
  const s = Math.round(seconds);
  if (s < 60) return `${s} s`;
  if (s < 3600) return `${Math.floor(s / 60)} min ${s % 60} s`;
  return `${Math.floor(s / 3600)} h ${Math.floor((s % 3600) / 60)} min`;
}

export const clock = (unix) => new Date(unix * 1000).toLocaleTimeString("en-GB");

/** Return 14:05, or 14:05:09 if it is no whole minute. */
export const tick = (unix) => (unix % 60 ? clock(unix) : clock(unix).slice(0, 5));

/** Return `1 worker` or `3 workers`. */
export const counted = (number, noun, many = `${noun}s`) => `${number} ${number === 1 ? noun : many}`;

/** Return `3 running, 1 lost`. */
export const counts = (states) =>
  Object.entries(states || {}).map(([name, n]) => `${n} ${name}`).join(", ");
