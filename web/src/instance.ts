// Instances of the engine's module. Each model has its own, so that a trap ends no other model.

import * as single64 from "../wasm/memory64.js";
import * as threaded64 from "../wasm/memory64-threads.js";
import * as single from "../wasm/starling.js";
import * as threaded from "../wasm/threads.js";
import { sharedMemory64 } from "./capacity.js";
import { type ErrorCode, StarlingError } from "./errors.js";
import { importsMemory, isMemory64 } from "./module.js";

/** The classes and functions of one instance. */
export type Bindings = ReturnType<typeof single.instantiate>;

/** The bindings of a module. */
function bindingsOf(module: WebAssembly.Module): Bindings {
  const [one, shared] = isMemory64(module) ? [single64, threaded64] : [single, threaded];
  // the other bindings have all of these and more
  return ((importsMemory(module) ? shared : one) as unknown as typeof single).instantiate();
}

/** Whether an error means that no object of the instance can be used any more. */
export const isFatal = (e: unknown) => e instanceof StarlingError && (e.code === "crashed" || e.code === "disposed");

/** An instance of the engine's module, with a memory of its own. */
export class Instance {
  readonly bindings: Bindings;
  readonly memory: WebAssembly.Memory;
  readonly isMemory64: boolean;
  #crash: StarlingError | undefined;
  /** Rejects when a future of the module ends by a trap. */
  readonly #trapped: Promise<never>;

  /**
   * An instance for a model of `bytes` bytes.
   *
   * @throws {StarlingError} if there is no memory for it, or the module is not the engine's
   */
  constructor(module: WebAssembly.Module, bytes: number) {
    this.bindings = bindingsOf(module);
    this.isMemory64 = isMemory64(module);
    try {
      const memory = this.isMemory64 && importsMemory(module) ? sharedMemory64(bytes) : undefined;
      // the bindings of modules without threads take no memory
      const start = { module, ...(memory && { memory }) };
      this.memory = this.bindings.initSync(start).memory;
      this.#trapped = new Promise((_, reject) => this.bindings.onTrap((trap) => reject(this.#crashOf(trap))));
      this.#trapped.catch(() => {});
    } catch (e) {
      const message = `the WebAssembly module cannot be instantiated: ${(e as Error).message}`;
      throw new StarlingError(e instanceof RangeError ? "memory" : "request", message, { cause: e });
    }
  }

  /**
   * Calls the module. `nameOf` returns the name of a file of the model by index, for errors that are about one.
   *
   * @throws {StarlingError} with the `code` of the module's error; after a trap `crashed`, at this call and all later ones
   */
  call<T>(work: (bindings: Bindings) => T, nameOf?: (file: number) => string): T {
    if (this.#crash) throw this.#crash;
    try {
      return work(this.bindings);
    } catch (e) {
      throw e instanceof WebAssembly.RuntimeError || e instanceof RangeError ? this.#crashOf(e) : errorOf(e, nameOf);
    }
  }

  /** As {@link call}, for a future of the module: rejects also when it ends by a trap, between two calls from here. */
  async run<T>(work: (bindings: Bindings) => Promise<T>, nameOf?: (file: number) => string): Promise<T> {
    const future = this.call(work, nameOf);
    try {
      return await Promise.race([future, this.#trapped]);
    } catch (e) {
      throw errorOf(e, nameOf);
    }
  }

  /** The error of a trap: with the message of the panic, if that was the reason. */
  #crashOf(trap: Error): StarlingError {
    if (this.#crash) return this.#crash;
    const panic = this.bindings.panicMessage();
    this.bindings.abandon();
    const why = panic || `${trap.message}; most likely its memory ran out, of which a module has at most ${this.isMemory64 ? 16 : 4} GiB`;
    return (this.#crash = new StarlingError("crashed", `Starling crashed: ${why}`, { cause: trap }));
  }
}

/** An error of the module as a {@link StarlingError}; others, as of a stream that it read, as they are. */
function errorOf(e: unknown, nameOf: ((file: number) => string) | undefined): unknown {
  const { code, file, message, cause } = (e ?? {}) as { code?: unknown; file?: number; message: string; cause?: unknown };
  // a DOMException's code is a number, those of Node's errors are in capitals
  if (e instanceof StarlingError || typeof code !== "string" || code !== code.toLowerCase()) return e;
  const name = file === undefined ? undefined : nameOf?.(file);
  return new StarlingError(code as ErrorCode, name === undefined ? message : `${name}: ${message}`, { cause });
}
