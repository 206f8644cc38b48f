// The chat page of `kvrag serve`. It uses the server's public API alone: /v1/models, /v1/corpus, /v1/chat/completions.

const $ = (id) => document.getElementById(id);
const POLL_MS = 500;
const NAMED = 3; // documents named in the line above an answer's sources
const KEPT_TURNS = 4; // earlier turns that are sent with a question

let key = sessionStorage.getItem("kvrag-key") ?? "";
let models = { plain: "", rag: "" };
let samples = { documents: {}, questions: [], is_chat: true };
let turns = []; // {question, answer}
let races = []; // {blend, full: seconds to the first token, same}
let documents = [];
const uploads = new Map(); // name -> share sent, or the reason why it failed
const problems = new Map(); // name -> what was skipped or guessed in an uploaded file
let busy = null; // AbortController of the question that is being answered
let polling = false;

// ---------------------------------------------------------------- the server

class ServerError extends Error {
  constructor(message, status, code) {
    super(message);
    Object.assign(this, { status, code });
  }
}

const headers = () => (key ? { Authorization: `Bearer ${key}` } : {});

/** Send a request; throw a ServerError with the server's message for an error response. */
async function call(path, options = {}) {
  for (;;) {
    let response;
    try {
      response = await fetch(path, { ...options, headers: { ...headers(), ...options.headers } });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ServerError("The server does not answer. Check that it is still running.", 0);
    }
    if (response.ok) return response;
    const problem = await failure(response);
    if (problem.status !== 401) throw problem;
    await askForKey(problem.message);
  }
}

async function failure(response) {
  const body = await response.json().catch(() => null);
  const message = body?.error?.message ?? `The server answered with status ${response.status}.`;
  return new ServerError(message, response.status, body?.error?.code);
}

let asking = null; // the open dialog: several requests may need the key at once

function askForKey(reason) {
  asking ??= new Promise((resolve) => {
    const dialog = $("key-dialog");
    $("key-reason").textContent = key ? `The key was rejected: ${reason}` : "This server requires an API key.";
    dialog.addEventListener("close", () => {
      key = $("key").value.trim();
      sessionStorage.setItem("kvrag-key", key);
      asking = null;
      resolve();
    }, { once: true });
    dialog.showModal();
  });
  return asking;
}

/** Stream a chat completion: call `onEvent` with each event's object. */
async function stream(body, signal, onEvent) {
  const response = await call("v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ ...body, stream: true, temperature: 0 }),
    signal,
  });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new ServerError("The connection ended before the answer was complete.", 0);
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: ")) continue;
      if (line === "data: [DONE]") return;
      const event = JSON.parse(line.slice(6));
      if (event.error) throw new ServerError(event.error.message, 200, event.error.code);
      onEvent(event);
    }
  }
}

// ---------------------------------------------------------------- documents

const path = (name) => `v1/corpus/${name.split("/").map(encodeURIComponent).join("/")}`;
const isPending = (doc) => doc.status === "queued" || doc.status === "encoding";
const count = (number, noun) => `${number.toLocaleString("en")} ${noun}${number === 1 ? "" : "s"}`;

/** Read the list of documents, and repeat this while any of them is being encoded. */
async function refresh() {
  documents = (await (await call("v1/corpus?limit=10000")).json()).data;
  showDocuments();
  if (documents.some(isPending) && !polling) {
    polling = true;
    setTimeout(() => {
      polling = false;
      refresh().catch((error) => ($("summary").textContent = error.message));
    }, POLL_MS);
  }
}

function showDocuments() {
  const listed = new Map(documents.map((doc) => [doc.id, doc]));
  const rows = [...uploads].filter(([name]) => !isPending(listed.get(name) ?? {})).map(([name, state]) => {
    if (typeof state === "string") return row(name, state, null, true);
    return row(name, `uploading, ${Math.round(100 * state)} %`, state);
  });
  for (const doc of documents) {
    if (uploads.has(doc.id) && !isPending(doc)) continue;
    const share = doc.tokens ? doc.tokens_done / doc.tokens : null;
    const status = {
      ready: count(doc.chunks, "chunk"),
      queued: "waiting",
      encoding: share === null ? "encoding" : `encoding, ${Math.round(100 * share)} %`,
      failed: doc.error,
    };
    const item = row(doc.id, status[doc.status], doc.status === "encoding" ? share : null, doc.status === "failed");
    item.append(...(problems.get(doc.id) ?? []).map((text) => element("span", "status problem", text)));
    rows.push(item);
  }
  $("documents").replaceChildren(...rows);
  const pending = documents.filter(isPending).length;
  $("summary").textContent = pending ? `encoding, ${pending} left` : count(documents.length, "document");
  const known = Object.keys(samples.documents);
  $("samples").hidden = !known.length || documents.length > 0;
  const has = known.some((name) => listed.has(name));
  $("questions").hidden = !has;
  $("run-all").hidden = !has || !$("race").checked;
}

