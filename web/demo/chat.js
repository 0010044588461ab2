// The conversation: messages that can be edited, and answers that can be asked for again.

import { $, element, save } from "./dom.js";
import { Answer } from "./tokens.js";

export class Conversation {
  /**
   * `answer({ messages }, view)` answers them and returns the result, with the options it was asked for with. `canWrite()`
   * says whether there is a model for it that has nothing else to do; `stop()` ends its answer.
   */
  constructor(answer, canWrite, stop) {
    this.answer = answer;
    this.canWrite = canWrite;
    this.isAnswering = false;
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
    $("clear").onclick = () => {
      if (this.isAnswering) stop();
      this.messages = [];
      this.draw();
    };
    $("export").onclick = () => {
      const digits = (_, value) => (typeof value === "bigint" ? String(value) : value);
      // receipts as they are: their seeds have more digits than numbers here
      const messages = this.messages.map(({ role, content, receipt, options }) => {
        const message = JSON.stringify({ role, content, sampling: options }, digits);
        return receipt ? `${message.slice(0, -1)},"receipt":${receipt}}` : message;
      });
      save("conversation.json", `{"messages":[\n${messages.join(",\n")}\n]}`);
    };
  }

  /** Puts a message of the user at that place, forgets what came after, and answers. */
  async ask(at, content) {
    if (!this.canWrite()) return;
    this.messages.length = at;
    this.messages.push({ role: "user", content });
    const messages = this.messages.map(({ role, content }) => ({ role, content }));
    const reply = { role: "assistant", content: "", view: new Answer(element("div", { className: "text" })) };
    this.messages.push(reply);
    this.draw();
    this.isAnswering = true;
    const result = await this.answer({ messages }, reply.view);
    this.isAnswering = false;
    reply.content = reply.view.text;
    reply.receipt = result?.receipt;
    reply.options = result?.options;
    const place = this.messages.indexOf(reply);
    if (place < 0) return;
    if (!result && reply.content === "") {
      // no answer: an empty one would be a part of what is asked next
      this.messages.splice(place, 1);
      $("messages").children[place].remove();
      return;
    }
    // only this one: another may be edited
    $("messages").children[place].replaceWith(this.#node(reply, place));
  }

  draw() {
    $("messages").replaceChildren(...this.messages.map((message, at) => this.#node(message, at)));
    for (const id of ["export", "clear"]) $(id).disabled = this.messages.length === 0;
  }

  /** After the switch between text and tokens was thrown. */
  redraw() {
    for (const { view } of this.messages) view?.redraw();
  }

  /** Which buttons can be pressed. */
  enable() {
    for (const button of $("messages").querySelectorAll(".writes")) button.disabled = !this.canWrite();
  }

  #node(message, at) {
    // an answer may still be on its way into its view
    const text = message.view?.host ?? element("div", { className: "text" }, message.content);
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
        this.#writes("Again, same seed", () => this.ask(at, message.content)),
      );
    } else if (message.receipt) {
      buttons.append(small("Save receipt", () => save("receipt.json", message.receipt)));
    }
    return node;
  }

  /** A button that makes the model write. */
  #writes(label, onclick) {
    const button = small(label, onclick);
    button.classList.add("writes");
    button.disabled = !this.canWrite();
    return button;
  }

  #edit(node, at) {
    const area = element("textarea", { rows: 3, value: this.messages[at].content, ariaLabel: "Edited message" });
    const done = this.#writes("Send", () => this.ask(at, area.value));
    const back = small("Cancel", () => node.replaceWith(this.#node(this.messages[at], at)));
    node.replaceChildren(area, element("div", { className: "row" }, done, back));
    area.focus();
  }
}

const small = (label, onclick) => element("button", { type: "button", className: "small", onclick }, label);
