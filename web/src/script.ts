// Workers, wherever the package comes from.

import { StarlingError } from "./errors.js";
import { builds } from "./features.js";

/** Scripts of this origin that import one of another. */
const importers = new Map<string, string>();

/**
 * Starts a worker. Browsers start none of another origin, as where a page has the package from a CDN; there, a script of
 * the page's own imports the file `name`.
 */
export function startWorker(name: string, start: () => Worker): Worker {
  if (typeof Worker === "undefined")
    throw new StarlingError("unsupported", "this runtime has no workers: load with `worker: false`");
  try {
    return start();
  } catch (e) {
    if ((e as Error).name !== "SecurityError") throw refused(e as Error);
  }
  // from a URL that there is anyway: bundlers would take this file along
  const { href } = new URL(`../dist/${name}`, builds.simd128());
  let script = importers.get(href);
  if (script === undefined) {
    script = URL.createObjectURL(new Blob([`import ${JSON.stringify(href)};`], { type: "text/javascript" }));
    importers.set(href, script);
  }
  try {
    return new Worker(script, { type: "module" });
  } catch (e) {
    throw refused(e as Error);
  }
}

const refused = (cause: Error) =>
  new StarlingError("unsupported", `the worker does not start: ${cause.message}`, { cause });
