// The chat page of `kvrag serve`. It calls the server's public API only: /v1/models, /v1/corpus, /v1/checks,
// /v1/chat/completions.

import { markdown } from "./markdown.js";

const $ = (id) => document.getElementById(id);
const POLL_MS = 500;
const MAX_TURNS = 4; // earlier turns that are sent with a question
const UNDO_MS = 5000;
const WAIT_MS = 1000; // without a token, until an answer says so
const MAX_SOURCES = 8; // shown of an answer
const MARK = "\uE000$&\uE001"; // marks a token, in Markdown
const FULL = { policy: "full" };
const BLENDED = { policy: "query", controller: "off", deterministic: true, history: "exact" }; // no KV of the other lane

let key = sessionStorage.getItem("kvrag-key") ?? "";
let model = "";
let hasCorpus = false;
let samples = { documents: [], questions: [], is_chat: true };
const turns = []; // {question, raced, lanes, sources}, lanes as returned by `answer`; kept in the tab until "New chat"
let documents = [];
let poll = 0; // timer of the next refresh
const uploads = new Map(); // name -> the error of a failed upload, or "" while it is sent
const added = []; // names of uploaded files, the newest first
const problems = new Map(); // name -> warnings about an uploaded file
const removed = new Map(); // name -> timer of the deletion, which can be undone until then
let busy = null; // AbortController of the current question
const dropping = new Set(); // names whose deletion has begun

// ---------------------------------------------------------------- the server

const failure = (message, status = 0, code = "") => Object.assign(new Error(message), { status, code });

/** Send a request, asking for the API key if needed; throw an error response as a `failure`. */
async function call(path, options = {}) {
  for (;;) {
    const headers = key ? { ...options.headers, Authorization: `Bearer ${key}` } : options.headers;
    const response = await fetch(path, { ...options, headers }).catch((error) => {
      if (error.name === "AbortError") throw error;
      throw failure("The server does not answer. Check that it is still running.");
    });
    if (response.ok) return response;
    if (response.status === 401) {
      await askForKey();
      continue;
    }
    const error = (await response.json().catch(() => null))?.error;
    throw failure(error?.message ?? `The server answered with status ${response.status}.`, response.status, error?.code);
  }
}

/** Show the key dialog; several requests may wait for it at once. */
function askForKey() {
  const dialog = $("key-dialog");
  $("key-reason").textContent = key ? "The server does not know this key. Try another one." : "This server requires an API key.";
  if (!dialog.open) dialog.showModal();
  return new Promise((resolve) => dialog.addEventListener("close", () => {
    key = $("key").value.trim();
    sessionStorage.setItem("kvrag-key", key);
    resolve();
  }, { once: true }));
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
    if (done) throw failure("The connection ended before the answer was complete.");
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: ")) continue;
      if (line === "data: [DONE]") return;
      const event = JSON.parse(line.slice(6));
      if (event.error) throw failure(event.error.message, 200, event.error.code);
      onEvent(event);
    }
  }
}

// ---------------------------------------------------------------- documents

const path = (name) => `v1/corpus/${name.split("/").map(encodeURIComponent).join("/")}`;
const isPending = (doc) => doc.status === "queued" || doc.status === "encoding";
const isSample = ({ id }) => samples.documents.some((name) => id === name || id.endsWith(`/${name}`));
const count = (number, noun) => `${number.toLocaleString("en")} ${noun}${number === 1 ? "" : "s"}`;

/** Read the list of documents; repeat while documents are being encoded. */
async function refresh() {
  documents = (await (await call("v1/corpus?limit=10000")).json()).data;
  showDocuments();
  clearTimeout(poll);
  if (documents.some(isPending)) {
    poll = setTimeout(() => refresh().catch((error) => ($("summary").textContent = error.message)), POLL_MS);
  }
}

