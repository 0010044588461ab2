// The grammar module at work, beside the engine's: what answers have to be becomes constraints, which the engine's module
// asks by number.

import { Grammars, initSync } from "../wasm/grammar.js";
import type { Constraint } from "../wasm/constraints.js";
import { StarlingError } from "./errors.js";
import type { Wanted } from "./structure.js";

/** Why the module is of no use any more: it has one instance for all models of a thread. */
let crashed: StarlingError | undefined;

/** Calls the module, unless it has crashed. */
function guarded<T>(work: () => T): T {
  if (crashed) throw crashed;
  try {
    return work();
  } catch (e) {
    if (!(e instanceof WebAssembly.RuntimeError || e instanceof RangeError)) throw e;
    throw (crashed = new StarlingError("request", `reading a grammar has failed: ${e.message}; load the model anew`, {
      cause: e,
    }));
  }
}

/** Makes constraints for one model. */
export class GrammarReader {
  #grammars: Grammars;

  /** `words` are the model's tokens. */
  constructor(module: WebAssembly.Module, words: Uint8Array) {
    this.#grammars = guarded(() => {
      initSync({ module });
      return new Grammars(words);
    });
  }

  /**
   * A constraint at the beginning of an answer.
   *
   * @throws {StarlingError} with what is wrong
   */
  constraint({ json, param }: Wanted): Constraint {
    return guarded(() => {
      try {
        const made = this.#grammars.constraint(json);
        return {
          fork: () => guarded(() => made.fork()),
          allow: (mask) => guarded(() => made.allow(mask)),
          accept: (token) => guarded(() => made.accept(token)),
          free: () => guarded(() => made.free()),
        };
      } catch (e) {
        if (typeof e !== "string") throw e;
        throw new StarlingError("request", param === undefined ? e : `${param}: ${e}`);
      }
    });
  }

  free(): void {
    if (!crashed) this.#grammars.free();
  }
}
