// Helper threads: workers with the module and the shared memory of the engine's worker.

import { StarlingError } from "./errors.js";
import { importsMemory } from "./module.js";
import type { Thread } from "./runtime.js";
import { startWorker } from "./script.js";

/** The one message to a helper. */
export interface ThreadStart {
  module: WebAssembly.Module;
  memory: WebAssembly.Memory;
}

/** Messages from a helper: it has started, or why it ended. */
export type FromThread = { type: "ready" } | { type: "lost"; why: string };

/**
 * The helper threads of an engine. They end only when the page terminates the engine's worker: Chromium leaks threads that are
 * ending when their parent is terminated.
 */
export class Helpers {
  #workers: Thread[] = [];
  /** Called when a helper has ended: the engine cannot continue. */
  onLost: (error: StarlingError) => void = () => {};

  /** Starts up to `wanted` helpers, fewer if the runtime refuses; none for a module without shared memory. */
  static async start(module: WebAssembly.Module, memory: WebAssembly.Memory, wanted: number): Promise<Helpers> {
    const helpers = new Helpers();
    if (!importsMemory(module)) return helpers;
    const starts = Array.from({ length: wanted }, () => helpers.#start({ module, memory }));
    await Promise.allSettled(starts);
    return helpers;
  }

  #start(start: ThreadStart): Promise<void> {
    return new Promise((resolve, reject) => {
      // bundlers look for exactly this form
      const worker = startWorker(
        "thread.js",
        () => new Worker(new URL("./thread.js", import.meta.url), { type: "module" }),
      );
      const lost = (why: string) => {
        reject(new Error(why));
        if (this.#workers.includes(worker))
          this.onLost(new StarlingError("crashed", `Starling crashed: a thread ended: ${why}`));
      };
      worker.onerror = (event) => {
        event.preventDefault();
        lost(event.message ?? "the script cannot be loaded");
      };
      worker.onmessage = ({ data }: MessageEvent<FromThread>) => {
        if (data.type === "lost") return lost(data.why);
        this.#workers.push(worker);
        resolve();
      };
      worker.postMessage(start);
    });
  }

  get count(): number {
    return this.#workers.length;
  }
}
