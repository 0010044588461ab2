// A running generation: an iterator of text or tokens, and a promise of the result.

import { fromWire } from "./errors.js";
import type { CoreEvent } from "./protocol.js";
import type { Completion, GenerateOptions, Token } from "./types.js";

/** Token id of text that was held back until the end. */
const HELD_BACK = -1;

/**
 * A generation. Iterate once, over this object for text or over {@link tokens} for tokens; {@link result} is the complete
 * answer. Leaving the loop early stops the generation: the result is then the text so far.
 */
export class Generation implements AsyncIterable<string> {
  /** The complete answer. Rejects with the error, or with the reason of an abort. */
  readonly result: Promise<Completion>;

  #queue: Token[] = [];
  #tokens: Token[] = [];
  #usage = { promptTokens: 0, cachedTokens: 0 };
  #seed: number | bigint;
  #started = performance.now();
  #prefilled = NaN;
  #ended = false;
  #error: unknown;
  #wake: () => void = () => {};
  #resolve!: (value: Completion) => void;
  #reject!: (e: unknown) => void;
  #cancel: () => void;
  #logprobs: boolean;

  /** @internal */
  constructor(options: GenerateOptions, cancel: () => void) {
    const { signal, logprobs } = options;
    this.#logprobs = logprobs !== undefined && logprobs !== false;
    this.#seed = options.seed ?? 0;
    this.result = new Promise((resolve, reject) => ([this.#resolve, this.#reject] = [resolve, reject]));
    // iterators throw the error too
    this.result.catch(() => {});
    const abort = () => this.fail(signal!.reason);
    this.#cancel = () => {
      signal?.removeEventListener("abort", abort);
      cancel();
    };
    if (signal?.aborted) abort();
    else signal?.addEventListener("abort", abort, { once: true });
  }

  /** The tokens of the answer as they are generated. Text that was held back as a possible start of a stop text comes last,
   * with the id -1. */
  async *tokens(): AsyncGenerator<Token, void> {
    try {
      for (;;) {
        const next = this.#queue.shift();
        if (next) yield next;
        else if (this.#error !== undefined) throw this.#error;
        else if (this.#ended) return;
        else await new Promise<void>((resolve) => (this.#wake = resolve));
      }
    } finally {
      this.#stop();
    }
  }

  /** Ends the generation with what there is. */
  #stop(): void {
    if (this.#ended) return;
    this.#ended = true;
    const now = performance.now();
    const prefilled = Number.isNaN(this.#prefilled) ? now : this.#prefilled;
    const [promptMs, generationMs] = [prefilled - this.#started, now - prefilled];
    const n = this.#tokens.length;
    this.#resolve({
      text: this.#tokens.map((token) => token.text).join(""),
      tokens: this.#tokens,
      finishReason: "cancelled",
      seed: this.#seed,
      usage: { ...this.#usage, completionTokens: n, draftTokens: 0, acceptedDraftTokens: 0 },
      timings: {
        queuedMs: 0,
        promptMs,
        generationMs,
        promptPerSecond: promptMs > 0 ? (this.#usage.promptTokens - this.#usage.cachedTokens) / (promptMs / 1000) : 0,
        generationPerSecond: generationMs > 0 && n > 0 ? (n - 1) / (generationMs / 1000) : 0,
      },
    });
    this.#cancel();
  }

  async *[Symbol.asyncIterator](): AsyncGenerator<string, void> {
    for await (const { text } of this.tokens()) if (text !== "") yield text;
  }

  /** @internal Ends the generation with an error. */
  fail(error: unknown): void {
    if (this.#ended) return;
    this.#ended = true;
    this.#error = error;
    this.#reject(error);
    this.#wake();
    this.#cancel();
  }

  /** @internal */
  receive(event: CoreEvent): void {
    if (this.#ended) return;
    switch (event.type) {
      case "prefilled":
        this.#prefilled = performance.now();
        this.#usage = { promptTokens: event.promptTokens, cachedTokens: event.cachedTokens };
        break;
      case "token":
        if (!this.#logprobs) delete event.token.logprob;
        this.#tokens.push(event.token);
        this.#queue.push(event.token);
        break;
      case "failed":
        return this.fail(fromWire(event.error));
      case "done": {
        if (event.text !== "") this.#queue.push({ id: HELD_BACK, text: event.text });
        const text = this.#tokens.map((token) => token.text).join("") + event.text;
        this.#ended = true;
        this.#resolve({
          text,
          tokens: this.#tokens,
          finishReason: event.reason,
          seed: this.#seed,
          usage: {
            ...this.#usage,
            completionTokens: event.completionTokens,
            draftTokens: event.draftTokens,
            acceptedDraftTokens: event.acceptedDraftTokens,
          },
          timings: event.timings,
          ...(event.stopToken !== undefined && { stopToken: event.stopToken }),
          ...(event.receipt !== undefined && { receipt: event.receipt }),
        });
        this.#cancel();
      }
    }
    this.#wake();
  }
}