function showDocuments() {
  const pending = documents.filter(isPending);
  const sent = [...uploads].filter(([name]) => !pending.some((doc) => doc.id === name));
  const listed = documents.filter((doc) => !uploads.has(doc.id) || isPending(doc));
  const uploading = sent.map(([id, error]) => ({ id, error, status: error ? "failed" : "uploading" }));
  const stage = (doc) => (doc.status === "encoding" ? 0 : isPending(doc) ? 1 : 2);
  const age = (doc) => (added.includes(doc.id) ? added.indexOf(doc.id) : added.length);
  listed.sort((a, b) => stage(a) - stage(b) || age(a) - age(b));
  $("documents").replaceChildren(...[...uploading, ...listed].map(documentRow));
  $("summary").textContent = pending.length ? `encoding, ${pending.length} left` : documents.length;
  $("questions").hidden = !documents.some(isSample);
}

/** Return a document's name without the folder that contains all documents with absolute names. */
function shortName(name) {
  const folders = documents.filter(({ id }) => id.startsWith("/")).map(({ id }) => id.slice(0, id.lastIndexOf("/") + 1));
  let common = folders[0] ?? "";
  while (!folders.every((folder) => folder.startsWith(common))) common = common.replace(/[^/]*\/$/, "");
  return name.startsWith(common) ? name.slice(common.length) : name;
}

function documentRow(doc) {
  const share = doc.status === "encoding" && doc.tokens ? doc.tokens_done / doc.tokens : null;
  const statuses = {
    uploading: "uploading",
    queued: "waiting",
    encoding: share === null ? "encoding" : `encoding, ${Math.round(100 * share)} %`,
    ready: count(doc.chunks ?? 0, "chunk"),
    failed: doc.error,
  };
  const isGone = removed.has(doc.id);
  const row = fill("document", { name: shortName(doc.id), status: isGone ? "deleted" : statuses[doc.status] });
  row.querySelector(".name").title = doc.id;
  row.classList.toggle("gone", isGone);
  row.querySelector(".status").classList.toggle("failed", doc.status === "failed");
  const remove = row.querySelector("button");
  remove.textContent = isGone ? "Undo" : "×";
  remove.disabled = dropping.has(doc.id);
  remove.ariaLabel = remove.title = `${isGone ? "Keep" : "Delete"} ${doc.id}`;
  remove.addEventListener("click", () => {
    clearTimeout(removed.get(doc.id));
    if (!removed.delete(doc.id)) removed.set(doc.id, setTimeout(() => drop(doc.id).catch(showDocuments), UNDO_MS));
    showDocuments();
  });
  const bar = row.querySelector("progress");
  bar.hidden = share === null || isGone;
  bar.value = share ?? 0;
  for (const text of problems.get(doc.id) ?? []) row.append(fill("problem", { problem: text }));
  return row;
}

async function drop(name) {
  clearTimeout(removed.get(name));
  dropping.add(name);
  showDocuments();
  uploads.delete(name);
  problems.delete(name);
  if (documents.some((doc) => doc.id === name)) {
    await call(path(name), { method: "DELETE", keepalive: true }).catch((error) => {
      if (error.status !== 404) uploads.set(name, error.message);
    });
  }
  removed.delete(name);
  dropping.delete(name);
  await refresh();
}

/** Upload files, one after the other. */
async function add(files) {
  added.unshift(...files.map(({ name }) => name));
  $("sidebar").scrollTop = 0;
  for (const { name } of files) {
    uploads.set(name, "");
    clearTimeout(removed.get(name));
    removed.delete(name);
  }
  showDocuments();
  for (const file of files) {
    const name = file.name;
    try {
      const skipped = (await (await call(path(name), { method: "PUT", body: file })).json()).problems;
      problems.set(name, skipped.map(({ line, message }) => (line === null ? message : `line ${line}: ${message}`)));
      uploads.delete(name);
    } catch (error) {
      uploads.set(name, error.message.replace(`${name}: `, "").replace(`${name}, `, "")); // which the row shows
    }
  }
  await refresh();
}

/** Wait until a document can be retrieved, and all sample documents; return how many documents are not encoded yet. */
async function ready(say, signal) {
  await Promise.all([...removed.keys()].map(drop)); // a deleted document is no source of the answer
  for (;;) {
    await refresh();
    const pending = documents.filter(isPending);
    const awaited = documents.some((doc) => doc.chunks) ? pending.filter(isSample) : pending;
    if (!awaited.length && !documents.some((doc) => doc.chunks)) {
      throw failure("There are no documents yet: add one under Documents.");
    }
    if (!awaited.length) return pending.length;
    say(`Waiting: ${count(awaited.length, "document")} left to encode. This happens once.`);
    await new Promise((resolve) => setTimeout(resolve, POLL_MS));
    signal.throwIfAborted();
  }
}

