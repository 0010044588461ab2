// The conversation: messages that can be edited, and answers that can be asked for again.

import { $, element, save } from "./dom.js";
import { samplingOptions } from "./sampling.js";
import { Answer } from "./tokens.js";

export class Conversation {
  /** `answer(start, view)` runs a generation and returns its result; `start(options)` makes it. */
  constructor(answer) {
    this.answer = answer;
    /** `{ role, content, view?, receipt? }` */
    this.messages = [];
    $("chat-form").onsubmit = (event) => {
      event.preventDefault();
      const content = $("message").value.trim();
      if (content === "") return;
      $("message").value = "";
      this.ask(this.messages.length, content);
    };
    $("message").onkeydown = (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      if (!$("send").disabled) $("chat-form").requestSubmit();
    };
    $("clear").onclick = () => {
      this.messages = [];
      this.draw();
    };
    $("export").onclick = () => {
      const messages = this.messages.map(({ role, content, receipt }) => ({
        role,
        content,
        ...(receipt && { receipt: JSON.parse(receipt) }),
      }));
      save("conversation.json", JSON.stringify({ sampling: samplingOptions(), messages }, null, 2));
    };
  }

  /** Puts a message of the user at that place, forgets what came after, and answers. */
  async ask(at, content) {
    this.messages.length = at;
    this.messages.push({ role: "user", content });
    const messages = this.messages.map(({ role, content }) => ({ role, content }));
    const reply = { role: "assistant", content: "" };
    this.messages.push(reply);
    this.draw();
    const host = $("messages").lastElementChild.querySelector(".text");
    reply.view = new Answer(host);
    const result = await this.answer((model, options) => model.chat(messages, options), reply.view);
    reply.content = reply.view.text;
    reply.receipt = result?.receipt;
    this.draw();
  }

  draw() {
    $("messages").replaceChildren(...this.messages.map((message, at) => this.#node(message, at)));
    for (const { view } of this.messages) view?.redraw();
    for (const id of ["export", "clear"]) $(id).disabled = this.messages.length === 0;
  }

  #node(message, at) {
    const text = element("div", { className: "text" }, message.view ? "" : message.content);
    message.view?.host.replaceWith(text);
    const buttons = element("div", { className: "row" });
    const node = element(
      "div",
      { className: `message ${message.role}` },
      element("h3", {}, message.role === "user" ? "You" : "Starling"),
      text,
      buttons,
    );
    if (message.view) {
      const { tokens } = message.view;
      message.view = Object.assign(new Answer(text), { tokens });
    }
    const button = (label, onclick) =>
      buttons.append(element("button", { type: "button", className: "small", onclick }, label));
    if (message.role === "user") {
      button("Edit", () => this.#edit(node, at));
      button("Again, same seed", () => this.ask(at, message.content));
    } else if (message.receipt) {
      button("Save receipt", () => save("receipt.json", message.receipt));
    }
    return node;
  }

  #edit(node, at) {
    const area = element("textarea", { rows: 3, value: this.messages[at].content, ariaLabel: "Edited message" });
    const done = element(
      "button",
      { type: "button", className: "small", onclick: () => this.ask(at, area.value) },
      "Send",
    );
    const back = element("button", { type: "button", className: "small", onclick: () => this.draw() }, "Cancel");
    node.replaceChildren(area, element("div", { className: "row" }, done, back));
    area.focus();
  }
}
