// An answer as text, or as tokens with their probabilities.

import { $, element } from "./dom.js";
import { folded, showMarkdown, showReasoning } from "./markdown.js";
import { highlight } from "./highlight.js";

const percent = (logprob) => `${(100 * Math.exp(logprob)).toFixed(1)} %`;

const showsTokens = () => $("show-tokens").checked;

/** Shows an answer while it is generated. */
export class Answer {
  text = "";
  tokens = [];
  /** Joins characters that several tokens make. */
  #decoder = new TextDecoder();

  constructor(host, prompt = "") {
    this.host = host;
    this.body = this.makeBody();
    host.replaceChildren(...(prompt ? [element("span", { className: "prompt" }, prompt)] : []), this.body);
    host.onpointerover = ({ target }) => this.#show(target.closest?.(".token"));
    host.onpointerleave = hide;
    host.onfocusin = ({ target }) => this.#show(target.closest(".token"));
    host.onfocusout = hide;
    host.onkeydown = (event) => this.#move(event);
  }

  makeBody() {
    return element("span", { className: "body" });
  }

  /** Adds what an event brings. */
  add({ text = "", tokens }) {
    this.text += text;
    if (showsTokens() && this.tokens.length === 0 && tokens.length > 0) this.clear();
    for (const token of tokens) {
      const said = token.bytes && !("id" in token) ? this.#decode(token.bytes) : token.text;
      this.tokens.push({ ...token, said });
      if (showsTokens()) this.body.append(this.#node(this.tokens.length - 1));
    }
    if (!showsTokens()) this.drawText(text);
  }

  /** Removes what is shown. */
  clear() {
    this.body.replaceChildren();
  }

  #decode(bytes) {
    return this.#decoder.decode(new Uint8Array(bytes), { stream: true });
  }

  drawText(text) {
    this.body.append(text);
  }

  /** Whether tokens are shown instead of the text. */
  get isTokens() {
    return showsTokens() && this.tokens.length > 0;
  }

  /** Draws all anew after a change of "Tokens". */
  redraw() {
    this.body.replaceChildren(...(this.isTokens ? this.tokens.map((_, i) => this.#node(i)) : [this.text]));
  }

  #node(index) {
    const { said, logprob } = this.tokens[index];
    if (logprob === undefined) return document.createTextNode(said);
    const node = element("span", { className: "token", tabIndex: index === 0 ? 0 : -1 }, said);
    node.dataset.index = index;
    node.style.setProperty("--unlikely", (1 - Math.exp(logprob)).toFixed(3));
    return node;
  }

  #show(node) {
    if (!node) return hide();
    const token = this.tokens[node.dataset.index];
    const rows = token.top?.map(({ text, logprob }) => {
      const bar = element("td", { className: "share" }, element("i"));
      bar.firstChild.style.width = `${(100 * Math.exp(logprob)).toFixed(1)}%`;
      const isPicked = text === token.text || logprob === token.logprob;
      return element(
        "tr",
        { className: isPicked ? "picked" : "" },
        element("td", {}, JSON.stringify(text)),
        bar,
        element("td", { className: "numbers" }, percent(logprob)),
      );
    });
    const tip = $("tip");
    const id = token.id === undefined ? "" : `, id ${token.id}`;
    tip.replaceChildren(
      element("div", {}, `${JSON.stringify(token.text)}${id}: ${percent(token.logprob)}`),
      element("table", {}, ...(rows ?? [])),
    );
    tip.hidden = false;
    node.setAttribute("aria-describedby", "tip");
    const { left, bottom, top } = node.getBoundingClientRect();
    tip.style.left = `${Math.max(8, Math.min(left, innerWidth - tip.offsetWidth - 8))}px`;
    tip.style.top =
      bottom + tip.offsetHeight + 4 < innerHeight ? `${bottom + 4}px` : `${Math.max(0, top - tip.offsetHeight - 4)}px`;
  }

  /** Moves the focus between tokens with arrow keys; one token is in the tab order. */
  #move(event) {
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

/** An answer of a chat: Markdown, reasoning and tool calls, or tokens. */
export class ChatAnswer extends Answer {
  reasoning = "";
  /** `{ id, name, arguments }` */
  calls = [];
  isDone = false;
  #frame = 0;

  makeBody() {
    return element("div", { className: "body" });
  }

  add(event) {
    this.reasoning += event.reasoning ?? "";
    for (const { index, id, function: part } of event.calls ?? []) {
      const call = (this.calls[index] ??= { id, name: "", arguments: "" });
      call.name += part.name ?? "";
      call.arguments += part.arguments ?? "";
    }
    super.add(event);
  }

  clear() {
    this.body.areas = undefined;
    this.body.classList.remove("waiting");
    super.clear();
  }

  /** Markdown is drawn once a frame. */
  drawText() {
    this.#frame ||= requestAnimationFrame(() => this.draw());
  }

  draw() {
    cancelAnimationFrame(this.#frame);
    this.#frame = 0;
    if (this.isTokens) return;
    showAnswer(this.body, this);
  }

  /** The answer is complete. */
  end() {
    this.isDone = true;
    this.draw();
  }

  redraw() {
    this.clear();
    if (this.isTokens) super.redraw();
    else this.draw();
  }
}

/** Shows the parts of an answer in `body`. */
export function showAnswer(body, { text, reasoning, calls, isDone }) {
  if (!body.areas) {
    body.areas = ["", "markdown", "calls"].map((className) => element("div", { className }));
    body.replaceChildren(...body.areas);
  }
  const [before, main, after] = body.areas;
  if (reasoning) showReasoning(before, reasoning, isDone || text !== "" || calls.length > 0);
  showMarkdown(main, text);
  body.classList.toggle("waiting", !isDone && text === "" && !reasoning && calls.length === 0);
  for (const [i, call] of calls.entries()) {
    if (!call) continue;
    const details =
      after.children[i] ??
      folded("call", "tool", `Calls ${call.name}`, element("pre", { tabIndex: 0 }, element("code")));
    if (!details.isConnected) after.append(details);
    const [code, shown] = [details.querySelector("code"), pretty(call.arguments)];
    if (code.textContent !== shown) code.replaceChildren(...highlight(shown, "json"));
  }
}

function pretty(json) {
  try {
    return JSON.stringify(JSON.parse(json), null, 2);
  } catch {
    return json; // not complete
  }
}

function hide() {
  $("tip").hidden = true;
}