function row(name, status, share, failed = false) {
  const item = element("li");
  const remove = element("button", "", "×");
  remove.type = "button";
  remove.ariaLabel = remove.title = `Delete ${name}`;
  remove.addEventListener("click", () => drop(name, remove));
  item.append(element("span", "name", name), remove, element("span", failed ? "status failed" : "status", status));
  item.firstChild.title = name;
  if (share !== null) {
    const bar = element("progress");
    bar.value = share;
    item.append(bar);
  }
  return item;
}

async function drop(name, button) {
  button.disabled = true;
  const known = documents.some((doc) => doc.id === name);
  uploads.delete(name);
  problems.delete(name);
  try {
    if (known) await call(path(name), { method: "DELETE" });
  } catch (error) {
    if (error.status !== 404) uploads.set(name, error.message);
  }
  await refresh();
}

/** Upload [name, content] pairs sequentially. */
async function add(named) {
  for (const [name] of named) uploads.set(name, 0);
  showDocuments();
  for (const [name, content] of named) {
    try {
      const skipped = (await send(name, content)).problems;
      problems.set(name, skipped.map(({ line, message }) => (line === null ? message : `line ${line}: ${message}`)));
      uploads.delete(name);
    } catch (error) {
      uploads.set(name, error.message.replace(`${name}: `, "")); // the row begins with the name
    }
  }
  await refresh();
}

const chosen = (files) => add([...files].map((file) => [file.name, file]));

/** Upload a file, and return the response; XMLHttpRequest because fetch reports no progress. */
function send(name, content) {
  return new Promise((resolve, reject) => {
    const request = new XMLHttpRequest();
    request.open("PUT", path(name));
    for (const [field, value] of Object.entries(headers())) request.setRequestHeader(field, value);
    request.upload.addEventListener("progress", (event) => {
      uploads.set(name, event.loaded / event.total);
      showDocuments();
    });
    request.addEventListener("error", () => reject(new ServerError("The upload was cut off: try again.", 0)));
    request.addEventListener("load", async () => {
      if (request.status < 300) return resolve(JSON.parse(request.response));
      reject(await failure(new Response(request.response, { status: request.status })));
    });
    request.send(content);
  });
}

/** Wait until a document can be retrieved and no document is being encoded. */
async function ready(say, signal) {
  for (;;) {
    await refresh();
    if (!documents.some(isPending)) break;
    const left = documents.filter(isPending).length;
    say(`Waiting: ${count(left, "document")} left to encode. This happens once.`);
    await new Promise((resolve) => setTimeout(resolve, POLL_MS));
    signal.throwIfAborted();
  }
  if (!documents.some((doc) => doc.chunks)) {
    throw new ServerError("There are no documents yet: add one under Documents, or load the sample documents.", 0);
  }
}

// ---------------------------------------------------------------- questions

async function ask(question) {
  $("welcome").hidden = true;
  const turn = $("turn-template").content.cloneNode(true).firstElementChild;
  turn.querySelector(".asked").textContent = question;
  $("chat").append(turn);
  const blend = lane(turn, "kvrag", "");
  busy = new AbortController();
  showBusy();
  try {
    if (models.rag) await ready(blend.say, busy.signal);
    const messages = [
      ...(samples.is_chat ? turns.slice(-KEPT_TURNS) : []).flatMap((turn) => [
        { role: "user", content: `Question: ${turn.question}` },
        { role: "assistant", content: turn.answer },
      ]),
      { role: "user", content: question },
    ];
    const body = { model: models.rag || models.plain, messages };
    const first = await answer(blend, body, busy.signal, (hits) => showSources(turn, hits));
    turns.push({ question, answer: first.text });
    if ($("race").checked) {
      const full = lane(turn, "Full prefill", "full");
      const second = await answer(full, { ...body, policy: "full" }, busy.signal);
      judge(turn, blend, first, full, second);
    }
  } catch (error) {
    const last = [...turn.querySelectorAll(".lane")].at(-1);
    stopClock(last);
    const text = last.querySelector(".answer");
    if (error.name === "AbortError") {
      text.textContent += " (stopped)";
    } else {
      text.classList.add("problem");
      text.textContent = error.message;
    }
    return false;
  } finally {
    busy = null;
    showBusy();
  }
  return true;
}

