// A lane for each worker, or for each host of a large job, coloured by state over time.

import { $, byName, colour, counted, element, onScreen } from "./format.js";

const LANE = 16;
const LABELS = 170;
const MOST = 120;
const LEAST_S = 60;
const COLOURS = {
  running: "running", ready: "ready", starting: "starting", warming: "starting",
  stopping: "stopping", ending: "stopping", lost: "lost", failure: "lost", spare: "forming",
};
const LEGEND = ["running", "ready", "starting", "stopping", "lost", "spare"];

export function drawLegend() {
  $("legend").replaceChildren(...LEGEND.map((state) => element("span", state, `dot s-${state}`)));
}

const byPlace = (a, b) =>
  byName(a.host, b.host) || byName(a.name, b.name);

let width = 0;
let latest = null;
const draw = onScreen($("lanes").parentElement, () => latest && width && drawNow(latest));
new ResizeObserver(([{ contentRect }]) => {
  width = Math.round(contentRect.width);
  draw();
}).observe($("lanes").parentElement);

export function drawLanes(model) {
  latest = model;
  draw();
}

function drawNow(model) {
  const canvas = $("lanes");
  const now = model.now();
  const lanes = [...model.lanes.values()].filter((lane) => lane.segments.length).sort(byPlace);
  const shown = lanes.slice(0, MOST);
  const first = Math.min(now - LEAST_S, ...shown.map((lane) => lane.segments[0][0]));
  const from = Math.max(first, now - 3600);
  const height = Math.max(LANE, shown.length * LANE);
  const ratio = devicePixelRatio || 1;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
  }
  const pen = canvas.getContext("2d");
  const labels = Math.min(LABELS, width / 3);
  const x = (t) => labels + ((Math.max(t, from) - from) / (now - from)) * (width - labels);
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, width, height);
  pen.font = "12px system-ui, sans-serif";
  pen.textBaseline = "middle";
  const text = colour("text");
  shown.forEach((lane, n) => {
    const top = n * LANE;
    pen.fillStyle = text;
    const rank = lane.rank >= 0 && lane.state ? ` · rank ${lane.rank}` : "";
    pen.fillText(`${lane.name}${rank}`, 0, top + LANE / 2, labels - 6);
    lane.segments.forEach(([t, state], i) => {
      const until = i + 1 < lane.segments.length ? lane.segments[i + 1][0] : now;
      if (state === null || until < from) return;
      pen.fillStyle = colour(COLOURS[state] || "idle");
      pen.fillRect(x(t), top + 2, Math.max(1, x(until) - x(t)), LANE - 4);
    });
    pen.fillStyle = colour("lost");
    for (const t of lane.failures) if (t >= from) pen.fillRect(x(t) - 2, top, 4, LANE);
  });
  const minutes = Math.round((now - from) / 60);
  const hidden = lanes.length > MOST ? `; ${lanes.length - MOST} more are in the tables only` : "";
  canvas.setAttribute("aria-label", `States of ${counted(shown.length, model.grouped ? "host" : "worker")} in the last ${minutes} min${hidden}`);
}
