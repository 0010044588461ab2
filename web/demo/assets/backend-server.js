// Back end of a server's page: its own API. The server sends this file as backend.js.

import { $, button, element, icon, recall, remember } from "./dom.js";
import { bodyOf, eventOf, eventsOf, jsonOf, parseChunk, partsOf } from "./wire.js";

/** The key is kept for the tab; the reference at /docs uses it too. */
const KEY = ["starling-key", "sessionStorage"];
/** Milliseconds between looks at a model that is being loaded. */
const INTERVAL = 700;
/** Milliseconds between looks at the models while they are shown. */
const SHOWN_INTERVAL = 3000;

const STATES = { loaded: "ready", loading: "loading", draining: "loading", failed: "failed" };
/** The state of a model of the list. */
const stateOf = ({ status }) => STATES[status.value] ?? "unloaded";

class ServerError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** `ui` is that of backend.js. */
export class Backend {
  kind = "server";
  /** `{ name, contextLength, generates, sampling }` of the chosen model; incomplete until it is loaded. */
  model = undefined;
  /** `none`, `unloaded`, `loading`, `ready` or `failed`. */
  state = "none";
  loadingName = "";
  #models = [];
  #key = recall(...KEY);
  #timer;

  constructor(ui) {
    this.ui = ui;
    $("key-form").onsubmit = (event) => {
      event.preventDefault();
      this.#setKey($("key").value.trim());
      $("key").value = "";
      this.start();
    };
    $("pull-form").onsubmit = (event) => {
      event.preventDefault();
      this.#pull($("pull").value.trim());
    };
    $("model-panel").addEventListener("toggle", ({ newState }) => {
      if (newState === "open") this.#refresh().catch(() => {});
    });
  }

  async start() {
    try {
      await this.#refresh();
      $("key-form").hidden = true;
    } catch (e) {
      if (e.status !== 401) this.state = "failed";
      this.ui.progress(undefined);
      this.ui.fail(e);
      this.ui.changed();
    }
  }

  stopLoading() {}

  async answered() {}