function lane(turn, name, kind) {
  const box = $("lane-template").content.cloneNode(true).firstElementChild;
  if (kind) box.classList.add(kind);
  box.querySelector(".name").textContent = name;
  turn.querySelector(".lanes").append(box);
  follow();
  const say = (text) => {
    box.querySelector(".answer").textContent = text;
    follow();
  };
  return { box, say };
}

/** Stream one answer into a lane; drops the oldest turns when the conversation does not fit into the window. */
async function answer(into, body, signal, onSources = () => {}) {
  for (;;) {
    try {
      return await attempt(into, body, signal, onSources);
    } catch (error) {
      if (error.code !== "context_length_exceeded" || body.messages.length === 1) throw error;
      turns = turns.slice(1);
      body.messages.splice(0, 2);
    }
  }
}

async function attempt(into, body, signal, onSources) {
  const started = performance.now();
  let text = "";
  let seconds = null;
  let report = null;
  startClock(into.box, started);
  into.say("");
  await stream(body, signal, (event) => {
    if (event.citations) onSources(event.citations);
    report = event.kvrag ?? report;
    const piece = event.choices[0]?.delta?.content;
    if (!piece) return;
    if (seconds === null) {
      seconds = (performance.now() - started) / 1000;
      stopClock(into.box, seconds);
    }
    text += piece;
    into.say(text.trimStart());
  });
  if (seconds === null) {
    stopClock(into.box, (performance.now() - started) / 1000);
    into.say("(The model gave an empty answer.)");
  }
  const tokens = (number) => number.toLocaleString("en");
  into.box.querySelector(".detail").textContent =
    report.policy === "full"
      ? `${tokens(report.prompt_tokens)} prompt tokens, all computed`
      : `${tokens(report.prompt_tokens)} prompt tokens: ${tokens(report.reused_tokens)} reused, ` +
        `${tokens(report.recomputed_tokens)} of them recomputed`;
  return { text: text.trim(), seconds };
}

const clocks = new WeakMap();

function startClock(box, started) {
  const tick = () => {
    box.querySelector(".time").textContent = `${((performance.now() - started) / 1000).toFixed(1)} s`;
    clocks.set(box, requestAnimationFrame(tick));
  };
  stopClock(box);
  tick();
}

function stopClock(box, seconds) {
  cancelAnimationFrame(clocks.get(box));
  box.querySelector(".time").textContent = seconds === undefined ? "" : format(seconds);
}

const format = (seconds) => (seconds < 1 ? `${Math.round(1000 * seconds)} ms` : `${seconds.toFixed(2)} s`);
const median = (numbers) => {
  const sorted = numbers.toSorted((a, b) => a - b);
  const middle = sorted.length >> 1;
  return sorted.length % 2 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
};

function judge(turn, blend, first, full, second) {
  if (first.seconds === null || second.seconds === null) return;
  const slower = Math.max(first.seconds, second.seconds);
  blend.box.querySelector(".bar i").style.width = `${(100 * first.seconds) / slower}%`;
  full.box.querySelector(".bar i").style.width = `${(100 * second.seconds) / slower}%`;
  const same = first.text === second.text;
  const how = same ? "the same answer" : "the answers differ";
  const verdict = turn.querySelector(".verdict");
  verdict.textContent = `${ratio(first.seconds, second.seconds)}, ${how}`;
  verdict.hidden = false;
  races.push({ blend: first.seconds, full: second.seconds, same });
  showScore();
  follow();
}

const ratio = (blend, full) =>
  blend < full ? `First token ${(full / blend).toFixed(1)}x faster` : `Full prefill was ${(blend / full).toFixed(1)}x faster`;

function showScore() {
  $("score").hidden = !races.length;
  if (!races.length) return;
  const blend = median(races.map((race) => race.blend));
  const full = median(races.map((race) => race.full));
  const same = races.filter((race) => race.same).length;
  $("score-number").textContent = ratio(blend, full);
  $("score-text").textContent =
    `median of ${count(races.length, "question")}: ${format(blend)} against ${format(full)}; ` +
    `same answer to ${same} of ${races.length}`;
}

