// Calls of tools in the text of an answer, in the form that Hermes and Qwen have taught many models,
// `<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>`: found as `starling serve` finds them.

import { StarlingError } from "./errors.js";
import type { ChatCompletionRequest } from "./openai.js";
import type { Wanted } from "./structure.js";

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
  /** How the answer has to call them, if that is asked for. */
  calls?: Wanted;
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
    return { isForced };
  }
  for (const [i, tool] of tools.entries()) {
    if (tool?.type !== "function" || typeof tool.function?.name !== "string")
      throw refuse(`tools[${i}] is not a function with a name`);
  }
  if (!template.includes("tools"))
    throw new StarlingError("unsupported", "this model's chat template does not tell of tools; see chat_template");
  if (!isForced && !tools.some((tool) => tool?.function?.strict === true)) return { tools, isForced };
  const i = name === undefined ? 0 : tools.findIndex((tool) => tool?.function?.name === name);
  if (i < 0) throw refuse(`tool_choice asks for ${JSON.stringify(name)}, which is not among the tools`);
  const which = name === undefined ? { start: 0, end: tools.length } : { start: i, end: i + 1 };
  const parallel = name === undefined && request.parallel_tool_calls !== false;
  const json = JSON.stringify({ calls: { tools, which, forced: isForced, parallel } });
  return { tools, calls: { json, param: undefined }, isForced };
}

type Tool = { type?: unknown; function?: { name?: unknown; strict?: unknown } } | null;

/** Divides the text of an answer into what is said and what is called, as it comes. */
export class Divider {
  /** Text that is not known to be either; inside of a call, all of it. */
  #held = "";
  #inside = false;
  #calls = 0;
  #name: (() => string) | undefined;

  /** `name` gives calls their names; without it nothing is a call. */
  constructor(name?: () => string) {
    this.#name = name;
  }

  /** How many calls there were. */
  get calls(): number {
    return this.#calls;
  }

  push(text: string): Divided {
    if (!this.#name) return { said: text, calls: [] };
    this.#held += text;
    const divided: Divided = { said: "", calls: [] };
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

  /** The end of the text. */
  finish(): Divided {
    const held = this.#held;
    const divided: Divided = { said: "", calls: [] };
    if (this.#inside) {
      if (!this.#call(held, divided)) divided.said = OPEN + held;
    } else if (this.#calls === 0 || trimmedEnd(held) !== "") {
      // only white space between calls and the end says nothing
      divided.said = held;
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
    written = JSON.parse(text.trim(), asWritten);
  } catch {
    return undefined;
  }
  if (typeof written?.name !== "string") return undefined;
  const given = written.arguments ?? written.parameters ?? {};
  return { name: written.name, arguments: typeof given === "string" ? given : JSON.stringify(given) };
}

/** Keeps numbers as they were written, beyond 2^53 too, where the engine tells how that was. */
const asWritten = (_: string, value: unknown, context?: { source?: string }) =>
  typeof value === "number" && context?.source !== undefined && rawJSON ? rawJSON(context.source) : value;

const { rawJSON } = JSON as { rawJSON?: (text: string) => unknown };

/** Characters at the end that may belong to the beginning of a call: white space, and a part of the tag. */
function kept(text: string): number {
  let tag = OPEN.length - 1;
  while (!text.endsWith(OPEN.slice(0, tag))) tag--;
  return text.length - trimmedEnd(text.slice(0, text.length - tag)).length;
}

/** As the server's `trim_end`; `trimEnd` has other characters. */
function trimmedEnd(text: string): string {
  let end = text.length;
  while (end > 0 && /\p{White_Space}/u.test(text[end - 1]!)) end--;
  return text.slice(0, end);
}
