// The chat: messages can be edited, answers regenerated, and conversations stay in this browser.

import { $, element, save } from "./dom.js";
import * as store from "./store.js";
import { copyButton, showMarkdown } from "./markdown.js";
import { ChatAnswer } from "./tokens.js";

export class Conversation {
  /**
   * `answer({ messages, seed }, view)` generates an answer into `view` and returns the result and its options. `canWrite()` returns
   * whether a model is loaded and idle; `stop()` aborts the running answer.
   */
  constructor(answer, canWrite, stop) {
    this.answer = answer;
    this.canWrite = canWrite;
    this.isAnswering = false;
    this.stop = stop;
    this.id = newId();
    /** `{ role, content, view?, receipt?, options? }` */
    this.messages = [];
    $("chat-form").onsubmit = (event) => {
      event.preventDefault();
      const content = $("message").value.trim();
      if (content === "" || !this.canWrite()) return;
      $("message").value = "";
      this.ask(this.messages.length, content);
    };
    $("message").onkeydown = (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      if (!$("send").disabled) $("chat-form").requestSubmit();
    };
    $("clear").onclick = () => this.open({ id: newId(), messages: [] });
    $("export").onclick = () => {
      const digits = (_, value) => (typeof value === "bigint" ? String(value) : value);
      // receipts verbatim: JSON.parse would round their 64-bit seeds
      const messages = this.messages.map(({ role, content, receipt, options }) => {
        const message = JSON.stringify({ role, content, sampling: options }, digits);
        return receipt ? `${message.slice(0, -1)},"receipt":${receipt}}` : message;
      });
      save("conversation.json", `{"messages":[\n${messages.join(",\n")}\n]}`);
    };
    const [last] = store.list();
    if (last) this.open(last);
  }

  /** Shows a conversation of the list, or a new one. */
  open({ id, messages }) {
    if (this.isAnswering) this.stop();
    this.id = id;
    this.messages = messages;
    this.draw();
    this.drawList();
  }

  /** Keeps the conversation in this browser. */
  #keep() {
    const messages = this.messages
      .filter(({ content }) => content !== "")
      .map(({ role, content, receipt, options }) => ({ role, content, receipt, options }));
    if (messages.length > 0) store.put({ id: this.id, title: messages[0].content.slice(0, 80), messages });
    this.drawList();
  }

  drawList() {
    const all = store.list();
    $("conversations").hidden = all.length === 0;
    $("conversation-list").replaceChildren(
      ...all.map((conversation) => {
        const { id, title } = conversation;
        const open = element("button", { type: "button", className: "small open", onclick: () => this.open(conversation) }, title);
        if (id === this.id) open.setAttribute("aria-current", "true");
        const remove = small("Remove", () => {
          store.remove(id);
          if (id === this.id) this.open({ id: newId(), messages: [] });
          else this.drawList();
        });
        remove.setAttribute("aria-label", `Remove the conversation ${title}`);
        return element("li", {}, open, remove);
      }),
    );
  }

  /** Sets the user message at index `at`, drops all later messages, and generates an answer, with `seed` or the one chosen. */
  async ask(at, content, seed) {
    if (!this.canWrite()) return;
    this.messages.length = at;
    this.messages.push({ role: "user", content });
    const messages = this.messages.map(({ role, content }) => ({ role, content }));
    const reply = { role: "assistant", content: "", view: new ChatAnswer(element("div", { className: "text" })) };
    this.messages.push(reply);
    this.draw();
    this.#keep();
    this.isAnswering = true;
    const result = await this.answer({ messages, seed }, reply.view);
    this.isAnswering = false;
    reply.content = reply.view.text;
    reply.view.draw();
    reply.receipt = result?.receipt;
    reply.options = result?.options;
    const index = this.messages.indexOf(reply);
    if (index < 0) return;
    if (!result && reply.content === "") {
      // an empty answer would become a part of the next prompt
      this.messages.splice(index, 1);
      $("messages").children[index].remove();
      this.#keep();
      return;
    }
    this.#keep();
    // no full redraw: the user may be editing another message
    $("messages").children[index].replaceWith(this.#node(reply, index));
  }

  draw() {
    $("messages").replaceChildren(...this.messages.map((message, at) => this.#node(message, at)));
    for (const id of ["export", "clear"]) $(id).disabled = this.messages.length === 0;
  }

  /** Redraws the answers after a change of "Show tokens". */
  redraw() {
    for (const { view } of this.messages) view?.redraw();
  }

  /** Enables the buttons that start an answer. */
  enable() {
    for (const button of $("messages").querySelectorAll(".writes")) button.disabled = !this.canWrite();
  }

  #node(message, at) {
    // the view of an answer may still receive tokens
    const text = message.view?.host ?? element("div", { className: "text" });
    if (!message.view && message.role === "assistant") {
      const body = element("div", { className: "body markdown" });
      showMarkdown(body, message.content);
      text.append(body);
    } else if (!message.view) text.append(message.content);
    const buttons = element("div", { className: "row" });
    const node = element(
      "div",
      { className: `message ${message.role}` },
      element("h3", {}, message.role === "user" ? "You" : "Starling"),
      text,
      buttons,
    );
    if (message.role === "user") {
      buttons.append(
        small("Edit", () => this.#edit(node, at)),
        this.#answerButton("Again", () => this.ask(at, message.content)),
        this.#answerButton("Again, same seed", () =>
          this.ask(at, message.content, this.messages[at + 1]?.options?.seed),
        ),
      );
    } else {
      buttons.append(copyButton(() => message.content));
      if (message.receipt) buttons.append(small("Save receipt", () => save("receipt.json", message.receipt)));
    }
    return node;
  }

  /** A button that starts an answer. */
  #answerButton(label, onclick) {
    const button = small(label, onclick);
    button.classList.add("writes");
    button.disabled = !this.canWrite();
    return button;
  }

  #edit(node, at) {
    const area = element("textarea", { rows: 3, value: this.messages[at].content, ariaLabel: "Edited message" });
    const done = this.#answerButton("Send", () => this.ask(at, area.value));
    const back = small("Cancel", () => node.replaceWith(this.#node(this.messages[at], at)));
    node.replaceChildren(area, element("div", { className: "row" }, done, back));
    area.focus();
  }
}

const newId = () => crypto.randomUUID?.() ?? String(Math.random());

const small = (label, onclick) => element("button", { type: "button", className: "small", onclick }, label);
