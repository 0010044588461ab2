// Constraints of answers, by number, for the engine's module, which knows of no others: those of the grammar module, or
// any other that has their methods.

const constraints = new Map();
let last = 0;

/** Keeps a constraint; returns its number. It is freed when no answer needs it any more. */
export function add(constraint) {
  // numbers of the module have 32 bits
  do last = (last + 1) >>> 0;
  while (last === 0 || constraints.has(last));
  constraints.set(last, constraint);
  return last;
}

/** What a constraint that throws has told: that it has failed. */
const FAILED = 4;

const ask = (number, question) => {
  try {
    return question(constraints.get(number));
  } catch {
    return FAILED;
  }
};

/** The number of a copy; of none, which fails, if there cannot be one. */
export const fork = (number) => {
  const copy = ask(number, (constraint) => constraint.fork());
  return copy === FAILED ? 0 : add(copy);
};

export const allow = (number, mask) => ask(number, (constraint) => constraint.allow(mask));

export const accept = (number, token) => ask(number, (constraint) => constraint.accept(token));

export const drop = (number) => {
  ask(number, (constraint) => constraint.free());
  constraints.delete(number);
};
