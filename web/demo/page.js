// Loads models and connects the parts of the page.

import { Starling } from "../dist/index.js";
import { Conversation } from "./chat.js";
import { $, bytes, element, save, seconds } from "./dom.js";
import { samplingOptions } from "./sampling.js";
import { ALTERNATIVES, Answer } from "./tokens.js";
import { Verifier } from "./verify.js";

const query = new URLSearchParams(location.search);
const BUNDLED = new URL(query.get("model") ?? "../../fixtures/starling-tiny/starling-tiny-q8_0.gguf", location.href)
  .href;

let model;
let loading;
let generating;

const status = (text, bad = false) => Object.assign($("status"), { textContent: text, className: bad ? "bad" : "" });

const canWrite = () => Boolean(model?.info.generates) && !generating;

/** Enables and disables buttons. */
function updateButtons() {
  for (const id of ["write", "send"]) $(id).disabled = !canWrite();
  conversation.enable();
  for (const id of ["write-stop", "chat-stop"]) $(id).disabled = !generating;
  $("verify").disabled = !model;
  $("load").disabled = Boolean(loading);
  $("load-stop").hidden = !loading;
}

function chosenSource() {
  switch (new FormData($("model-form")).get("source")) {
    case "bundled":
      return BUNDLED;
    case "url":
      return $("url").value.trim();
    default: {
      const files = [...$("file").files].sort((a, b) => a.name.localeCompare(b.name));
      return files.length === 1 ? files[0] : files;
    }
  }
}

/** Loads `source`, by default the one chosen in the form. */
async function load(source) {
  loading?.abort();
  const mine = (loading = new AbortController());
  generating?.abort();
  model?.dispose();
  model = undefined;
  $("facts").hidden = true;
  $("loading").hidden = false;
  $("progress").removeAttribute("value");
  $("progress-text").textContent = "";
  updateButtons();
  status("Loading");
  try {
    source ??= chosenSource();
    const loaded = await Starling.load(source, {
      signal: mine.signal,
      receipts: true,
      kvCache: true,
      onProgress: showProgress,
    });
    // another load was started meanwhile
    if (loading !== mine) return loaded.dispose();
    model = loaded;
    const { info } = model;
    const { sharedMemory } = Starling.features();
    status(`${info.name ?? info.architecture} is ready${info.generates ? "" : "; it embeds texts and does not write"}`);
    $("backend").textContent =
      `${info.isa}, ${info.threads} thread${info.threads === 1 ? "" : "s"}${sharedMemory ? " (isolated page)" : ""}`;
    $("context").textContent = `${info.contextLength} tokens`;
    $("facts").hidden = false;
    await showMemory();
  } catch (e) {
    if (loading === mine) showError(e);
  } finally {
    if (loading === mine) {
      loading = undefined;
      $("loading").hidden = true;
      updateButtons();
    }
    await showCache();
  }
}

function showProgress({ from, loaded, total, rate, remaining }) {
  const known = total !== Infinity;
  if (known) $("progress").value = loaded / total;
  const left = known ? `, ${seconds(remaining)} left` : "";
  const rest = loaded < total ? `, ${bytes(rate)}/s${left}` : "";
  const where = { network: "the network", cache: "the cache", local: "this device" }[from];
  $("progress-text").textContent = `${bytes(loaded)}${known ? ` of ${bytes(total)}` : ""} from ${where}${rest}`;
}

async function showMemory() {
  const memory = await model.memory();
  $("memory").textContent =
    `${bytes(memory.module)}: weights ${bytes(memory.weights)}, context ${bytes(memory.kvReserved)}`;
}

async function showCache() {
  const [entries, usage] = await Promise.all([Starling.cache.list(), Starling.cache.usage()]);
  $("cache-usage").textContent =
    usage.storage === "none"
      ? "This browser keeps nothing here."
      : `${bytes(usage.cached)} cached; this site may use ${bytes(usage.quota)}.`;
  const item = ({ url, size }) => {
    const remove = element(
      "button",
      { type: "button", className: "small", onclick: () => Starling.cache.evict(url).then(showCache) },
      "Remove",
    );
    remove.setAttribute("aria-label", `Remove ${url}`);
    return element("li", {}, `${url} (${bytes(size)}) `, remove);
  };
  $("cache-list").replaceChildren(...entries.map(item));
}

/** Shows an error, or that the user stopped. */
function showError(e) {
  if (e.name === "AbortError") status("Stopped");
  else status(e.message, true);
}