// ---------------------------------------------------------------- questions

/** Answer a question; if the race is on, again with full prefill, or blended if full prefill was used. */
async function ask(question) {
  await started;
  $("welcome").hidden = true;
  const turn = fill("turn", { asked: question });
  $("turns").append(turn);
  sessionStorage.setItem("kvrag-asked", question); // for a reload before the answer
  const said = { question, raced: $("race").checked, lanes: [] };
  let lane = addLane(turn);
  setBusy(new AbortController());
  try {
    const missing = hasCorpus ? await ready(lane.say, busy.signal) : 0;
    const earlier = samples.is_chat ? turns.slice(-MAX_TURNS) : [];
    const messages = earlier.flatMap(({ question, lanes }) => [
      { role: "user", content: `Question: ${question}` },
      { role: "assistant", content: lanes[0].text },
    ]);
    const body = { model, messages: [...messages, { role: "user", content: question }] };
    const chosen = $("recompute").value;
    const recompute = chosen === "full" ? FULL : chosen ? { ratio: Number(chosen) } : {};
    if (hasCorpus && !sessionStorage.isWarm && said.raced) {
      lane.say("Warming up: the first answer of a server takes longer.");
      const first = { model, messages: [{ role: "user", content: "What is this about?" }], max_tokens: 1, policy: "none" };
      await stream(first, busy.signal, () => {}).catch((error) => {
        lane.say("");
        if (error.name === "AbortError") throw error; // others are the question's, too
      });
      sessionStorage.isWarm = true;
    }
    const onSources = (hits) => showSources(turn, (said.sources = sourcesOf(hits)));
    const first = await answer(lane, { ...body, ...recompute }, onSources, () => {}, missing);
    said.lanes.push(first);
    turns.push(said);
    keepTurns();
    sessionStorage.removeItem("kvrag-asked");
    if (said.raced) {
      lane = addLane(turn, first);
      const onFirst = (seconds) => judge(turn, [first, { seconds }]);
      said.lanes.push(await answer(lane, { ...body, ...(isFull(first) ? BLENDED : FULL) }, () => {}, onFirst));
      keepTurns();
      judge(turn, said.lanes);
    }
  } catch (error) {
    lane.part("detail").textContent = error.name === "AbortError" ? "Stopped" : error.message;
    if (error.name === "AbortError") return;
    lane.part("detail").classList.add("problem"); // below what has arrived of the answer
    lane.part("time").textContent = "";
    $("question").value ||= question;
  } finally {
    sessionStorage.removeItem("kvrag-asked");
    setBusy(null);
    showChecks();
  }
}

/** Show how many of the latest checked answers full prefill confirms. */
async function showChecks() {
  const checks = await call("v1/checks").then((response) => response.json()).catch(() => ({}));
  $("checks").textContent = checks.text ?? "";
}

const isFull = ({ policy }) => policy === "full";

/** Add the lane of the first answer to a turn, or the one beside that answer. */
function addLane(turn, first = null) {
  const name = !first ? "kvrag" : isFull(first) ? "Blended" : "Full prefill";
  const box = fill("lane", { name });
  box.classList.toggle("full", name === "Full prefill");
  turn.querySelector(".lanes").append(box);
  const part = (name) => box.querySelector(`.${name}`);
  const say = (text) => part("answer").replaceChildren(...markdown(text));
  return { part, say };
}

/** Show a complete answer, perhaps one from before a reload. */
function showAnswer({ part, say }, { text, marked, thought, time, total, detail, policy }) {
  part("answer").parentElement.classList.toggle("full", isFull({ policy }));
  say(text || "(The model gave an empty answer.)");
  const plain = part("answer").textContent;
  if (marked) say(marked);
  if (part("answer").textContent !== plain) say(text); // the mark is in code, or in Markdown's own characters
  part("thought").hidden = !thought;
  part("thought").lastElementChild.textContent = thought;
  part("time").textContent = time;
  part("total").textContent = total;
  part("detail").textContent = detail;
}

