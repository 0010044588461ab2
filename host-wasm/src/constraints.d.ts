/** A grammar at a place in an answer; 0 is no, 1 is yes, more is why it cannot go on. */
export interface Constraint {
  fork(): Constraint;
  /** Sets the bits of the tokens that may come next; says whether the answer may end. */
  allow(mask: Uint32Array): number;
  /** Takes the next token; says whether the answer is complete. */
  accept(token: number): number;
  free(): void;
}

/** Keeps a constraint; returns its number. It is freed when no answer needs it any more. */
export function add(constraint: Constraint): number;
/** Frees the one with the number. */
export function drop(number: number): void;
