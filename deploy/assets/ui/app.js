// The page: asks for the key, runs prompts, and shows what comes of them.

import { Answer, firstDifference } from "./answer.js";
import { drawFigures, drawSources, drawTenants, loadLine } from "./panels.js";
import { ServerError, key, samples, servedModels, serverInfo } from "./server.js";
import { Legend, element, meet } from "./sources.js";
import { captionOf, drawTree } from "./tree.js";

const POLL_MS = 3000;
const MAX_SEED = 2 ** 31;

const at = (id) => document.getElementById(id);
const legend = new Legend(at("legend"), [at("drafted"), at("plain")]);
const shown = { drafted: null, plain: null, samples: [], step: 0, isStale: false, engines: [], chats: new Set() };
const EXAMPLES = {
  completion: at("prompt").value,
  chat: "Write a recipe for pancakes: first the ingredients, then the steps.",
};
let running = null;

function tell(error) {
  at("alert").hidden = !error;
  at("alert").textContent = error ? error.message : "";
}

// The key.

async function open() {
  try {
    const [info, models] = [await serverInfo(), await servedModels()];
    const names = models.map((model) => model.id);
    shown.engines = info.engines;
    shown.chats = new Set(models.filter((model) => model.is_chat).map((model) => model.id));
    at("chosen-model").replaceChildren(...names.map((name) => element("option", { text: name, value: name })));
    at("models").hidden = names.length === 1;
    at("forget").hidden = !key.get();
    choose();
    legend.draw();
    show({ isOpen: true });
    tell(null);
    poll();
  } catch (error) {
    const isKey = error instanceof ServerError && [401, 403].includes(error.status);
    at("model").textContent = isKey ? "" : "not reached";
    show({ isOpen: false });
    // The first question for a key is no error.
    tell(isKey && !key.get() ? null : error);
    if (isKey) at("key").focus();
  }
}

function show({ isOpen }) {
  at("page").hidden = !isOpen;
  at("key-form").hidden = isOpen;
}

/** Show what is known of the model that is chosen. */
function choose() {
  const model = at("chosen-model").value;
  const engines = shown.engines.filter((engine) => engine.model === model);
  const names = new Set(engines.flatMap((engine) => engine.drafters.map((drafter) => drafter.name)));
  meet(names);
  at("model").textContent = model;
  drawDrafters(names);
  ask(shown.chats.has(model) ? "chat" : "completion");
}

/** Ask for answers or for continuations; a prompt of one's own stays. */
function ask(kind) {
  document.querySelector(`input[name=kind][value=${kind}]`).checked = true;
  if (Object.values(EXAMPLES).includes(at("prompt").value)) at("prompt").value = EXAMPLES[kind];
}

function drawDrafters(names) {
  const boxes = [...names].map((name) => {
    const label = element("label");
    const box = element("input", { type: "checkbox", name: "drafter", value: name });
    box.checked = true;
    label.append(box, ` ${name}`);
    return label;
  });
  const none = element("span", { text: "this server has none", className: "quiet" });
  at("drafters").replaceChildren(element("legend", { text: "Drafters" }), ...(boxes.length ? boxes : [none]));
}

async function readSamples() {
  try {
    shown.samples = await samples(at("chosen-model").value);
    at("load").textContent = loadLine(shown.samples);
    drawTables();
  } catch (error) {
    at("load").textContent = error.message;
  }
}

async function poll() {
  if (document.visibilityState === "visible" && !at("page").hidden) await readSamples();
  setTimeout(poll, POLL_MS);
}

// Running.

function bodyOf() {
  const kind = document.querySelector("input[name=kind]:checked").value;
  const boxes = [...document.querySelectorAll("input[name=drafter]")];
  const chosen = boxes.filter((box) => box.checked).map((box) => box.value);
  const prompt = at("prompt").value;
  const body = {
    model: at("chosen-model").value,
    ...(kind === "chat" ? { messages: [{ role: "user", content: prompt }] } : { prompt }),
    temperature: Number(at("temperature").value),
    seed: at("seed").value === "" ? Math.floor(Math.random() * MAX_SEED) : Number(at("seed").value),
    max_tokens: Number(at("max-tokens").value),
    store: at("learn").checked ? undefined : false,
  };
  const speculative = { explain: true, enabled: chosen.length > 0 };
  if (chosen.length && chosen.length < boxes.length) speculative.drafters = chosen;
  return { kind, body, speculative };
}

