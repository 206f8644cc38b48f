// A chat page for `kvrag serve --page examples/chat`. It calls the server's public API only: /v1/models, /v1/corpus,
// /v1/checks, /v1/chat/completions.

const $ = (id) => document.getElementById(id);
const MAX_TURNS = 4; // earlier turns that are sent with a question

let key = sessionStorage.getItem("kvrag-key") ?? "";
let model = "";
let isTiny = false; // the bundled model, which answers single questions only
const turns = []; // the messages of each turn
const problems = new Map(); // name -> warnings about an uploaded file
let busy = null; // AbortController of the current question

// ---------------------------------------------------------------- the server

/** Send a request, asking for the API key if needed; throw an error response. */
async function call(path, options = {}) {
  for (;;) {
    const headers = key ? { ...options.headers, Authorization: `Bearer ${key}` } : options.headers;
    const response = await fetch(path, { ...options, headers }).catch((error) => {
      if (error.name === "AbortError") throw error;
      throw new Error("The server does not answer. Check that it is still running.");
    });
    if (response.ok) return response;
    if (response.status === 401) {
      askForKey();
      continue;
    }
    const error = (await response.json().catch(() => null))?.error;
    const message = error?.message ?? `The server answered with status ${response.status}.`;
    throw Object.assign(new Error(message), { status: response.status });
  }
}

/** Ask for the API key, and keep it for this tab. */
function askForKey() {
  const reason = key ? "The server does not know this key. Try another one." : "This server requires an API key.";
  const entered = prompt(reason)?.trim();
  if (!entered) throw new Error("This server requires an API key: reload the page to enter it.");
  sessionStorage.setItem("kvrag-key", (key = entered));
}

/** Stream a chat completion: call `onEvent` with each event's object. */
async function stream(messages, onEvent) {
  const response = await call("v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ model, messages, stream: true, temperature: 0 }),
    signal: busy.signal,
  });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new Error("The connection ended before the answer was complete.");
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: ")) continue;
      if (line === "data: [DONE]") return;
      const event = JSON.parse(line.slice(6));
      if (event.error) throw new Error(event.error.message);
      onEvent(event);
    }
  }
}

// ---------------------------------------------------------------- documents

const path = (name) => `v1/corpus/${name.split("/").map(encodeURIComponent).join("/")}`;
const count = (number, noun) => `${number.toLocaleString("en")} ${noun}${number === 1 ? "" : "s"}`;
const shortName = (name) => name.split("/").slice(-2).join("/"); // those of `kvrag warm` are absolute paths

async function showDocuments() {
  const documents = (await (await call("v1/corpus?limit=10000")).json()).data;
  $("documents").replaceChildren(...documents.map(documentRow));
  $("summary").textContent = documents.length;
}

function documentRow(doc) {
  const row = fill("document", { name: shortName(doc.id), status: count(doc.chunks, "chunk") });
  row.querySelector(".name").title = doc.id;
  const remove = row.querySelector("button");
  remove.ariaLabel = remove.title = `Delete ${doc.id}`;
  remove.addEventListener("click", () => confirm(`Delete ${doc.id}?`) && drop(doc.id));
  for (const text of problems.get(doc.id) ?? []) row.append(fill("problem", { problem: text }));
  return row;
}

async function drop(name) {
  await call(path(name), { method: "DELETE" }).catch((error) => alert(error.message));
  problems.delete(name);
  await showDocuments();
}

/** Upload files, one after the other. */
async function add(files) {
  const failed = [];
  for (const file of files) {
    $("summary").textContent = `encoding ${file.name}`;
    try {
      const skipped = (await (await upload(file)).json()).problems;
      const texts = skipped.map(({ line, message }) => (line === null ? message : `line ${line}: ${message}`));
      problems.set(file.name, texts);
    } catch (error) {
      failed.push(`${file.name}: ${error.message}`);
    }
    await showDocuments();
  }
  if (failed.length) alert(failed.join("\n"));
}

/** Upload a file; again if it takes longer than the server's limit, since the server then continues. */
async function upload(file) {
  for (;;) {
    try {
      return await call(path(file.name), { method: "PUT", body: file });
    } catch (error) {
      if (error.status !== 504) throw error;
    }
  }
}

