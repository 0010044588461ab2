// Calls of tools in the text of an answer, in the form that Hermes and Qwen have taught many models,
// `<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>`: found as `starling serve` finds them.

import { StarlingError } from "./errors.js";
import type { ChatCompletionRequest } from "./openai.js";
import { parseExact } from "./request.js";
import type { Asked, Wanted } from "./structure.js";

const OPEN = "<tool_call>";
const CLOSE = "</tool_call>";

/** A call of a tool. */
export interface ToolCall {
  /** Which of the answer. */
  index: number;
  /** Its name, for the tool's answer. */
  id: string;
  type: "function";
  /** What is called; arguments are a text of JSON. */
  function: { name: string; arguments: string };
}

/** New text, and new calls. */
export interface Divided {
  said: string;
  calls: ToolCall[];
}

/** What a request says of tools. */
interface Told {
  /** Those that the model is told of, if any. */
  tools?: unknown[];
  /** How an answer calls them, if there are any; with a form, what is either calls or of that form. */
  calls?: (answer?: Asked) => Wanted;
  /** Whether the answer has to keep to that: a call is asked for, or a tool is strict. */
  isBound: boolean;
  /** Whether the answer is nothing but calls. */
  isForced: boolean;
}

/**
 * What a request says of tools.
 *
 * @throws {StarlingError} with what is wrong with them
 */
export function told(request: ChatCompletionRequest, template: string): Told {
  const refuse = (what: string) => new StarlingError("request", what);
  const choice = request.tool_choice ?? "auto";
  const name = typeof choice === "object" ? choice.function?.name : undefined;
  const isForced = choice === "required" || name !== undefined;
  if (choice !== "auto" && choice !== "none" && !isForced)
    throw refuse(`tool_choice is ${JSON.stringify(choice)}, expected auto, none, required, or an object that names a function`);
  const tools = (request.tools ?? []) as Tool[];
  if (!Array.isArray(tools)) throw refuse("tools is not a list");
  if (tools.length === 0 || choice === "none") {
    if (isForced) throw refuse("tool_choice asks for a call, but the request has no tools");
    return { isBound: false, isForced };
  }
  for (const [i, tool] of tools.entries()) {
    if (tool?.type !== "function" || typeof tool.function?.name !== "string")
      throw refuse(`tools[${i}] is not a function with a name`);
  }
  if (!template.includes("tools"))
    throw new StarlingError("unsupported", "this model's chat template does not tell of tools; see chat_template");
  const isBound = isForced || tools.some((tool) => tool?.function?.strict === true);
  const i = name === undefined ? 0 : tools.findIndex((tool) => tool?.function?.name === name);
  if (i < 0) throw refuse(`tool_choice asks for ${JSON.stringify(name)}, which is not among the tools`);
  const which = name === undefined ? { start: 0, end: tools.length } : { start: i, end: i + 1 };
  const parallel = name === undefined && request.parallel_tool_calls !== false;
  const calls = (answer?: Asked) => {
    const said = JSON.stringify({ tools, which, forced: isForced, parallel });
    const other = answer ? `,"answer":[${JSON.stringify(answer.param)},${answer.form}]` : "";
    return { json: `{"calls":${said.slice(0, -1)}${other}}}`, param: undefined };
  };
  return { tools, calls, isBound, isForced };
}

type Tool = { type?: unknown; function?: { name?: unknown; strict?: unknown } } | null;

/**
 * The calls of an earlier answer, a message that stands at `at`, as templates want them: with arguments that are data, not
 * text of it. Arguments that are missing, null or empty are `{}`.
 *
 * @throws {StarlingError} with the part that is wrong
 */
export function checkedCalls(calls: unknown, at: string): unknown[] {
  const refuse = (where: string, what: string) => new StarlingError("request", `${where} ${what}`);
  const isObject = (value: unknown): value is Record<string, unknown> =>
    typeof value === "object" && value !== null && !Array.isArray(value);
  if (!Array.isArray(calls)) throw refuse(at, "is not a list");
  return calls.map((call: unknown, i) => {
    const here = `${at}[${i}]`;
    if (!isObject(call)) throw refuse(here, "is not an object");
    if ((call["type"] ?? "function") !== "function") throw refuse(`${here}.type`, 'is not "function"');
    if (typeof (call["id"] ?? "") !== "string") throw refuse(`${here}.id`, "is not a string");
    const called = call["function"];
    if (called === undefined) throw refuse(`${here}.function`, "is missing");
    if (!isObject(called)) throw refuse(`${here}.function`, "is not an object");
    const { name } = called;
    if (name === undefined) throw refuse(`${here}.function.name`, "is missing");
    if (typeof name !== "string") throw refuse(`${here}.function.name`, "is not a string");
    if (name === "") throw refuse(`${here}.function.name`, "is empty");
    const said = called["arguments"] ?? {};
    if (typeof said !== "string" && !isObject(said))
      throw refuse(`${here}.function.arguments`, "is neither a string nor an object");
    return { ...call, function: { ...called, arguments: typeof said === "string" ? data(said) : said } };
  });
}

