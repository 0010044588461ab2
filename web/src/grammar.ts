// The grammar module at work, beside the engine's: what answers have to be becomes constraints, which the engine's module
// asks by number.

import type { Constraint } from "../wasm/constraints.js";
import { Grammars, type Constraint as Made, __wbg_reset_state as startAnew, initSync } from "../wasm/grammar.js";
import { StarlingError } from "./errors.js";
import type { Form } from "./protocol.js";

/** How often the module has crashed, and was started anew: nothing is left of what it had made before. */
let crashes = 0;

/** Calls the module. */
function guarded<T>(work: () => T): T {
  try {
    return work();
  } catch (e) {
    if (!(e instanceof WebAssembly.RuntimeError || e instanceof RangeError)) throw e;
    crashes += 1;
    startAnew();
    throw `reading it has failed, most likely as it is nested too deeply: ${e.message}`;
  }
}

/** A constraint for as long as the module has it. */
class Held implements Constraint {
  #made: Made;
  #crashes = crashes;

  constructor(made: Made) {
    this.#made = made;
  }

  fork(): Constraint {
    return new Held(guarded(() => this.#made.fork()));
  }

  allow(mask: Uint32Array): number {
    return guarded(() => this.#made.allow(mask));
  }

  accept(token: number): number {
    return guarded(() => this.#made.accept(token));
  }

  free(): void {
    if (this.#crashes === crashes) guarded(() => this.#made.free());
  }
}

/** Makes constraints for one model. */
export class GrammarReader {
  #words: () => Uint8Array;
  #grammars: Grammars | undefined;
  #crashes = crashes;

  /** `words` gives the model's tokens. */
  constructor(words: () => Uint8Array) {
    this.#words = words;
  }

  /**
   * A constraint at the beginning of an answer.
   *
   * @throws {StarlingError} with what is wrong
   */
  constraint({ json, param, module }: Form): Constraint {
    try {
      return guarded(() => {
        initSync({ module });
        if (!this.#grammars || this.#crashes !== crashes) {
          this.#grammars = new Grammars(this.#words());
          this.#crashes = crashes;
        }
        return new Held(this.#grammars.constraint(json));
      });
    } catch (e) {
      if (typeof e !== "string") throw e;
      throw new StarlingError("request", param === undefined ? e : `${param}: ${e}`);
    }
  }

  free(): void {
    if (this.#grammars && this.#crashes === crashes) this.#grammars.free();
    this.#grammars = undefined;
  }
}
