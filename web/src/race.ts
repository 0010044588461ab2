// Which of two ways to compute is faster here.

import type { Isa } from "./features.js";
import type { Bindings } from "./instance.js";

const TURNS = 8;
/** A millisecond or two of products: some clocks tick ten times in one. */
const ROUNDS = 100;

const [DOTS, I16] = ["relaxed-simd", "relaxed-i16"] as const;

const time = (bindings: Bindings, isa: Isa) => {
  const start = performance.now();
  bindings.race(isa, ROUNDS);
  return performance.now() - start;
};

/** Begins well before {@link fasterIsa}, that the engine may compile what it runs; says whether there is a choice. */
export function beginRace(bindings: Bindings): boolean {
  return [DOTS, I16, DOTS, I16].every((isa) => bindings.race(isa, ROUNDS));
}

/**
 * The faster instruction set of a module for relaxed SIMD: where the processor has no instruction for its dot product,
 * which nothing tells, others are faster, those of 4-bit weights most.
 */
export function fasterIsa(bindings: Bindings): Isa {
  // the least of each: what it takes once it is compiled well, and when nothing else had the processor
  let [dots, i16] = [Infinity, Infinity];
  for (let turn = 0; turn < TURNS; turn++) {
    dots = Math.min(dots, time(bindings, DOTS));
    i16 = Math.min(i16, time(bindings, I16));
  }
  return i16 < dots ? I16 : DOTS;
}
