// Measures which of two instruction sets is faster on this CPU.

import type { Isa } from "./features.js";
import type { Bindings } from "./instance.js";

const REPEATS = 8;
/** 1 to 2 ms: browser clocks have a resolution of 0.1 ms. */
const ROUNDS = 100;

const [DOTS, I16] = ["relaxed-simd", "relaxed-i16"] as const;

const time = (bindings: Bindings, isa: Isa) => {
  const start = performance.now();
  bindings.race(isa, ROUNDS);
  return performance.now() - start;
};

/** Warms up the JIT for {@link fasterIsa}; returns whether the module has both instruction sets. */
export function beginRace(bindings: Bindings): boolean {
  return [DOTS, I16, DOTS, I16].every((isa) => bindings.race(isa, ROUNDS));
}

/**
 * The faster instruction set of a relaxed-SIMD module. On a CPU without an instruction for the relaxed dot product, which
 * cannot be detected, 16-bit products are faster, most so with 4-bit weights.
 */
export function fasterIsa(bindings: Bindings): Isa {
  // the minimum: fully compiled, and not preempted
  let [dots, i16] = [Infinity, Infinity];
  for (let turn = 0; turn < REPEATS; turn++) {
    dots = Math.min(dots, time(bindings, DOTS));
    i16 = Math.min(i16, time(bindings, I16));
  }
  return i16 < dots ? I16 : DOTS;
}
