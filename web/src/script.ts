// Starting workers, also when the package comes from another origin.

import { StarlingError } from "./errors.js";
import { builds } from "./features.js";
import { type Thread, nodeThread } from "./runtime.js";

/** Blob URLs of same-origin scripts that import a cross-origin one. */
const importers = new Map<string, string>();

/**
 * Starts a worker. Browsers refuse workers of another origin, such as a CDN; then a blob script of this origin imports `name`.
 */
export function startWorker(name: string, start: () => Worker): Thread {
  // relative to a URL that exists anyway: for a new one bundlers would copy the file
  const url = new URL(`../dist/${name}`, builds.simd128());
  const thread = nodeThread(url);
  if (thread) return thread;
  if (typeof Worker === "undefined")
    throw new StarlingError("unsupported", "this runtime has no workers: load with `worker: false`");
  try {
    return start();
  } catch (e) {
    if ((e as Error).name !== "SecurityError") throw startError(e as Error);
  }
  const { href } = url;
  let script = importers.get(href);
  if (script === undefined) {
    script = URL.createObjectURL(new Blob([`import ${JSON.stringify(href)};`], { type: "text/javascript" }));
    importers.set(href, script);
  }
  try {
    return new Worker(script, { type: "module" });
  } catch (e) {
    throw startError(e as Error);
  }
}

const startError = (cause: Error) =>
  new StarlingError("unsupported", `the worker cannot start: ${cause.message}`, { cause });
