// The chat: messages can be edited, answers regenerated, each as a branch, and conversations stay in this browser.

import { $, button, copyButton, element, save } from "./dom.js";
import { chatOptions } from "./sampling.js";
import * as store from "./store.js";
import * as tree from "./tree.js";
import { ChatAnswer, showAnswer } from "./tokens.js";

/** Why an answer ended, if that is worth a word. */
const ENDS = {
  length: "limit of tokens",
  cancelled: "stopped",
  timeout: "time limit of the server",
  not_finite: "numbers not finite",
};

export class Conversation {
  /**
   * `answer({ messages, options }, view)` generates an answer into `view` and returns its facts. `canWrite()` returns whether a
   * model is loaded and idle; `stop()` aborts the running answer; `verify(receipt)` verifies a receipt; `shown()` is called when
   * other messages are shown.
   */
  constructor(page) {
    this.page = page;
    this.isAnswering = false;
    const { id, ...tree } = empty();
    this.id = id;
    this.tree = tree;
    $("chat-form").onsubmit = (event) => {
      event.preventDefault();
      const content = $("message").value.trim();
      if (content === "" || !page.canWrite()) return;
      $("message").value = "";
      $("message").dispatchEvent(new Event("input"));
      this.ask(this.tree.leaf, content);
    };
    $("clear").onclick = () => this.begin();
    $("export").onclick = () => this.#export();
  }

  /** Shows the last conversation. */
  start() {
    this.open(store.list()[0] ?? empty());
  }

  get messages() {
    return tree.path(this.tree).map((index) => this.tree.nodes[index]);
  }

  /** Begins a conversation. */
  begin() {
    this.open(empty());
    $("message").focus();
  }

  /** Shows a conversation of the list, or a new one. */
  open({ id, nodes, leaf }) {
    if (this.isAnswering) this.page.stop();
    this.id = id;
    this.tree = { nodes, leaf };
    this.draw();
    this.drawList();
    this.page.shown();
  }

