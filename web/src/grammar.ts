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
    throw new StarlingError("request", `reading it has failed, most likely as it is nested too deeply: ${e.message}`);
  }
}

/** A constraint for as long as the module has it. */
class Held implements Constraint {
  #made: Made;
  #crashes = crashes;

  constructor(made: Made) {
    this.#made = made;
  }

  #ask<T>(question: (made: Made) => T): T {
    if (!this.isThere()) throw new StarlingError("request", "the grammar has failed");
    return guarded(() => question(this.#made));
  }

  isThere(): boolean {
    return this.#crashes === crashes;
  }

  fork(): Constraint {
    return new Held(this.#ask((made) => made.fork()));
  }

  allow(mask: Uint32Array): number {
    return this.#ask((made) => made.allow(mask));
  }

  accept(token: number): number {
    return this.#ask((made) => made.accept(token));
  }

  free(): void {
    if (this.isThere()) guarded(() => this.#made.free());
  }
}

/** Makes constraints for one model. */
export class GrammarReader {
  #words: () => Uint8Array;
  #grammars: { of: Grammars; crashes: number } | undefined;
  /** What was read last: the answers to one request follow the same. */
  #last: { json: string; constraint: Held } | undefined;

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
    if (this.#last?.json !== json || !this.#last.constraint.isThere()) {
      this.#forget();
      try {
        this.#last = { json, constraint: guarded(() => this.#read(json, module)) };
      } catch (e) {
        const said = e instanceof StarlingError && e.code === "request" ? e.message : e;
        if (typeof said !== "string") throw e;
        throw new StarlingError("request", param === undefined ? said : `${param}: ${said}`);
      }
    }
    return this.#last.constraint.fork();
  }

  #read(json: string, module: WebAssembly.Module): Held {
    initSync({ module });
    if (this.#grammars?.crashes !== crashes) this.#grammars = { of: new Grammars(this.#words()), crashes };
    return new Held(this.#grammars.of.constraint(json));
  }

  #forget(): void {
    this.#last?.constraint.free();
    this.#last = undefined;
  }

  free(): void {
    this.#forget();
    if (this.#grammars?.crashes === crashes) this.#grammars.of.free();
    this.#grammars = undefined;
  }
}
