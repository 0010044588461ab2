// Requests in the form of a vendor's client: `create` answers them whole or in pieces, with the module's own functions.

import { fromWire } from "./errors.js";
import type { CompletionHost, CoreEvent, OpenedCompletion, Receiver } from "./protocol.js";
import { json, randomSeed } from "./request.js";
import type { Wanted } from "./structure.js";

/** The API of a request, as the module names it. */
export type Api = "chat_completions" | "responses" | "messages";

/** What each API's request has. */
interface Streamable {
  stream?: boolean | null;
}

/** What the body of an API does not have. */
interface PageFields {
  seed?: number | bigint | null;
  chat_template?: string | null;
  repeat_last_n?: number | null;
}

/** Answers that have choices may have receipts. */
interface HasChoices {
  choices: { index: number; finish_reason: string | null; receipt?: string }[];
}

/** A request whose answer comes in pieces, or whole. */
type Streamed<Q, S> = Omit<Q, "stream"> & (S extends true ? { stream: true } : { stream?: false | null });

/** Requests Q that are answered with an R, or with a stream of E. */
export class Resource<Q extends Streamable, R, E> {
  #host: CompletionHost;
  #api: Api;

  /** @internal */
  constructor(host: CompletionHost, api: Api) {
    this.#host = host;
    this.#api = api;
  }

  /** Answers a request; with `stream`, piece by piece. */
  create(request: Streamed<Q, true>, options?: { signal?: AbortSignal }): Promise<AsyncIterable<E>>;
  create(request: Streamed<Q, false>, options?: { signal?: AbortSignal }): Promise<R>;
  create(request: Q, options?: { signal?: AbortSignal }): Promise<R | AsyncIterable<E>>;
  async create(
    request: Streamable & PageFields,
    { signal }: { signal?: AbortSignal } = {},
  ): Promise<R | AsyncIterable<E>> {
    signal?.throwIfAborted();
    const opened = await this.#host.open(this.#body(request), pageOf(this.#api, request));
    const run = new Run<R, E>(this.#host, opened, signal);
    return opened.stream ? run.chunks() : run.response();
  }

  /** Counts the tokens of a request's prompt. */
  protected async count(request: object): Promise<number> {
    const opened = await this.#host.open(this.#body(request), pageOf(this.#api, request, true));
    return opened.prompt_tokens;
  }

  /** The body, as a client sends it to a server. A seed has 64 bits, more than a JSON number in JavaScript. */
  #body(request: PageFields): string {
    const { seed: given, chat_template: _, repeat_last_n: __, ...body } = request;
    const text = json(body);
    // Anthropic's API has no seed: the module draws one
    if (this.#api === "messages") return text;
    const seed = given ?? randomSeed();
    return `{"seed":${typeof seed === "bigint" ? seed : JSON.stringify(seed)}${text === "{}" ? "" : ","}${text.slice(1)}`;
  }
}

/** What the module has no access to: entropy and the clock; and the options that the server's body does not have. */
function pageOf(api: Api, { chat_template: template, repeat_last_n }: PageFields, counts = false): string {
  const random = Array.from(crypto.getRandomValues(new Uint8Array(16)), (byte) => byte.toString(16).padStart(2, "0"));
  const now = new Date();
  const created = Math.floor(now.getTime() / 1000);
  const local = created - now.getTimezoneOffset() * 60;
  return json({ api, counts, random: random.join(""), created, now: local, template, repeat_last_n });
}

/** The choices of one completion. */
class Run<R, E> implements Receiver {
  #host: CompletionHost;
  #completion: number;
  #cancels: (() => void)[] = [];
  #running: number;
  #queue: E[] = [];
  #response: R | undefined;
  #failure: { error: unknown } | undefined;
  #isClosed = false;
  #wake: () => void = () => {};
  #unlisten: () => void;

  constructor(host: CompletionHost, { completion, n, constraint, param }: OpenedCompletion, signal?: AbortSignal) {
    this.#host = host;
    this.#completion = completion;
    this.#running = n;
    const abort = () => this.fail(signal!.reason);
    this.#unlisten = () => signal?.removeEventListener("abort", abort);
    if (signal?.aborted) {
      abort();
      return;
    }
    signal?.addEventListener("abort", abort, { once: true });
    const wanted: Wanted | undefined = constraint && { json: JSON.stringify(constraint), param };
    for (let index = 0; index < n; index++) this.#cancels.push(host.start({ completion, index }, wanted, this));
  }

  receive(event: CoreEvent): void {
    if (event.type === "failed") return this.fail(fromWire(event.error));
    if (event.type !== "completion" || this.#isClosed) return;
    const { chunks, response, receipts } = event;
    const add = (answer: Partial<HasChoices>) => {
      for (const choice of answer.choices ?? []) {
        const receipt = choice.finish_reason === null ? undefined : receipts[choice.index];
        if (receipt !== undefined) choice.receipt = receipt;
      }
    };
    for (const chunk of chunks) {
      add(chunk);
      this.#queue.push(chunk as E);
    }
    if (response !== undefined) {
      add(response);
      this.#response = response as R;
    }
    if (event.isDone && --this.#running === 0) this.#close();
    this.#wake();
  }

  fail(error: unknown): void {
    if (this.#isClosed) return;
    this.#failure = { error };
    this.#close();
    this.#wake();
  }

  /** Stops the choices that have not ended. */
  #close(): void {
    if (this.#isClosed) return;
    this.#isClosed = true;
    this.#unlisten();
    for (const cancel of this.#cancels) cancel();
    this.#host.close(this.#completion);
  }

  #change(): Promise<void> {
    return new Promise((resolve) => (this.#wake = resolve));
  }

  async response(): Promise<R> {
    while (!this.#isClosed) await this.#change();
    if (this.#failure) throw this.#failure.error;
    return this.#response!;
  }

  async *chunks(): AsyncGenerator<E, void> {
    try {
      for (;;) {
        const next = this.#queue.shift();
        if (next) yield next;
        else if (this.#failure) throw this.#failure.error;
        else if (this.#isClosed) return;
        else await this.#change();
      }
    } finally {
      this.#close();
    }
  }
}