async function run() {
  if (running) return;
  running = new AbortController();
  setRunning(true);
  tell(null);
  const { kind, body, speculative } = bodyOf();
  const compares = at("compare").checked;
  at("plain-side").hidden = !compares;
  document.querySelector(".pair").classList.toggle("two", compares);
  at("verdict").hidden = true;
  shown.drafted = new Answer(at("drafted"), legend);
  shown.plain = compares ? new Answer(at("plain"), legend) : null;
  shown.step = 0;
  refresh();
  const signal = running.signal;
  const drafted = () => shown.drafted.run(kind, { ...body, speculative }, signal, refresh);
  const plain = () =>
    shown.plain?.run(kind, { ...body, speculative: { enabled: false, report: true } }, signal, refresh);
  try {
    at("status").textContent = `Streaming, seed ${body.seed}`;
    if (at("together").checked) await Promise.all([drafted(), plain()]);
    else {
      await drafted();
      if (compares) at("status").textContent = "Decoding plainly";
      await plain();
    }
    at("status").textContent = `Done: ${shown.drafted.numTokens} tokens, seed ${body.seed}`;
    if (compares) drawVerdict();
  } catch (error) {
    if (error.name !== "AbortError") tell(error);
    at("status").textContent = error.name === "AbortError" ? "Stopped" : "Failed";
    running.abort();
  }
  running = null;
  setRunning(false);
  refresh();
  readSamples();
}

function setRunning(isRunning) {
  at("run").disabled = isRunning;
  at("stop").disabled = !isRunning;
  for (const pane of [at("drafted"), at("plain")]) pane.setAttribute("aria-busy", String(isRunning));
}

function drawVerdict() {
  const place = firstDifference(shown.drafted, shown.plain);
  const speed = shown.drafted.tokensPerS / shown.plain.tokensPerS;
  const verdict = at("verdict");
  verdict.hidden = false;
  verdict.className = `verdict ${place === null ? "same" : "differs"}`;
  const times = Number.isFinite(speed) ? `, ${speed.toFixed(2)} times as fast` : "";
  verdict.textContent =
    place === null
      ? `\u2713 The same ${shown.drafted.numTokens} tokens${times}`
      : `\u2717 The texts differ from token ${place} on`;
  at("status").textContent += `. ${verdict.textContent}`;
}

// Showing: at most once a frame, however fast tokens come.

function refresh() {
  if (shown.isStale) return;
  shown.isStale = true;
  requestAnimationFrame(() => {
    shown.isStale = false;
    legend.draw();
    drawFigures(at("drafted-figures"), shown.drafted);
    if (shown.plain) drawFigures(at("plain-figures"), shown.plain);
    const last = shown.drafted.steps.length - 1;
    at("step").max = String(Math.max(last, 0));
    at("step").disabled = last < 0;
    if (at("follow").checked) shown.step = Math.max(last, 0);
    drawStep();
    drawTables();
  });
}

function drawTables() {
  drawSources(at("sources"), shown.drafted, shown.samples);
  drawTenants(at("tenants-card"), at("tenants-head"), at("tenants"), shown.samples);
}

function drawStep() {
  const number = shown.step;
  at("step").value = String(number);
  for (const token of document.querySelectorAll(".token.now")) token.classList.remove("now");
  const step = shown.drafted?.steps[number];
  if (!step) return;
  for (const span of step.spans) span.classList.add("now");
  const caption = captionOf(step, number);
  at("step").setAttribute("aria-valuetext", caption);
  at("tree-caption").textContent = caption;
  at("tree").replaceChildren(...(step.tree ? [drawTree(step, caption)] : []));
}

function goTo(number) {
  if (!shown.drafted?.steps.length) return;
  at("follow").checked = false;
  shown.step = Math.min(Math.max(number, 0), shown.drafted.steps.length - 1);
  drawStep();
  scrollTo(at("drafted"), shown.drafted.steps[shown.step].spans[0]);
}

/** Bring a token into its pane; the page itself stays where it is. */
function scrollTo(pane, token) {
  const [outer, inner] = [pane.getBoundingClientRect(), token.getBoundingClientRect()];
  if (inner.top < outer.top || inner.bottom > outer.bottom) {
    pane.scrollTop += inner.top - outer.top - outer.height / 2;
  }
}

at("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key.set(at("key").value.trim());
  at("key").value = "";
  open();
});
at("forget").addEventListener("click", () => {
  key.forget();
  location.reload();
});
at("run-form").addEventListener("submit", (event) => {
  event.preventDefault();
  run();
});
at("run-form").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) at("run-form").requestSubmit();
});
at("stop").addEventListener("click", () => running?.abort());
at("step").addEventListener("input", () => goTo(Number(at("step").value)));
at("before").addEventListener("click", () => goTo(shown.step - 1));
at("after").addEventListener("click", () => goTo(shown.step + 1));
at("follow").addEventListener("change", refreshIfAny);
for (const kind of document.querySelectorAll("input[name=kind]")) {
  kind.addEventListener("change", () => ask(kind.value));
}
at("chosen-model").addEventListener("change", () => {
  choose();
  readSamples();
});
at("drafted").addEventListener("click", (event) => {
  const step = event.target.dataset?.step;
  if (step !== undefined) goTo(Number(step));
});

function refreshIfAny() {
  if (shown.drafted) refresh();
}

open();