/** What a text of JSON says; the text itself if it is none. */
function data(text: string): unknown {
  if (text.trim() === "") return {};
  try {
    return parseExact(text);
  } catch {
    return text;
  }
}

/** Divides the text of an answer into what is said and what is called, as it comes. */
export class Divider {
  /** Text that is not known to be either; inside of a call, all of it. */
  #held = "";
  #inside = false;
  #calls = 0;
  #name: (() => string) | undefined;
  /** Text that does not begin with a call has none: it is of a form of its own, which may spell the tags. */
  #isFormed: boolean;
  /** That such a text has begun. */
  #isText = false;

  /** `name` gives calls their names; without it nothing is a call. */
  constructor(name?: () => string, isFormed = false) {
    this.#name = name;
    this.#isFormed = isFormed;
  }

  /** How many calls there were. */
  get calls(): number {
    return this.#calls;
  }

  push(text: string): Divided {
    if (!this.#name) return { said: text, calls: [] };
    this.#held += text;
    if (this.#isFormed && !this.#inside && this.#calls === 0 && !this.#held.startsWith(OPEN))
      this.#isText ||= !OPEN.startsWith(this.#held);
    const divided: Divided = { said: "", calls: [] };
    if (this.#isText) {
      divided.said = this.#held;
      this.#held = "";
      return divided;
    }
    for (;;) {
      const tag = this.#inside ? CLOSE : OPEN;
      const at = this.#held.indexOf(tag);
      if (at < 0) break;
      const before = this.#held.slice(0, at);
      this.#held = this.#held.slice(at + tag.length);
      if (!this.#inside) divided.said += trimmedEnd(before);
      // whatever is no call is what the model says
      else if (!this.#call(before, divided)) divided.said += OPEN + before + CLOSE;
      this.#inside = !this.#inside;
    }
    if (!this.#inside) {
      const sure = this.#held.length - kept(this.#held);
      divided.said += this.#held.slice(0, sure);
      this.#held = this.#held.slice(sure);
    }
    return divided;
  }

  /** The end of the text. If it is `cut`, a call that is not complete, or text that may begin one, is dropped. */
  finish(cut = false): Divided {
    const held = this.#held;
    const divided: Divided = { said: "", calls: [] };
    if (this.#inside) {
      const whole = held.slice(0, held.length - beginning(CLOSE, held));
      if (!this.#call(whole, divided) && !cut) divided.said = OPEN + held;
    } else {
      const tag = beginning(OPEN, held);
      const said = cut && tag > 0 ? trimmedEnd(held.slice(0, held.length - tag)) : held;
      // only white space between calls and the end says nothing
      if (this.#calls === 0 || trimmedEnd(said) !== "") divided.said = said;
    }
    this.#held = "";
    this.#inside = false;
    return divided;
  }

  #call(text: string, { calls }: Divided): boolean {
    const call = read(text);
    if (call) calls.push({ index: this.#calls++, id: this.#name!(), type: "function", function: call });
    return call !== undefined;
  }
}

/** A call as models write it. */
function read(text: string): ToolCall["function"] | undefined {
  let written: { name?: unknown; arguments?: unknown; parameters?: unknown } | null;
  try {
    written = parseExact(text.trim()) as typeof written;
  } catch {
    return undefined;
  }
  if (typeof written?.name !== "string") return undefined;
  const given = written.arguments ?? written.parameters ?? {};
  return { name: written.name, arguments: typeof given === "string" ? given : JSON.stringify(given) };
}

/** Characters at the end that may belong to the beginning of a call: white space, and a part of the tag. */
function kept(text: string): number {
  return text.length - trimmedEnd(text.slice(0, text.length - beginning(OPEN, text))).length;
}

/** Characters at the end of a text that are the beginning of a tag. */
function beginning(tag: string, text: string): number {
  let n = tag.length - 1;
  while (!text.endsWith(tag.slice(0, n))) n--;
  return n;
}

/** As the server's `trim_end`; `trimEnd` has other characters. */
function trimmedEnd(text: string): string {
  let end = text.length;
  while (end > 0 && /\p{White_Space}/u.test(text[end - 1]!)) end--;
  return text.slice(0, end);
}
