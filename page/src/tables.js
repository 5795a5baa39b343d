// Tables, tiles and the list of events. Only what has changed is written.

import { $, byName, bytes, clock, counts, duration, element, figure, percent, say } from "./format.js";

const MOST_LINES = 200;
const CLASSES = ["training", "redone", "forming", "syncing", "starting", "waiting", "slow", "lost"];

/** Write rows into a table's body: `rows` are [key, texts]; `dress(cells, key)` adds the rest. */
function fill(body, rows, classes, dress = () => {}) {
  const known = new Map([...body.children].map((row) => [row.dataset.key, row]));
  const kept = new Set(rows.map(([key]) => key));
  for (const [key, row] of known) if (!kept.has(key)) row.remove(); // first: no other row moves then
  let next = body.firstElementChild;
  for (const [key, texts] of rows) {
    let row = known.get(key);
    if (!row) {
      row = element("tr");
      row.dataset.key = key;
      row.append(...texts.map((_, n) => element("td", "", classes[n] || "")));
    }
    if (row === next) next = next.nextElementSibling;
    else body.insertBefore(row, next);
    const before = written.get(row) || [];
    texts.forEach((text, n) => {
      if (text !== before[n]) row.cells[n].textContent = text;
    });
    written.set(row, texts);
    dress(row.children, key);
  }
}

/** The texts of each row: to compare them costs less than to ask the page. */
const written = new WeakMap();

function dot(cell, name) {
  if (cell.className !== name) cell.className = name;
}

export function drawTiles(model) {
  const { job } = model;
  const { counters = {}, goodput = {}, numbers = {} } = job;
  const wanted = job.wanted && job.wanted !== job.size ? ` of ${job.wanted}` : "";
  const total = job.total ? ` / ${figure(job.total)}` : "";
  const left = job.total && job.steps_per_s ? (job.total - job.step) / job.steps_per_s : null;
  const tiles = [
    ["workers", `${job.size ?? "–"}${wanted}`],
    ["round", figure(job.round)],
    ["step", `${figure(job.step)}${total}`],
    ["steps/s", figure(job.steps_per_s)],
    ["samples/s", figure(job.samples_per_s)],
    ["goodput", percent(goodput.goodput)],
    ["running for", duration(goodput.wall)],
    ["failures", figure(counters.failures)],
  ];
  if (left !== null) tiles.push(["left", duration(left)]);
  for (const [name, value] of Object.entries(numbers)) tiles.push([name, figure(value, 4)]);
  const list = $("tiles");
  while (list.children.length > tiles.length) list.lastElementChild.remove();
  tiles.forEach(([name, value], n) => {
    if (n === list.children.length) {
      const tile = element("div");
      tile.append(element("dt"), element("dd"));
      list.append(tile);
    }
    say(list.children[n].firstChild, name);
    say(list.children[n].lastChild, value);
  });
}

export function drawGoodput(model) {
  const seconds = (model.job.goodput || {}).seconds || {};
  const names = [...CLASSES, ...Object.keys(seconds).filter((name) => !CLASSES.includes(name))];
  const sum = Object.values(seconds).reduce((a, b) => a + b, 0) || 1;
  const rows = names.map((name) => [name, [name, duration(seconds[name] || 0), percent((seconds[name] || 0) / sum)]]);
  fill($("goodput"), rows, ["", "n", "n"], (cells, name) => {
    dot(cells[0], `dot c-${name}`);
  });
  const bar = $("goodput-bar");
  if (bar.children.length !== names.length) {
    bar.replaceChildren(...names.map((name) => element("span", "", `c-${name}`)));
  }
  names.forEach((name, n) => {
    bar.children[n].style.flexGrow = String((seconds[name] || 0) / sum);
  });
}

const used = (part, whole) => (whole ? `${bytes(part)} / ${bytes(whole)}` : "–");

/** Return the times of a host in the last node check. */
function checked(found) {
  if (!found) return "";
  const part = (name) => (found[name] == null ? "" : `${name} ${duration(found[name])}`);
  return [found.verdict, part("compute"), part("network")].filter(Boolean).join(", ");
}