/** The sampling options; throws if the prompt leaves no room for an answer. */
async function optionsFor({ prompt, messages, seed }) {
  const options = { ...samplingOptions(), ...(seed !== undefined && { seed }) };
  const { ids } = messages ? await model.applyTemplate(messages) : await model.tokenize(prompt);
  const { contextLength } = model.info;
  if (ids.length >= contextLength)
    throw new Error(
      `${messages ? "The conversation" : "The text"} has ${ids.length} tokens, and the model's context ${contextLength}: ` +
        (messages ? "begin a new one, or edit an earlier message" : "shorten it"),
    );
  return options;
}

/** Generates into a view from a prompt or messages; returns the result and its options, or undefined if aborted or failed. */
async function answer(to, view) {
  generating = new AbortController();
  const { signal } = generating;
  updateButtons();
  status("Writing");
  try {
    const options = await optionsFor(to);
    signal.throwIfAborted();
    // answers with a structure have no receipt
    const more = { logprobs: ALTERNATIVES, receipt: options.structure === undefined, signal };
    const { prompt, messages } = to;
    const generation = messages
      ? model.chat(messages, { ...options, ...more })
      : model.generate(prompt, { ...options, ...more });
    for await (const token of generation.tokens()) view.add(token);
    const result = await generation.result;
    const { timings, usage } = result;
    $("speed").textContent =
      `${timings.generationPerSecond.toFixed(1)} tokens/s written, ${timings.promptPerSecond.toFixed(0)} read` +
      (usage.cachedTokens > 0 ? `; ${usage.cachedTokens} of ${usage.promptTokens} prompt tokens cached` : "");
    const ended = {
      stop: "the model ended",
      length: "the limit of tokens is reached",
      not_finite: "the model's numbers are not finite",
    }[result.finishReason];
    status(`${usage.completionTokens} tokens: ${ended}`);
    return { ...result, options: { ...options, seed: result.seed } };
  } catch (e) {
    // the status shows the progress of a model that is loading
    if (!loading) showError(e);
  } finally {
    generating = undefined;
    updateButtons();
    if (model) await showMemory().catch(() => {});
  }
}

const stop = () => generating?.abort();

let written;
let receipt;
$("write-form").onsubmit = async (event) => {
  event.preventDefault();
  if ($("write").disabled) return;
  const prompt = $("prompt").value;
  written = new Answer($("answer"), prompt);
  $("write-receipt").hidden = true;
  receipt = (await answer({ prompt }, written))?.receipt;
  $("write-receipt").hidden = !receipt;
};
$("write-receipt").onclick = () => {
  save("receipt.json", receipt);
  $("receipt").value = receipt;
};

const conversation = new Conversation(answer, canWrite, stop);
conversation.drawList();
const verifier = new Verifier(() => model);

for (const id of ["write-stop", "chat-stop"]) $(id).onclick = stop;
$("load-stop").onclick = () => loading?.abort();
$("show-tokens").onchange = () => {
  written?.redraw();
  conversation.redraw();
};
$("model-form").onchange = () => {
  const source = new FormData($("model-form")).get("source");
  $("file-row").hidden = source !== "file";
  $("url-row").hidden = source !== "url";
};
$("model-form").onsubmit = (event) => {
  event.preventDefault();
  load();
};

// tabs, with arrow keys
const tabs = [...document.querySelectorAll('[role="tab"]')];
function choose(tab) {
  for (const other of tabs) {
    other.setAttribute("aria-selected", String(other === tab));
    other.tabIndex = other === tab ? 0 : -1;
    $(other.getAttribute("aria-controls")).hidden = other !== tab;
  }
  for (const id of ["options", "show-tokens-row"]) $(id).hidden = tab.id === "tab-verify";
}
for (const [i, tab] of tabs.entries()) {
  tab.onclick = () => choose(tab);
  tab.onkeydown = ({ key }) => {
    const to = { ArrowRight: tabs[(i + 1) % tabs.length], ArrowLeft: tabs.at(i - 1) }[key];
    if (!to) return;
    choose(to);
    to.focus();
  };
}

// dropped GGUF files are loaded, other files are receipts
const hasFiles = ({ dataTransfer }) => dataTransfer.types.includes("Files");
addEventListener("dragover", (event) => hasFiles(event) && event.preventDefault());
addEventListener("drop", (event) => {
  if (!hasFiles(event)) return;
  event.preventDefault();
  const files = [...event.dataTransfer.files].sort((a, b) => a.name.localeCompare(b.name));
  const models = files.filter(({ name }) => /\.gguf$/i.test(name));
  if (models.length > 0) load(models.length === 1 ? models[0] : models);
  else if (files.length > 0) {
    choose($("tab-verify"));
    verifier.take(files[0]);
  }
});

// errors that no handler caught
addEventListener("unhandledrejection", ({ reason }) => status(reason?.message ?? String(reason), true));
load();
