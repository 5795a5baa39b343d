// The page: it logs in, follows the job and draws what has changed, at most once a frame.

import { Charts } from "./charts.js";
import { $, counted, element, forgetColours, say } from "./format.js";
import { drawLanes, drawLegend } from "./lanes.js";
import { follow, logIn, logOut, post, role } from "./live.js";
import { Model } from "./model.js";
import { drawEvents, drawGoodput, drawHosts, drawMembers, drawPoints, drawStacks, drawTiles } from "./tables.js";

let model = new Model();
let charts = null;
let mayAct = false;
let planned = false;
let newEvents = [];
let stacksAsked = false;

// ---- drawing -------------------------------------------------------------------------------

function draw() {
  planned = false;
  $("job").hidden = false;
  charts ??= new Charts();
  const { job, end } = model;
  const state = end ? end.event.replace("job_", "") : job.state || "…";
  say($("run"), job.run_id || "elastic-driver");
  say($("state"), state);
  say($("why"), (end && end.reason) || job.reason || "");
  document.title = `${job.run_id || "elastic-driver"}: ${state}, ${counted(job.size ?? 0, "worker")}`;
  $("controls").hidden = !mayAct || Boolean(end);
  drawTiles(model);
  drawGoodput(model);
  charts.draw(model.history);
  drawLanes(model);
  drawHosts(model, dressHost);
  drawMembers(model);
  drawPoints(model);
  if (newEvents.length) drawEvents(newEvents);
  newEvents = [];
  if (model.stacks) {
    drawStacks(model.stacks);
    if (stacksAsked) $("stacks-head").focus();
    stacksAsked = false;
  }
  model.stacks = null;
}

function drawSoon() {
  if (planned) return;
  planned = true;
  requestAnimationFrame(draw);
}

/** Show the button that fits the state of a host: drain it, or undo that. */
function dressHost(cells, host) {
  const cell = cells[10];
  const { state } = model.hosts.get(host);
  const undo = state === "draining" || state === "drained";
  if (!mayAct || model.end || state === "removed") {
    cell.replaceChildren();
    return;
  }
  let button = cell.firstElementChild;
  if (!button) {
    button = element("button");
    button.type = "button";
    cell.append(button);
  }
  const text = undo ? "Undo drain" : "Drain";
  if (button.textContent === text) return;
  say(button, text);
  button.setAttribute("aria-label", `${undo ? "Undo the drain of" : "Drain"} host ${host}`);
  button.onclick = () => (undo ? undrain(host) : drain(host));
}

// ---- requests ------------------------------------------------------------------------------

const hostPath = (host, verb) => `/v1/hosts/${encodeURIComponent(host)}:${verb}`;

const act = (path, body = {}) => tried(() => post(path, body));

/** Do it and return true, or show the problem. */
async function tried(work) {
  $("problem").hidden = true;
  try {
    await work();
    return true;
  } catch (error) {
    say($("problem"), error.message);
    $("problem").hidden = false;
    return false;
  }
}

function confirmed(question, yes) {
  const dialog = $("confirm");
  say($("confirm-text"), question);
  say($("confirm-yes"), yes);
  dialog.returnValue = "no";
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => resolve(dialog.returnValue === "yes"), { once: true });
  });
}

/** Say what was asked for; `undo` takes it back. */
function tell(text, undo = null) {
  say($("told-text"), text);
  $("undo").hidden = !undo;
  $("undo").onclick = undo;
}

async function undrain(host) {
  if (await act(hostPath(host, "undrain"))) tell(`Host ${host} may be used again.`);
}

async function scale(workers) {
  const { wanted, max_np: most, size } = model.job;
  const before = wanted ?? most ?? size;
  if (!(await act("/v1/scale", { num_proc: workers }))) return;
  $("scale-to").value = String(workers);
  const all = model.hosts.size === model.job.host_count;
  const slots = [...model.hosts.values()].reduce((sum, row) => sum + (row.state === "usable" ? row.slots : 0), 0);
  const rest = all && slots < workers ? ` The usable hosts have ${counted(slots, "slot")} now; the others wait for more.` : "";
  tell(`${counted(workers, "worker is", "workers are")} wanted.${rest}`, before !== workers && (() => scale(before)));
}

