// Markdown of answers as DOM nodes. A model's text is not trusted: HTML in it is shown as text, what marked makes is sanitised, and
// nothing is fetched.

import { Marked } from "./vendor/marked.js";
import DOMPurify from "./vendor/purify.js";
import { element } from "./dom.js";

const escape = (text) => text.replace(/[&<>"]/g, (c) => `&#${c.charCodeAt(0)};`);

const marked = new Marked({
  gfm: true,
  breaks: true,
  renderer: {
    html: ({ text }) => escape(text),
    image: ({ href, text }) => escape(`![${text}](${href})`),
    // the page has its own outline
    heading({ tokens }) {
      return `<p><strong>${this.parser.parseInline(tokens)}</strong></p>`;
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

function fragment(text) {
  const html = marked.parse(text, { async: false });
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
    const language = /language-(\S+)/.exec(block.querySelector("code")?.className ?? "")?.[1];
    const code = element("div", { className: "code" });
    block.replaceWith(code);
    block.tabIndex = 0;
    const head = element("div", { className: "code-head" }, element("span", {}, language ?? "code"));
    head.append(copyButton(() => block.textContent));
    code.append(head, block);
  }
  return nodes;
}

/** A button that copies a text. */
export function copyButton(text) {
  const button = element("button", { type: "button", className: "small copy" }, "Copy");
  button.onclick = async () => {
    try {
      await navigator.clipboard.writeText(text());
      button.textContent = "Copied";
    } catch {
      button.textContent = "Not allowed";
    }
    setTimeout(() => (button.textContent = "Copy"), 1500);
  };
  return button;
}

/** Shows a text in `host`; keeps reasoning folded or open as the user left it. */
export function showMarkdown(host, text) {
  const { reasoning, isClosed, rest } = parts(text);
  const nodes = [];
  if (reasoning?.trim()) {
    const isOpen = host.querySelector(".reasoning")?.open ?? false;
    const summary = element("summary", {}, isClosed ? "Reasoning" : "Reasoning …");
    nodes.push(element("details", { className: "reasoning", open: isOpen }, summary, fragment(reasoning)));
  }
  nodes.push(fragment(rest));
  host.replaceChildren(...nodes);
}
