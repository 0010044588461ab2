// Anthropic's Messages API.

import type { CompletionHost } from "./protocol.js";
import { Resource } from "./resource.js";

/** What Anthropic's clients send to `/v1/messages`. */
export interface MessageRequest {
  /** Ignored, as there is one model, but Anthropic's clients must send it. */
  model: string;
  max_tokens: number;
  messages: { role: "user" | "assistant" | "system"; content: string | object[] }[];
  system?: string | object[] | null;
  stream?: boolean | null;
  stop_sequences?: string[] | null;
  temperature?: number | null;
  top_p?: number | null;
  top_k?: number | null;
  /** Functions; tools that Anthropic's service runs are skipped. */
  tools?: { name: string; description?: string; input_schema?: object; type?: string; [field: string]: unknown }[] | null;
  tool_choice?: { type: "auto" | "any" | "tool" | "none"; name?: string; disable_parallel_tool_use?: boolean } | null;
  thinking?: { type: "enabled" | "disabled" | "adaptive"; budget_tokens?: number } | null;
  output_config?: { format?: { type: "json_schema"; schema: object } | null; [field: string]: unknown } | null;
  metadata?: { user_id?: string | null } | null;
  /** Jinja in place of the model's own template. */
  chat_template?: string | null;
}

export type MessageBlock =
  | { type: "text"; text: string }
  | { type: "thinking"; thinking: string; signature: string }
  | { type: "tool_use"; id: string; name: string; input: Record<string, unknown> };

export interface MessageUsage {
  input_tokens: number;
  cache_creation_input_tokens: number;
  cache_read_input_tokens: number;
  output_tokens: number;
}

export interface Message {
  id: string;
  type: "message";
  role: "assistant";
  model: string;
  content: MessageBlock[];
  stop_reason: "end_turn" | "max_tokens" | "stop_sequence" | "tool_use" | "refusal" | null;
  stop_sequence: string | null;
  usage: MessageUsage;
}

/** An event of a stream, from `message_start` to `message_stop`. */
export type MessageEvent =
  | { type: "message_start"; message: Message }
  | { type: "content_block_start"; index: number; content_block: MessageBlock }
  | {
      type: "content_block_delta";
      index: number;
      delta:
        | { type: "text_delta"; text: string }
        | { type: "thinking_delta"; thinking: string }
        | { type: "signature_delta"; signature: string }
        | { type: "input_json_delta"; partial_json: string };
    }
  | { type: "content_block_stop"; index: number }
  | {
      type: "message_delta";
      delta: { stop_reason: Message["stop_reason"]; stop_sequence: string | null };
      usage: MessageUsage;
    }
  | { type: "message_stop" };

/** `messages` of Anthropic's client. */
export class Messages extends Resource<MessageRequest, Message, MessageEvent> {
  /** @internal */
  constructor(host: CompletionHost) {
    super(host, "messages");
  }

  /** Counts the tokens of a prompt. */
  async countTokens(request: Omit<MessageRequest, "stream" | "max_tokens">): Promise<{ input_tokens: number }> {
    return { input_tokens: await this.count(request) };
  }
}
