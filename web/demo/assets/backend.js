// Back end of the demo: the engine of the package, in this page. The server has another under this name: backend-server.js.

import { Starling } from "../../dist/index.js";
import { $, bytes, element } from "./dom.js";
import { bodyOf, eventOf, generateOptions } from "./wire.js";

const query = new URLSearchParams(location.search);
const BUNDLED = new URL(query.get("model") ?? "../../fixtures/starling-tiny/starling-tiny-q8_0.gguf", location.href)
  .href;

/**
 * `ui.changed()` is called when the model or its state changes, `ui.progress(...)` while one is loaded, `ui.stop()` before a
 * model is dropped, `ui.fail(error)` for errors.
 */
export class Backend {
  kind = "page";
  /** `{ name, contextLength, generates }` of a model that is ready. */
  model = undefined;
  /** `none`, `loading`, `ready` or `failed`. */
  state = "none";
  /** The name of a model that is being loaded. */
  loadingName = "";
  #starling;
  #loading;

  constructor(ui) {
    this.ui = ui;
    $("model-form").onchange = () => {
      const source = new FormData($("model-form")).get("source");
      $("file-row").hidden = source !== "file";
      $("url-row").hidden = source !== "url";
    };
    $("model-form").onsubmit = (event) => {
      event.preventDefault();
      this.load();
    };
  }

  start() {
    return this.load();
  }

  stopLoading() {
    this.#loading?.abort();
  }

  #chosenSource() {
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
  async load(source = this.#chosenSource()) {
    this.#loading?.abort();
    const mine = (this.#loading = new AbortController());
    $("model-panel").hidePopover();
    this.ui.stop();
    this.#starling?.dispose();
    this.#starling = this.model = undefined;
    this.state = "loading";
    this.loadingName = nameOf(source);
    this.ui.progress({});
    this.ui.changed();
    try {
      const loaded = await Starling.load(source, {
        signal: mine.signal,
        receipts: true,
        kvCache: true,
        onProgress: (progress) => this.ui.progress(progress),
      });
      // another load was started meanwhile
      if (this.#loading !== mine) return loaded.dispose();
      const { info } = (this.#starling = loaded);
      this.model = {
        name: info.name ?? info.architecture,
        contextLength: info.contextLength,
        generates: info.generates,
        sha256: info.sha256,
      };
      this.state = "ready";
      const { sharedMemory } = Starling.features();
      $("backend").textContent =
        `${info.isa}, ${info.threads} thread${info.threads === 1 ? "" : "s"}${sharedMemory ? " (isolated page)" : ""}`;
      await this.answered();
    } catch (e) {
      if (this.#loading !== mine) return;
      this.state = e.name === "AbortError" ? "none" : "failed";
      this.ui.fail(e);
    } finally {
      if (this.#loading === mine) {
        this.#loading = undefined;
        this.ui.progress(undefined);
        this.ui.changed();
      }
      await this.#showCache();
    }
  }

  /** Shows what has changed after an answer. */
  async answered() {
    const memory = await this.#starling?.memory().catch(() => undefined);
    if (memory)
      $("memory").textContent =
        `${bytes(memory.module)}: weights ${bytes(memory.weights)}, context ${bytes(memory.kvReserved)}`;
  }

  async #showCache() {
    const [entries, usage] = await Promise.all([Starling.cache.list(), Starling.cache.usage()]);
    $("cache-usage").textContent =
      usage.storage === "none"
        ? "This browser keeps nothing here."
        : `${bytes(usage.cached)} cached; this site may use ${bytes(usage.quota)}.`;
    const item = ({ url, size }) => {
      const remove = element(
        "button",
        { type: "button", className: "small", onclick: () => Starling.cache.evict(url).then(() => this.#showCache()) },
        "Remove",
      );
      remove.setAttribute("aria-label", `Remove ${url}`);
      const use = element("button", { type: "button", className: "link", title: url, onclick: () => this.load(url) });
      use.append(url.split("/").at(-1));
      return element("li", {}, use, element("span", { className: "soft numbers" }, bytes(size)), remove);
    };
    $("cache-list").replaceChildren(...entries.map(item));
  }

  /** Answers `messages` or continues a `prompt`: events as of `eventOf`. */
  async *answer({ messages, prompt, options: given, signal }) {
    const model = this.#starling;
    // drawn here, so that an answer that is stopped has one too
    const options = { seed: randomSeed(), ...given };
    await this.#checkLength({ messages, prompt, tools: options.tools });
    signal.throwIfAborted();
    if (messages) {
      const chunks = await model.chat.completions.create(bodyOf({ messages, options }), { signal });
      for await (const chunk of chunks) yield { ...eventOf(chunk), seed: options.seed };
      return;
    }
    const generation = model.generate(prompt, { ...generateOptions(options), signal });
    for await (const token of generation.tokens()) yield { text: token.text, tokens: [token], seed: options.seed };
    const { finishReason, usage, receipt } = await generation.result;
    yield {
      tokens: [],
      finish: finishReason,
      receipt,
      usage: {
        prompt_tokens: usage.promptTokens,
        completion_tokens: usage.completionTokens,
        prompt_tokens_details: { cached_tokens: usage.cachedTokens },
      },
    };
  }

  /** Throws if a prompt leaves no room for an answer. */
  async #checkLength({ messages, prompt, tools }) {
    const model = this.#starling;
    const { ids } = messages ? await model.applyTemplate(messages, tools && { tools }) : await model.tokenize(prompt);
    const { contextLength } = model.info;
    if (ids.length >= contextLength)
      throw new Error(
        `${messages ? "The conversation" : "The text"} has ${ids.length} tokens, and the model's context ${contextLength}: ` +
          (messages ? "begin a new one, or edit an earlier message" : "shorten it"),
      );
  }

  /** Replays a receipt: `{ verified, tokens, step, reason }`. */
  verify(receipt) {
    return this.#starling.verify(receipt);
  }

  /** The text of each token; the receipt of another model may have ids that this one lacks. */
  texts(ids) {
    return Promise.all(ids.map((id) => this.#starling.detokenize([id]).catch(() => `[${id}]`)));
  }
}

/** A seed that a JSON number has exactly. */
const randomSeed = () => Math.floor(Math.random() * Number.MAX_SAFE_INTEGER);

function nameOf(source) {
  if (typeof source === "string") return decodeURIComponent(source.split(/[?#]/)[0].split("/").at(-1)) || source;
  return [source].flat()[0]?.name ?? "the model";
}