  #export() {
    const digits = (_, value) => (typeof value === "bigint" ? String(value) : value);
    // receipts verbatim: JSON.parse would round their 64-bit seeds
    const messages = this.messages.map(({ role, content, reasoning, calls, receipt, options }) => {
      const message = JSON.stringify({ role, content, reasoning, tool_calls: calls, sampling: options }, digits);
      return receipt ? `${message.slice(0, -1)},"receipt":${receipt}}` : message;
    });
    save("conversation.json", `{"messages":[\n${messages.join(",\n")}\n]}`);
  }

  /** Keeps a conversation in this browser, without an answer that has not ended. */
  #keep(id = this.id, { nodes, leaf } = this.tree) {
    const isRunning = nodes.at(-1)?.view?.isDone === false;
    const kept = (isRunning ? nodes.slice(0, -1) : nodes).map(({ view, ...node }) => node);
    const last = leaf < kept.length ? leaf : nodes[leaf].parent;
    const conversation = { id, title: kept[0]?.content.slice(0, 80), nodes: kept, leaf: last };
    this.drawList(kept.length > 0 ? store.put(conversation) : store.list());
  }

  drawList(all = store.list()) {
    $("no-conversations").hidden = all.length > 0;
    $("conversation-list").replaceChildren(
      ...all.map((conversation) => {
        const { id, title } = conversation;
        const open = element(
          "button",
          { type: "button", className: "open", title, onclick: () => id !== this.id && this.open(conversation) },
          title,
        );
        if (id === this.id) open.setAttribute("aria-current", "true");
        const remove = () => {
          store.remove(id);
          if (id === this.id) this.open(empty());
          else this.drawList();
        };
        return element("li", {}, open, button("trash", `Remove the conversation ${title}`, remove, true));
      }),
    );
  }

  /** Adds a message of the user below `parent`, and generates an answer, with `seed` or the one chosen. */
  ask(parent, content, seed) {
    if (!this.page.canWrite()) return;
    const at = tree.add(this.tree, { role: "user", content }, parent);
    return this.reply(at, seed);
  }

  /** Generates an answer below `at`, beside those that are there. */
  async reply(at, seed) {
    if (!this.page.canWrite()) return;
    const { id, tree: shown } = this;
    const before = shown.leaf;
    shown.leaf = at;
    const asked = this.messages;
    const view = new ChatAnswer(element("div", { className: "text" }));
    const node = { role: "assistant", content: "", view };
    tree.add(shown, node, at);
    const reply = shown.nodes.at(-1);
    this.draw();
    view.draw();
    this.#keep();
    this.page.shown();
    this.isAnswering = true;
    const to = () => {
      const { system, ...options } = chatOptions();
      const messages = [...(system === "" ? [] : [{ role: "system", content: system }]), ...asked.map(wireMessage)];
      return { messages, options: { ...options, ...(seed !== undefined && { seed }) } };
    };
    const facts = await this.page.answer(to, view);
    this.isAnswering = false;
    view.end();
    const { text, reasoning, calls } = view;
    Object.assign(reply, { content: text, ...facts });
    if (reasoning) reply.reasoning = reasoning;
    if (calls.length > 0) reply.calls = calls;
    const index = shown.nodes.indexOf(reply);
    if (index < 0) return;
    const isShown = this.tree === shown;
    if (text === "" && !reasoning && calls.length === 0) {
      // an empty answer would become a part of the next prompt
      tree.removeLeaf(shown, index);
      if (before >= 0 && before < shown.nodes.length) shown.leaf = before === index ? at : before;
      if (shown.leaf < at) shown.leaf = at;
    }
    // unless it was removed
    if (isShown || store.list().some((kept) => kept.id === id)) this.#keep(id, shown);
    if (!isShown) return;
    const drawn = $("messages").querySelector(`[data-index="${index}"]`);
    if (shown.nodes[index] === reply) drawn?.replaceWith(this.#node(index));
    // the user may be editing another message
    else if ($("messages").querySelector(".edited")) drawn?.remove();
    else this.draw();
  }

  draw() {
    $("messages").replaceChildren(...tree.path(this.tree).map((index) => this.#node(index)));
    for (const id of ["export", "clear"]) $(id).disabled = this.tree.nodes.length === 0;
  }

  /** Redraws the answers after a change of "Tokens". */
  redraw() {
    for (const { view } of this.messages) view?.redraw();
  }

  /** Enables the buttons that start an answer. */
  enable() {
    for (const button of $("messages").querySelectorAll(".writes")) button.disabled = !this.page.canWrite();
  }

  /** Edits the last message of the user. */
  editLast() {
    const nodes = $("messages").querySelectorAll(".message.user");
    nodes[nodes.length - 1]?.querySelector(".edit")?.click();
  }

  /** Answers the last message again. */
  again() {
    const { nodes, leaf } = this.tree;
    if (leaf >= 0) return this.reply(nodes[leaf].role === "assistant" ? nodes[leaf].parent : leaf);
  }

  #node(index) {
    const message = this.tree.nodes[index];
    const isAnswer = message.role === "assistant";
    // the view of an answer may still receive tokens
    const text = message.view?.host ?? element("div", { className: "text" });
    if (!message.view && isAnswer) {
      const body = element("div", { className: "body" });
      const { content, reasoning, calls = [] } = message;
      showAnswer(body, { text: content, reasoning, calls, isDone: true });
      text.append(body);
    } else if (!message.view) text.append(message.content);
    const actions = element("div", { className: "actions" });
    const names = { user: "You", assistant: "Starling", tool: `Result of ${message.name ?? "a tool"}` };
    const node = element(
      "article",
      { className: `message ${message.role}` },
      element("h2", {}, names[message.role] ?? message.role),
      text,
      actions,
    );
    node.dataset.index = index;
    const isRunning = message.view && !message.view.isDone;
    actions.hidden = isRunning;
    const branches = this.#branches(index);
    if (isAnswer) {
      actions.append(
        ...branches,
        copyButton(() => message.content),
        this.#answerButton("again", "Again", () => this.reply(message.parent)),
      );
      if (message.options?.seed !== undefined || isRunning)
        actions.append(
          this.#answerButton("again", "Again, same seed", () => this.reply(message.parent, message.options?.seed)),
        );
      if (message.receipt)
        actions.append(
          button("receipt", "Save receipt", () => save("receipt.json", message.receipt)),
          button("check", "Verify", () => this.page.verify(message.receipt)),
        );
      const facts = this.#facts(message);
      if (facts) node.append(facts);
      if (message.calls && this.tree.leaf === index && !isRunning) node.append(this.#results(index));
    } else {
      actions.append(...branches);
      if (message.role === "user") {
        const edit = button("edit", "Edit", () => this.#edit(node, index));
        edit.classList.add("edit");
        actions.append(edit);
      }
      if (this.tree.leaf === index) actions.append(this.#answerButton("again", "Again", () => this.reply(index)));
    }
    return node;
  }

  /** What is known of an answer: tokens, speed, seed. */
  #facts({ usage, rate, options, finish }) {
    if (!usage && options?.seed === undefined) return undefined;
    const facts = element("p", { className: "facts" });
    if (usage) facts.append(element("span", {}, `${usage.completion_tokens} tokens`));
    if (rate) facts.append(element("span", {}, `${rate.toFixed(1)} tokens/s`));
    if (options?.seed !== undefined) {
      const seed = element(
        "button",
        { type: "button", className: "link", title: "Copy the seed" },
        `seed ${options.seed}`,
      );
      seed.onclick = () => navigator.clipboard.writeText(String(options.seed)).catch(() => {});
      facts.append(seed);
    }
    if (ENDS[finish]) facts.append(element("span", {}, ENDS[finish]));
    return facts;
  }

  /** The number of a branch, and buttons to the others. */
  #branches(index) {
    const all = tree.siblings(this.tree, index);
    if (all.length < 2) return [];
    const at = all.indexOf(index);
    const turn = (to, name, label) => {
      const show = () => {
        if (this.isAnswering) this.page.stop();
        this.tree.leaf = tree.newest(this.tree, all[to]);
        this.draw();
        this.#keep();
        $("messages").querySelector(`[data-index="${all[to]}"] .branches button`)?.focus();
      };
      const made = button(name, label, show, true);
      made.disabled = to < 0 || to >= all.length;
      return made;
    };
    const number = element("span", { className: "numbers" }, `${at + 1}/${all.length}`);
    return [
      element(
        "span",
        { className: "branches" },
        turn(at - 1, "left", "Branch before"),
        number,
        turn(at + 1, "right", "Branch after"),
      ),
    ];
  }

  /** A button that starts an answer. */
  #answerButton(name, label, onclick) {
    const made = button(name, label, onclick);
    made.classList.add("writes");
    made.disabled = !this.page.canWrite();
    return made;
  }

  #edit(node, index) {
    const { content, parent } = this.tree.nodes[index];
    const area = element("textarea", { rows: 3, value: content, ariaLabel: "Edited message" });
    const done = this.#answerButton("send", "Send", () => this.ask(parent, area.value));
    const back = button("close", "Cancel", () => node.replaceWith(this.#node(index)));
    area.onkeydown = (event) => {
      if (event.key === "Escape") back.click();
      else if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        done.click();
      } else return;
      event.stopPropagation();
    };
    node.classList.add("edited");
    node.replaceChildren(area, element("div", { className: "actions" }, done, back));
    area.focus();
  }

  /** Fields for the results of tool calls. */
  #results(index) {
    const { calls } = this.tree.nodes[index];
    const areas = calls.map(({ name }) =>
      element("textarea", { rows: 2, placeholder: "JSON or text", ariaLabel: `Result of ${name}` }),
    );
    const form = element("form", { className: "results" });
    for (const [i, { name }] of calls.entries()) form.append(element("label", {}, `Result of ${name}`, areas[i]));
    const send = this.#answerButton("send", "Send results", () => {});
    send.type = "submit";
    form.append(element("div", { className: "actions" }, send));
    form.onsubmit = (event) => {
      event.preventDefault();
      if (!this.page.canWrite()) return;
      let at = index;
      for (const [i, { id, name }] of calls.entries())
        at = tree.add(this.tree, { role: "tool", content: areas[i].value, name, callId: id }, at);
      this.reply(at);
    };
    return form;
  }
}

/** A message as the API takes it. */
function wireMessage({ role, content, reasoning, calls, name, callId }) {
  if (role === "tool") return { role, content, name, tool_call_id: callId };
  if (!calls) return { role, content };
  return {
    role,
    content,
    ...(reasoning && { reasoning_content: reasoning }),
    tool_calls: calls.map((call) => ({
      id: call.id,
      type: "function",
      function: { name: call.name, arguments: call.arguments },
    })),
  };
}

/** A conversation without messages. */
const empty = () => ({ id: crypto.randomUUID?.() ?? String(Math.random()), nodes: [], leaf: -1 });