/**
 * Stream an answer into a lane, which names the number of `missing` documents. Drops the oldest turn, and tries again,
 * while the prompt exceeds the context window.
 */
async function answer(lane, body, onSources, onFirst, missing = 0) {
  let started = performance.now();
  let text = "";
  let thought = "";
  const pieces = []; // the text of each token
  let seconds = null; // to the first token
  let report = null;
  let end = null;
  const time = () => format(seconds ?? (performance.now() - started) / 1000);
  const showTime = () => (lane.part("time").textContent = time());
  let heard = 0; // when the last token came
  const clock = setInterval(() => {
    showTime();
    const isWaiting = seconds !== null && performance.now() - heard > WAIT_MS; // the rest of the KV may be recomputed
    lane.part("detail").textContent = isWaiting ? "Computing the next token" : "";
  }, 100);
  const onEvent = (event) => {
    if (event.citations) onSources(event.citations);
    report = event.kvrag ?? report;
    end = event.choices[0]?.finish_reason ?? end;
    pieces.push(...(event.choices[0]?.logprobs?.content ?? []).map(({ token }) => token));
    const { content = "", reasoning_content: thinking = "" } = event.choices[0]?.delta ?? {};
    if (!content && !thinking) return;
    heard = performance.now();
    if (seconds === null) {
      seconds = (performance.now() - started) / 1000;
      onFirst(seconds);
    }
    if (thinking) {
      lane.part("thought").hidden = false;
      lane.part("thought").lastElementChild.append(thinking);
    }
    thought += thinking;
    text += content.replace(/[\uE000\uE001]/g, "\uFFFD"); // marks are the page's
    lane.say(text.trimStart());
  };
  lane.say("");
  try {
    for (;;) {
      started = performance.now();
      try {
        await stream({ ...body, logprobs: true }, busy.signal, onEvent);
        break;
      } catch (error) {
        if (error.code !== "context_length_exceeded" || body.messages.length === 1) throw error;
        turns.shift();
        body.messages.splice(0, 2);
      }
    }
  } finally {
    clearInterval(clock);
    showTime();
  }
  const whole = (performance.now() - started) / 1000;
  const tokens = (name) => report[`${name}_tokens`].toLocaleString("en");
  const share = Math.round((100 * report.reused_tokens) / Math.max(1, report.prompt_tokens));
  const why = body.policy ? "" : [report.decision, ...report.notes].filter(Boolean).join("; ");
  const computed = `${tokens("reused")} reused (${share} %), ${tokens("recomputed")} stored but recomputed`;
  const isNew = isFull(report) && !report.conversation_tokens;
  const used = `${tokens("prompt")} prompt tokens: ${isNew ? "all computed" : computed}`;
  const isKept = report.conversation_tokens > report.prompt_tokens / 2;
  const kept = report.conversation_tokens && `${tokens("conversation")} kept from the conversation`;
  const cut = end === "length" && "stopped at the token limit (--max-tokens)";
  const without = missing && `without ${count(missing, "document")} still to encode`;
  const recomputed = report.completed ?? report.deepened;
  const { token } = recomputed ?? {};
  const more = report.completed ? "the rest" : "more";
  const doubt = recomputed && `unsure after ${count(token, "token")}, so ${more} was recomputed first`;
  const [before, piece = ""] = [pieces.slice(0, token).join(""), pieces[token]];
  const isShown = piece.trim() && text.startsWith(before + piece); // not in a thought
  const marked = isShown && (before + piece.replace(piece.trim(), MARK) + text.slice((before + piece).length)).trim();
  const detail = [used, kept, doubt, without, why, cut].filter(Boolean).join("; ");
  const shown = { text: text.trim(), marked, thought, time: time(), total: `whole answer ${format(whole)}`, detail };
  const result = { ...shown, seconds, whole, isKept, policy: report.policy };
  showAnswer(lane, result);
  return result;
}

const format = (seconds) => (seconds < 1 ? `${Math.round(1000 * seconds)} ms` : `${seconds.toFixed(2)} s`);

