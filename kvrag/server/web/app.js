// The chat page of `kvrag serve`. It calls the server's public API only: /v1/models, /v1/corpus, /v1/checks,
// /v1/chat/completions.

const $ = (id) => document.getElementById(id);
const POLL_MS = 500;
const MAX_TURNS = 4; // earlier turns that are sent with a question
const FULL = { policy: "full" };
const BLENDED = { policy: "query", controller: "off", deterministic: true, edited_history: "exact" }; // no KV of the other lane

let key = sessionStorage.getItem("kvrag-key") ?? "";
let model = "";
let hasCorpus = false;
let isWarm = false;
let samples = { documents: [], questions: [], is_chat: true };
const turns = []; // the messages of each turn
let documents = [];
let poll = 0; // timer of the next refresh
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
    throw new Error(error?.message ?? `The server answered with status ${response.status}.`);
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
async function stream(body, onEvent) {
  const response = await call("v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ ...body, stream: true, temperature: 0 }),
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
const isPending = (doc) => doc.status === "queued" || doc.status === "encoding";
const isSample = ({ id }) => samples.documents.some((name) => id === name || id.endsWith(`/${name}`));
const count = (number, noun) => `${number.toLocaleString("en")} ${noun}${number === 1 ? "" : "s"}`;
const shortName = (name) => name.split("/").slice(-2).join("/"); // those of `kvrag warm` are absolute paths

/** Show the list of documents; repeat while documents are being encoded. */
async function refresh() {
  documents = (await (await call("v1/corpus?limit=10000")).json()).data;
  const pending = documents.filter(isPending);
  const others = documents.filter((doc) => !isPending(doc));
  $("documents").replaceChildren(...[...pending, ...others].map(documentRow));
  $("summary").textContent = pending.length ? `encoding, ${pending.length} left` : documents.length;
  $("questions").hidden = pending.length > 0 || !documents.some(isSample);
  clearTimeout(poll);
  if (pending.length) {
    poll = setTimeout(() => refresh().catch((error) => ($("summary").textContent = error.message)), POLL_MS);
  }
}

function documentRow(doc) {
  const statuses = { queued: "waiting", encoding: "encoding", ready: count(doc.chunks ?? 0, "chunk"), failed: doc.error };
  const row = fill("document", { name: shortName(doc.id), status: statuses[doc.status] });
  row.querySelector(".name").title = doc.id;
  row.querySelector(".status").classList.toggle("failed", doc.status === "failed");
  const remove = row.querySelector("button");
  remove.ariaLabel = remove.title = `Delete ${doc.id}`;
  remove.addEventListener("click", () => confirm(`Delete ${doc.id}?`) && drop(doc.id));
  const bar = row.querySelector("progress");
  bar.hidden = doc.status !== "encoding";
  bar.value = doc.tokens ? doc.tokens_done / doc.tokens : 0;
  for (const text of problems.get(doc.id) ?? []) row.append(fill("problem", { problem: text }));
  return row;
}

async function drop(name) {
  await call(path(name), { method: "DELETE" }).catch((error) => alert(error.message));
  problems.delete(name);
  await refresh();
}

/** Upload files, one after the other. */
async function add(files) {
  const failed = [];
  for (const file of files) {
    $("summary").textContent = `uploading ${file.name}`;
    try {
      const skipped = (await (await call(path(file.name), { method: "PUT", body: file })).json()).problems;
      const texts = skipped.map(({ line, message }) => (line === null ? message : `line ${line}: ${message}`));
      problems.set(file.name, texts);
    } catch (error) {
      failed.push(`${file.name}: ${error.message}`);
    }
  }
  await refresh();
  if (failed.length) alert(failed.join("\n"));
}

/** Wait until a document can be retrieved; return how many documents are not encoded yet. */
async function ready(say) {
  for (;;) {
    await refresh();
    const pending = documents.filter(isPending);
    if (documents.some((doc) => doc.chunks)) return pending.length;
    if (!pending.length) throw new Error("There are no documents yet: add one under Documents.");
    say(`Waiting: ${count(pending.length, "document")} left to encode. This happens once.`);
    await new Promise((resolve) => setTimeout(resolve, POLL_MS));
    busy.signal.throwIfAborted();
  }
}

// ---------------------------------------------------------------- questions

/** Answer a question; if the race is on, again with full prefill, or blended if full prefill was used. */
async function ask(question) {
  await started;
  $("welcome").hidden = true;
  const turn = fill("turn", { asked: question });
  $("turns").append(turn);
  let lane = addLane(turn, "kvrag");
  setBusy(new AbortController());
  try {
    const missing = hasCorpus ? await ready(lane.say) : 0;
    const earlier = samples.is_chat ? turns.slice(-MAX_TURNS).flat() : [];
    const body = { model, messages: [...earlier, { role: "user", content: question }] };
    if (hasCorpus && !isWarm && $("race").checked) {
      lane.say("Warming up: the first answer of a server takes longer.");
      const first = { model, messages: [{ role: "user", content: "What is this about?" }], max_tokens: 1, policy: "none" };
      await stream(first, () => {});
      isWarm = true;
    }
    const first = await answer(lane, body, (hits) => showSources(turn, hits));
    if (missing) lane.part("detail").append(`; without ${count(missing, "document")} still to encode`);
    turns.push([{ role: "user", content: `Question: ${question}` }, { role: "assistant", content: first.text }]);
    if ($("race").checked) {
      lane = addLane(turn, first.isFull ? "Blended" : "Full prefill");
      judge(turn, first, await answer(lane, { ...body, ...(first.isFull ? BLENDED : FULL) }));
    }
  } catch (error) {
    lane.part("detail").textContent = error.name === "AbortError" ? "Stopped" : error.message;
    if (error.name === "AbortError") return;
    lane.part("detail").classList.add("problem"); // below what has arrived of the answer
    $("question").value ||= question;
  } finally {
    setBusy(null);
    showChecks();
  }
}

/** Show how many of the latest checked answers full prefill confirms. */
async function showChecks() {
  const checks = await call("v1/checks").then((response) => response.json()).catch(() => ({}));
  $("checks").textContent = checks.text ?? "";
}

/** Add the lane of an answer to a turn. */
function addLane(turn, name) {
  const box = fill("lane", { name });
  turn.querySelector(".lanes").append(box);
  const part = (name) => box.querySelector(`.${name}`);
  return { box, part, say: (text) => (part("answer").textContent = text) };
}

/** Stream an answer into a lane. */
async function answer(lane, body, onSources = () => {}) {
  const started = performance.now();
  const passed = () => (performance.now() - started) / 1000;
  let text = "";
  let seconds = null; // to the first token
  let report = null;
  let end = null;
  const clock = setInterval(() => (lane.part("time").textContent = format(seconds ?? passed())), 100);
  lane.say("");
  try {
    await stream(body, (event) => {
      if (event.citations) onSources(event.citations);
      report = event.kvrag ?? report;
      end = event.choices[0]?.finish_reason ?? end;
      const { content = "", reasoning_content: thought = "" } = event.choices[0]?.delta ?? {};
      if (!content && !thought) return;
      seconds ??= passed();
      text += content;
      lane.part("thought").hidden &&= !thought;
      lane.part("thought").lastElementChild.append(thought);
      lane.say(text.trim());
    });
  } finally {
    clearInterval(clock);
  }
  const whole = passed();
  lane.part("time").textContent = format(seconds ?? whole);
  lane.part("total").textContent = `whole answer ${format(whole)}`;
  lane.part("detail").textContent = summary(report, end, body.policy);
  const isFull = report.policy === "full";
  lane.box.classList.toggle("full", isFull);
  if (!text) lane.say("(The model gave an empty answer.)");
  const isKept = report.conversation_tokens > report.prompt_tokens / 2;
  return { text: text.trim(), seconds: seconds ?? whole, whole, isKept, isFull };
}

/** Return what was reused for an answer and, unless its policy was chosen here, why not more. */
function summary(report, end, policy) {
  const tokens = (name) => report[`${name}_tokens`].toLocaleString("en");
  const share = Math.round((100 * report.reused_tokens) / Math.max(1, report.prompt_tokens));
  const computed = `${tokens("reused")} reused (${share} %), ${tokens("recomputed")} stored but recomputed`;
  const isNew = report.policy === "full" && !report.conversation_tokens;
  const more = report.completed ? "the rest" : "more";
  const doubt = report.completed ?? report.deepened;
  return [
    `${tokens("prompt")} prompt tokens: ${isNew ? "all computed" : computed}`,
    report.conversation_tokens && `${tokens("conversation")} kept from the conversation`,
    doubt && `unsure after ${count(doubt.token, "token")}, so ${more} was recomputed first`,
    ...(policy ? [] : [report.decision, ...report.notes]),
    end === "length" && "stopped at the token limit (--max-tokens)",
  ].filter(Boolean).join("; ");
}

const format = (seconds) => (seconds < 1 ? `${Math.round(1000 * seconds)} ms` : `${seconds.toFixed(2)} s`);

/** Compare the two answers of a turn. */
function judge(turn, first, second) {
  const slow = Math.max(first.seconds, second.seconds);
  const bars = turn.querySelectorAll(".bar");
  [first, second].forEach(({ seconds }, number) => (bars[number].value = seconds / slow));
  const [ours, full] = first.isFull ? [second, first] : [first, second];
  turn.querySelector(".verdict").textContent = [
    `${first.isFull ? "Blended: first" : "First"} token ${format(ours.seconds)} instead of ${format(full.seconds)}`,
    `whole answer ${format(ours.whole)} instead of ${format(full.whole)}`,
    ours.isKept && "most of the prompt was kept from the conversation",
    first.text === second.text ? "the same answer" : "the answers differ",
  ].filter(Boolean).join("; ");
}

/** Show the retrieved chunks of an answer, best first. */
function showSources(turn, hits) {
  const names = new Set(hits.map((hit) => hit.document));
  const box = turn.querySelector(".sources");
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
  $("questions").disabled = !!busy;
}

function listen() {
  $("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    if (busy) return busy.abort();
    const question = $("question").value.trim();
    $("question").value = "";
    if (question) ask(question);
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
  $("sidebar").open = innerWidth > 760; // else it covers the chat, as in style.css
  try {
    const names = (await (await call("v1/models")).json()).data.map((model) => model.id);
    $("model").textContent = model = names[0];
    showChecks();
    samples = await (await call("samples.json")).json();
    hasCorpus = names.includes(`${model}-rag`);
    if (!hasCorpus) {
      $("sidebar").hidden = true;
      document.body.classList.add("alone");
      return;
    }
    model = `${model}-rag`;
    $("tiny").hidden = samples.is_chat;
    $("questions").append(...samples.questions.map((question) => {
      const button = fill("question", { suggestion: question });
      button.addEventListener("click", () => ask(question));
      return button;
    }));
    await refresh();
  } catch (error) {
    $("model").textContent = error.message;
  }
}

const started = start();