function sourceName(hit) {
  if (!hit.pages) return hit.document;
  const [first, last] = hit.pages;
  return `${hit.document} (${first === last ? `page ${first}` : `pages ${first}-${last}`})`;
}

function showSources(turn, hits) {
  const box = turn.querySelector(".sources");
  box.hidden = !hits.length;
  const names = [...new Set(hits.map((hit) => hit.document))];
  const others = names.length > NAMED + 1 ? ` and ${names.length - NAMED} other documents` : "";
  const named = (others ? names.slice(0, NAMED) : names).join(", ");
  box.querySelector("summary").textContent = `${count(hits.length, "chunk")} from ${named}${others}`;
  box.querySelector("ol").replaceChildren(...hits.map((hit) => {
    const item = element("li");
    const details = element("details");
    const summary = element("summary", "", `${sourceName(hit)} `);
    summary.append(element("span", "", hit.text.replace(/\s+/g, " ").slice(0, 90)));
    details.append(summary, element("p", "", hit.text));
    item.append(details);
    return item;
  }));
}

// ---------------------------------------------------------------- the page

function element(tag, name = "", text = "") {
  const created = document.createElement(tag);
  if (name) created.className = name;
  if (text) created.textContent = text;
  return created;
}

/** Scroll to the end, unless the reader has scrolled up. */
function follow() {
  const chat = $("chat");
  if (chat.scrollHeight - chat.scrollTop - chat.clientHeight < 240) chat.scrollTop = chat.scrollHeight;
}

function showBusy() {
  $("send").textContent = busy ? "Stop" : "Ask";
  for (const button of document.querySelectorAll("#questions button, #run-all, #clear")) button.disabled = !!busy;
}

function theme(name) {
  document.documentElement.dataset.theme = name;
  localStorage.setItem("kvrag-theme", name);
}

function listen() {
  $("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    if (busy) return busy.abort();
    const question = $("question").value.trim();
    if (!question) return;
    $("question").value = "";
    ask(question);
  });
  $("question").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    if (!busy) $("composer").requestSubmit();
  });
  $("question").addEventListener("input", (event) => {
    event.target.style.height = "auto";
    event.target.style.height = `${event.target.scrollHeight + 2}px`;
  });
  $("files").addEventListener("change", (event) => {
    chosen(event.target.files);
    event.target.value = "";
  });
  for (const kind of ["dragover", "dragleave", "drop"]) {
    $("drop").addEventListener(kind, (event) => {
      event.preventDefault();
      $("drop").classList.toggle("over", kind === "dragover");
      if (kind === "drop") chosen(event.dataTransfer.files);
    });
  }
  $("samples").addEventListener("click", () => {
    $("samples").hidden = true;
    add(Object.entries(samples.documents));
  });
  $("race").addEventListener("change", () => {
    $("note").hidden = !$("race").checked;
    showDocuments();
  });
  $("run-all").addEventListener("click", async () => {
    // without earlier turns, so that every prompt contains the same number of chunks and nothing else
    for (const question of samples.questions) {
      turns = [];
      if (!(await ask(question))) return;
    }
  });
  $("clear").addEventListener("click", () => {
    turns = [];
    races = [];
    document.querySelectorAll(".turn").forEach((turn) => turn.remove());
    $("welcome").hidden = false;
    showScore();
  });
  $("theme").addEventListener("click", () => {
    theme(document.documentElement.dataset.theme === "dark" ? "light" : "dark");
  });
  $("show-documents").addEventListener("click", (event) => {
    event.target.ariaExpanded = String($("sidebar").classList.toggle("open"));
  });
}

async function start() {
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  document.documentElement.dataset.theme = localStorage.getItem("kvrag-theme") ?? (dark ? "dark" : "light");
  listen();
  try {
    const names = (await (await call("v1/models")).json()).data.map((model) => model.id);
    models.plain = names[0];
    models.rag = names.find((name) => name === `${names[0]}-rag`) ?? "";
    $("model").textContent = models.plain;
    if (!models.rag) {
      $("sidebar").hidden = $("show-documents").hidden = true;
      document.body.classList.add("alone");
      return;
    }
    samples = await (await call("samples.json")).json();
    $("tiny").hidden = samples.is_chat;
    $("questions").append(...samples.questions.map((question) => {
      const button = element("button", "", question);
      button.type = "button";
      button.addEventListener("click", () => ask(question));
      return button;
    }));
    await refresh();
  } catch (error) {
    $("model").textContent = error.message;
  }
}

start();