/** Compare the answers of a turn: the first tokens once the second one begins, all of them once it is complete. */
function judge(turn, [first, second]) {
  if (!second || first.seconds === null || second.seconds === null) return;
  const slow = Math.max(first.seconds, second.seconds);
  const bars = turn.querySelectorAll(".bar");
  [first, second].forEach(({ seconds }, number) => (bars[number].value = seconds / slow));
  const [ours, full] = isFull(first) ? [second, first] : [first, second];
  const parts = [`${isFull(first) ? "Blended: first" : "First"} token ${format(ours.seconds)} instead of ${format(full.seconds)}`];
  if (second.whole) {
    parts.push(`whole answer ${format(ours.whole)} instead of ${format(full.whole)}`);
    if (ours.isKept) parts.push("most of the prompt was kept from the conversation");
    parts.push(first.text === second.text ? "the same answer" : "the answers differ");
  }
  turn.querySelector(".verdict").textContent = parts.join("; ");
}

/** Return the sources of an answer to show: those of its retrieved chunks, best first, that are most similar. */
function sourcesOf(hits) {
  const names = new Set(hits.map((hit) => hit.document));
  const all = `${count(hits.length, "chunk")} from ${count(names.size, "document")}`;
  const shown = hits.slice(0, MAX_SOURCES).map(({ document, pages, text }) => {
    const [first, last] = pages ?? [];
    const range = first === last ? `page ${first}` : `pages ${first}-${last}`;
    return { where: shortName(document) + (pages ? ` (${range})` : ""), text };
  });
  return { shown, summary: shown.length < hits.length ? `${all}, the ${shown.length} most similar` : all };
}

function showSources(turn, { shown, summary }) {
  const box = turn.querySelector(".sources");
  box.hidden = !shown.length;
  box.querySelector("summary").textContent = summary;
  box.querySelector("ol").replaceChildren(...shown.map(({ where, text }) =>
    fill("source", { where, start: text.replace(/\s+/g, " ").slice(0, 200), text })));
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

/** Keep the turns for a reload of the tab; the oldest ones are left out if its storage is full. */
function keepTurns() {
  for (let first = 0; first < turns.length; first++) {
    try {
      return sessionStorage.setItem("kvrag-chat", JSON.stringify(turns.slice(first)));
    } catch (error) {
      if (error.name !== "QuotaExceededError") throw error;
    }
  }
}

function restoreTurns() {
  turns.push(...JSON.parse(sessionStorage.getItem("kvrag-chat") ?? "[]"));
  $("welcome").hidden = turns.length > 0;
  for (const said of turns) {
    const turn = fill("turn", { asked: said.question });
    $("turns").append(turn);
    const [first, second] = said.lanes;
    showAnswer(addLane(turn), first);
    if (second) showAnswer(addLane(turn, first), second);
    if (said.sources) showSources(turn, said.sources);
    judge(turn, said.lanes);
  }
}

/** Keep the value of a control for a reload of the tab. */
function keep(name, property) {
  const control = $(name);
  control[property] = JSON.parse(sessionStorage.getItem(`kvrag-${name}`)) ?? control[property];
  control.addEventListener("change", () => sessionStorage.setItem(`kvrag-${name}`, JSON.stringify(control[property])));
}

function listen() {
  keep("race", "checked");
  keep("recompute", "value");
  $("new").addEventListener("click", () => ["kvrag-chat", "kvrag-asked"].forEach((name) => sessionStorage.removeItem(name)));
  $("question").value ||= sessionStorage.getItem("kvrag-asked") ?? "";
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
  window.addEventListener("dragover", (event) => event.preventDefault());
  window.addEventListener("drop", (event) => {
    if (event.target === $("files")) return; // which takes them itself
    event.preventDefault(); // else the browser opens the file
    if (hasCorpus) add([...event.dataTransfer.files]);
  });
  window.addEventListener("pagehide", () => [...removed.keys()].forEach(drop));
}

async function start() {
  listen();
  $("sidebar").open = innerWidth > 760; // else it covers the chat, as in style.css
  try {
    const names = (await (await call("v1/models")).json()).data.map((model) => model.id);
    $("model").textContent = model = names[0];
    restoreTurns();
    showChecks();
    samples = await (await call("samples.json")).json();
    if (!samples.is_adaptive) $("recompute").options[0].text = "as the server is set";
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
