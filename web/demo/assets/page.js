// Connects the parts of the page with its back end.

import { Backend } from "./backend.js";
import { Conversation } from "./chat.js";
import { $, bytes, button, element, save, seconds } from "./dom.js";
import { samplingOptions, suit } from "./sampling.js";
import { Answer } from "./tokens.js";
import { Verifier } from "./verify.js";
import { choose, chosen, connectKeys, connectPanels, connectScrolling } from "./layout.js";

let generating;
let written;
let receipt;

/** Shows the state of work, or an error with buttons that help. */
function status(text, bad = false, buttons = []) {
  Object.assign($("status"), { textContent: text, className: bad ? "bad" : "" });
  $("notice").classList.toggle("bad", bad);
  $("notice-buttons").replaceChildren(...buttons);
}

/** Shows an error, or that the user stopped. */
function fail(e) {
  if (e.name === "AbortError") return status("Stopped");
  // the form for the key is shown
  if (e.status === 401) return status("Waiting for the API key");
  const buttons = [];
  if (backend.state === "failed" || backend.state === "none") {
    if (backend.kind === "page") buttons.push(button("down", "Choose a model", () => $("model-panel").showPopover()));
    else if (e.status === 0) buttons.push(button("again", "Try again", () => backend.start()));
  } else if (conversation.isAnswering) buttons.push(button("again", "Try again", () => conversation.again()));
  // a sentence of a server begins with a small letter, as do names, which stay as they are
  status(
    e.message.replace(/^[a-z]+ /, (word) => word[0].toUpperCase() + word.slice(1)),
    true,
    buttons,
  );
}

const backend = new Backend({
  fail,
  stop: () => stop(),
  changed: showModel,
  progress: showProgress,
});

// what is not loaded is loaded by asking
const canWrite = () =>
  Boolean(backend.model?.generates) && ["ready", "unloaded"].includes(backend.state) && !generating;

/** Enables and disables buttons. */
function updateButtons() {
  for (const id of ["write", "send"]) $(id).disabled = !canWrite();
  conversation.enable();
  for (const id of ["write-stop", "chat-stop"]) $(id).disabled = !generating;
  document.body.classList.toggle("generating", Boolean(generating));
  $("verify").disabled = !backend.model;
}

const STATES = { none: "", unloaded: "loaded when asked", loading: "loading", ready: "", failed: "failed" };

/** Shows the model and its state. */
function showModel() {
  const { model, state, loadingName } = backend;
  $("model-dot").className = `dot ${state}`;
  $("model-name").textContent = model?.name ?? (state === "loading" ? loadingName : "No model");
  $("model-state").textContent = STATES[state];
  $("model-button").setAttribute("aria-label", `Model: ${$("model-name").textContent} ${STATES[state]}`);
  $("facts").hidden = !model?.contextLength;
  if (model) {
    $("context").textContent = `${model.contextLength} tokens`;
    $("sha256-row").hidden = !model.sha256;
    $("sha256").textContent = model.sha256 ?? "";
    suit(model.sampling);
  }
  if (state === "ready")
    status(`${model.name} is ready${model.generates ? "" : "; it embeds texts and does not write"}`);
  else if (state === "unloaded") status(`${model.name} is loaded when you ask it`);
  showWelcome();
  updateButtons();
}

const SUGGESTIONS = {
  page: ["Tell me a story of a fox and a bird.", "Who are you?", "Why is the sky blue?"],
  server: [
    "Explain how a rainbow forms.",
    "Write a function that reverses a linked list.",
    "Compare bread and rice in a table.",
  ],
};

/** Title, text and buttons before there are messages. */
function welcome() {
  const { model, state, kind } = backend;
  const suggestion = (text, onclick) => element("button", { type: "button", className: "suggestion", onclick }, text);
  if (!model || state === "failed") {
    if (kind === "server") return undefined;
    const choose = suggestion("Choose a model", () => $("model-panel").showPopover());
    return ["No model", "Take the bundled one, a GGUF file of this device, or one at a URL.", [choose]];
  }
  const where = kind === "page" ? "It runs in this page, on your machine." : "It runs on this server.";
  if (!model.generates)
    return [`${model.name} embeds texts`, `${where} Choose a model that writes to chat with it.`, []];
  if (chosen() === "tab-write")
    return [`Write with ${model.name}`, `${where} Type the beginning of a text, and the model goes on from there.`, []];
  const ask = (text) => {
    $("message").value = text;
    $("chat-form").requestSubmit();
  };
  return [
    `Chat with ${model.name}`,
    `${where} The same seed gives the same answer, on any machine.`,
    SUGGESTIONS[kind].map((text) => suggestion(text, () => ask(text))),
  ];
}

/** Shows what there is before there are messages, if there are none. */
function showWelcome() {
  const isEmpty = { "tab-chat": conversation.tree.nodes.length === 0, "tab-write": !written }[chosen()];
  const [title, text, buttons] = (isEmpty && backend.state !== "loading" && welcome()) || [];
  $("welcome").hidden = !title;
  $("answer").hidden = !written;
  $("welcome-title").textContent = title ?? "";
  $("welcome-text").textContent = text ?? "";
  $("suggestions").replaceChildren(...(buttons ?? []));
}