export function drawHosts(model, dress) {
  const { job } = model;
  const order = [...model.hosts].sort(([a], [b]) => byName(a, b));
  const nodes = new Map(((job.node_check || {}).nodes || []).map((each) => [each.node, each]));
  const rows = order.map(([name, row]) => {
    const rest = row.cooldown_left ? `, ${duration(row.cooldown_left)} left` : "";
    const gpus = (row.gpus || []).map((gpu) => percent(gpu.used)).join(" ");
    const state = `${row.state}${rest}`;
    const net = row.net_in === undefined ? "–" : `${bytes(row.net_in)}/s, ${bytes(row.net_out)}/s`;
    const why = [row.reason, ...(row.evidence || [])].filter(Boolean).join("; ");
    return [name, [name, state, counts(row.states) || "none", percent(row.cpu), used(row.memory_used, row.memory_total),
      used(row.disk_used, row.disk_total), net, gpus, checked(nodes.get(name)), why, undefined]];
  });
  fill($("hosts"), rows, ["", "", "", "n", "n", "n", "n", "", "", "why", ""], dress);
  const more = job.host_count > rows.length ? `; ${rows.length} rows, those in trouble first` : "";
  say($("hosts-sum"), `${counts(job.host_states)}${more}`);
}

export function drawMembers(model) {
  const { job } = model;
  const order = [...model.members].sort(([, a], [, b]) => (a.rank < 0) - (b.rank < 0) || a.rank - b.rank);
  const rows = order.map(([name, row]) => [name, [row.rank < 0 ? "spare" : String(row.rank), name, row.state,
    row.step >= 0 ? figure(row.step) : "–", figure(row.steps_per_s), figure(row.samples_per_s), bytes(row.memory),
    percent(row.cpu), row.pid ? String(row.pid) : "–", [row.slow, row.leaving].filter(Boolean).join("; ")]]);
  fill($("members"), rows, ["n", "", "", "n", "n", "n", "n", "n", "n", "why"], (cells, name) => {
    dot(cells[2], `dot s-${model.members.get(name).state}`);
  });
  const more = job.member_count > rows.length ? `; ${rows.length} rows, those in trouble first` : "";
  say($("members-sum"), `${counts(job.states)}${more}`);
}

export function drawEvents(events) {
  const list = $("events");
  const lines = events.map((event) => {
    const line = element("li");
    const time = element("time", clock(event.t));
    time.dateTime = new Date(event.t * 1000).toISOString();
    line.append(time, event.text);
    return line;
  });
  list.prepend(...lines.slice(-MOST_LINES).reverse());
  while (list.children.length > MOST_LINES) list.lastElementChild.remove();
}

export function drawPoints(model) {
  if (!$("numbers").open) return;
  const { history } = model;
  const rows = [];
  for (let n = history.t.length - 1; n >= 0 && rows.length < 30; n--) {
    const time = clock(history.t[n]);
    const texts = [time, String(history.world_size[n]), figure(history.step[n]), figure(history.steps_per_s[n]),
      figure(history.samples_per_s[n]), duration(history.step_time[n])];
    rows.push([String(history.t[n]), texts]);
  }
  fill($("points"), rows, ["", "n", "n", "n", "n", "n"]);
}

export function drawStacks(event) {
  const parts = [element("p", `${clock(event.t)}: ${event.reason || ""}`)];
  const groups = [...(event.stacks || [])].sort((a, b) => Number(b.odd) - Number(a.odd));
  for (const group of groups) {
    const apart = group.odd ? ", apart from the others" : "";
    parts.push(element("h3", `rank ${group.ranks.join(", ")}: ${group.where || ""}${apart}`));
    const stack = element("pre", group.stack || "");
    stack.tabIndex = 0; // so that keys scroll it
    stack.setAttribute("role", "region");
    stack.setAttribute("aria-label", `Stack of rank ${group.ranks.join(", ")}`);
    parts.push(stack);
  }
  $("stacks").replaceChildren(...parts);
  $("stacks-part").hidden = false;
}
