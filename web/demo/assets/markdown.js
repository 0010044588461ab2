// Markdown of answers as DOM nodes. A model's text is not trusted: HTML in it is shown as text, what marked makes is sanitised, and
// nothing is fetched.

import { Marked } from "./marked.js";
import DOMPurify from "./purify.js";
import { copyButton, element, icon } from "./dom.js";
import { highlight } from "./highlight.js";

const escape = (text) => text.replace(/[&<>"]/g, (c) => `&#${c.charCodeAt(0)};`);

const marked = new Marked({
  gfm: true,
  breaks: true,
  renderer: {
    html: ({ text }) => escape(text),
    image: ({ href, text }) => escape(`![${text}](${href})`),
    // the page has its own outline
    heading({ tokens, depth }) {
      return `<p class="heading-${depth}"><strong>${this.parser.parseInline(tokens)}</strong></p>`;
    },
    checkbox: ({ checked }) => (checked ? "☑ " : "☐ "),
  },
});

const TAGS = "a blockquote br code del em hr li ol p pre strong table tbody td th thead tr ul".split(" ");
const ATTRIBUTES = ["align", "class", "href", "start", "title"];

/** Text of an answer before its end: reasoning, which some models write first, and the rest. */
function parts(text) {
  const [, reasoning, isClosed, rest] = /^\s*<think>(.*?)(?:(<\/think>)(.*))?$/s.exec(text) ?? [];
  return reasoning === undefined ? { rest: text } : { reasoning, isClosed: isClosed !== undefined, rest: rest ?? "" };
}

function fragment(html) {
  const nodes = DOMPurify.sanitize(html, {
    ALLOWED_TAGS: TAGS,
    ALLOWED_ATTR: ATTRIBUTES,
    ALLOW_DATA_ATTR: false,
    RETURN_DOM_FRAGMENT: true,
  });
  for (const link of nodes.querySelectorAll("a")) Object.assign(link, { target: "_blank", rel: "noopener noreferrer" });
  for (const table of nodes.querySelectorAll("table")) {
    const scroller = element("div", { className: "scroll", tabIndex: 0 });
    table.replaceWith(scroller);
    scroller.append(table);
  }
  for (const block of nodes.querySelectorAll("pre")) {
    const inner = block.querySelector("code") ?? block;
    const language = /language-(\S+)/.exec(inner.className)?.[1];
    const code = element("div", { className: "code" });
    block.replaceWith(code);
    block.tabIndex = 0;
    inner.replaceChildren(...highlight(inner.textContent, language));
    const head = element("div", { className: "code-head" }, element("span", {}, language ?? "code"));
    head.append(copyButton(() => block.textContent));
    code.append(head, block);
  }
  return nodes;
}

/**
 * Shows a text in `host`. While it is streamed, only the blocks that have changed are drawn again. `host.shown` has the text, the
 * length of the part that more text cannot change, and the blocks after it as `{ raw, nodes }`.
 */
function showBlocks(host, given) {
  const text = given.replace(/\r\n?/g, "\n");
  let { shown } = host;
  if (shown?.text === text) return;
  if (!shown || !text.startsWith(shown.text)) {
    host.replaceChildren();
    shown = { text: "", settled: 0, blocks: [] };
  }
  const rest = text.slice(shown.settled);
  const tokens = marked.lexer(rest);
  const same = tokens.findIndex(({ raw }, i) => shown.blocks[i]?.raw !== raw);
  const kept = same < 0 ? tokens.length : same;
  for (const { nodes } of shown.blocks.slice(kept)) nodes.forEach((node) => node.remove());
  const blocks = shown.blocks.slice(0, kept);
  for (const token of tokens.slice(kept)) {
    const nodes = [...fragment(marked.parser([token])).childNodes];
    host.append(...nodes);
    blocks.push({ raw: token.raw, nodes });
  }
  // more text can change the last block, and until its first line is complete the one before
  const end = tokens.findLastIndex(({ type }) => type !== "space");
  const last = tokens[end]?.raw.includes("\n") ? end : 0;
  const before = tokens
    .slice(0, last)
    .map(({ raw }) => raw)
    .join("");
  const isExact = rest.startsWith(before);
  host.shown = {
    text,
    settled: shown.settled + (isExact ? before.length : 0),
    blocks: isExact ? blocks.slice(last) : blocks,
  };
}

/** Folded text with an icon; stays open or closed as the user left it. */
export function folded(className, iconName, title, body) {
  const summary = element("summary", {}, icon(iconName), title);
  return element("details", { className: `folded ${className}` }, summary, body);
}

/** Shows reasoning, folded, before an answer. */
export function showReasoning(host, reasoning, isDone) {
  if (!host.firstChild) {
    host.replaceChildren(folded("reasoning", "thought", element("span"), element("div", { className: "markdown" })));
  }
  const [details] = host.children;
  details.querySelector("summary span").textContent = isDone ? "Reasoning" : "Reasoning …";
  details.classList.toggle("running", !isDone);
  showBlocks(details.lastChild, reasoning);
}

/** Shows a text in `host`, with reasoning that it begins with. */
export function showMarkdown(host, text) {
  const { reasoning, isClosed, rest } = parts(text);
  if (!host.areas) {
    host.areas = [element("div"), element("div", { className: "blocks" })];
    host.replaceChildren(...host.areas);
  }
  const [before, main] = host.areas;
  if (reasoning?.trim()) showReasoning(before, reasoning, isClosed);
  else before.replaceChildren();
  showBlocks(main, rest);
}
