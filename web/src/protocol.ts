// Messages between the page and the worker, and the interface of an engine that both sides implement.

import type { Core } from "./core.js";
import type { WireError } from "./errors.js";
import type { LoadRequest } from "./load.js";
import type { Wanted } from "./structure.js";
import type { ModelInfo, Progress, Timings, Token } from "./types.js";

/** An event of a request. */
export type CoreEvent =
  | { type: "prefilled"; job: number; promptTokens: number; cachedTokens: number }
  | { type: "token"; job: number; token: Token }
  | {
      type: "done";
      job: number;
      text: string;
      reason: "stop" | "length" | "not_finite";
      completionTokens: number;
      draftTokens: number;
      acceptedDraftTokens: number;
      stopToken: number | undefined;
      timings: Timings;
      receipt: string | undefined;
    }
  | {
      type: "completion";
      job: number;
      /** New chunks of a stream. */
      chunks: object[];
      /** Whether the choice has ended. */
      isDone: boolean;
      /** The response, with the last choice. */
      response: object | undefined;
      /** Receipts by choice. */
      receipts: Record<number, string>;
    }
  | { type: "failed"; job: number; error: WireError };

/** Whether a job has no more events. */
export const isLast = (event: CoreEvent) =>
  event.type === "done" || event.type === "failed" || (event.type === "completion" && event.isDone);

/** A choice of an open completion. */
export interface Choice {
  completion: number;
  index: number;
}

/** A chat completion, or a request of another API, that the module has accepted. */
export interface OpenedCompletion {
  completion: number;
  /** Tokens of the prompt. */
  prompt_tokens: number;
  /** Number of choices. */
  n: number;
  stream: boolean;
  /** Constraint of the answers, for the grammar module. */
  constraint?: object;
  /** Path of the field that defines it. */
  param?: string;
}

/** The constraint of an answer, and the module that compiles it. */
export interface OutputConstraint extends Wanted {
  module: WebAssembly.Module;
}

/** Methods of {@link Core} that the page calls. */
export type Method =
  | "tokenize"
  | "detokenize"
  | "embed"
  | "render"
  | "openCompletion"
  | "closeCompletion"
  | "verify"
  | "logitsSha256"
  | "saveCache"
  | "restoreCache"
  | "clearKvCache"
  | "memory"
  | "crash";

export type ToWorker =
  | { type: "load"; options: LoadRequest }
  | { type: "abort" }
  | { type: "submit"; job: number; request: string | Choice; constraint: OutputConstraint | undefined }
  | { type: "cancel"; job: number }
  | { type: "call"; call: number; method: Method; args: unknown[] };

export type FromWorker =
  | { type: "progress"; progress: Progress }
  | { type: "loaded"; info: ModelInfo }
  | { type: "refused"; error: WireError }
  | { type: "events"; events: CoreEvent[] }
  | { type: "reply"; call: number; value: unknown }
  | { type: "fault"; call: number; error: WireError };

/** An engine in a worker or inline. */
export interface Backend {
  readonly info: ModelInfo;
  submit(job: number, request: string | Choice, constraint: OutputConstraint | undefined): void;
  cancel(job: number): void;
  call<M extends Method>(method: M, ...args: Parameters<Core[M]>): Promise<ReturnType<Core[M]>>;
  dispose(): void;
}

/** Takes the events of a job. */
export interface Receiver {
  receive(event: CoreEvent): void;
  fail(error: unknown): void;
}

/** What completions need of a model. */
export interface CompletionHost {
  open(body: string, page: string): Promise<OpenedCompletion>;
  close(completion: number): void;
  /** Queues a choice; returns a function that cancels it. */
  start(choice: Choice, wanted: Wanted | undefined, receiver: Receiver): () => void;
}
