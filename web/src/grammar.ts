// The grammar module, which compiles JSON schemas and grammars to constraints. The engine's module calls these as objects.

import { type Constraint as Compiled, type Grammars, instantiate } from "../wasm/grammar.js";
import type { Constraint } from "../wasm/starling.js";
import { StarlingError } from "./errors.js";
import type { OutputConstraint } from "./protocol.js";

/** An instance of the grammar module with the tokens of one model. A trap ends it, and all constraints that it made. */
class GrammarInstance {
  readonly grammars: Grammars;
  #abandon: () => void;
  #hasTrapped = false;

  constructor(module: WebAssembly.Module, words: Uint8Array) {
    const { Grammars, initSync, abandon } = instantiate();
    initSync({ module });
    this.#abandon = abandon;
    this.grammars = new Grammars(words);
  }

  get hasTrapped(): boolean {
    return this.#hasTrapped;
  }

  call<T>(work: () => T): T {
    if (this.#hasTrapped) throw new StarlingError("request", "the grammar has failed");
    try {
      return work();
    } catch (e) {
      if (!(e instanceof WebAssembly.RuntimeError || e instanceof RangeError)) throw e;
      this.#hasTrapped = true;
      this.#abandon();
      const message = `compiling it failed, most likely because it is nested too deeply: ${e.message}`;
      throw new StarlingError("request", message, { cause: e });
    }
  }
}

/** A constraint that can be used for as long as its instance works. */
class InstanceConstraint implements Constraint {
  readonly instance: GrammarInstance;
  #compiled: Compiled;

  constructor(instance: GrammarInstance, compiled: Compiled) {
    this.instance = instance;
    this.#compiled = compiled;
  }

  fork(): InstanceConstraint {
    return new InstanceConstraint(this.instance, this.instance.call(() => this.#compiled.fork()));
  }

  allow(mask: Uint32Array): number {
    return this.instance.call(() => this.#compiled.allow(mask));
  }

  accept(token: number): number {
    return this.instance.call(() => this.#compiled.accept(token));
  }

  free(): void {
    if (!this.instance.hasTrapped) this.instance.call(() => this.#compiled.free());
  }
}

/** Compiles the constraints of one model. */
export class GrammarReader {
  #words: () => Uint8Array;
  #instance: GrammarInstance | undefined;
  /** What was compiled last: several answers to one request have the same constraint. */
  #last: { json: string; constraint: InstanceConstraint } | undefined;

  /** `words` returns the model's tokens. */
  constructor(words: () => Uint8Array) {
    this.#words = words;
  }

  /**
   * A constraint at the start of a text.
   *
   * @throws {StarlingError} with what is wrong
   */
  constraint({ json, param, module }: OutputConstraint): Constraint {
    if (this.#last?.json !== json || this.#last.constraint.instance.hasTrapped) {
      this.#forget();
      try {
        this.#last = { json, constraint: this.#compile(json, module) };
      } catch (e) {
        // the module throws what is wrong with the grammar as a string
        const message = e instanceof StarlingError && e.code === "request" ? e.message : e;
        if (typeof message !== "string") throw e;
        throw new StarlingError("request", param === undefined ? message : `${param}: ${message}`);
      }
    }
    return this.#last.constraint.fork();
  }

  #compile(json: string, module: WebAssembly.Module): InstanceConstraint {
    if (!this.#instance || this.#instance.hasTrapped) this.#instance = new GrammarInstance(module, this.#words());
    const instance = this.#instance;
    return new InstanceConstraint(instance, instance.call(() => instance.grammars.constraint(json)));
  }

  #forget(): void {
    this.#last?.constraint.free();
    this.#last = undefined;
  }

  free(): void {
    this.#forget();
    this.#instance = undefined;
  }
}
