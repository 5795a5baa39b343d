// The job as the messages of the driver tell it: rows, history and the lanes of workers.

const MOST_LANES = 200;
const MOST_SEGMENTS = 400;
const KEPT_S = 3600;
const COLUMNS = ["t", "world_size", "step", "steps_per_s", "samples_per_s", "step_time"];
const STATE_AFTER = {
  worker_started: "starting", worker_ready: "ready", spare_ready: "spare",
  spare_promoted: "ready", worker_left: "ending", worker_hung: "lost", worker_lost: "lost",
  worker_exited: null,
};
const GONE = ["stopped", "success", "failure"]; // such a worker's lane has ended

export class Model {
  constructor() {
    this.job = {};
    this.hosts = new Map();
    this.members = new Map();
    this.history = Object.fromEntries(COLUMNS.map((name) => [name, []]));
    this.lanes = new Map(); // by worker, or by host if there are many workers
    this.grouped = false;
    this.stacks = null;
    this.end = null;
    this.skew = 0; // seconds from this browser's clock to the driver's
  }

  /** The driver's time, in unix seconds. */
  now() {
    return this.end ? this.end.t : Date.now() / 1000 + this.skew;
  }

  takeStatus(status) {
    if (status.full) {
      this.hosts.clear();
      this.members.clear();
      for (const name of COLUMNS) this.history[name] = [];
    }
    Object.assign(this.job, status.job);
    merge(this.hosts, status.hosts);
    merge(this.members, status.members);
    const grouped = this.job.member_count > this.members.size;
    if (grouped !== this.grouped) this.lanes.clear();
    this.grouped = grouped;
    const now = this.now();
    if (grouped) {
      for (const [name, row] of this.hosts) this.#move(name, worst(row.states), now, name);
      this.#endOthers(this.hosts, now);
    } else {
      for (const [name, row] of this.members) {
        this.#move(name, GONE.includes(row.state) ? null : row.state, now, row.host, row.rank);
      }
      this.#endOthers(this.members, now);
    }
  }

  takeHistory(news) {
    const after = this.history.t.at(-1) ?? 0;
    const first = news.t.findIndex((t) => t > after);
    if (first < 0) return;
    for (const name of COLUMNS) this.history[name].push(...news[name].slice(first));
    const last = this.history.t.at(-1);
    const old = this.history.t.findIndex((t) => t >= last - KEPT_S);
    if (old > 60) for (const name of COLUMNS) this.history[name].splice(0, old);
  }

  takeEvents(events) {
    for (const event of events) {
      if (this.end && event.event === "job_started") this.end = null;
      if (event.event === "stacks_collected") this.stacks = event;
      if (event.event === "job_succeeded" || event.event === "job_failed") this.end = event;
      if (!this.grouped) this.#laneOf(event);
    }
  }

  #laneOf(event) {
    if (event.event === "round_completed") {
      for (const lane of this.lanes.values()) {
        if (["ready", "starting"].includes(lane.state)) this.#move(lane.name, "running", event.t);
      }
    } else if (event.worker && event.event in STATE_AFTER) {
      this.#move(event.worker, STATE_AFTER[event.event], event.t, event.host, event.rank);
      if (event.loss) this.#fail(event.worker, event.t);
    }
  }

  /** Mark that a worker has failed, once: the exit of one that hung follows. */
  #fail(name, t) {
    const failures = this.lanes.get(name)?.failures;
    if (failures?.length === 0) failures.push(t);
  }

  /** Record that a lane has another state from `t` on; null: it ends. */
  #move(name, state, t, host = "", rank = undefined) {
    let lane = this.lanes.get(name);
    if (!lane) {
      if (state === null) return;
      this.#makeRoom();
      lane = { name, host, rank, state: null, segments: [], failures: [] };
      this.lanes.set(name, lane);
    }
    if (host) lane.host = host;
    if (rank !== undefined) lane.rank = rank;
    if (lane.state === state) return;
    lane.state = state;
    lane.segments.push([t, state]);
    if (lane.segments.length > MOST_SEGMENTS) lane.segments.shift();
  }

  #endOthers(rows, now) {
    for (const lane of this.lanes.values()) if (!rows.has(lane.name)) this.#move(lane.name, null, now);
  }

  /** Forget the lane that ended first if there are too many. */
  #makeRoom() {
    if (this.lanes.size < MOST_LANES) return;
    for (const [name, lane] of this.lanes) {
      if (lane.state === null) {
        this.lanes.delete(name);
        return;
      }
    }
  }
}

function merge(rows, news) {
  for (const [name, row] of Object.entries(news)) {
    if (row === null) rows.delete(name);
    else rows.set(name, row);
  }
}

/** Return the state of a group of workers that matters most. */
function worst(states) {
  for (const state of ["lost", "failure", "stopping", "ending", "starting", "ready", "running", "spare"]) {
    if (states && states[state]) return state;
  }
  return null;
}