  #setKey(key) {
    this.#key = key;
    remember(KEY[0], key, KEY[1]);
  }

  #headers() {
    return { "content-type": "application/json", ...(this.#key && { authorization: `Bearer ${this.#key}` }) };
  }

  async #fetch(path, body, signal) {
    const options = body === undefined ? {} : { method: "POST", body: typeof body === "string" ? body : jsonOf(body) };
    let response;
    try {
      response = await fetch(path, { ...options, headers: this.#headers(), signal });
    } catch (e) {
      if (e.name === "AbortError") throw e;
      throw new ServerError(0, "The server cannot be reached. Check that it is running, then try again.");
    }
    if (response.ok) return response;
    if (response.status === 401) this.#askKey();
    const told = await response.json().catch(() => undefined);
    const message = told?.error?.message ?? told?.error ?? `The server answered with status ${response.status}.`;
    const after = response.headers.get("retry-after");
    throw new ServerError(response.status, after ? `${message} (try again in ${after} s)` : message);
  }

  #askKey() {
    $("key-text").textContent = this.#key
      ? "The server does not accept this key. Check it, and enter it again."
      : "The key stays in this tab and is forgotten when the tab is closed.";
    this.#setKey(undefined);
    this.state = "none";
    $("key-form").hidden = false;
    $("key").focus();
  }

  /** Asks for the models and their states. */
  async #refresh() {
    clearTimeout(this.#timer);
    const { data } = await (await this.#fetch("v1/models")).json();
    this.#models = data;
    const wanted = this.model?.name ?? recall("starling-model");
    this.#choose(data.find(({ id }) => id === wanted) ?? data.find(({ generates }) => generates) ?? data[0]);
    this.#drawList();
    const isLoading = data.some((card) => stateOf(card) === "loading");
    const isShown = $("model-panel").matches(":popover-open");
    if (isLoading || isShown) {
      this.#timer = setTimeout(() => this.start(), isLoading ? INTERVAL : SHOWN_INTERVAL);
    }
  }

  #choose(card) {
    const before = JSON.stringify([this.model, this.state]);
    if (!card) {
      this.model = undefined;
      this.state = "none";
    } else {
      this.state = stateOf(card);
      this.loadingName = card.id;
      this.model = {
        name: card.id,
        contextLength: card.max_model_len,
        // what is not loaded is loaded when it is asked
        generates: card.generates ?? true,
        sampling: card.chat_sampling,
        sha256: card.sha256,
      };
    }
    if (card && JSON.stringify([this.model, this.state]) === before) return;
    this.ui.progress(this.state === "loading" ? {} : undefined);
    if (!card) this.ui.fail(new Error("This server has no models: start it with a model, or with --models-dir"));
    else if (this.state === "failed") this.ui.fail(new Error(`${card.id} could not be loaded: ${card.status.error}`));
    this.ui.changed();
  }

  #drawList() {
    const item = (card) => {
      const isChosen = card.id === this.model?.name;
      const state = stateOf(card);
      const about = [
        { ready: "ready", loading: "loading", failed: "could not be loaded", unloaded: "loaded when asked" }[state],
        card.max_model_len && `context ${card.max_model_len}`,
        card.generates === false && "embeds only",
      ];
      const choose = element("button", { type: "button", className: "model", onclick: () => this.#use(card.id) });
      if (isChosen) choose.setAttribute("aria-current", "true");
      choose.append(
        element("span", { className: `dot ${state}` }),
        element(
          "span",
          {},
          card.id,
          element("small", {}, about.filter(Boolean).join(" · ")),
          ...(card.status.error ? [element("small", { className: "bad" }, card.status.error)] : []),
        ),
        isChosen ? icon("check") : "",
      );
      const row = element("li", {}, choose);
      if (state === "ready") row.append(this.#unloadButton(card.id));
      return row;
    };
    const focused = document.activeElement?.closest?.("#model-list li");
    const at = focused ? [...$("model-list").children].indexOf(focused) : -1;
    $("model-list").replaceChildren(...this.#models.map(item));
    if (at >= 0) $("model-list").children[at]?.querySelector("button").focus();
    $("pull-form").hidden = !["localhost", "127.0.0.1", "[::1]"].includes(location.hostname);
  }

  #unloadButton(model) {
    const unload = async () => {
      try {
        await this.#fetch("models/unload", { model });
        await this.#refresh();
      } catch (e) {
        this.ui.fail(e);
      }
    };
    return button("close", `Unload ${model}`, unload, true);
  }

  /** Uses a model from now on, and has it loaded. */
  async #use(id) {
    remember("starling-model", id);
    const card = this.#models.find((other) => other.id === id);
    this.#choose(card);
    this.#drawList();
    $("model-panel").hidePopover();
    if (this.state === "ready" || this.state === "loading") return;
    try {
      await this.#fetch("models/load", { model: id });
      await this.#refresh();
    } catch (e) {
      // who may not load models has them loaded by asking
      if (e.status !== 403) this.ui.fail(e);
    }
  }

  /** Downloads a model to the server. */
  async #pull(model) {
    if (model === "") return;
    $("model-panel").hidePopover();
    this.loadingName = model;
    this.ui.progress({});
    try {
      const response = await this.#fetch("api/pull", { model });
      for await (const line of partsOf(response.body, "\n")) {
        if (!line.trim()) continue;
        const { error, completed, total } = JSON.parse(line);
        if (error) throw new Error(error.message ?? error);
        if (total) this.ui.progress({ from: "network", loaded: completed ?? 0, total });
      }
    } catch (e) {
      this.ui.fail(e);
    } finally {
      this.ui.progress(undefined);
      await this.#refresh().catch(() => {});
    }
  }

  /** Answers `messages` or continues a `prompt`: events as of `eventOf`. */
  async *answer({ messages, prompt, options, signal }) {
    const body = { model: this.model.name, ...bodyOf({ messages, prompt, options }) };
    const path = messages ? "v1/chat/completions" : "v1/completions";
    const response = await this.#fetch(path, body, signal);
    try {
      for await (const data of eventsOf(response.body)) {
        const chunk = parseChunk(data);
        if (chunk.error) throw new ServerError(200, chunk.error.message);
        yield eventOf(chunk);
      }
    } catch (e) {
      if (e.name !== "TypeError") throw e;
      throw new ServerError(0, "The connection to the server broke off.");
    }
    // the answer may have loaded it
    if (this.state !== "ready") await this.#refresh();
  }

  /** Replays a receipt: `{ verified, tokens, step, reason }`. */
  async verify(receipt) {
    JSON.parse(receipt);
    const { verified, tokens, reason } = await (await this.#fetch("v1/verify", `{"receipt":${receipt}}`)).json();
    const step = /(?:token|step) (\d+)/.exec(reason ?? "")?.[1];
    return { verified, tokens, reason, step: step === undefined ? null : Number(step) };
  }

  /** The text of each token. */
  async texts(ids) {
    // a request without an answer, which echoes its prompt token by token
    const body = { model: this.model.name, prompt: ids, max_tokens: 0, echo: true, logprobs: 0 };
    const { choices } = await (await this.#fetch("v1/completions", body)).json();
    return choices[0].logprobs.tokens;
  }
}