/** Shows the progress of loading; undefined: nothing is being loaded. */
function showProgress(progress) {
  $("loading").hidden = !progress;
  if (!progress) return;
  const { from, loaded, total, rate, remaining } = progress;
  $("loading-title").textContent = `Loading ${backend.loadingName}`;
  $("load-stop").hidden = backend.kind !== "page";
  if (loaded === undefined) {
    status("Loading");
    $("progress").removeAttribute("value");
    $("progress-text").textContent = backend.kind === "server" ? "The server reads it into memory." : "";
    return;
  }
  const known = total !== Infinity;
  if (known) $("progress").value = loaded / total;
  const left = known && remaining !== undefined ? `, ${seconds(remaining)} left` : "";
  const rest = loaded < total && rate !== undefined ? `, ${bytes(rate)}/s${left}` : "";
  const where = { network: "the network", cache: "the cache", local: "this device" }[from];
  $("progress-text").textContent = `${bytes(loaded)}${known ? ` of ${bytes(total)}` : ""} from ${where}${rest}`;
}

const ENDED = {
  stop: "the model ended",
  length: "the limit of tokens is reached",
  not_finite: "the model's numbers are not finite",
  tool_calls: "the model calls a tool",
  timeout: "the time limit of the server is reached",
};

/** Generates into a view; `to()` returns `{ prompt | messages, options }`. Returns the facts of the answer as far as it got. */
async function answer(to, view) {
  generating = new AbortController();
  const { signal } = generating;
  updateButtons();
  status("Writing");
  let facts;
  try {
    const { prompt, messages, options: more } = to();
    const options = { ...samplingOptions(), ...more };
    facts = { options };
    const began = performance.now();
    let first;
    let count = 0;
    for await (const event of backend.answer({ prompt, messages, options, signal })) {
      const { seed, usage, finish, receipt, tokens } = event;
      if (seed !== undefined) facts.options = { ...options, seed };
      if (tokens.length > 0) first ??= performance.now();
      count += tokens.length;
      if (usage) facts.usage = usage;
      if (finish) facts.finish = finish;
      if (receipt) facts.receipt = receipt;
      view.add(event);
    }
    signal.throwIfAborted();
    const [read, wrote] = [(first ?? began) - began, performance.now() - (first ?? began)];
    if (count > 1) facts.rate = ((count - 1) / wrote) * 1000;
    showFacts(facts, read);
  } catch (e) {
    if (e.name === "AbortError" && facts) facts.finish = "cancelled";
    // the status shows the progress of a model that is loading
    if (backend.state !== "loading") fail(e);
  } finally {
    generating = undefined;
    updateButtons();
    await backend.answered();
  }
  return facts;
}

function showFacts({ usage, rate, finish }, readMs) {
  const n = usage.prompt_tokens;
  const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
  const speeds = [
    rate && `${rate.toFixed(1)} tokens/s written`,
    n > cached && readMs > 0 && `${(((n - cached) / readMs) * 1000).toFixed(0)} read`,
  ];
  $("speed").textContent =
    speeds.filter(Boolean).join(", ") + (cached > 0 ? `; ${cached} of ${n} prompt tokens cached` : "");
  const used = n + usage.completion_tokens;
  const { contextLength } = backend.model;
  $("context-use").textContent = contextLength ? `${used} of ${contextLength} tokens of context` : "";
  status(`${usage.completion_tokens} tokens: ${ENDED[finish] ?? finish}`);
}

const stop = () => generating?.abort();

$("write-form").onsubmit = async (event) => {
  event.preventDefault();
  if ($("write").disabled) return;
  const prompt = $("prompt").value;
  written = new Answer($("answer"), prompt);
  $("write-receipt").hidden = true;
  $("write-facts").hidden = true;
  showWelcome();
  const facts = await answer(() => ({ prompt, options: {} }), written);
  receipt = facts?.receipt;
  $("write-receipt").hidden = !receipt;
  const seed = facts?.options.seed;
  $("write-facts").hidden = seed === undefined;
  $("write-facts").textContent = `${facts?.usage ? `${facts.usage.completion_tokens} tokens · ` : ""}seed ${seed}`;
};
$("write-receipt").onclick = () => {
  save("receipt.json", receipt);
  $("receipt").value = receipt;
};

const { toEnd } = connectScrolling();
const conversation = new Conversation({
  answer,
  canWrite,
  stop,
  verify(text) {
    choose($("tab-verify"));
    verifier.show(text);
  },
  shown() {
    toEnd();
    showWelcome();
  },
});
const verifier = new Verifier(backend);

document.body.dataset.backend = backend.kind;
for (const id of ["write-stop", "chat-stop"]) $(id).onclick = stop;
$("load-stop").onclick = () => backend.stopLoading();
$("show-tokens").onchange = () => {
  written?.redraw();
  conversation.redraw();
};
conversation.start();
connectPanels(showWelcome);
connectKeys({
  stop,
  isGenerating: () => Boolean(generating),
  begin: () => conversation.begin(),
  again: () => canWrite() && conversation.again(),
  editLast: () => conversation.editLast(),
});

// dropped GGUF files are loaded, other files are receipts
const hasFiles = ({ dataTransfer }) => dataTransfer.types.includes("Files");
addEventListener("dragover", (event) => hasFiles(event) && event.preventDefault());
addEventListener("drop", (event) => {
  if (!hasFiles(event)) return;
  event.preventDefault();
  const files = [...event.dataTransfer.files].sort((a, b) => a.name.localeCompare(b.name));
  const models = files.filter(({ name }) => /\.gguf$/i.test(name));
  if (models.length > 0 && backend.load) backend.load(models.length === 1 ? models[0] : models);
  else if (files.length > 0) {
    choose($("tab-verify"));
    verifier.take(files[0]);
  }
});

// errors that no handler caught
addEventListener("unhandledrejection", ({ reason }) => status(reason?.message ?? String(reason), true));
backend.start();
