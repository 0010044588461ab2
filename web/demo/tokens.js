// An answer as text, or as tokens with their probabilities.

import { $, element } from "./dom.js";
import { showMarkdown } from "./markdown.js";

/** Alternatives shown for each token. */
export const ALTERNATIVES = 5;

const percent = (logprob) => `${(100 * Math.exp(logprob)).toFixed(1)} %`;

/** Shows an answer while it is generated. */
export class Answer {
  constructor(host, prompt = "") {
    this.host = host;
    this.tokens = [];
    this.body = this.makeBody();
    host.replaceChildren(...(prompt ? [element("span", { className: "prompt" }, prompt)] : []), this.body);
    host.onpointerover = ({ target }) => this.show(target.closest?.(".token"));
    host.onpointerleave = () => hide();
    host.onfocusin = ({ target }) => this.show(target.closest(".token"));
    host.onfocusout = () => hide();
    host.onkeydown = (event) => this.move(event);
  }

  makeBody() {
    return element("span", { className: "body" });
  }

  get text() {
    return this.tokens.map(({ text }) => text).join("");
  }

  add(token) {
    this.tokens.push(token);
    this.body.append(this.#node(token, this.tokens.length - 1));
  }

  /** Redraws all tokens after a change of "Show tokens". */
  redraw() {
    this.body.replaceChildren(...this.tokens.map((token, i) => this.#node(token, i)));
    this.body.normalize();
  }

  #node(token, index) {
    if (!$("show-tokens").checked || token.logprob === undefined) return document.createTextNode(token.text);
    const node = element("span", { className: "token", tabIndex: index === 0 ? 0 : -1 }, token.text);
    node.dataset.index = index;
    node.style.background = `rgba(var(--unlikely), ${(0.55 * (1 - Math.exp(token.logprob))).toFixed(3)})`;
    return node;
  }

  show(node) {
    if (!node) return hide();
    const token = this.tokens[node.dataset.index];
    const rows = token.top?.map(({ id, text, logprob }) =>
      element(
        "tr",
        {},
        element("td", {}, id === token.id ? "▸" : ""),
        element("td", {}, JSON.stringify(text)),
        element("td", {}, percent(logprob)),
      ),
    );
    const tip = $("tip");
    tip.replaceChildren(
      element("div", {}, `${JSON.stringify(token.text)}, id ${token.id}: ${percent(token.logprob)}`),
      element("table", {}, ...(rows ?? [])),
    );
    tip.hidden = false;
    node.setAttribute("aria-describedby", "tip");
    const { left, bottom, top } = node.getBoundingClientRect();
    tip.style.left = `${Math.max(0, Math.min(left, innerWidth - tip.offsetWidth - 8))}px`;
    tip.style.top =
      bottom + tip.offsetHeight + 4 < innerHeight ? `${bottom + 4}px` : `${Math.max(0, top - tip.offsetHeight - 4)}px`;
  }

  /** Moves the focus between tokens with arrow keys; one token is in the tab order. */
  move(event) {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (event.key === "Escape") hide();
    const from = event.target.closest?.(".token");
    if (!step || !from) return;
    const all = [...this.body.querySelectorAll(".token")];
    const to = all[all.indexOf(from) + step];
    if (!to) return;
    event.preventDefault();
    [from.tabIndex, to.tabIndex] = [-1, 0];
    to.focus();
  }
}

/** An answer of a chat: Markdown, or tokens. */
export class ChatAnswer extends Answer {
  #frame = 0;

  makeBody() {
    return element("div", { className: "body markdown" });
  }

  add(token) {
    if ($("show-tokens").checked) return super.add(token);
    this.tokens.push(token);
    this.#frame ||= requestAnimationFrame(() => this.draw());
  }

  draw() {
    cancelAnimationFrame(this.#frame);
    this.#frame = 0;
    if (!$("show-tokens").checked) showMarkdown(this.body, this.text);
  }

  redraw() {
    const showsTokens = $("show-tokens").checked;
    this.body.classList.toggle("markdown", !showsTokens);
    if (showsTokens) super.redraw();
    else this.draw();
  }
}

function hide() {
  $("tip").hidden = true;
}
