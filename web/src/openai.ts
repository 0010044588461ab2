// Chat completions in the form of OpenAI's client.

import type { CompletionHost } from "./protocol.js";
import { Resource } from "./resource.js";
import type { StructureRequest } from "./structure.js";
import type { ToolCall } from "./tools.js";
import type { ChatMessage } from "./types.js";

/**
 * What OpenAI's clients send, with the names and the defaults of `starling serve`: the answer is that of the server to the
 * same body. The seed is random unless it is given; the response tells it.
 */
export interface ChatCompletionRequest extends StructureRequest {
  messages: ChatMessage[];
  /** Ignored: there is one model. */
  model?: string;
  stream?: boolean;
  stream_options?: { include_usage?: boolean } | null;
  max_tokens?: number | null;
  max_completion_tokens?: number | null;
  /** 1 by default; 0 takes the most probable token. */
  temperature?: number | null;
  /** 1, the default, is off; 0 takes the most probable token. */
  top_p?: number | null;
  n?: number | null;
  stop?: string | string[] | null;
  seed?: number | bigint | null;
  frequency_penalty?: number | null;
  presence_penalty?: number | null;
  /** Whether these two count the tokens of the answer only, so by default, or those of the prompt too. */
  penalty_scope?: "all" | "answer" | null;
  logit_bias?: Record<string, number> | null;
  logprobs?: boolean | null;
  top_logprobs?: number | null;
  /** Functions that the model may call, where its chat template tells of them; those that are `strict` by their schemas. */
  tools?: unknown[] | null;
  /** `none` does not tell the model of them; `required` makes the answer nothing but calls, a function one call of it. */
  tool_choice?: "auto" | "none" | "required" | { type: "function"; function: { name: string } } | null;
  /** Whether an answer that is made to call may do so more than once: so by default. */
  parallel_tool_calls?: boolean | null;
  /** Ignored, as are the server's names for who is served first and what its cache keeps apart. */
  user?: string | null;
  priority?: unknown;
  cache_salt?: string | null;
  /** 0 or -1, the default, is off. */
  top_k?: number | null;
  /** 0, the default, is off. */
  min_p?: number | null;
  typical_p?: number | null;
  repetition_penalty?: number | null;
  /** The same. */
  repeat_penalty?: number | null;
  /** Tokens the penalties look back at, all by default; the server always takes all. */
  repeat_last_n?: number | null;
  /** 0, the default, is off. */
  dry_multiplier?: number | null;
  dry_base?: number | null;
  dry_allowed_length?: number | null;
  dry_penalty_last_n?: number | null;
  dry_sequence_breakers?: string[] | null;
  stop_token_ids?: number[] | null;
  ignore_eos?: boolean | null;
  /** Whether answers come with a receipt, which is a text here. */
  receipt?: boolean | null;
  /** Continue the last message, which must be the assistant's, instead of starting a new one. Default: false. */
  continue_final_message?: boolean | null;
  /** Append the generation prompt of the chat template. Default: true, unless the last message is continued. */
  add_generation_prompt?: boolean | null;
  chat_template_kwargs?: Record<string, unknown> | null;
  /** Jinja in place of the model's own template. */
  chat_template?: string | null;
}

export interface ChatLogprob {
  token: string;
  logprob: number;
  bytes: number[];
  top_logprobs: { token: string; logprob: number; bytes: number[] }[];
}

export interface CompletionUsage {
  prompt_tokens: number;
  completion_tokens: number;
  total_tokens: number;
  prompt_tokens_details: { cached_tokens: number };
  /** If the answers have reasoning. */
  completion_tokens_details?: { reasoning_tokens?: number };
}

/** Part of a tool call: the first has ID and name, the arguments of all joined are JSON. */
export interface ToolCallDelta {
  index: number;
  id?: string;
  type?: "function";
  function: { name?: string; arguments: string };
}

export interface ChatCompletion {
  id: string;
  object: "chat.completion";
  created: number;
  model: string;
  choices: {
    index: number;
    /** Without text where there is none beside calls. */
    message: {
      role: "assistant";
      content: string | null;
      /** The model's reasoning, if there is any. */
      reasoning_content?: string;
      tool_calls?: ToolCall[];
      refusal: null;
    };
    logprobs: { content: ChatLogprob[] } | null;
    finish_reason: "stop" | "length" | "tool_calls";
    /** If asked for. */
    receipt?: string;
  }[];
  usage: CompletionUsage;
  /** Equal fingerprints have equal answers; of the model too if it was loaded with `receipts`. */
  system_fingerprint: string;
  seed: number;
}

export interface ChatCompletionChunk {
  id: string;
  object: "chat.completion.chunk";
  created: number;
  model: string;
  choices: {
    index: number;
    delta: { role?: "assistant"; content?: string; reasoning_content?: string; tool_calls?: ToolCallDelta[] };
    logprobs: { content: ChatLogprob[] } | null;
    finish_reason: "stop" | "length" | "tool_calls" | null;
    /** If asked for, in the last piece. */
    receipt?: string;
  }[];
  usage?: CompletionUsage | null;
  system_fingerprint: string;
  seed: number;
}

/** `chat.completions` of OpenAI's client. */
export class Completions extends Resource<ChatCompletionRequest, ChatCompletion, ChatCompletionChunk> {
  /** @internal */
  constructor(host: CompletionHost) {
    super(host, "chat_completions");
  }
}
