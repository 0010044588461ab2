// OpenAI's Responses API.

import type { ChatLogprob } from "./openai.js";
import type { CompletionHost } from "./protocol.js";
import { Resource } from "./resource.js";

/** What OpenAI's clients send to `/v1/responses`. The page keeps no responses: a conversation is sent whole. */
export interface ResponseRequest {
  /** Text, or items: messages, function calls and their outputs, reasoning. */
  input: string | ResponseInputItem[];
  /** Ignored: there is one model. */
  model?: string;
  instructions?: string | null;
  stream?: boolean | null;
  max_output_tokens?: number | null;
  temperature?: number | null;
  top_p?: number | null;
  /** Random unless it is given; the response tells it. */
  seed?: number | bigint | null;
  /** Functions; tools of other types are skipped. */
  tools?: { type: string; name?: string; description?: string | null; parameters?: object | null; strict?: boolean | null }[];
  tool_choice?: "auto" | "none" | "required" | { type: string; name?: string } | null;
  parallel_tool_calls?: boolean | null;
  text?: { format?: { type: "text" | "json_object" } | { type: "json_schema"; name?: string; schema: object } } | null;
  reasoning?: { effort?: string | null; summary?: string | null } | null;
  /** `message.output_text.logprobs` returns log-probabilities. */
  include?: string[] | null;
  top_logprobs?: number | null;
  metadata?: Record<string, unknown> | null;
  /** Jinja in place of the model's own template. */
  chat_template?: string | null;
}

export type ResponseInputItem =
  | { type?: "message"; role: string; content: string | object[] }
  | { type: "function_call"; call_id: string; name: string; arguments: string }
  | { type: "function_call_output"; call_id: string; output: string | object[] }
  | { type: "reasoning"; content?: object[]; summary?: object[] }
  | { type: string; [field: string]: unknown };

export type ResponseOutputItem =
  | { type: "reasoning"; id: string; status: string; summary: []; content: { type: "reasoning_text"; text: string }[] }
  | {
      type: "message";
      id: string;
      status: string;
      role: "assistant";
      content: { type: "output_text"; text: string; annotations: []; logprobs: ChatLogprob[] }[];
    }
  | { type: "function_call"; id: string; call_id: string; name: string; arguments: string; status: string };

export interface Response {
  id: string;
  object: "response";
  created_at: number;
  status: "in_progress" | "completed" | "incomplete" | "failed";
  incomplete_details: { reason: "max_output_tokens" | "content_filter" } | null;
  model: string;
  output: ResponseOutputItem[];
  usage: {
    input_tokens: number;
    input_tokens_details: { cached_tokens: number };
    output_tokens: number;
    output_tokens_details: { reasoning_tokens: number };
    total_tokens: number;
  } | null;
  seed: number;
  [field: string]: unknown;
}

/** An event of a stream, from `response.created` to `response.completed` or `response.incomplete`. */
export type ResponseEvent =
  | {
      type: "response.created" | "response.in_progress" | "response.completed" | "response.incomplete" | "response.failed";
      sequence_number: number;
      response: Response;
    }
  | {
      type: "response.output_text.delta" | "response.reasoning_text.delta" | "response.function_call_arguments.delta";
      sequence_number: number;
      item_id: string;
      output_index: number;
      delta: string;
      [field: string]: unknown;
    }
  | {
      type:
        | "response.output_item.added"
        | "response.output_item.done"
        | "response.content_part.added"
        | "response.content_part.done"
        | "response.output_text.done"
        | "response.reasoning_text.done"
        | "response.function_call_arguments.done";
      sequence_number: number;
      output_index: number;
      [field: string]: unknown;
    };

/** `responses` of OpenAI's client. */
export class Responses extends Resource<ResponseRequest, Response, ResponseEvent> {
  /** Counts the tokens of a prompt. */
  readonly inputTokens = {
    count: async (request: Omit<ResponseRequest, "stream">): Promise<{ object: "response.input_tokens"; input_tokens: number }> => ({
      object: "response.input_tokens",
      input_tokens: await this.count(request),
    }),
  };

  /** @internal */
  constructor(host: CompletionHost) {
    super(host, "responses");
  }
}