async function drain(host) {
  const usable = [...model.hosts].filter(([, row]) => row.state === "usable");
  const last = usable.length === 1 && usable[0][0] === host && model.job.host_count === model.hosts.size;
  if (last && !(await confirmed(`${host} is the only usable host: without it the job waits for another.`, "Drain it"))) return;
  if (await act(hostPath(host, "drain"), { reason: "asked for on the page" })) {
    tell(`Host ${host} is being drained.`, () => undrain(host));
  }
}

function listen() {
  $("scale").addEventListener("submit", (event) => {
    event.preventDefault();
    scale(Number($("scale-to").value));
  });
  $("ask-stacks").addEventListener("click", async () => {
    stacksAsked = await act("/v1/stacks", { reason: "asked for on the page" });
    if (stacksAsked) tell("The workers are asked for their stacks; they come at the end of the page.");
  });
  $("stop").addEventListener("click", async () => {
    if (await confirmed("Stop the job? Its workers end now; this cannot be undone.", "Stop it")) {
      if (await act("/v1/stop", { reason: "asked for on the page" })) tell("The job is stopping.");
    }
  });
  $("numbers").addEventListener("toggle", () => drawPoints(model));
  $("login").addEventListener("submit", async (event) => {
    event.preventDefault();
    const token = $("token").value.trim().split("\n")[0];
    if (await tried(() => logIn({ token }))) begin();
  });
  $("logout").addEventListener("click", async () => {
    if (await tried(logOut)) location.reload();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    forgetColours();
    charts?.redraw();
    if (charts) drawSoon();
  });
}

// ---- the job -------------------------------------------------------------------------------

const on = {
  hello: (data) => {
    mayAct = data.role !== "reader";
    model = new Model();
    if (data.now) model.skew = data.now - Date.now() / 1000;
    newEvents = [];
    $("events").replaceChildren();
    $("logout").hidden = false;
  },
  status: (data) => {
    model.takeStatus(data);
    const { min_np: least, max_np: most, wanted, size } = model.job;
    $("scale-to").min = String(least || 1);
    if (most) $("scale-to").max = String(most);
    if (!$("scale-to").value) $("scale-to").value = String(wanted || size || least || 1);
    drawSoon();
  },
  history: (data) => {
    model.takeHistory(data);
    drawSoon();
  },
  events: (data) => {
    model.takeEvents(data);
    newEvents.push(...data);
    drawSoon();
  },
  end: () => {
    if (model.end) say($("link"), "The job is over; this is its last picture");
    drawSoon();
    return Boolean(model.end); // else another driver may go on with it
  },
  linked: (text) => say($("link"), text || "Live"),
  refused: () => showLogin(),
};

function showLogin() {
  $("job").hidden = true;
  $("login").hidden = false;
  say($("link"), "Not logged in");
  $("token").focus();
}

async function begin() {
  $("login").hidden = true;
  $("token").value = "";
  await follow(on);
}

/** Show a job that is over, from the data in this file. */
function showReport(report) {
  on.hello({ role: "reader" });
  $("logout").hidden = true;
  model.takeEvents(report.events);
  newEvents = report.events;
  model.end ??= { ...report.events.at(-1), event: `job_${report.state}`, reason: report.reason };
  model.takeStatus({ full: true, job: report.job, hosts: {}, members: {} });
  model.takeHistory(report.history);
  say($("link"), "A report: nothing here is live");
  for (const id of ["hosts-head", "members-head", "speed-head", "time-head"]) $(id).closest("section").hidden = true;
  draw();
}

async function start() {
  listen();
  drawLegend();
  const report = $("report");
  if (report) return showReport(JSON.parse(report.textContent));
  const code = /^#code=([\w-]+)$/.exec(location.hash);
  if (code) {
    history.replaceState(null, "", "/");
    if (await tried(() => logIn({ code: code[1] }))) return begin();
  }
  return (await role()) ? begin() : showLogin();
}

start();
