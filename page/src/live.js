// The connection to the driver: its stream of events, and requests that change something.

const WAITS_S = [1, 2, 4, 8];
const STORED = "elastic";

// The key of this tab's session, which goes with each request. The cookie alone opens nothing: a browser sends it
// to all servers of this host's name, but what is stored here belongs to this server's address alone.
let key = "";

/** Keep the key of a session, or with "" forget it. */
function keep(given) {
  key = given;
  try {
    if (given) sessionStorage.setItem(STORED, given);
    else sessionStorage.removeItem(STORED);
  } catch {
    // The browser stores nothing: the session lasts until the page is left.
  }
}

function stored() {
  try {
    return sessionStorage.getItem(STORED) || "";
  } catch {
    return "";
  }
}

/** Send a request with the key. */
function ask(path, options = {}) {
  return fetch(path, { ...options, headers: { ...options.headers, "X-Elastic": key || "page" } });
}

/** Send JSON and return the answer's document; throws an Error with the driver's own words. */
export async function post(path, body = {}) {
  const headers = { "Content-Type": "application/json" };
  const answer = await ask(path, { method: "POST", headers, body: JSON.stringify(body) });
  if (answer.ok) return answer.status === 204 ? null : answer.json();
  const problem = (await answer.json().catch(() => ({}))).error || {};
  const words = [problem.message || `the driver answered ${answer.status}`, problem.hint];
  throw Object.assign(new Error(words.filter(Boolean).join("; ")), { status: answer.status });
}

/** Begin a session with `{token}` or `{code}`; throws as `post` does. */
export async function logIn(given) {
  keep((await post("/login", given)).key);
}

/** End the sessions of this browser. */
export async function logOut() {
  await post("/logout");
  keep("");
}

/** Return the role of this tab's session, or null. */
export async function role() {
  key = stored();
  return key ? (await (await ask("/login")).json()).role : null;
}

/**
 * Read the stream until the job is over, and begin again when the connection breaks.
 * `on` has a function for each kind of message, `linked(text)`, and `refused()`: no session.
 * `end` returns whether the job is over.
 * While nobody sees the page, the stream is closed.
 */
export async function follow(on) {
  for (let tries = 0; ; ) {
    await visible();
    const leave = new AbortController();
    const hide = () => document.hidden && leave.abort();
    document.addEventListener("visibilitychange", hide);
    try {
      const answer = await ask("/v1/live", { signal: leave.signal });
      if (answer.status === 401) {
        keep("");
        return on.refused();
      }
      if (!answer.ok) throw new Error(`the driver answered ${answer.status}`);
      on.linked("");
      for await (const [kind, data] of messages(answer.body)) {
        tries = 0;
        const over = on[kind]?.(data);
        if (kind === "end" && over) return undefined;
      }
    } catch {
      // Told below; the next try may succeed, as the driver may be another one by then.
    } finally {
      document.removeEventListener("visibilitychange", hide);
    }
    if (!document.hidden) {
      const wait = WAITS_S[Math.min(tries++, WAITS_S.length - 1)];
      on.linked(`The driver does not answer; trying again in ${wait} s`);
      await new Promise((resolve) => setTimeout(resolve, wait * 1000));
    }
  }
}

function visible() {
  if (!document.hidden) return Promise.resolve();
  return new Promise((resolve) => {
    document.addEventListener("visibilitychange", resolve, { once: true });
  }).then(visible);
}

async function* messages(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = ""; ; ) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const found = /^event: (\w+)\ndata: (.*)$/s.exec(part);
      if (found) yield [found[1], JSON.parse(found[2])];
    }
  }
}