// ---------------------------------------------------------------- questions

async function ask(question) {
  $("welcome").hidden = true;
  const turn = fill("turn", { asked: question });
  $("turns").append(turn);
  setBusy(new AbortController());
  try {
    const earlier = isTiny ? [] : turns.slice(-MAX_TURNS).flat();
    const text = await answer(turn, [...earlier, { role: "user", content: question }]);
    turns.push([{ role: "user", content: `Question: ${question}` }, { role: "assistant", content: text }]);
  } catch (error) {
    const detail = turn.querySelector(".detail"); // below what has arrived of the answer
    detail.textContent = error.name === "AbortError" ? "Stopped" : error.message;
    detail.classList.toggle("problem", error.name !== "AbortError");
    $("question").value ||= error.name === "AbortError" ? "" : question;
  } finally {
    setBusy(null);
    await showChecks();
  }
}

/** Stream an answer into a turn; return its text. */
async function answer(turn, messages) {
  const part = (name) => turn.querySelector(`.${name}`);
  let text = "";
  let report = null;
  await stream(messages, (event) => {
    if (event.citations) showSources(part("sources"), event.citations);
    report = event.kvrag ?? report;
    const { content = "", reasoning_content: thought = "" } = event.choices[0]?.delta ?? {};
    text += content;
    part("thought").hidden &&= !thought;
    part("thought").lastElementChild.append(thought);
    part("answer").textContent = text.trim();
  });
  const tokens = (name) => report[`${name}_tokens`].toLocaleString("en");
  const share = Math.round((100 * report.reused_tokens) / Math.max(1, report.prompt_tokens));
  const used = `${tokens("reused")} reused (${share} %), ${tokens("recomputed")} stored but recomputed`;
  part("detail").textContent = [`${tokens("prompt")} prompt tokens: ${used}`, ...report.notes].join("; ");
  if (!text) part("answer").textContent = "(The model gave an empty answer.)";
  return text.trim();
}

/** Show in a sentence how many answers full prefill confirms. */
async function showChecks() {
  const checks = await call("v1/checks").then((response) => response.json()).catch(() => ({}));
  $("checks").textContent = checks.text ?? "";
}

/** Show the retrieved chunks of an answer, best first. */
function showSources(box, hits) {
  const names = new Set(hits.map((hit) => hit.document));
  box.hidden = !hits.length;
  box.querySelector("summary").textContent = `${count(hits.length, "chunk")} from ${count(names.size, "document")}`;
  box.querySelector("ol").replaceChildren(...hits.map(({ document, pages, text }) => {
    const where = pages ? ` (p. ${[...new Set(pages)].join("-")})` : "";
    return fill("source", { where: shortName(document) + where, text });
  }));
}

// ---------------------------------------------------------------- the page

/** Copy a template, and set the texts of its elements by class. */
function fill(name, texts) {
  const copy = $(`${name}-template`).content.cloneNode(true).firstElementChild;
  for (const [part, text] of Object.entries(texts)) {
    (copy.matches(`.${part}`) ? copy : copy.querySelector(`.${part}`)).textContent = text;
  }
  return copy;
}

function setBusy(controller) {
  busy = controller;
  $("send").textContent = busy ? "Stop" : "Ask";
}

function listen() {
  $("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    if (busy) return busy.abort();
    const question = $("question").value.trim();
    $("question").value = "";
    if (question) started.then(() => ask(question));
  });
  $("question").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    if (!busy) $("composer").requestSubmit();
  });
  $("files").addEventListener("change", (event) => {
    add([...event.target.files]);
    event.target.value = "";
  });
}

async function start() {
  listen();
  try {
    const names = (await (await call("v1/models")).json()).data.map((model) => model.id);
    $("model").textContent = model = names[0];
    $("tiny").hidden = !(isTiny = model === "reader");
    $("sidebar").hidden = !names.includes(`${model}-rag`);
    if ($("sidebar").hidden) return;
    model = `${model}-rag`;
    await showDocuments();
  } catch (error) {
    $("model").textContent = error.message;
  }
}

const started = start();
