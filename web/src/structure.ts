// What an answer has to be, in the forms that callers give it.

import { StarlingError } from "./errors.js";
import { parseExact } from "./request.js";

/** What an answer has to be. Properties of JSON come in the order of the schema. */
export type Structure =
  /** JSON by a schema; any object if that is `true`. */
  | { json: object | true }
  /** A text that a regular expression matches as a whole. */
  | { regex: string }
  /** One of these texts. */
  | { choice: string[] }
  /** A text of a grammar in Lark's syntax, as llguidance has it. */
  | { grammar: string };

/** What the grammar module is asked for, in JSON, and the part of the request that says so; none if the module says it. */
export interface Wanted {
  json: string;
  param: string | undefined;
}

/** Forms by the names of {@link Structure}. */
const GRAMMARS = {
  json: (param: string, value: unknown) => ({ schema: value === true ? { type: "object" } : parsed(param, value) }),
  regex: (_: string, value: unknown) => ({ regex: value }),
  choice: (_: string, value: unknown) => ({ choice: value }),
  grammar: (_: string, value: unknown) => ({ lark: [value, []] }),
} as const;

const refuse = (what: string) => new StarlingError("request", what);

/** A schema, itself or as a text. */
function parsed(param: string, value: unknown): unknown {
  if (typeof value !== "string") return value;
  try {
    return parseExact(value);
  } catch (e) {
    throw refuse(`${param} is a text that is not JSON: ${(e as Error).message}`);
  }
}

/** What an option asks for. */
export function ofOption(structure: Structure | undefined): Wanted | undefined {
  if (structure === undefined) return undefined;
  const named = Object.entries(structure).filter(([, value]) => value !== undefined);
  const [kind, value] = named[0] ?? [""];
  if (named.length !== 1 || !Object.hasOwn(GRAMMARS, kind))
    throw refuse(`structure has ${named.map(([name]) => name).join(", ") || "nothing"}, expected one of json, regex, choice and grammar`);
  const param = `structure.${kind}`;
  return { json: JSON.stringify({ grammar: GRAMMARS[kind as keyof typeof GRAMMARS](param, value) }), param };
}

/** The parts of a request that say what the answer is: as OpenAI, llama-server and vLLM have them, and the server. */
export interface StructureRequest {
  /** `{ type: "json_schema", json_schema: { schema } }`; `json_object` is any object, `text` any text. */
  response_format?: { type: string; json_schema?: { schema?: unknown; [more: string]: unknown }; schema?: unknown } | null;
  json_schema?: unknown;
  /** In Lark's syntax. */
  grammar?: string | null;
  structured_outputs?: {
    json?: unknown;
    regex?: string | null;
    choice?: string[] | null;
    grammar?: string | null;
    json_object?: boolean | null;
  } | null;
  guided_json?: unknown;
  guided_regex?: string | null;
  guided_choice?: string[] | null;
  guided_grammar?: string | null;
}
