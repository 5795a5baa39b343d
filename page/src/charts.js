// The charts, drawn by uPlot.

import uPlot from "uplot";
import { $, colour, element, figure, onScreen, say, tick } from "./format.js";

const HEIGHT = 170;

class Chart {
  #plot = null;
  #data = null;
  #width = 200;

  constructor(id, label, colour, column, { stepped = false, unit = "" } = {}) {
    this.figure = $(id);
    this.place = element("div");
    this.caption = element("figcaption");
    this.figure.append(this.place, this.caption);
    Object.assign(this, { label, colour, column, stepped, unit });
    this.#width = Math.max(200, this.figure.clientWidth);
    new ResizeObserver(([{ contentRect }]) => {
      this.#width = Math.max(200, Math.round(contentRect.width));
      this.#plot?.setSize(this.#size());
    }).observe(this.figure);
    this.drawSoon = onScreen(this.figure, () => this.#draw());
  }

  #size() {
    return { width: this.#width, height: HEIGHT };
  }

  draw(history, more = {}) {
    const column = more.column || this.column;
    const label = more.label || this.label;
    const values = history[column];
    const last = values.findLast((value) => value !== null);
    say(this.caption, `${label} now: ${last === undefined ? "not known" : figure(last)} ${this.unit}`.trim());
    const [length, end] = [history.t.length, history.t.at(-1)];
    if (this.#data && this.#data.length === length && this.#data.end === end && this.#data.column === column) return;
    this.#data = { length, end, column, label, lines: [history.t, values] };
    this.drawSoon();
  }

  #draw() {
    const { label, lines } = this.#data;
    if (this.#plot) this.#plot.setData(lines);
    else if (lines[0].length) this.#plot = new uPlot(this.#options(label), lines, this.place);
  }

  redraw() {
    this.#plot?.redraw(false, true);
  }

  #options(label) {
    const axis = { stroke: () => colour("muted"), grid: { stroke: () => colour("line"), width: 1 }, ticks: { show: false } };
    const paths = this.stepped ? uPlot.paths.stepped({ align: 1 }) : undefined;
    return {
      ...this.#size(),
      legend: { show: false },
      cursor: { drag: { x: false, y: false } },
      scales: { y: { range: (_u, _low, high) => [0, high > 0 ? high * 1.1 : 1] } },
      axes: [{ ...axis, values: (_u, times) => times.map(tick) }, { ...axis, size: 52 }],
      series: [{}, { label, stroke: () => colour(this.colour), width: 2, paths, points: { show: false } }],
    };
  }
}

export class Charts {
  constructor() {
    this.size = new Chart("chart-size", "Workers", "ready", "world_size", { stepped: true });
    this.speed = new Chart("chart-speed", "Steps per second", "running", "steps_per_s");
    this.time = new Chart("chart-time", "Time of a step", "starting", "step_time", { unit: "s" });
  }

  redraw() {
    for (const chart of [this.size, this.speed, this.time]) chart.redraw();
  }

  draw(history) {
    const samples = history.samples_per_s.some((value) => value !== null);
    this.size.draw(history);
    this.speed.draw(history, samples ? { column: "samples_per_s", label: "Samples per second" } : {});
    this.time.draw(history);
  }
}
